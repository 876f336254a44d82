"""Gradients that modules write directly into the buffer that is reduced, and gradients that `whole` first sums over
tensor-parallel ranks.

A custom backward may write its product to a given tensor (`torch.addmm(out=)`, a fused kernel). This avoids a copy of
the gradient and, with a wider `reduce_dtype`, rounding to the compute dtype. The backward calls `weight_gradient`, and
returns None as the weight's gradient. The forward keeps the weight as an attribute of `ctx`, not with
`save_for_backward`: under an activation checkpoint, the backward would get a copy.

Megatron's convention works too. A module sets `weight.grad_added_to_main_grad = False` on its parameter before
`fully_shard`. In backward it adds to `weight.main_grad` and sets `weight.grad_added_to_main_grad = True`. weft then
ignores autograd's gradient of the weight, unless `weight.zero_out_wgrad = True`: the module then returns zeros to
autograd, and weft adds autograd's gradient, which comes from the weight's other uses.

`whole` is for weights that are replicated over tensor-parallel ranks, each of which computes a partial gradient:

    forward     the parameter, Replicate()   ->  a plain tensor in the same memory
    backward    this rank's part             ->  the sum over the ranks, Replicate()

The sum is an all-reduce, which a captured graph (`weft.graphs`) must not contain. Therefore a capture substitutes
another tensor for the plain one, and the caller of the graph calls `whole` outside of the graph.
"""

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.fsdp.parameter import known, record_of

PART_CLASS = "_weft_part_class"  # the attribute in which a DTensor stores the class of its local part


originals: MutableMapping[Any, "weakref.ref[nn.Parameter]"] = WeakTensorKeyDictionary()
"""During a graph capture, leaves stand in for parameters. This maps each leaf to its parameter."""
substitutes: dict[str, Callable[..., Any]] = {}
"""Functions to call during a graph capture: `answer` in place of `weight_gradient`, `enter` in place of `whole`."""


@contextmanager
def substituting(**functions: Callable[..., Any]) -> Iterator[None]:
    """Set these `substitutes` in this context."""
    before = dict(substitutes)
    substitutes.update(functions)
    try:
        yield
    finally:
        substitutes.clear()
        substitutes.update(before)


@torch.compiler.disable
def weight_gradient(parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Return the buffer to which a custom backward writes the gradient of `parameter`, and whether to add to it.

    If the second value is False, overwrite the whole buffer, which is uninitialized. If it is True, add to the buffer.
    Return None to autograd as the gradient of the parameter. Gradients from other uses of the parameter are added to
    the buffer.

    Call this function once before each write. You may call it until the reduction of the unit's gradients starts,
    usually at the end of the unit's backward.

    The buffer has the parameter's shape or, with tensor parallelism, the shape of this rank's slice. Its dtype is
    `reduce_dtype`, except in two cases, in which it is `main_grads_dtype`:

    - Gradients of several backwards accumulate before they are reduced.
    - `reduce_dtype` has a smaller range than the computation's dtype. The range of bfloat16 is slightly smaller than
      that of float32.

    For a parameter that is in no unit, the buffer is its `.grad`.

    `parameter`: the full parameter that forward used, or its sharded parameter. Raises ValueError for a frozen one.
    """
    parameter = original_of(parameter)
    if not parameter.requires_grad:
        raise ValueError("weight_gradient of a frozen parameter: call it only if parameter.requires_grad")
    if (answer := substitutes.get("answer")) is not None:
        return answer(parameter)
    if parameter in known:
        record = record_of(parameter)
        assert record is not None, "the parameter outlived its model"
        assert record.unit.channels is not None, f"{record.unit} belongs to no model yet"
        return record.unit.channels.gradient_to_write(record)
    accumulate = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad, accumulate


def original_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter for which the leaf `parameter` stands in (see `originals`), or `parameter` itself."""
    if parameter not in originals:
        return parameter
    original = originals[parameter]()
    assert original is not None, "the parameter outlived its model"
    return original


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, or a plain tensor unchanged. If the local tensor requires grad, `parameter_of`
    finds its DTensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local()
    if part.requires_grad:  # otherwise it may be the parameter's own tensor: a reference back would be a cycle
        if PART_CLASS in vars(parameter):
            part = part.as_subclass(vars(parameter)[PART_CLASS])
        part.part_of = parameter  # type: ignore[attr-defined]
    return part


def parameter_of(weight: torch.Tensor) -> nn.Parameter | None:
    """Return `weight` if it is a parameter, frozen or not. If it requires grad and is the `local_part` of a DTensor
    parameter, return this parameter. Otherwise return None."""
    whole = getattr(weight, "part_of", weight)
    return whole if isinstance(whole, nn.Parameter) else None


def whole(parameter: Any, mesh: DeviceMesh) -> torch.Tensor:
    """Return `parameter` as a plain tensor. If it is a DTensor, backward sums its gradient over the 1-D `mesh`."""
    if not isinstance(parameter, DTensor):
        return parameter
    return substitutes.get("enter", _Whole.apply)(parameter, mesh)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any, mesh: DeviceMesh) -> torch.Tensor:
        ctx.group, ctx.lies = group_of(mesh, 0), (parameter.device_mesh, parameter.placements)
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        wide = wide.contiguous()
        reduce_now(wide, dist.ReduceOp.SUM, ctx.group, "a gradient of tensor-parallel ranks")
        return DTensor.from_local(wide.to(gradient.dtype), *ctx.lies, run_check=False), None
