"""A DTensor with uneven shards.

torch's `Shard(0)` means even chunks of rows. weft cuts a flat buffer into equal shards, so a parameter's parts may have
different numbers of rows, or end inside a row. `UnevenDTensor` stores its cuts, and uses them in `full_tensor`, for
checkpoints, and in operators (`rules.py`).

A part is a range of the flattened tensor, in which the dimension that is cut comes first (`weft.layout.cuts`). For
example, a tensor of the shape [4, 3, 2] has four rows [3, 2], each of three blocks [2]:

    cuts                                  shape of each part (`Cuts.row_dims`)
    between rows only                     [n, 3, 2]
    also inside rows, not inside blocks   [n, 2]
    also inside blocks                    1-D

On a rank that has nothing of the tensor, the part has zero elements.

With tensor parallelism the mesh has one more axis (for experts: one or two). The cuts then divide each tensor-parallel
rank's slice:

    mesh (dp, tp), placements (_, Shard(1))      tensor | slice of tp 0 | slice of tp 1 |
                                                        |   cuts over   |   cuts over   |
                                                        |  the dp ranks |  the dp ranks |
"""

import copy
import math
import operator
import weakref
from collections.abc import Iterator, MutableMapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm import collectives
from weft.comm.groups import group_of
from weft.layout.cuts import Cuts
from weft.mesh import position_on


def spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor with this global shape and stride."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, or any other `value` unchanged."""
    return value._local_tensor if isinstance(value, DTensor) else value


class RuledDTensor(DTensor):
    """A DTensor whose operators follow weft's rules: `rules.py` sets `__torch_dispatch__`."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        """A tensor with the memory of this tensor, detached from autograd. Writes to it change this tensor."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        raise RuntimeError(
            f"assignment to .data of a sharded tensor of shape {tuple(self.shape)}: it lies in the flat buffer of its "
            f"unit, which cannot be replaced. Write values with copy_() under torch.no_grad(); to swap values "
            f"temporarily, keep tensor.detach().clone() and copy_() it back"
        )

    def data_ptr(self) -> int:
        """Return 0, as torch's DTensor does: only the local tensor has memory."""
        return 0


