"""Hybrid models whose weights travel quantized: which weights, and the numbers of one process."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import weft
from tests.fsdp.nets import full
from tests.pool import distributed
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, shard
from weft.models.narrow import choose_weights
from weft.quantize import blockwise, dequantize, except_ends, mx, nvfp4, quantize, rowwise, tensorwise

CFG = HybridConfig(
    pattern="M[*E][*-]G/[*-]",
    vocab_size=37,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_experts=4,
    moe_intermediate_size=32,
    mtp_loss_coef=0.0,
)


def chosen(model: HybridModel, quantize=None) -> list[str]:
    policy = choose_weights(model, weft.MixedPrecisionPolicy(param_quantization=mx(32), quantize=quantize))
    return [name for name, parameter in model.named_parameters() if policy.quantize(name, parameter)]


def test_projections_and_experts_are_quantized_and_the_ends_are_left_out():
    names = chosen(HybridModel(CFG))
    of_attention = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    mlp = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    attention = [f"self_attention.{each}" for each in of_attention]
    layers = {
        0: ["mixer.in_proj.weight", "mixer.out_proj.weight"],
        1: [*attention, *(f"mlp.experts.{each.removesuffix('.weight')}" for each in mlp)],
        2: [*attention, *(f"mlp.{each}" for each in mlp)],
        3: ["mixer.in_proj.weight", "mixer.out_proj.weight"],
    }
    main = [f"decoder.layers.{number}.{name}" for number, names in layers.items() for name in names]
    assert [name for name in names if "mtp" not in name] == main
    assert len(names) == len(main) + len(layers[2]), "of the prediction depth"
    inner = chosen(HybridModel(CFG), except_ends(2, 3))  # M * | E * - | G * -
    assert inner == [name for name in main if "layers.1.mlp" in name or "layers.2" in name]
    own = chosen(HybridModel(CFG), lambda name, parameter: name.endswith("in_proj.weight"))
    assert own == ["decoder.layers.0.mixer.in_proj.weight", "decoder.layers.3.mixer.in_proj.weight"]


def test_ends_that_are_the_whole_model_are_refused():
    with pytest.raises(ValueError, match=r"except_ends\(4, 4\) of a model with 8 layers"):
        chosen(HybridModel(CFG), except_ends(4, 4))
    with pytest.raises(ValueError, match=r"weft\.models\.shard"):
        except_ends()("weight", None)
    with pytest.raises(ValueError, match="first=-1"):
        except_ends(-1)


@pytest.mark.slow
@distributed(2)
def test_experts_of_other_ranks_equal_one_process():
    cfg = dataclasses.replace(CFG, pattern="[*E][*-]")
    tokens, labels = torch.randint(cfg.vocab_size, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for recipe in (tensorwise(), rowwise(), blockwise(16, 32), mx(32), nvfp4()):
        meshes = init_meshes("cpu", ep=2)
        models = []
        for given in (None, meshes):
            torch.manual_seed(7)
            models.append(HybridModel(cfg, meshes=given))
        whole, parts = models
        names = chosen(whole)
        with torch.no_grad():
            for name in names:
                weight = whole.get_parameter(name)
                weight.copy_(dequantize(*quantize(weight, recipe), recipe))
        shard(parts, meshes, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))
        expected, loss = whole(tokens, labels=labels), parts(tokens[mine], labels=labels[mine])
        expected.backward(), loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        assert_close(mean / 2, expected.detach())
        for (name, one), (_, other) in zip(parts.named_parameters(), whole.named_parameters(), strict=True):
            assert_close(full(one.grad), other.grad, msg=lambda text, name=name: f"{name}: {text}")
