"""A DTensor that tells the truth about uneven cuts.

torch's `Shard(0)` means even chunks of rows. A flat buffer cuts where padding is least: between rows of unequal number,
or inside a row. `UnevenDTensor` is a DTensor that carries its cuts and answers for them:

    operator                                        | runs
    ------------------------------------------------+------------------------------------------------------------
    element-wise, foreach, fused optimizer steps    | on the local parts, where all have the same cuts
    norms and full reductions                       | on the local parts, then one small all-reduce
    copy_ from a full tensor or from other cuts     | on the slice that lies here
    everything else, if it changes no argument      | on an even DTensor of the same values (communicates)

A part is a range of the flattened tensor. It has whole rows' shape where its cuts allow, else it is 1-D; on a rank that
holds none of the tensor it has zero elements.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types
from torch.utils._pytree import tree_flatten, tree_map

from weft.comm import collectives
from weft.comm.groups import group_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Cuts:
    """Where one tensor is cut: part r holds elements `[borders[r], borders[r + 1])`. One part: the tensor is whole."""

    shape: tuple[int, ...]
    borders: tuple[int, ...]

    @property
    def parts(self) -> int:
        """Into how many parts."""
        return len(self.borders) - 1

    @cached_property
    def row_dims(self) -> int | None:
        """The first dimension that no cut divides: a part has the shape `[rows, *shape[row_dims:]]`; None: 1-D."""
        for dim in range(1, len(self.shape)):
            row = math.prod(self.shape[dim:])
            if row and all(border % row == 0 for border in self.borders):
                return dim
        return None

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The local shape of a part."""
        numel = self.borders[part + 1] - self.borders[part]
        if self.row_dims is not None:
            rows = self.shape[self.row_dims :]
            return (numel // math.prod(rows), *rows)
        if math.prod(self.shape) == numel:
            return self.shape
        return (numel,)

    def boxes(self, part: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The part as rectangles of the full tensor: `(offsets, sizes, first element within the part)`."""
        start, stop = self.borders[part], self.borders[part + 1]
        at = start
        while at < stop:
            offsets, sizes = _largest_box(self.shape, at, stop)
            yield offsets, sizes, at - start
            at += math.prod(sizes)


class UnevenDTensor(DTensor):
    """A DTensor over a 1-D mesh whose parts are those of `cuts`."""

    _cuts: Cuts

    @classmethod
    def make(
        cls,
        local: torch.Tensor,
        cuts: Cuts,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        requires_grad: bool = False,
    ) -> "UnevenDTensor":
        """The tensor of shape `cuts.shape` whose part on this rank is `local`."""
        shape = torch.Size(cuts.shape)
        stride = torch.empty(shape, device="meta").stride()
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
        return cls._wrap(local, spec, cuts, requires_grad)

    @classmethod
    def _wrap(
        cls, local: torch.Tensor, spec: DTensorSpec, cuts: Cuts, requires_grad: bool = False
    ) -> "UnevenDTensor":
        made = cls(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
        made._cuts = cuts
        return made

    def like(self, local: torch.Tensor) -> "UnevenDTensor":
        """The tensor with this one's cuts and other values."""
        spec = self._spec
        if local.dtype != spec.tensor_meta.dtype:  # type: ignore[union-attr]
            meta = TensorMeta(spec.shape, spec.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return UnevenDTensor._wrap(local, spec, self._cuts)

    @property
    def part(self) -> int:
        """Which part of the cuts lies on this rank."""
        return self._spec.mesh.get_local_rank(0) if self._cuts.parts > 1 else 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group over which the parts lie."""
        return group_of(self._spec.mesh, 0)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's part."""
        if self.requires_grad and torch.is_grad_enabled():
            return _ToLocal.apply(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank. Collective."""
        if self.requires_grad and torch.is_grad_enabled():
            return _ToFull.apply(self)
        return self._gathered()

    def redistribute(  # type: ignore[override]
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """An even DTensor with these placements and the same values. Collective."""
        mesh = device_mesh or self._spec.mesh
        full = self.full_tensor()
        return distribute_tensor(full, mesh, placements or self._spec.placements, src_data_rank=None)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """The part of `full`, a plain tensor of the global shape, that lies here."""
        borders = self._cuts.borders
        flat = full.reshape(-1)[borders[self.part] : borders[self.part + 1]]
        return flat.view(self._local_tensor.shape)

    def _gathered(self) -> torch.Tensor:
        if self._cuts.parts == 1:
            return self._local_tensor.detach().clone().view(self._cuts.shape)
        full = torch.empty(self._cuts.shape, dtype=self.dtype, device=self._local_tensor.device)
        borders = self._cuts.borders
        parts = [full.view(-1)[start:stop] for start, stop in zip(borders, borders[1:])]
        parts[self.part].copy_(self._local_tensor.detach().view(-1))
        collectives.all_gather_uneven(parts, self.part, self.group)
        return full

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
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self._cuts.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in self._cuts.boxes(self.part)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        flat = self._local_tensor.detach().view(-1)
        for offsets, sizes, start in self._cuts.boxes(self.part):
            if index.offset is None or torch.Size(offsets) == index.offset:
                return flat[start : start + math.prod(sizes)].view(sizes)
        raise ValueError(f"{index.fqn}: no part of this tensor at offset {index.offset} lies on this rank")

    # --- operators --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func) or _RULES.setdefault(func, _rule_of(func))
        return rule(func, args, kwargs)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        ctx.tensor = tensor.detach()
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.tensor.like(grad)


class _ToFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        ctx.tensor = tensor.detach()
        return tensor._gathered()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.tensor.like(ctx.tensor.slice_of(grad).contiguous())


def _largest_box(shape: tuple[int, ...], at: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The largest rectangle of a tensor that starts at flat element `at` and ends at or before `stop`."""
    offsets = []
    rest = at
    for dim in range(len(shape)):
        row = math.prod(shape[dim + 1 :])
        offsets.append(rest // row)
        rest %= row
    for dim in range(len(shape)):
        row = math.prod(shape[dim + 1 :])
        count = min((stop - at) // row, shape[dim] - offsets[dim])
        if count and not any(offsets[dim + 1 :]):
            return tuple(offsets), (*(1,) * dim, count, *shape[dim + 1 :])
    return (), ()


_LOCAL_BY_NAME = {
    "aten::detach",
    "aten::alias",
    "aten::clone",
    "aten::_to_copy",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::empty_like",
    "aten::full_like",
    "aten::fill_",
    "aten::zero_",
    "aten::lerp_",
}


def _rule_of(func: Any) -> Callable[[Any, tuple, dict], Any]:
    name = func._schema.name
    if name in ("aten::copy_",):
        return _copy
    if name in ("aten::_foreach_copy_",):
        return _foreach_copy
    if name in ("aten::_foreach_norm",):
        return _foreach_norm
    if name in ("aten::linalg_vector_norm", "aten::norm"):
        return _vector_norm
    if name in _REDUCTIONS:
        return _reduction
    if name == "aten::equal":
        return _equal
    if name == "aten::_local_scalar_dense":
        return lambda func, args, kwargs: args[0]._gathered().item()
    if name.startswith("aten::_fused_") or (
        name.startswith("aten::_foreach_") and name != "aten::_foreach_max"
    ):
        return _local_lists
    if name in _LOCAL_BY_NAME or torch.Tag.pointwise in func.tags:
        return _local
    return _on_even


def _uneven(values: Any) -> list[UnevenDTensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, UnevenDTensor)]


def _local(func: Any, args: tuple, kwargs: dict) -> Any:
    """An element-wise operator on the parts, where every operand is cut alike or a scalar."""
    like, *others = _uneven((args, kwargs))
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf is not like and not _fits(leaf, like):
            return _on_even(func, args, kwargs)
    result = func(*_localized(args), **_localized(kwargs))
    if func._schema.is_mutable:
        return kwargs["out"] if "out" in kwargs else args[0]
    return like.like(result)


def _fits(operand: torch.Tensor, like: UnevenDTensor) -> bool:
    if isinstance(operand, UnevenDTensor):
        return operand._cuts == like._cuts and operand.device_mesh == like.device_mesh
    if isinstance(operand, DTensor):
        return operand.dim() == 0 and all(placement.is_replicate() for placement in operand.placements)
    return operand.dim() == 0


def _localized(values: Any) -> Any:
    return tree_map(lambda leaf: leaf._local_tensor if isinstance(leaf, DTensor) else leaf, values)


def _local_lists(func: Any, args: tuple, kwargs: dict) -> Any:
    """A foreach or fused operator on the parts: lists run side by side, tensor by tensor."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    first = next(values for values in lists if any(isinstance(value, UnevenDTensor) for value in values))
    for values in lists:
        for value, like in zip(values, first):
            if isinstance(value, torch.Tensor) and isinstance(like, UnevenDTensor) and not _fits(value, like):
                raise TypeError(
                    f"{func}: operands of shape {tuple(like.shape)} are cut differently "
                    f"({getattr(value, '_cuts', None)} and {like._cuts}); use tensors of one sharded parameter"
                )
    result = func(*_localized(args), **_localized(kwargs))
    if func._schema.is_mutable:
        return None
    return [
        like.like(value) if isinstance(like, UnevenDTensor) else value for like, value in zip(first, result)
    ]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    target, source = args[:2]
    if not isinstance(target, UnevenDTensor):
        if isinstance(target, DTensor):
            source = distribute_tensor(
                _whole(source), target.device_mesh, target.placements, src_data_rank=None
            )
        else:
            source = _whole(source)
        return func(target, source, *args[2:], **kwargs)
    if isinstance(source, torch.Tensor) and not _fits(source, target):
        if source.shape != target.shape:
            raise ValueError(
                f"copy_ of shape {tuple(source.shape)} into a parameter of shape {tuple(target.shape)}"
            )
        source = target.slice_of(_whole(source))
    func(target._local_tensor, _localized(source), *args[2:], **kwargs)
    return target


def _foreach_copy(func: Any, args: tuple, kwargs: dict) -> None:
    for target, source in zip(args[0], args[1]):
        target.copy_(source, *args[2:], **kwargs)


def _replicated(value: torch.Tensor, like: UnevenDTensor) -> DTensor:
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _combined_norms(locals_: torch.Tensor, order: float, like: UnevenDTensor) -> torch.Tensor:
    """Norms of whole tensors from those of their parts, for all tensors of `locals_`, 1-D, at once."""
    if like._cuts.parts == 1:
        return locals_
    if math.isinf(order):
        op = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        return collectives.reduce_now(locals_, op, like.group)
    if order == 0:
        return collectives.reduce_now(locals_, dist.ReduceOp.SUM, like.group)
    return collectives.reduce_now(locals_.pow(order), dist.ReduceOp.SUM, like.group).pow(1 / order)


def _part_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if not local.numel():
        nothing = math.inf if order == -math.inf else 0.0
        return torch.full((), nothing, dtype=dtype or local.dtype, device=local.device)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def _foreach_norm(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    tensors: list[UnevenDTensor] = args[0]
    for tensor in tensors:
        if not isinstance(tensor, UnevenDTensor) or tensor.device_mesh != tensors[0].device_mesh:
            return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    if any(tensor._cuts.parts != tensors[0]._cuts.parts for tensor in tensors):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    norms = torch.stack([_part_norm(tensor._local_tensor, order, dtype) for tensor in tensors])
    return [_replicated(norm, tensors[0]) for norm in _combined_norms(norms, order, tensors[0]).unbind()]


def _vector_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dims not in (None, []) or keepdim or not isinstance(order, (int, float)):
        return _on_even(func, args, kwargs)
    norm = _part_norm(tensor._local_tensor, float(order), kwargs.get("dtype"))
    return _replicated(_combined_norms(norm.view(1), float(order), tensor)[0], tensor)


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "aten::sum": (dist.ReduceOp.SUM, 0),
    "aten::mean": (dist.ReduceOp.SUM, 0),
    "aten::max": (dist.ReduceOp.MAX, None),
    "aten::min": (dist.ReduceOp.MIN, None),
    "aten::all": (dist.ReduceOp.MIN, True),
    "aten::any": (dist.ReduceOp.MAX, False),
}


def _reduction(func: Any, args: tuple, kwargs: dict) -> Any:
    """A reduction over the whole tensor; over some of its dimensions it runs on an even DTensor."""
    tensor, local = args[0], args[0]._local_tensor
    op, empty = _REDUCTIONS[func._schema.name]
    if len(args) > 1 or set(kwargs) - {"dtype"}:
        return _on_even(func, args, kwargs)
    if local.numel():
        value = local.sum(**kwargs) if func._schema.name == "aten::mean" else func(local, **kwargs)
    elif empty is None:  # the largest or smallest value of nothing
        info = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
        limit = -math.inf if local.is_floating_point() else info.min
        value = local.new_full((), limit if op == dist.ReduceOp.MAX else -limit)
    else:
        value = func(local, **kwargs) if func._schema.name != "aten::mean" else local.sum(**kwargs)
    if tensor._cuts.parts > 1:
        small = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
        value = collectives.reduce_now(small, op, tensor.group).to(value.dtype)
    if func._schema.name == "aten::mean":
        value = value / tensor.numel()
    return _replicated(value, tensor)


def _equal(func: Any, args: tuple, kwargs: dict) -> bool:
    one, other = args
    like = one if isinstance(one, UnevenDTensor) else other
    if not (_fits(one, like) and _fits(other, like)):
        return torch.equal(_whole(one), _whole(other))
    same = torch.tensor(int(torch.equal(_localized(one), _localized(other))))
    if like._cuts.parts > 1:
        same = collectives.reduce_now(same.to(like._local_tensor.device), dist.ReduceOp.MIN, like.group)
    return bool(same)


def _on_even(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operator on even DTensors of the same values; torch's own rules place the result."""
    if func._schema.is_mutable:
        raise TypeError(
            f"{func} changes a sharded parameter in a way that its cuts do not allow; "
            "change `.to_local()`, or `.full_tensor()` followed by `.copy_()`"
        )

    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim():
            raise RuntimeError(
                f"{func} mixes a plain tensor with a sharded parameter of shape {tuple(_uneven((args, kwargs))[0].shape)}: "
                "its module runs outside the sharded module that gathers it. Call the module that was passed to "
                "fully_shard, shard this module on its own, or use weft.register_fsdp_forward_method for another method"
            )

    def even(leaf: Any) -> Any:
        if not isinstance(leaf, UnevenDTensor):
            return leaf
        return distribute_tensor(leaf._gathered(), leaf.device_mesh, leaf.placements, src_data_rank=None)

    return func(*tree_map(even, args), **tree_map(even, kwargs))


_RULES: dict[Any, Callable[[Any, tuple, dict], Any]] = {}


def _register(types: Iterable[Any]) -> None:
    for known in types:
        if UnevenDTensor not in known:
            known.append(UnevenDTensor)


_register((_optim_foreach_types, _util_foreach_types))
