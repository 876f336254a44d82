"""Ranks that run different units in a step get the gradients of the mathematics: the mean over ranks of each rank's
gradient, zero where it did not run."""

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights, sgd
from tests.pool import distributed
from weft.comm.watch.hang_detector import DELAY_S, hang_detector

RESIDENT = ["no_shard", "optim", "optim_grads"]


class Routes(nn.Module):
    """Four equal blocks between an embedding and a head; `path` says which of them run, in which order.

    Blocks from `dropped` on run too, but the loss does not depend on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(4))
        self.head = nn.Linear(13, 11)
        self.path: Sequence[int] = ()
        self.dropped: Sequence[int] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.path:
            x = self.blocks[number](x)
        for number in self.dropped:
            self.blocks[number](x)
        return self.head(x)


def make() -> Routes:
    torch.manual_seed(0)
    return Routes().double()


def shard(net: Routes, **options) -> Routes:
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return weft.fully_shard(net, **options)


Way = Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]]
"""The path and the dropped blocks of a rank in a step's microbatch."""

WAYS: dict[str, Way] = {
    "each rank another one of two": lambda rank, step, micro: ((0, 1 + (rank + step) % 2, 3), ()),
    "the last rank fewer": lambda rank, step, micro: ((0, 3) if rank == last() else (0, 1, 2, 3), ()),
    "the last rank one of them twice": lambda rank, step, micro: ((0, 1, 0, 3) if rank == last() else (0, 1, 3), ()),
    "in another order": lambda rank, step, micro: ((2, 1, 0) if rank == last() else (0, 1, 2), ()),
    "only in forward": lambda rank, step, micro: ((0, 3), (1, 2) if rank == last() else (2,)),
    "none in the last microbatch": lambda rank, step, micro: ((0, 1, 2) if not micro else (0, 3), ()),
    "all skip one in some steps": lambda rank, step, micro: ((0, 1, 2, 3) if step % 2 else (0, 3), ()),
}


def last() -> int:
    return dist.get_world_size() - 1


def assert_truth(way: Way, microbatches: int, flagged: bool = True, **options) -> None:
    """Three steps of the sharded net have the gradients and weights of one process that goes every rank's way."""
    plain, sharded = make(), shard(make(), **options)
    optimizers = sgd(plain, sharded)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step, batch in enumerate(nets.data(3, 2 * ranks * microbatches)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro, rows in enumerate(batch.chunk(microbatches)):
            for each, part in enumerate(rows.chunk(ranks)):
                plain.path, plain.dropped = way(each, step, micro)
                (loss_of(plain, part) / ranks).backward()
            sharded.path, sharded.dropped = way(rank, step, micro)
            if flagged:
                sharded.set_is_last_backward(micro == microbatches - 1)
            loss_of(sharded, rows.chunk(ranks)[rank]).backward()
        assert_gradients(sharded, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_weights(sharded, plain)
    assert all(role["live"] == 0 for role in weft.memory_report(sharded)["transient"].values())


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.slow
@distributed(2)
def test_units_of_the_same_shape_that_run_on_different_ranks_have_correct_gradients():
    assert_truth(WAYS["each rank another one of two"], 1, strategy="optim_grads")


@distributed(2)
def test_units_that_do_not_run_in_the_last_microbatch_are_reduced_with_what_they_have():
    assert_truth(WAYS["none in the last microbatch"], 2, strategy="optim")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RESIDENT)
@distributed(2)
def test_units_that_run_on_some_ranks_only_have_correct_gradients(strategy):
    some = {"no_shard": slice(0, None, 2), "optim": slice(1, None, 2)}.get(strategy, slice(None))
    for number, (name, way) in [*enumerate(WAYS.items())][some]:
        microbatches = 1 + (number + RESIDENT.index(strategy)) % 2
        try:
            assert_truth(way, microbatches, strategy=strategy)
        except AssertionError as error:
            raise AssertionError(f"{name}, {microbatches} microbatches: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 18])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_a_unit_that_ran_on_one_rank_before_it_was_frozen_is_still_reduced_by_all(strategy, bucket_bytes):
    runtime = weft.RuntimeOptions(bucket_bytes=bucket_bytes)
    plain, sharded = make(), shard(make(), strategy=strategy, runtime=runtime)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = nets.data(2, 2 * ranks)
    for net, mine in ((plain, range(ranks)), (sharded, [rank])):
        for micro, batch in enumerate(batches):
            if net is sharded:
                net.set_requires_gradient_sync(micro == 1)
            for each in mine:
                net.path = [(0, 1, 2), (0, 2)][each]
                (loss_of(net, batch.chunk(ranks)[each]) / len(mine)).backward()
            net.blocks[1].requires_grad_(False)
    assert any(parameter.grad.full_tensor().any() for parameter in sharded.blocks[1].parameters())
    assert_gradients(sharded, plain)


@pytest.mark.long
@distributed(2)
def test_gathers_of_units_that_run_on_some_ranks_only_are_joined_by_the_others():
    for name in ("each rank another one of two", "the last rank one of them twice", "in another order"):
        try:
            assert_truth(WAYS[name], 1, strategy="optim_grads_params")
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert hang_detector().joins > 0
    assert hang_detector()._delay() < DELAY_S / 5, "where ranks joined, they speak of shorter waits"


@pytest.mark.long
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
@distributed(4)
def test_units_that_run_on_some_ranks_only_have_true_gradients_on_two_axes(outer_strategy):
    """Each way with one of the strategies; those that only forward or only a microbatch leaves out, with both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    both = ("only in forward", "none in the last microbatch")
    mine = list(WAYS)[outer_strategy == "optim" :: 2]
    for name, way in WAYS.items():
        if name not in (*mine, *both):
            continue
        for flagged in (True, False) if name == "none in the last microbatch" else (True,):
            options = {"strategy": "optim_grads", "outer_strategy": outer_strategy, "mesh": mesh}
            try:
                assert_truth(way, 2, flagged, **options)
            except AssertionError as error:
                raise AssertionError(f"{name}, flagged {flagged}: {error}") from error


@distributed(4)
def test_a_rank_that_takes_part_in_a_gather_sends_the_weights_of_now():
    """What the detector of hangs calls, called by hand: a rank that waits elsewhere serves a gather of others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    on_demand = weft.RuntimeOptions(prefetch_bytes=0)
    plain, sharded = make(), shard(make(), mesh=mesh, outer_strategy="optim", runtime=on_demand)
    tokens = nets.data(1, 2)[0]
    skips = dist.get_rank() % 2 == 1  # one of each pair on the shard axis
    for net in (plain, sharded):
        net.path = (0, 1, 2, 3)
        with torch.no_grad():
            net(tokens)
            for parameter in net.parameters():
                parameter.mul_(1.5)

    def serve(*_) -> None:
        for block in sharded.blocks[1:3] if skips else ():
            unit = block._weft_unit
            part = functools.partial(unit.groups[0].serve, unit.channels, 0)
            sharded._weft_driver.runtime._helper.serve(unit, part)

    sharded.blocks[0].register_forward_hook(serve)
    plain.path = sharded.path = (0, 3) if skips else (0, 1, 2, 3)
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens), plain(tokens))
