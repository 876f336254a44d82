"""Gradients that modules write directly into the buffer that is reduced.

A custom backward that can write its product to a given tensor (`torch.addmm(out=)`, a fused kernel) avoids a copy of
the gradient and, with a wider `reduce_dtype`, rounding it to the compute dtype. It calls `weight_gradient` with the
weight that its forward kept as an attribute of `ctx`, because a saved one is a copy under an activation checkpoint, and
returns None for its gradient.

Megatron's convention works too: a module sets `weight.grad_added_to_main_grad = False` on its parameter before
`fully_shard`. In backward it adds to `weight.main_grad` and sets `weight.grad_added_to_main_grad = True`. The gradient
that it returns to autograd for that weight is then ignored, unless `weight.zero_out_wgrad` is True, for zeros.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.fsdp.parameter import known, record_of

PART_CLASS = "_weft_part_class"  # the attribute of a DTensor with the class of its local part


@dataclass
class Substitutes:
    """What replaces functions while a graph captures: `answer` replaces `weight_gradient`, and `enter` replaces
    `weft.fsdp.gradients.partial.whole`; None: the function itself."""

    answer: Callable[[nn.Parameter], tuple[torch.Tensor, bool]] | None = None
    enter: Callable[[Any, DeviceMesh], torch.Tensor] | None = None


substitutes = Substitutes()


@contextmanager
def substituting(**functions: Callable[..., Any]) -> Iterator[None]:
    """Set these `substitutes` in this context."""
    before = {name: getattr(substitutes, name) for name in functions}
    vars(substitutes).update(functions)
    try:
        yield
    finally:
        vars(substitutes).update(before)


@torch.compiler.disable
def weight_gradient(parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Return the buffer for the gradient of `parameter` in this backward, and whether to add to it.

    The buffer has the parameter's shape, and the dtype in which gradients are reduced, or accumulated over
    microbatches. If the second value is False, overwrite the whole buffer, which is uninitialised; otherwise add to it.
    Call this once before each write, and return None for this gradient to autograd. Gradients from other uses of the
    parameter are added. It may be called in backward, or later until the unit's `reduce()`.

    `parameter`: the full parameter in forward, or the registered sharded one. For a parameter that is not sharded, the
    buffer is its `.grad`. Raises ValueError for a frozen parameter.
    """
    if not parameter.requires_grad:
        raise ValueError("weight_gradient of a frozen parameter: call it only if parameter.requires_grad")
    if substitutes.answer is not None:
        return substitutes.answer(parameter)
    if parameter in known:
        record = record_of(parameter)
        assert record is not None, "the parameter outlived its model"
        assert record.unit.channels is not None, f"{record.unit} belongs to no model yet"
        return record.unit.channels.gradient_to_write(record)
    accumulate = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad, accumulate


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, whose parameter `parameter_of` finds, or a plain parameter itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local()
    if part.requires_grad:  # otherwise it may be the parameter's own tensor: a reference back would be a cycle
        if PART_CLASS in vars(parameter):
            part = part.as_subclass(vars(parameter)[PART_CLASS])
        part.part_of = parameter  # type: ignore[attr-defined]
    return part


def parameter_of(weight: torch.Tensor) -> nn.Parameter | None:
    """Return `weight` if it is a parameter, or the parameter whose local part it is; None otherwise."""
    whole = getattr(weight, "part_of", weight)
    return whole if isinstance(whole, nn.Parameter) else None


def says_it_wrote(parameter: nn.Parameter) -> bool:
    """Return whether the module added to `main_grad` in this backward."""
    return getattr(parameter, "grad_added_to_main_grad", False)
