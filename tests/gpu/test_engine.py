"""The engine on a GPU: the numbers of the plain model, in the right order on all streams, with memory that stays."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.gpu.cards import (
    DEVICE,
    REHEARSES,
    dawdle,
    no_wait_of_the_host,
    on_one_card,
    reduce_scatter_over_twins,
    takes_time,
)
from weft.comm import collectives
from weft.comm.lanes import Lane
from weft.comm.ranges import span
from weft.comm.transport import Pending
from weft.debug.timeline import Timeline
from weft.fsdp.module import runtime_of, units_under
from weft.memory.buffer import FlatBuffer
from weft.overlap.hidden import overlap

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CASES = list(itertools.product(STRATEGIES, (1, 2), (None, "non-reentrant")))
if REHEARSES:  # the streams of all are checked elsewhere
    CASES = [("optim", 2, None), ("optim_grads_params", 1, "non-reentrant")]


def compare_with_plain(mesh_shape: tuple[int, ...]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE, mesh_shape)
    batches = nets.data(3, 4 * ranks).to(DEVICE)

    def sgd(net):  # AdamW would make whole steps of how gradients near zero are rounded
        return torch.optim.SGD(net.parameters(), lr=0.1)

    for strategy, microbatches, recompute in CASES:
        options = {"microbatches": microbatches, "optimizer": sgd}
        expected = nets.train(nets.make().to(DEVICE), batches, **options)
        net = nets.shard(nets.make(recompute).to(DEVICE), mesh=mesh, strategy=strategy)
        found = nets.train(net, batches, rank=rank, ranks=ranks, **options)
        for what in ("gradients", "weights"):
            torch.testing.assert_close(found[what], expected[what])


@pytest.mark.gpu
def test_one_rank_over_nccl_equals_the_plain_model_with_all_strategies(tmp_path):
    on_one_card(compare_with_plain, 1, "nccl", tmp_path, (1,))


@pytest.mark.gpu
def test_two_axes_of_one_rank_over_nccl_equal_the_plain_model(tmp_path):
    on_one_card(compare_with_plain, 1, "nccl", tmp_path, (1, 1))


@pytest.mark.gpu
def test_two_ranks_on_one_card_over_gloo_equal_the_plain_model(tmp_path):
    on_one_card(compare_with_plain, 2, "gloo", tmp_path, (2,))


def memory_stays() -> None:
    net = nets.shard(
        nets.make(width=64, hidden=256).to(DEVICE), mesh=init_device_mesh(DEVICE, (dist.get_world_size(),))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    tokens = nets.data(1, 4)[0].to(DEVICE)
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        nets.loss_of(net, tokens).backward()
        weft.optim.clip_grad_norm_(net, 1.0)
        optimizer.step()
        kinds = weft.memory_report(net)["transient"].values()
        seen.append([kind["allocations"] for kind in kinds])
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.allocated")
            seen[-1] += [stats[name] for name in names]
    assert all(each == seen[3] for each in seen[4:]), seen


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_a_steady_step_keeps_the_memory_it_has(tmp_path, ranks, backend):
    on_one_card(memory_stays, ranks, backend, tmp_path)


def nobody_waits() -> None:
    net = nets.shard(nets.make().to(DEVICE))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    tokens = nets.data(1, 4)[0].to(DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        nets.loss_of(net, tokens).backward()
        weft.optim.clip_grad_norm_(net, 1.0)
        optimizer.step()

    for _ in range(3):
        step()
    with no_wait_of_the_host():
        step()


@pytest.mark.gpu
def test_the_host_waits_for_nothing_in_a_step(tmp_path):
    on_one_card(nobody_waits, 1, "nccl", tmp_path)


def test_the_host_waits_for_no_gather_and_no_reduction(world):
    world(0, 8)
    nobody_waits()


@pytest.mark.parametrize("allocator", ["trace", "caching"])
@pytest.mark.parametrize("slow", ["gather", "reduce", "compute"])
def test_no_stream_runs_ahead_of_what_it_reads(monkeypatch, world, allocator, slow):
    """Two ranks, one of them pretended: gathers bring weights that are known, late; memory is poisoned when taken."""
    truth: dict[int, torch.Tensor] = {}

    def all_gather(full, source, group, tag):
        if slow == "gather":
            dawdle()
        full.copy_(truth[source.data_ptr()])
        return Pending()

    def reduce_scatter(*args, **options):
        if slow == "reduce":
            dawdle()
        return reduce_scatter_over_twins(*args, **options)

    monkeypatch.setattr(collectives, "all_gather", all_gather)
    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
    world(0, 2)
    plain = nets.make().to(DEVICE)
    weights = dict(plain.named_parameters())
    net = nets.shard(nets.make().to(DEVICE), runtime=weft.RuntimeOptions(allocator=allocator))
    channels = runtime_of(net).channels
    for pool in (channels.weights, channels.gradients):
        monkeypatch.setattr(pool, "take", poisoning(pool.take))
    for unit in units_under(net):
        for group in unit.groups:
            flat = torch.empty(group.layout.numel, device=DEVICE)
            names = [f"{unit.name}.{each.name}" if unit.name else each.name for each in group.parameters]
            FlatBuffer(group.layout, group.mesh, group.plan.whole, flat).fill([weights[name] for name in names])
            truth[group.main_weight.local.data_ptr()] = flat
    tokens = nets.data(1, 4)[0].to(DEVICE)
    nets.loss_of(plain, tokens).backward()
    for _ in range(4):
        if slow == "compute":
            dawdle()
        net.zero_grad()
        nets.loss_of(net, tokens).backward()
        for unit in units_under(net):
            for group in unit.trainable_groups:
                flat = torch.empty(group.layout.numel, device=DEVICE)
                names = [f"{unit.name}.{each.name}" if unit.name else each.name for each in group.parameters]
                FlatBuffer(group.layout, group.mesh, group.plan.whole, flat).fill([weights[n].grad for n in names])
                mine = flat.view(2, -1)[0]
                torch.testing.assert_close(group.gradients.main.buffer.local, mine)


def poisoning(take):
    def poisoned(transient):
        tensor = take(transient)
        if tensor.numel():
            tensor.fill_(torch.nan)
        return tensor

    return poisoned


@pytest.mark.gpu
@takes_time
def test_a_lane_overlaps_with_the_computation(tmp_path):
    def late(tag):
        dawdle()
        return Pending()

    torch.cuda.init()
    lane = Lane("gather", torch.device("cuda", 0))
    with Timeline() as timeline:
        with span("compute", "before"):
            dawdle()
        ticket = lane.run(late)
        with span("compute", "beside"):
            dawdle()
        ticket.wait()
        with span("compute", "behind"):
            dawdle()
    before, gather, beside, behind = (each for each in timeline.intervals() if each.lane != "wait")
    assert overlap([before, gather], "compute", "gather") == 0
    assert overlap([beside, gather], "compute", "gather") > 0
    assert overlap([behind, gather], "compute", "gather") == 0
