"""The engine over a transport without tags and helpers, with bundles, on one process group: as over NCCL, on CPU.

Tests of other files run here with the collectives that are built into the backend, which run one after another.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets, test_behaviour, test_frozen, test_numbers
from tests.fsdp.seams import test_freshness, test_two_roots
from tests.pool import distributed
from weft.comm import backends
from weft.comm.agreement import Agreement
from weft.comm.builtin import BuiltIn
from weft.comm.gloo import Gloo
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime import options
from weft.fsdp.runtime.reductions import Reductions

Z3 = {"strategy": "optim_grads_params"}


class Untagged(BuiltIn):
    """Counts what it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("all_", "reduce_")):
            self.moved.append(name)
        return super().__getattribute__(name)


def case(body: Callable, ranks: int = 2, **given: Any) -> Any:
    name = [body.__name__.removeprefix("test_"), *(getattr(each, "__name__", str(each)) for each in given.values())]
    return pytest.param(body, ranks, given, id="-".join(name))


CASES = [
    case(test_numbers.test_one_axis_equals_one_process, recompute="non-reentrant"),
    case(
        test_numbers.test_two_axes_equal_one_process,
        4,
        recompute=None,
        microbatches=3,
        flagged=True,
        some=slice(0, None, 2),
    ),
    case(test_behaviour.test_parameters_tied_across_units_stay_tied, **Z3),
    case(test_behaviour.test_several_forwards_then_their_backwards_in_any_order),
    case(test_behaviour.test_a_block_may_run_twice_in_one_forward),
    case(test_behaviour.test_validation_during_training_changes_nothing, allocator="trace"),
    case(test_behaviour.test_training_goes_on_after_an_exception_in_forward, **Z3),
    case(test_frozen.test_adapters_frozen_units_and_later_changes_equal_one_process, recompute="non-reentrant"),
    case(test_freshness.test_an_optimizer_that_steps_between_microbatches, strategy="optim"),
    case(
        test_freshness.test_weights_that_a_forward_writes_in_another_unit_are_those_of_its_next_use,
        strategy="optim_grads",
        bucket_bytes=1 << 20,
        reshard_after_forward=None,
    ),
    case(test_two_roots.test_two_roots_that_step_between_each_others_passes, **Z3),
]


def untagged(module: str, name: str, given: dict[str, Any]) -> None:
    """Run the body of a test on this rank."""
    body = getattr(importlib.import_module(module), name)
    transport = Untagged()
    with mock.patch.object(options, "BUCKET_BYTES", 1 << 18), mock.patch.object(backends, "INSTEAD", transport):
        getattr(body, "body", body)(**given)
    assert "all_gather" in str(transport.moved)


@pytest.mark.long
@pytest.mark.parametrize(("body", "ranks", "given"), CASES)
def test_a_transport_without_tags_changes_nothing(pool, body, ranks, given):
    pool.run(ranks, untagged, body.__module__, body.__name__, given)


@pytest.mark.slow
@distributed(2)
def test_small_units_travel_in_one_group_call_where_the_transport_has_no_tags():
    results, rank, world, logs = [], dist.get_rank(), dist.get_world_size(), []
    transport = Untagged()
    for each in (Gloo(), transport):
        logs.append(Counter())

        def note(agreement: Agreement, unit: int, operation: str, nbytes: int) -> None:
            logs[-1][operation] += 1

        with mock.patch.object(backends, "INSTEAD", each), mock.patch.object(Agreement, "note", note):
            net = nets.shard(nets.make(), runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in nets.data(3, 4):
                nets.loss_of(net, batch[rank::world]).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([each.full_tensor() for each in net.parameters()])
    assert {"all_gather_bundle", "reduce_scatter_bundle"} <= set(transport.moved)
    assert not {"all_gather", "reduce_scatter"} & set(transport.moved)
    assert logs[0]["reduction"] == 0 < logs[1]["reduction"], "without tags, the order of all collectives is compared"
    torch.testing.assert_close(*results)


@pytest.mark.slow
@distributed(2)
def test_a_gather_into_main_weights_is_no_write_to_them_so_that_the_microbatches_of_a_step_share_it():
    transport, gathers = Untagged(), []
    with mock.patch.object(backends, "INSTEAD", transport):
        net = nets.shard(nets.make(), strategy="optim")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number, batch in enumerate(nets.data(6, 4)):
            transport.moved.clear()
            net.set_is_last_backward(number % 2 == 1)
            nets.loss_of(net, batch[dist.get_rank() :: 2]).backward()
            gathers.append(sum(each.startswith("all_gather") for each in transport.moved))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert all(gathers[::2]) and not any(gathers[1::2]), gathers


class Reversed(nn.Module):
    """Layers that run in another order than they were registered. A call may run only the last `count` of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor, count: int = 6) -> torch.Tensor:
        for layer in reversed(self.layers[-count:]):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
@distributed(2)
def test_units_that_ranks_must_run_in_one_order_anyway_are_reduced_when_their_gradients_are_ready():
    started: list[int] = []

    def reduce(order: Reductions, unit: int, group: ParameterGroup, start: Any = Reductions.reduce_group) -> Any:
        started.append(len(order.waiting))
        return start(order, unit, group)

    waiting = []
    for each in (Gloo(), Untagged()):
        with mock.patch.object(backends, "INSTEAD", each), mock.patch.object(Reductions, "reduce_group", reduce):
            net = Reversed()
            for layer in net.layers:
                weft.fully_shard(layer)
            weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=0))
            for count in (6, 3):
                started.clear()
                net(torch.ones(1, 16), count).sum().backward()
                waiting.append((len(started), max(started)))
    gloo, untagged = waiting[:2], waiting[2:]
    assert untagged == [(6, 0), (3, 0)], "none waits for its turn, and none is reduced that did not run"
    assert gloo[0] == (6, 5), "the others have arrived, and wait for the one that was registered last"
