"""The combined schedule on a GPU: the same numbers, the exchange on a stream of its own, a host that does not wait."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
import weft.moe.dispatch
from tests.gpu.cards import (
    DEVICE,
    all_gather_from_twins,
    dawdle,
    no_wait_of_the_host,
    on_one_card,
    reduce_scatter_over_twins,
    takes_time,
)
from weft.comm import collectives
from weft.comm.lanes import Ticket
from weft.comm.transport import Pending
from weft.debug.timeline import Timeline
from weft.models import HybridConfig, HybridModel
from weft.moe.experts import GroupedExperts
from weft.overlap import forward_backward
from weft.overlap.hidden import overlap
from weft.overlap.wgrad import DelayedWeights

CFG = HybridConfig(
    pattern="[*E]*[*E]",
    vocab_size=37,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=96,
    num_experts=4,
    moe_intermediate_size=32,
    aux_loss_coef=0.1,
)
EXCHANGING_LAYERS = 2
MICROBATCHES = 3
WAYS = [{"overlap": False}, {}, {"delay_wgrad": True}, {"delay_wgrad": True, "early_release": True}]


def build(**options) -> HybridModel:
    meshes = weft.init_meshes(DEVICE, ep=dist.get_world_size())
    torch.manual_seed(0)
    runtime = weft.RuntimeOptions(separate_all_gather_group=True)
    return weft.models.shard(HybridModel(CFG, meshes=meshes).to(DEVICE), meshes, runtime=runtime, **options)


def data() -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (2, 2, 16)
    return [torch.randint(CFG.vocab_size, shape, generator=generator).to(DEVICE).unbind() for _ in range(MICROBATCHES)]


def gradients(model: HybridModel) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def compare_with_plain() -> None:
    model, microbatches = build(), data()
    losses = []
    for number, (tokens, labels) in enumerate(microbatches):
        model.set_is_last_backward(number + 1 == MICROBATCHES)
        losses.append(model(tokens, labels))
        losses[-1].backward()
    expected = [loss.detach() for loss in losses], gradients(model)
    for way in WAYS:
        found = forward_backward(model, microbatches, **way), gradients(model)
        torch.testing.assert_close(found, expected, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.gpu
def test_two_ranks_on_one_card_over_gloo_compute_what_plain_forward_and_backward_do(tmp_path):
    on_one_card(compare_with_plain, 2, "gloo", tmp_path)


@pytest.fixture
def mirrored(monkeypatch, world):
    """One rank of two, of which the other has the same tokens and weights: what it would send to this one is known.
    Every exchange takes long, and what it will bring is poison until then."""

    def all_to_all(output, source, output_sizes, source_sizes, group, tag):
        if output.is_floating_point():
            output.fill_(torch.nan)
            dawdle()
        output.zero_()
        for part in output.split(list(output_sizes)):
            common = min(len(part), len(source))
            part[:common].copy_(source[:common])
        return Pending()

    monkeypatch.setattr(collectives, "all_gather", all_gather_from_twins)
    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter_over_twins)
    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    monkeypatch.setattr(weft.moe.dispatch, "all_to_all", all_to_all)
    world(0, 2)


@pytest.mark.slow
def test_no_step_runs_ahead_of_the_exchange_it_needs(mirrored):
    model, microbatches = build(), data()
    expected = None
    for way in WAYS:
        found = forward_backward(model, microbatches, **way), gradients(model)
        expected = expected or found
        torch.testing.assert_close(found, expected, msg=lambda text, way=way: f"{way}: {text}")
    assert all(gradient.isfinite().all() for gradient in expected[1].values())


@pytest.mark.gpu
@takes_time
def test_the_exchange_overlaps_with_the_computation(mirrored):
    model, microbatches = build(), data()
    for _ in range(2):
        forward_backward(model, microbatches)
    with Timeline() as timeline:
        forward_backward(model, microbatches)
    assert overlap(timeline.intervals(), "exchange", "compute") > 0


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows_have_zero_gradients_in_any_memory(dtype, delayed):
    experts = GroupedExperts(4, 64, 96).to(DEVICE, dtype)
    offsets = torch.tensor([0, 16, 16, 48], dtype=torch.int32, device=DEVICE)  # experts 0 and 2 get nothing
    rows = torch.randn(48, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    with DelayedWeights() if delayed else nullcontext() as queue:
        output = experts(rows, offsets)
        dirt = [torch.full_like(weight, torch.nan) for weight in experts.parameters() for _ in range(2)]
        del dirt  # what is allocated next has it
        output.sum().backward()
        if queue is not None:
            queue.run()
    for name, weight in experts.named_parameters():
        assert not weight.grad[[0, 2]].count_nonzero(), f"{name} of experts without rows"
        assert weight.grad[[1, 3]].isfinite().all() and weight.grad[[1, 3]].count_nonzero(), name


@pytest.mark.slow
@pytest.mark.skipif(
    "torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)",  # asked when it runs
    reason="grouped_mm reads its offsets on the host before Hopper",
)
def test_the_host_waits_for_the_split_sizes_alone(mirrored):
    # In fp32 grouped_mm reads its offsets on the host.
    model, microbatches = build(mp_policy=weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16)), data()
    for _ in range(3):
        forward_backward(model, microbatches)
    waits = []
    synchronize = Ticket.synchronize

    def counted(ticket):
        waits.append(ticket)
        synchronize(ticket)

    with mock.patch.object(Ticket, "synchronize", counted), no_wait_of_the_host():
        forward_backward(model, microbatches)
    assert len(waits) == EXCHANGING_LAYERS * MICROBATCHES
