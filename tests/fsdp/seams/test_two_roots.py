"""Models beside each other: what one sends is never taken for what another does."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import STRATEGIES, assert_gradients, assert_weights, naming, sgd, step
from tests.pairs import all_pairs
from tests.pool import distributed
from weft.fsdp.runtime.joint_backward import JointBackward, end_with_backward


class Routes(nn.Module):
    """Four equal blocks between two layers; `path` says which of them run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(4))
        self.last = nn.Linear(13, 13)
        self.path: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.path:
            x = self.blocks[number](x)
        return self.last(x)


def make(seed: int) -> Routes:
    torch.manual_seed(seed)
    return Routes().double()


def shard(net: Routes, **options) -> Routes:
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return weft.fully_shard(net, **options)


def inputs(steps: int) -> torch.Tensor:
    """`[steps, rows, width]`"""
    return torch.randn(steps, 8, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def rows_of(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


PATHS = {
    "the last rank fewer": ((0, 1, 2, 3), (0, 3)),
    "each rank another one": ((0, 1, 3), (0, 2, 3)),
    "the last rank none": ((0, 1, 2, 3), ()),
    "in another order": ((0, 1, 2), (2, 1, 0)),
}
ORDERS = ["conditional first", "conditional last"]


def apart(plain: list[Routes], sharded: list[Routes], paths, order: str, together: bool, steps: int = 2) -> None:
    """Steps of two models of which the first has layers that run on some ranks only."""
    optimizers = sgd(*plain, *sharded)
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def losses(models: list[Routes], rows: torch.Tensor, who: int) -> list[torch.Tensor]:
        models[0].path = paths[who]
        found = {number: models[number](rows).square().mean() for number in ((0, 1) if order == ORDERS[0] else (1, 0))}
        return list(found.values())

    for number, batch in enumerate(inputs(steps)):
        with naming("step", number):
            for models, jobs in ((plain, range(ranks)), (sharded, [rank])):
                for who in jobs:
                    values = losses(models, batch.chunk(ranks)[who], who)
                    scale = len(jobs)
                    for value in [sum(values)] if together else values:
                        (value / scale).backward()
            for one, other in zip(sharded, plain):
                assert_gradients(one, other)
            step(optimizers)
    for one, other in zip(sharded, plain):
        assert_weights(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "order", "strategy"),
    [
        ("the last rank fewer", "conditional last", "optim_grads_params"),
        ("each rank another one", "conditional first", "optim_grads_params"),
        ("the last rank none", "conditional first", "optim_grads"),
        ("in another order", "conditional first", "optim_grads"),
        ("in another order", "conditional last", "optim_grads_params"),
    ],
)
@distributed(2, timeout=40)
def test_two_roots_of_which_one_has_layers_that_run_on_some_ranks_only(paths, order, strategy):
    sharded = [shard(make(seed), strategy=strategy) for seed in (0, 1)]
    steps = 3 if strategy == "optim_grads" else 2  # in the others each gather waits for a rank that joins it
    apart([make(0), make(1)], sharded, PATHS[paths], order, together=True, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("paths", ["each rank another one", "in another order"])  # the others: the test above
@distributed(2, timeout=40)
def test_two_roots_with_backwards_of_their_own_of_which_one_has_layers_that_run_on_some_ranks_only(paths):
    sharded = [shard(make(seed)) for seed in (0, 1)]
    apart([make(0), make(1)], sharded, PATHS[paths], ORDERS[0], together=False)


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nets.Block(13, 29)
        self.head = nn.Linear(13, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def tied() -> list[Student]:
    """Two models with one head."""
    torch.manual_seed(0)
    models = [Student().double() for _ in range(2)]
    models[1].head.weight = models[0].head.weight
    return models


@all_pairs(runs=["the first", "the second", "both", "in turn"], strategy=STRATEGIES[::3])
@distributed(2, timeout=40)
def test_a_parameter_tied_across_two_roots(runs, strategy):
    def which(number: int) -> list[int]:
        return {
            "the first": [0],
            "the second": [1],
            "both": [0, 1],
            "in turn": [number % 2],
        }[runs]

    def train() -> None:
        plain, sharded = tied(), tied()
        for net in sharded:
            weft.fully_shard(net.block, strategy=strategy)
            weft.fully_shard(net, strategy=strategy)
        parameters = [
            list(dict.fromkeys(parameter for net in models for parameter in net.parameters()))
            for models in (plain, sharded)
        ]
        optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in parameters]
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for number, batch in enumerate(inputs(4)):
            with naming("step", number):
                for models, jobs in ((plain, range(ranks)), (sharded, [rank])):
                    for who in jobs:
                        rows = batch.chunk(ranks)[who]
                        value = sum(models[each](rows).square().mean() for each in which(number))
                        (value / len(jobs)).backward()
                for one, other in zip(sharded, plain):
                    assert_gradients(one, other)
                step(optimizers)
        for one, other in zip(sharded, plain):
            assert_weights(one, other)

    try:
        train()
    except (RuntimeError, ValueError) as error:
        assert re.search(r"(?i)\b(tied|shared|shares)\b.*\bhead\b|\bhead\b.*\b(tied|shared|shares)\b", str(error)), (
            error
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_two_roots_that_step_between_each_others_passes(strategy):
    """A generator and a discriminator: forwards, backwards and steps of the two in between each other."""
    plain, sharded = [make(0), make(1)], [shard(make(seed), strategy=strategy) for seed in (0, 1)]
    for models, optimizers, mine in ((plain, sgd(*plain), lambda b: b), (sharded, sgd(*sharded), rows_of)):
        generator, judge = models
        for batch in inputs(3):
            rows = mine(batch)
            made = generator(rows)
            (judge(made.detach()).square().mean() - judge(rows).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            (judge(made).mean() + made.square().mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
    for one, other in zip(sharded, plain):
        assert_weights(one, other)


@pytest.mark.slow
@distributed(2)
def test_backwards_of_two_roots_in_the_order_of_their_forwards_and_the_other():
    plain, sharded = [make(0), make(1)], [shard(make(seed)) for seed in (0, 1)]
    optimizers = sgd(*plain, *sharded)
    for number, batch in enumerate(inputs(4)):
        for models, rows in ((plain, batch), (sharded, rows_of(batch))):
            losses = [net(rows).square().mean() for net in models]
            for loss in losses if number % 2 else reversed(losses):
                loss.backward()
        for one, other in zip(sharded, plain):
            assert_gradients(one, other)
        step(optimizers)


@pytest.mark.slow
@distributed(2, timeout=60)
def test_a_backward_that_reaches_two_roots_in_another_order_on_each_rank():
    """Who waited for room in the one would wait for a rank that does so in the other."""
    plain, sharded = [make(0), make(1)], [shard(make(seed), strategy="no_shard") for seed in (0, 1)]
    for number, batch in enumerate(inputs(3)):
        first = dist.get_rank() if number else 0  # that all have the same units is said in one order
        for models, rows in ((plain, batch), (sharded, rows_of(batch))):
            losses = [models[each](rows).square().mean() for each in (first, 1 - first)]
            (losses[0] + losses[1]).backward()
        for one, other in zip(sharded, plain):
            assert_gradients(one, other)
            for net in (one, other):
                net.zero_grad()


@pytest.mark.long
@distributed(2, timeout=60)
def test_many_roots_of_which_each_rank_runs_others():
    """The last layers run on one rank only, each another: none takes part in the message of another root."""
    count = 24
    torch.manual_seed(0)
    plain = nn.ModuleList(Routes().double() for _ in range(count))
    torch.manual_seed(0)
    sharded = nn.ModuleList(Routes().double() for _ in range(count))
    for net in sharded:
        shard(net)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for batch in inputs(1):
        for models, jobs in ((plain, range(ranks)), (sharded, [rank])):
            for who in jobs:
                x, total = batch.chunk(ranks)[who], 0.0
                for number, net in enumerate(models):
                    net.path = (0, 1, 2) if number % ranks == who else (0, 2)
                    total = total + net(x).square().mean()
                (total / len(jobs)).backward()
        assert_gradients(sharded, plain)
        for net in (plain, sharded):
            for parameter in net.parameters():
                parameter.grad = None


def test_a_backward_may_reach_another_model_while_that_has_a_forward_without_backward():
    """Then a wait for room could be one for a rank that waits for this one, and gradients of more units are alive."""
    one, other = (JointBackward([SimpleNamespace(serial=place, calls=set())], lambda: None) for place in range(2))
    other.begin()
    assert not one.may_share_backward(), "it has evaluated"
    other._units[0].calls.add("a forward")
    assert one.may_share_backward() and not other.may_share_backward()
    one.settle()
    assert not one.may_share_backward(), "it was reached, and its forward is kept for another backward"


def test_models_end_a_backward_in_the_order_of_their_places_whichever_was_reached_first():
    """Their ends talk to other ranks, which autograd may lead another way."""
    ended = []

    def reach(place):
        def hook(gradient):
            end_with_backward(place, lambda: ended.append(place), lambda: ended.append("failed"))

        return hook

    x = torch.ones((), requires_grad=True)
    for place in (2, 0, 1):
        x = x * 1.0
        x.register_hook(reach(place))
    x.backward()
    assert ended == [0, 1, 2]
