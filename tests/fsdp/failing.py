"""What fails in the middle of a pass."""

from typing import Any

import torch
from torch import nn


class Oops(Exception):
    """What tests expect."""


def throw(*_: Any) -> None:
    """A hook, before a forward or after."""
    raise Oops


class FailsInBackward(torch.autograd.Function):
    """The identity, of which the backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Oops


def fails_later(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook after a forward, whose backward then fails."""
    return FailsInBackward.apply(output)
