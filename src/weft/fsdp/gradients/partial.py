"""Weights that the ranks of a tensor-parallel axis have alike, while each computes a part of their gradient.

    forward     the parameter, Replicate()   ->  a plain tensor in the same memory
    backward    this rank's part             ->  the sum over the ranks, Replicate()

The sum is a message. What a graph holds must not send it, so `entering` puts another tensor in place of the plain one,
and the caller of the graph uses `whole` around it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of

Enter = Callable[[Any, DeviceMesh], Tensor]
_enter: Enter | None = None


@contextmanager
def entering(enter: Enter) -> Iterator[None]:
    """Inside, `whole` is what `enter` returns."""
    global _enter
    before, _enter = _enter, enter
    try:
        yield
    finally:
        _enter = before


def whole(parameter: Any, mesh: DeviceMesh) -> Tensor:
    """What the ranks of the 1-D `mesh` have alike of `parameter`, differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    return _Whole.apply(parameter, mesh) if _enter is None else _enter(parameter, mesh)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Any, mesh: DeviceMesh) -> Tensor:
        ctx.group, ctx.lies = group_of(mesh, 0), (parameter.device_mesh, parameter.placements)
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        wide = wide.contiguous()
        reduce_now(wide, dist.ReduceOp.SUM, ctx.group, "a gradient of tensor-parallel ranks")
        return DTensor.from_local(wide.to(gradient.dtype), *ctx.lies, run_check=False), None
