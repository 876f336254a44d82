"""Weights that are replicated over tensor-parallel ranks, each of which computes a partial gradient.

    forward     the parameter, Replicate()   ->  a plain tensor in the same memory
    backward    this rank's part             ->  the sum over the ranks, Replicate()

The sum is an all-reduce, which a captured graph must not contain. Therefore a capture substitutes another tensor for
the plain one, and the caller of the graph calls `whole` outside of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.fsdp.gradients.direct import substitutes


def whole(parameter: Any, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor of a `parameter` replicated over the 1-D `mesh`; backward sums its gradient over ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    return (substitutes.enter or _Whole.apply)(parameter, mesh)


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
