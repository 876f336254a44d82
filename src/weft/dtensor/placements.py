"""The placements of sharded tensors: `Shard(dim)` for even cuts over one mesh axis, else a subclass that has the cuts.

The cuts of a tensor (`weft.layout.cuts`) are the borders between the parts that the ranks have.

    placement of a parameter                      torch treats it as   `DTensor.from_local` treats it as
    --------------------------------------------  -------------------  -------------------------------------------------
    Shard(dim), if the cuts are even              even cuts            even cuts
    UnevenShard(dim, cuts), equal to Shard(dim)   even cuts            `cuts`: the local tensor is one of the parts

With a parameter's placements, `distribute_tensor` and `redistribute` return a DTensor with even cuts, which the
parameter's `copy_` and other operators accept. `from_local` returns a tensor with the parameter's cuts.

torch's own `from_local` multiplies the local shape by the number of ranks. With uneven cuts, the product differs
between ranks. Therefore weft wraps `from_local` and `redistribute`. With torch's own placements, the wrapped functions
behave as in torch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from weft.dtensor.local import whole_of
from weft.dtensor.uneven import UnevenDTensor
from weft.layout.cuts import Cuts


class _Uneven:
    """A placement with uneven `cuts`, for one of the mesh axes that the cuts span. torch treats it like `even`, torch's
    own placement with even cuts. `shape`: the shape of the whole tensor."""

    dim: int

    def __init__(self, even: Any, cuts: Cuts, shape: torch.Size) -> None:
        options = {"split_factor": even.split_factor} if isinstance(even, _StridedShard) else {}
        super().__init__(even.dim, **options)  # type: ignore[call-arg]
        self.even, self.cuts, self.shape = even, cuts, shape

    def __reduce__(self) -> Any:
        return type(self), (self.even, self.cuts, self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, borders={self.cuts.borders})"


class UnevenShard(_Uneven, Shard):
    """`Shard(dim)` with uneven cuts."""


class UnevenStridedShard(_Uneven, _StridedShard):
    """`UnevenShard` along a dimension that tensor parallelism slices too."""


def placements_of(tensor: UnevenDTensor) -> tuple[Placement, ...]:
    """Return the placements of `tensor`, one per mesh axis."""
    cuts, spec = tensor._cuts, tensor._spec
    if cuts.is_even or not cuts.axes:
        return spec.placements
    found = list(spec.placements)
    for axis in cuts.axes:
        kind: Any = UnevenStridedShard if isinstance(found[axis], _StridedShard) else UnevenShard
        found[axis] = kind(found[axis], cuts, spec.shape)
    return tuple(found)


def plain(placements: Sequence[Placement]) -> list[Placement]:
    """Return `placements`, with each of weft's placements replaced by torch's placement of even cuts."""
    return [each.even if isinstance(each, _Uneven) else each for each in placements]


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, cuts: Cuts) -> UnevenDTensor:
        made = UnevenDTensor._wrap(local.view_as(local), spec, cuts)
        ctx.tensor = made.detach()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        like = ctx.tensor
        if isinstance(gradient, UnevenDTensor) and gradient._cuts == like._cuts:
            return gradient._local_tensor, None, None
        return like.slice_of(whole_of(gradient)), None, None


def _like_a_part(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], given: torch.Size | None
) -> UnevenDTensor:
    """Return the sharded tensor whose part on this rank is `local`. `given`: the shape that the user passed, or None.
    Raises ValueError if `placements` are not those of one parameter, or do not fit `local` and `given`."""
    first: Any = next(each for each in placements if isinstance(each, _Uneven))
    cuts, shape = first.cuts, first.shape
    if [axis for axis, each in enumerate(placements) if isinstance(each, _Uneven)] != sorted(cuts.axes):
        raise ValueError(
            f"from_local(placements={list(placements)}): the placements of a weft parameter belong together; pass "
            f"parameter.placements unchanged, or Shard(dim) for your own parts"
        )
    made = UnevenDTensor.make(local.detach(), cuts, mesh, tuple(plain(placements)), shape=shape)
    expected = tuple(cuts.shaped(torch.empty(cuts.size_of(made.part), device="meta"), made.part).shape)
    if tuple(local.shape) != expected or (given is not None and tuple(given) != tuple(shape)):
        raise ValueError(
            f"from_local() of a tensor of shape {tuple(local.shape)} with the placements of a weft parameter of shape "
            f"{tuple(shape)}, whose part on this rank has the shape {expected}: pass a tensor computed from "
            f"parameter.to_local(), or Shard(dim) for your own parts"
        )
    return _FromLocal.apply(local, made._spec, cuts)


def taking_parts(from_local: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Wrap `DTensor.from_local` so that it also accepts `UnevenShard` and `UnevenStridedShard`."""

    @functools.wraps(from_local)
    def wrapped(local_tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if placements is None or not any(isinstance(each, _Uneven) for each in placements):
            return from_local(local_tensor, device_mesh, placements, **options)
        if device_mesh is None:
            raise ValueError("from_local() with the placements of a weft parameter: pass parameter.device_mesh too")
        return _like_a_part(local_tensor, device_mesh, placements, options.get("shape"))

    return wrapped


def taking_even(redistribute: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Wrap `DTensor.redistribute` to treat `UnevenShard` and `UnevenStridedShard` as placements of even cuts."""

    @functools.wraps(redistribute)
    def wrapped(self: DTensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        return redistribute(self, device_mesh, placements and plain(placements), **options)

    return wrapped


UnevenDTensor.placements = property(placements_of)  # type: ignore[assignment,method-assign]