class UnevenDTensor(RuledDTensor):
    """A DTensor whose parts are ranges of the flattened tensor, given by `Cuts`."""

    _cuts: Cuts

    @classmethod
    def make(
        cls,
        local: torch.Tensor,
        cuts: Cuts,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size | None = None,
    ) -> "UnevenDTensor":
        """Return the tensor whose part on this rank is `local`. `shape`: the shape of the whole tensor, if `cuts` cut
        only a tensor-parallel slice of it. Default: the shape in `cuts`."""
        shape = torch.Size(cuts.shape) if shape is None else shape
        stride = torch.empty(shape, device="meta").stride()
        return cls._wrap(local, spec_of(mesh, placements, shape, stride, local.dtype), _one(cuts))

    @classmethod
    def _wrap(cls, local: torch.Tensor, spec: DTensorSpec, cuts: Cuts, requires_grad: bool = False) -> "UnevenDTensor":
        # DTensor's __init__ does nothing and takes time.
        made: Any = cls.__new__(cls, local, spec, requires_grad=requires_grad)
        made._cuts = cuts
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return what DTensor returns. While `torch.compile` traces, make it skip the code that uses this tensor,
        because a compiled graph would create DTensors with even cuts. With `fullgraph=True`, raise RuntimeError."""
        if torch._guards.TracingContext.try_get() is None:
            return super().__tensor_flatten__()
        from torch._dynamo.exc import SkipFrame
        from torch._dynamo.symbolic_convert import InstructionTranslator

        if InstructionTranslator.current_tx().one_graph:
            raise RuntimeError(
                "torch.compile(fullgraph=True) of code that computes with sharded parameters, such as an optimizer's "
                "step: compiled graphs do not support uneven shards. Leave fullgraph out, or call "
                'torch.compiler.set_stance("force_eager") around it, which runs it eagerly'
            )
        raise SkipFrame("it computes with sharded parameters, and compiled graphs do not support uneven shards")

    def like(self, local: torch.Tensor) -> "UnevenDTensor":
        """Return a tensor with the cuts of this tensor and the values `local` on this rank."""
        spec = self._spec
        if local.dtype != spec.tensor_meta.dtype:  # type: ignore[union-attr]
            spec = spec_of(spec.mesh, spec.placements, spec.shape, spec.stride, local.dtype)
        return UnevenDTensor._wrap(local, spec, self._cuts)

    def owned_alike(self, local: torch.Tensor | None, meta: torch.Tensor) -> "UnevenDTensor":
        """Return a tensor with the shape, strides and dtype of `meta`. The owner (the rank that has all of this tensor)
        has all of the returned tensor too. `local`: the returned tensor's values on the owner; None on other ranks."""
        owner = self.owner
        assert owner is not None
        borders = (0,) * (owner + 1) + (meta.numel(),) * (self._cuts.parts - owner)
        cuts = Cuts(tuple(meta.shape), borders, self._cuts.axes)
        if local is None:
            empty = torch.empty(0, dtype=meta.dtype, device=self._local_tensor.device)
            local = cuts.shaped(empty, self.part)
        spec = spec_of(self._spec.mesh, self._spec.placements, meta.shape, meta.stride(), meta.dtype)
        return UnevenDTensor._wrap(local, spec, cuts)

    @property
    def slice_placements(self) -> tuple[Placement, ...]:
        """The placements after a gather over the cut axes: `Replicate()` on these axes, unchanged on the others."""
        cut = self._cuts.axes
        return tuple(Replicate() if axis in cut else p for axis, p in enumerate(self._spec.placements))

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes over which the elements are spread, by cuts or by tensor-parallel slices."""
        cut, placements = self._cuts.axes, self._spec.placements
        if len(cut) == len(placements):
            return cut
        return (*cut, *(axis for axis, p in enumerate(placements) if axis not in cut and p.is_shard()))

    @property
    def owner(self) -> int | None:
        """The index of the part that has all elements of the tensor. None if no part has all elements, or if the
        tensor has only one part."""
        return self._cuts.owner if self.axes == self._cuts.axes else None

    @property
    def part(self) -> int:
        return position_on(self._spec.mesh, self._cuts.axes)

    def combine(self, value: torch.Tensor, op: Any) -> torch.Tensor:
        """All-reduce `value`, a small tensor, in place over the `axes` of this tensor, and return it."""
        for axis in self.axes:
            collectives.reduce_now(value, op, group_of(self._spec.mesh, axis), f"a reduction of {tuple(self.shape)}")
        return value

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part. Differentiable from torch 2.13 on. `grad_placements`: this tensor's placements, with
        `Partial()` in place of `Replicate()` on each axis over which the gradient must be summed. None: no sums."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Read.apply(self, False, _partial(grad_placements, self._spec.placements))
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor. Collective. Differentiable from torch 2.13 on. `grad_placements`: for each mesh
        axis, `Partial()` if the gradient must be summed over it, otherwise `Replicate()`. None: no sums."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Read.apply(self, True, _partial(grad_placements, (Replicate(),) * self._spec.mesh.ndim))
        return self._gathered()

    def redistribute(  # type: ignore[override]
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """Return a DTensor with even cuts, these placements and the same values. Collective."""
        mesh = device_mesh or self._spec.mesh
        full = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        placements = self._spec.placements if placements is None else placements
        return full.redistribute(placements=placements, **kwargs)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `full`, a plain tensor of the global shape."""
        if self.shape != self._cuts.shape:
            full = full[tuple(slice(at, at + size) for at, size in zip(self._slice_offsets(), self._cuts.shape))]
        return self._cuts.part_of(full, self.part)

    def _slice_offsets(self) -> tuple[int, ...]:
        """Return the offset, per dimension, of this rank's tensor-parallel slice in the tensor."""
        return compute_local_shape_and_global_offset(self.shape, self._spec.mesh, self.slice_placements)[1]

    def _gathered(self) -> torch.Tensor:
        gathered = self._gathered_slice()
        if self.axes == self._cuts.axes:
            return gathered
        spec = DTensorSpec(self._spec.mesh, self.slice_placements, tensor_meta=self._spec.tensor_meta)
        return DTensor(gathered, spec, requires_grad=False).full_tensor()  # type: ignore[call-arg]

    def _gathered_slice(self) -> torch.Tensor:
        if self._cuts.parts == 1:
            return self._local_tensor.detach().clone(memory_format=torch.contiguous_format).view(self._cuts.shape)
        flat = torch.empty(math.prod(self._cuts.shape), dtype=self.dtype, device=self._local_tensor.device)
        borders, part = self._cuts.borders, self.part
        flat[borders[part] : borders[part + 1]] = self._cuts.flattened(self._local_tensor.detach())
        span = 1  # the number of adjacent parts that are gathered already: the axis of the finest cuts comes first
        for axis in reversed(self._cuts.axes):
            size, rank = self._spec.mesh.size(axis), self._spec.mesh.get_local_rank(axis)
            first = part // (span * size) * (span * size)
            edges = [borders[first + step * span] for step in range(size + 1)]
            pieces = [flat[start:stop] for start, stop in pairwise(edges)]
            group = group_of(self._spec.mesh, axis)
            collectives.all_gather_uneven(pieces, rank, group, f"the full tensor of {tuple(self.shape)}")
            span *= size
        return self._cuts.shaped(flat).contiguous()

    def __deepcopy__(self, memo: dict) -> "UnevenDTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a sharded tensor that autograd computed: detach() it first")
        made: Any = self.detach().clone()
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        made.grad_dtype = self.grad_dtype
        made.grad = copy.deepcopy(self.grad, memo)
        vars(made).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in vars(made)})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        facts = self._spec, self._cuts, self.requires_grad, isinstance(self, nn.Parameter)
        return _rebuilt, (self._local_tensor, *facts)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"UnevenDTensor(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"borders={self._cuts.borders}, device_mesh={self._spec.mesh})"
        )

    # --- Distributed Checkpoint -------------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        local = self._local_tensor.detach()
        for offsets, sizes, start in self._boxes():
            if index.offset is None or torch.Size(offsets) == index.offset:
                if local.shape == torch.Size(sizes):  # torchao's low-bit states support no other views
                    return local
                return local.view(-1)[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"{index.fqn}: no part of this tensor at offset {index.offset} lies on this rank")

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield this rank's part as rectangles of the tensor: `(offsets, sizes, index)`. `index`: the index, in the
        part, of the rectangle's first element."""
        if self.shape == self._cuts.shape:
            yield from self._cuts.boxes(self.part)
        elif self._local_tensor.numel():
            begin = self._slice_offsets()
            for offsets, sizes, start in self._cuts.boxes(self.part):
                yield tuple(map(operator.add, begin, offsets)), sizes, start


