"""Experts that are whole on each tensor-parallel rank: every rank routes its own positions."""

import pytest
import torch.distributed as dist

import weft
from tests.models.test_context import batch, build, same, trained
from tests.models.test_documents import config
from tests.pool import distributed
from weft.models import HybridModel
from weft.moe import load_statistics, router_losses

OPTIONS = {
    "shared_expert_intermediate_size": 8,
    "shared_expert_gate": True,
    "moe_latent_size": 12,
    "mlp_bias": True,
    "experts_bias": True,
    "router_bias": True,
    "aux_loss_coef": 0.1,
    "z_loss_coef": 0.1,
}


@pytest.mark.long
@distributed(2)
def test_losses_steps_and_loads_are_those_of_one_process():
    cfg, given = config("[*E]E", moe_rows_per="expert", **OPTIONS), [batch(None)]
    alone = build(cfg)
    expected = trained(alone, given, 3)
    for ep in (1, 2):  # with 2, experts are spread over the tensor-parallel ranks
        meshes = weft.init_meshes("cpu", tp=2, ep=ep, etp=1)
        model = build(cfg, meshes, {})
        same(trained(model, given, 3), expected)
        expected_counts = {name: each.tolist() for name, each in load_statistics(alone, reset=False).items()}
        for group in (meshes.dense, dist.group.WORLD):  # the second contains the tensor-parallel ranks already
            counts = load_statistics(model, reset=False, group=group)
            assert {name: each.tolist() for name, each in counts.items()} == expected_counts
        same([router_losses(model, group=meshes.dense)], [router_losses(alone, reset=False)], rtol=1e-5, atol=1e-6)


@distributed(2)
def test_what_cannot_be_is_refused():
    meshes = weft.init_meshes("cpu", tp=2, etp=1)
    with pytest.raises(ValueError, match=r"capacity_factor=1.0 with etp=1: dropping needs all posit"):
        HybridModel(config("E", capacity_factor=1.0), meshes)
    HybridModel(config("E", moe_intermediate_size=3), meshes)
    with pytest.raises(ValueError, match="moe_intermediate_size=3 is split over etp=2 ranks"):
        HybridModel(config("E", moe_intermediate_size=3), weft.init_meshes("cpu", tp=2))
    with pytest.raises(ValueError, match=r"etp=3: an expert is split over all tp=2 ranks or not at all"):
        weft.init_meshes("cpu", tp=2, etp=3)
    with pytest.raises(ValueError, match=r"ep=4 must divide the data-parallel ranks.* \* tp=2 = 2"):
        weft.init_meshes("cpu", tp=2, etp=1, ep=4)
