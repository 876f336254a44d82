"""Gradients that modules write themselves, straight into the buffer that is reduced.

A custom backward that can add its product to a given tensor (`torch.addmm(out=)`, a fused kernel) saves a copy of the
gradient and, with a wider `reduce_dtype`, its rounding to the computation's dtype:

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight                   # the parameter itself: checkpoints save copies
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            buffer, accumulate = weft.fsdp.weight_gradient(ctx.weight)
            if accumulate: buffer.addmm_(dy.t().to(buffer.dtype), x.to(buffer.dtype))
            else:          torch.mm(dy.t().to(buffer.dtype), x.to(buffer.dtype), out=buffer)
            return dy @ ctx.weight, None          # autograd has nothing to add

Megatron's convention works too: a module declares `weight.grad_added_to_main_grad = False` on its parameter before
`fully_shard`, finds `weight.main_grad` in backward, adds to it, and sets `weight.grad_added_to_main_grad = True`. What
it returns to autograd for that weight is then ignored, unless `weight.zero_out_wgrad` says that it is zeros.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.fsdp.parameter import known, record_of

PART_CLASS = "_weft_part_class"
"""The attribute of a DTensor that says which class its local part has."""
_answer: Callable[[nn.Parameter], tuple[torch.Tensor, bool]] | None = None


@contextmanager
def answering(answer: Callable[[nn.Parameter], tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Inside, `weight_gradient` asks `answer`, as where a backward is recorded."""
    global _answer
    before, _answer = _answer, answer
    try:
        yield
    finally:
        _answer = before


@torch.compiler.disable
def weight_gradient(parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Where to write the gradient of `parameter` in this backward: (buffer, accumulate).

    `buffer` has the parameter's shape, and the dtype in which gradients travel, or accumulate over microbatches. Write
    to it in full if `accumulate` is False, since it holds garbage; else add. Call it once for each time you write, just
    before you write, and return None for this gradient to autograd; gradients that autograd brings from other uses of
    the parameter are added. It may be called in backward, or after it until the unit's `reduce()`.

    `parameter`: as the module sees it in forward, or as it is registered at rest. For a parameter that is not sharded
    the buffer is its `.grad`. Raises ValueError for a frozen parameter.
    """
    if not parameter.requires_grad:
        raise ValueError("weight_gradient of a frozen parameter: ask only where parameter.requires_grad")
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
    """The parameter for local computation: of a DTensor what lies on this rank, which `parameter_of` knows again."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local()
    if part.requires_grad:  # else it may be the parameter's own, which must not refer to it
        if PART_CLASS in vars(parameter):
            part = part.as_subclass(vars(parameter)[PART_CLASS])
        part.part_of = parameter  # type: ignore[attr-defined]
    return part


def parameter_of(weight: torch.Tensor) -> nn.Parameter | None:
    """The parameter that `weight` is, or is the local part of; None for anything else."""
    whole = getattr(weight, "part_of", weight)
    return whole if isinstance(whole, nn.Parameter) else None


def declares_writing(parameter: nn.Parameter) -> bool:
    """Whether the parameter's module adds to `main_grad` itself, by Megatron's convention."""
    return hasattr(parameter, "grad_added_to_main_grad")


def says_it_wrote(parameter: nn.Parameter) -> bool:
    """Whether the module added to `main_grad` in this backward."""
    return getattr(parameter, "grad_added_to_main_grad", False)


def leaves_a_dummy(parameter: nn.Parameter) -> bool:
    """Whether what autograd brings for the parameter has no meaning."""
    return says_it_wrote(parameter) and not getattr(parameter, "zero_out_wgrad", False)


def withdraw_main_gradient(parameter: nn.Parameter) -> None:
    """The place behind `main_grad` is taken: it must not be written to any more."""
    vars(parameter).pop("main_grad", None)
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