class _ByRules(TorchDispatchMode):
    """Dispatches operators on each `RuledDTensor` to weft's rules."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C._EnableTorchFunction():
            if any(issubclass(each, RuledDTensor) for each in types):
                return RuledDTensor.__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))


_ATTRIBUTES = {"device", "dtype", "grad", "grad_dtype", "grad_fn", "is_leaf", "ndim", "requires_grad", "shape"}
"""Attributes that are read often and run no operator."""


def _ask_the_rules_first(
    cls: type[RuledDTensor], func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if getattr(getattr(func, "__self__", None), "__name__", None) in _ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        with _ByRules():
            return func(*args, **(kwargs or {}))


_BYPASSED = torch.__version__ < "2.13"
"""Whether this version of torch runs DTensor's dispatch in place of a subclass's `__torch_dispatch__`, for calls by the
user and for calls by autograd."""

if _BYPASSED:
    RuledDTensor.__torch_function__ = classmethod(_ask_the_rules_first)  # type: ignore[assignment]


class _Read(torch.autograd.Function):
    """Returns the whole tensor if `whole`, else this rank's part. `partial`: the result of `_partial` for the
    gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor, whole: bool, partial: Any) -> torch.Tensor:
        ctx.tensor, ctx.whole, ctx.partial = tensor.detach(), whole, partial
        return tensor._gathered() if whole else tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if _BYPASSED:
            raise RuntimeError(
                f"a gradient of to_local() or full_tensor() of a sharded tensor: torch {torch.__version__} cannot "
                "accumulate it; use torch 2.13, or compute with the weights that modules have in their forward"
            )
        if ctx.partial is not None:
            grad = DTensor.from_local(grad, ctx.tensor._spec.mesh, ctx.partial, run_check=False).full_tensor()
        return ctx.tensor.like(ctx.tensor.slice_of(grad).contiguous() if ctx.whole else grad), None, None


def _partial(given: Any, own: tuple[Placement, ...]) -> list[Placement] | None:
    """Return the placements of a gradient that must be summed: `Partial()` where `given` (the user's placements) has
    it, `Replicate()` elsewhere. None if no sum is needed. Raise ValueError if `given` differs from `own` (the tensor's
    placements) otherwise than by `Partial()` in place of `Replicate()`."""
    if given is None or tuple(given) == own:
        return None
    if len(given) != len(own) or any(a != b and not (a.is_partial() and b.is_replicate()) for a, b in zip(given, own)):
        raise ValueError(
            f"grad_placements={given} of a sharded tensor: choose {list(own)}, with Partial() in place of Replicate() "
            "where each rank has a part of the sum"
        )
    return [each if each.is_partial() else Replicate() for each in given]


_in_use: MutableMapping[tuple, Cuts] = weakref.WeakValueDictionary()


def _one(cuts: Cuts) -> Cuts:
    """Return the same object for equal cuts, because optimizers compare the cuts of thousands of tensors."""
    return _in_use.setdefault((cuts.shape, cuts.borders, cuts.axes, cuts.dim), cuts)


def _rebuilt(local: torch.Tensor, spec: DTensorSpec, cuts: Cuts, requires_grad: bool, is_parameter: bool) -> Any:
    made = UnevenDTensor._wrap(local, spec, _one(cuts), requires_grad)
    return nn.Parameter(made, requires_grad=requires_grad) if is_parameter else made


torch.serialization.add_safe_globals([_rebuilt, Cuts])

for _known in (_optim_foreach_types, _util_foreach_types):
    if UnevenDTensor not in _known:
        _known.append(UnevenDTensor)
