"""A sharded model beside the plain one: each rank goes its own way, and the plain one goes all of them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp import nets
from weft.fsdp.runtime.shared import Shared

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def backward(plain: nn.Module, sharded: nn.Module, loss: Callable[..., torch.Tensor], batch: torch.Tensor) -> None:
    """One backward of both: `loss(net, rows, rank)` of this rank's rows, the mean of all in the plain one."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = batch.chunk(ranks)
    (sum(loss(plain, part, each) for each, part in enumerate(parts)) / ranks).backward()
    loss(sharded, parts[rank], rank).backward()


def microbatches(
    plain: nn.Module, sharded: nn.Module, loss: Callable[..., torch.Tensor], batch: torch.Tensor, count: int
) -> None:
    """`backward` of each of `count` parts of the batch, the last one before the optimizer said to be it."""
    for number, rows in enumerate(batch.chunk(count)):
        sharded.set_is_last_backward(number == count - 1)
        backward(plain, sharded, loss, rows)


def assert_gradients(sharded: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Every parameter has the plain one's gradient, or none where that has none."""
    actual, expected = ({name: p.grad for name, p in net.named_parameters()} for net in (sharded, plain))
    nets.assert_same(actual, expected, **tolerance)


def assert_weights(sharded: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Every parameter has the plain one's value."""
    nets.assert_same(dict(sharded.named_parameters()), dict(plain.named_parameters()), **tolerance)


def sgd(*models: nn.Module, lr: float = 0.1) -> list[torch.optim.Optimizer]:
    """An optimizer for each, before any pass."""
    return [torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9) for net in models]


def step(optimizers: list[torch.optim.Optimizer]) -> None:
    """Step, and forget the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def tokens_loss(net: nn.Module, rows: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """`nets.loss_of`, as `backward` calls it."""
    return nets.loss_of(net, rows)


def right_or_refused(program: Callable[[], Any], unit: str) -> None:
    """Run `program`, which raises AssertionError where numbers are wrong; or it is told that `unit` is the trouble."""
    try:
        program()
    except (RuntimeError, ValueError) as error:
        assert re.search(unit, str(error)), f"refused without naming {unit!r}: {type(error).__name__}: {error}"


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """Add the case to the report of a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case}")
        raise


@contextmanager
def nothing_renewed() -> Iterator[None]:
    """Each pass finds all weights up to date: no use has to gather them again. Also a decorator."""
    renewed: list[str] = []

    def count(shared: Shared, unit: Any) -> None:
        renewed.append(str(unit))

    with mock.patch.object(Shared, "_before_renewal", count):
        yield
    assert not renewed, renewed
