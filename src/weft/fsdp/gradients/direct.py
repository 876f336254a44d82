"""Gradients that modules write directly into the buffer that is reduced.

A custom backward that can write its product to a given tensor (`torch.addmm(out=)`, a fused kernel) avoids a copy of
the gradient and, with a wider `reduce_dtype`, rounding it to the compute dtype:

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight                   # not saved: an activation checkpoint would return a copy
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            buffer, accumulate = weft.fsdp.weight_gradient(ctx.weight)
            if accumulate: buffer.addmm_(dy.t().to(buffer.dtype), x.to(buffer.dtype))
            else:          torch.mm(dy.t().to(buffer.dtype), x.to(buffer.dtype), out=buffer)
            return dy @ ctx.weight, None          # autograd has nothing to add

Megatron's convention works too: a module sets `weight.grad_added_to_main_grad = False` on its parameter before
`fully_shard`. In backward it adds to `weight.main_grad` and sets `weight.grad_added_to_main_grad = True`. The gradient
that it returns to autograd for that weight is then ignored, unless `weight.zero_out_wgrad` is True, for zeros.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.fsdp.parameter import known, record_of

PART_CLASS = "_weft_part_class"
"""The attribute of a DTensor with the class of its local part."""
_answer: Callable[[nn.Parameter], tuple[torch.Tensor, bool]] | None = None


@contextmanager
def answering(answer: Callable[[nn.Parameter], tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Let `weight_gradient` call `answer` in this context, for example while a graph captures a backward."""
    global _answer
    before, _answer = _answer, answer
    try:
        yield
    finally:
        _answer = before


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
    if _answer is not None:
        return _answer(parameter)
    if parameter in known:
        record = record_of(parameter)
        assert record is not None, "the parameter outlived its model"
        assert record.unit.gradient_to_write is not None, f"{record.unit} belongs to no model yet"
        return record.unit.gradient_to_write(record)
    accumulate = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad, accumulate


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, for local computation, or a plain parameter itself.

    `parameter_of` returns the parameter of such a local tensor.
    """
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


def declares_writing(parameter: nn.Parameter) -> bool:
    """Return whether the parameter's module adds to `main_grad`, by Megatron's convention."""
    return hasattr(parameter, "grad_added_to_main_grad")


def says_it_wrote(parameter: nn.Parameter) -> bool:
    """Return whether the module added to `main_grad` in this backward."""
    return getattr(parameter, "grad_added_to_main_grad", False)


def leaves_a_dummy(parameter: nn.Parameter) -> bool:
    """Return whether to ignore autograd's gradient of the parameter, because the module wrote `main_grad`."""
    return says_it_wrote(parameter) and not getattr(parameter, "zero_out_wgrad", False)


def withdraw_main_gradient(parameter: nn.Parameter) -> None:
    """Remove `main_grad`, so that modules no longer write to its buffer."""
    vars(parameter).pop("main_grad", None)
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
