"""What operators do to tensors that are cut unevenly.

operator                                        | runs
------------------------------------------------+------------------------------------------------------------
element-wise, foreach, fused optimizer steps    | on the local parts, where all have the same cuts
norms and full reductions                       | on the local parts, then one small all-reduce
copy_ from a full tensor or from other cuts     | on the slice that lies here
anything on tensors that one rank holds whole   | on that rank: matrix optimizers step without communication
views                                           | later: see `views.py`
everything else, if it changes no argument      | on a replicated DTensor of the same values (communicates)
everything else in place, or on a view in place | on the gathered tensor, then each rank keeps its part (communicates)
what would change shape, strides or memory      | not at all: TypeError

Whatever writes to local parts says so to their version counters: autograd's own code, which does that elsewhere, lies
above these rules.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_map

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.dtensor.uneven import RuledDTensor, UnevenDTensor
from weft.dtensor.views import ShardedView, is_view, parents_of, view_of

_LOCAL_BY_NAME = {
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


def run(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """The operator `func` on arguments among which are ruled tensors; `types`: the classes of its tensors."""
    if ShardedView in types:
        return _on_views(func, args, kwargs)
    rule = _known.get(func._op)
    if rule is None:
        rule = _known[func._op] = rule_of(func)
    return rule(func, args, kwargs)


_known: dict[Any, Callable[[Any, tuple, dict], Any]] = {}
"""The rules of operators that have been met; operators themselves are slow to look up."""


def rule_of(func: Any) -> Callable[[Any, tuple, dict], Any]:
    """The function that runs operator `func`, given it and its arguments."""
    name = func._schema.name
    if name == "aten::detach_":
        return lambda func, args, kwargs: args[0]  # autograd has done it
    if torch.Tag.inplace_view in func.tags:
        return _refuse
    if name in ("aten::detach", "aten::alias"):
        return lambda func, args, kwargs: args[0].like(args[0]._local_tensor)  # and so has its version counter
    if name == "aten::new_empty":
        return _new_empty
    if name in ("aten::copy_",):
        return _copy
    if name in ("aten::_foreach_copy_",):
        return _foreach_copy
    if name in ("aten::_foreach_norm",):
        return _foreach_norm
    if name in ("aten::linalg_vector_norm", "aten::norm"):
        return _vector_norm
    if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        return _unscale
    if name in _REDUCTIONS:
        return _reduction
    if name == "aten::equal":
        return _equal
    if name == "aten::_local_scalar_dense":
        return lambda func, args, kwargs: args[0]._gathered().item()
    if name.startswith("aten::_fused_") or (name.startswith("aten::_foreach_") and name != "aten::_foreach_max"):
        return _local_lists
    if torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable:
        return _fill_randomly
    if name in _LOCAL_BY_NAME or torch.Tag.pointwise in func.tags:
        if not func._schema.is_mutable:
            return _element_wise
        return _in_place if func._schema.arguments[0].is_write else _local
    return _view if is_view(func) else _on_owner


def _uneven(values: Any) -> list[UnevenDTensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, UnevenDTensor)]


def _changed(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that operator `func` writes to."""
    arguments = func._schema.arguments
    given = [*zip(arguments, args), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]
    return [
        leaf
        for argument, value in given
        if argument.is_write
        for leaf in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(leaf, torch.Tensor)
    ]


def _wrote(tensors: Iterable[DTensor]) -> None:
    """Say that the local parts of `tensors` have changed."""
    torch.autograd.graph.increment_version([tensor._local_tensor for tensor in tensors])


def _parts(args: tuple, kwargs: dict) -> list[Any] | None:
    """The short way of `_local`: the parts of operands that all are scalars or of one spec; None where they are not.

    So are those of what torch's optimizers do to each parameter by itself.
    """
    first = args[0]
    if type(first) is not UnevenDTensor or (kwargs and any(isinstance(each, torch.Tensor) for each in kwargs.values())):
        return None
    spec, cuts, mine = first._spec, first._cuts, []
    for each in args:
        if type(each) is UnevenDTensor:
            if each._spec is not spec or each._cuts is not cuts:
                return None
            each = each._local_tensor
        elif isinstance(each, torch.Tensor):
            return None
        mine.append(each)
    return mine


def _in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    mine = _parts(args, kwargs)
    if mine is None:
        return _local(func, args, kwargs)
    func._op(*mine, **kwargs)
    torch._C._increment_version([mine[0]])
    return args[0]


def _element_wise(func: Any, args: tuple, kwargs: dict) -> Any:
    mine = _parts(args, kwargs) if not kwargs else None  # a dtype, a memory format
    return _local(func, args, kwargs) if mine is None else args[0].like(func._op(*mine))


def _local(func: Any, args: tuple, kwargs: dict) -> Any:
    """An element-wise operator on the parts, where operands are scalars, cut alike, or can be sliced alike."""
    # Such operators have no lists of tensors; and torch's optimizers call them for each parameter: no pytrees.
    changed = kwargs.get("out", args[0]) if func._schema.is_mutable else None
    given = (*args, *kwargs.values())
    like = next(each for each in given if isinstance(each, UnevenDTensor)) if changed is None else changed
    if not isinstance(like, UnevenDTensor):
        return _on_owner(func, args, kwargs)
    if kwargs.get("memory_format") is torch.contiguous_format and not like.is_contiguous():
        return _on_owner(func, args, kwargs)  # the strides change
    mine = []
    for each in given:
        if isinstance(each, torch.Tensor) and not _fits(each, like):
            if each.shape != like.shape or not (isinstance(each, DTensor) or changed is not None):
                return _on_owner(func, args, kwargs)  # such as what a module computes that runs outside of its unit
            each = like.slice_of(_whole(each))
        mine.append(each._local_tensor if isinstance(each, DTensor) else each)
    try:
        result = func(*mine[: len(args)], **dict(zip(kwargs, mine[len(args) :])))
    except RuntimeError as error:
        _explain_dtypes(func, {leaf.dtype for leaf in _uneven(given)}, error)
        raise
    if changed is None:
        return like.like(result)
    _wrote([changed])
    return changed


def _explain_dtypes(func: Any, dtypes: set[torch.dtype], error: Exception) -> None:
    """Raise TypeError where several dtypes are the likely reason of `error`."""
    if len(dtypes) > 1:
        raise TypeError(
            f"{func} takes tensors of one dtype, not {' and '.join(sorted(map(str, dtypes)))}: Adam and fused "
            "optimizers need gradients in the weights' dtype; leave out main_grads_dtype, or set main_params_dtype to "
            "the same"
        ) from error


def _fits(operand: torch.Tensor, like: UnevenDTensor) -> bool:
    if isinstance(operand, UnevenDTensor):
        if operand._cuts is like._cuts and operand._spec is like._spec:
            return True
        return (
            operand._cuts == like._cuts
            and operand.device_mesh == like.device_mesh
            and operand._spec.shape == like._spec.shape
        )
    if isinstance(operand, DTensor):
        return operand.dim() == 0 and all(placement.is_replicate() for placement in operand.placements)
    return operand.dim() == 0


def _localized(values: Any) -> Any:
    return tree_map(lambda leaf: leaf._local_tensor if isinstance(leaf, DTensor) else leaf, values)


def _local_lists(func: Any, args: tuple, kwargs: dict) -> Any:
    """A foreach or fused operator on the parts: lists run side by side, tensor by tensor.

    Empty parts stay out of it, since kernels over many tensors have been seen to write to their neighbours; where there
    are results, theirs are made by themselves.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    first = next(values for values in lists if any(isinstance(value, UnevenDTensor) for value in values))
    for values in lists:
        if values is not first:
            _check_fits(func, values, first)
    empty = [isinstance(like, UnevenDTensor) and not like._local_tensor.numel() for like in first]
    some = any(empty)
    names = [argument.name for argument in func._schema.arguments]

    def on_parts(without: bool) -> Any:
        """The operator on what is filled, or `without` it on what is empty."""
        keep = [each is without for each in empty] if some else None
        mine = [_part_of(value, name, keep) for value, name in zip(args, names)]
        options = {name: _part_of(value, name, keep) for name, value in kwargs.items()}
        try:
            return func(*mine, **options)
        except RuntimeError as error:
            _explain_dtypes(func, {leaf.dtype for leaf in _uneven(lists)}, error)
            raise

    filled = on_parts(False) if not all(empty) else []
    if func._schema.is_mutable:
        _wrote(each for each in _changed(func, args, kwargs) if isinstance(each, DTensor))
        return None
    if some:
        rest = {False: iter(filled), True: iter(on_parts(True))}
        filled = [next(rest[each]) for each in empty]
    return [like.like(value) if isinstance(like, UnevenDTensor) else value for like, value in zip(first, filled)]


def _check_fits(func: Any, values: Sequence[Any], first: Sequence[Any]) -> None:
    """Raise TypeError for tensors that are cut in another way than those beside them in `first`.

    Equal cuts become the same object, so that the next look is short.
    """
    for value, like in zip(values, first):
        if not isinstance(like, UnevenDTensor) or not isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, UnevenDTensor):
            fits = _fits(value, like)
        elif value._cuts is like._cuts:
            continue
        elif fits := _fits(value, like):
            value._cuts = like._cuts
        if not fits:
            raise TypeError(
                f"{func}: operands of shape {tuple(like.shape)} are cut differently "
                f"({getattr(value, '_cuts', None)} and {like._cuts}); use tensors of one sharded parameter"
            )


def _part_of(value: Any, name: str, keep: Sequence[bool] | None) -> Any:
    """What an argument is on this rank, of lists the elements to `keep`; None: all."""
    if isinstance(value, (list, tuple)):
        if keep is not None:
            value = compress(value, keep)
        return [each._local_tensor if isinstance(each, DTensor) else each for each in value]
    local = value._local_tensor if isinstance(value, DTensor) else value
    if name == "scalars" and keep is not None and isinstance(local, torch.Tensor):
        return local[torch.tensor(keep, device=local.device)]  # one per tensor, in a tensor
    return local


def _new_empty(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """A plain tensor: what `nn.init` fills with the same values on all ranks, to copy them. But one cut alike for who
    names a device: a checkpoint's stager, which puts a copy of the local part there."""
    tensor = args[0]
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if "device" in kwargs and tuple(args[1]) == tensor.shape and isinstance(tensor, UnevenDTensor):
        return tensor.like(torch.empty_like(tensor._local_tensor, **kwargs))
    kwargs = {"dtype": tensor.dtype, "device": tensor.device} | kwargs
    return torch.empty(args[1], **kwargs)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """`copy_` where target, source or both are ruled: from a full tensor each rank takes its part."""
    target, source = args[:2]
    if not isinstance(target, UnevenDTensor):
        if isinstance(target, DTensor):
            source = distribute_tensor(_whole(source), target.device_mesh, target.placements, src_data_rank=None)
        else:
            source = _whole(source)
        return func(target, source, *args[2:], **kwargs)
    if isinstance(source, torch.Tensor) and not _fits(source, target):
        try:
            whole = _whole(source).expand(target.shape)
        except RuntimeError as error:
            raise ValueError(
                f"copy_ of shape {tuple(source.shape)} into a parameter of shape {tuple(target.shape)}"
            ) from error
        source = target.slice_of(whole)
    func(target._local_tensor, _localized(source), *args[2:], **kwargs)
    _wrote([target])
    return target


def _foreach_copy(func: Any, args: tuple, kwargs: dict) -> None:
    targets, sources = args[:2]
    if all(isinstance(each, UnevenDTensor) and _fits(source, each) for each, source in zip(targets, sources)):
        _local_lists(func, args, kwargs)
        return
    for target, source in zip(targets, sources):
        target.copy_(source, *args[2:], **kwargs)


def _unscale(func: Any, args: tuple, kwargs: dict) -> None:
    """A gradient scaler's step: an infinite or missing value on any rank is one on all."""
    gradients, found, *rest = args
    locals_ = _localized(gradients)
    if filled := [local for local in locals_ if local.numel()]:
        func(filled, found, *rest, **kwargs)
    torch.autograd.graph.increment_version(locals_)
    tensors = _uneven(gradients)
    meshes = {tensor.device_mesh for tensor in tensors}
    if len(meshes) > 1:  # what is replicated here may lie beside what is not, such as experts
        for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors):
            for axis in range(mesh.ndim):
                reduce_now(found, dist.ReduceOp.MAX, group_of(mesh, axis), "whether a gradient is infinite")
        return
    for alike in {tensor.axes: tensor for tensor in tensors}.values():
        alike.combine(found, dist.ReduceOp.MAX)


def _fill_randomly(func: Any, args: tuple, kwargs: dict) -> Any:
    """Random values as one process would draw them: every rank draws all and keeps its part."""
    target = args[0]
    if not isinstance(target, UnevenDTensor):  # out=
        return _write_through(func, args, kwargs)
    drawn = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    target._local_tensor.copy_(target.slice_of(func(drawn, *args[1:], **kwargs)))
    _wrote([target])
    return target


def _replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _combined_norms(locals_: torch.Tensor, order: float, like: UnevenDTensor) -> torch.Tensor:
    """Norms of whole tensors from those of their parts, for all tensors of `locals_`, 1-D, at once."""
    if not like.axes:
        return locals_
    if math.isinf(order):
        op = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        return like.combine(locals_, op)
    if order == 0:
        return like.combine(locals_, dist.ReduceOp.SUM)
    return like.combine(locals_.pow(order), dist.ReduceOp.SUM).pow(1 / order)


def _part_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if not local.numel():
        nothing = math.inf if order == -math.inf else 0.0
        return torch.full((), nothing, dtype=(dtype or local.dtype).to_real(), device=local.device)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def _foreach_norm(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    norms: list[Any] = [None] * len(args[0])
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for number, tensor in enumerate(args[0]):
        if isinstance(tensor, UnevenDTensor):
            alike.setdefault((tensor.device_mesh, tensor.axes), []).append(number)
        else:
            norms[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    mesh = _common_mesh([mesh for mesh, _ in alike])
    for (own, _), numbers in alike.items():
        like = args[0][numbers[0]]
        parts = torch.stack([_part_norm(args[0][number]._local_tensor, order, dtype) for number in numbers])
        for number, norm in zip(numbers, _combined_norms(parts, order, like).unbind()):
            norms[number] = _replicated(norm, mesh or own)
    return norms


def _common_mesh(meshes: list[DeviceMesh]) -> DeviceMesh | None:
    """A mesh on which a value is replicated if it is on one of `meshes`; None where there is none.

    One whose first axes are those of all others, or any where they all lay out the same ranks.
    """
    longest = max(meshes, key=lambda mesh: mesh.ndim)
    groups = [group_of(longest, axis) for axis in range(longest.ndim)]
    if all([group_of(mesh, axis) for axis in range(mesh.ndim)] == groups[: mesh.ndim] for mesh in meshes):
        return longest
    return longest if len({frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}) == 1 else None


def _vector_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    if tensor.owner is not None:
        return _on_owner(func, args, kwargs)
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dims not in (None, []) or keepdim or not isinstance(order, (int, float)):
        return _on_whole(func, args, kwargs)
    norm = _part_norm(tensor._local_tensor, float(order), kwargs.get("dtype"))
    return _replicated(_combined_norms(norm.view(1), float(order), tensor)[0], tensor.device_mesh)


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "aten::sum": (dist.ReduceOp.SUM, 0),
    "aten::mean": (dist.ReduceOp.SUM, 0),
    "aten::max": (dist.ReduceOp.MAX, None),
    "aten::min": (dist.ReduceOp.MIN, None),
    "aten::all": (dist.ReduceOp.MIN, True),
    "aten::any": (dist.ReduceOp.MAX, False),
}


def _reduction(func: Any, args: tuple, kwargs: dict) -> Any:
    """A reduction over the whole tensor; over some of its dimensions it runs on the whole one."""
    tensor, local = args[0], args[0]._local_tensor
    op, empty = _REDUCTIONS[func._schema.name]
    if len(args) > 1 or set(kwargs) - {"dtype"}:
        return _on_whole(func, args, kwargs)
    if local.numel():
        value = local.sum(**kwargs) if func._schema.name == "aten::mean" else func(local, **kwargs)
    elif empty is None:  # the largest or smallest value of nothing
        if local.is_floating_point():
            least, most = -math.inf, math.inf
        else:
            least, most = torch.iinfo(local.dtype).min, torch.iinfo(local.dtype).max
        value = local.new_full((), least if op == dist.ReduceOp.MAX else most)
    else:
        value = func(local, **kwargs) if func._schema.name != "aten::mean" else local.sum(**kwargs)
    if tensor.axes:
        small = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
        value = tensor.combine(small, op).to(value.dtype)
    if func._schema.name == "aten::mean":
        value = value / tensor.numel()
    return _replicated(value, tensor.device_mesh)


def _equal(func: Any, args: tuple, kwargs: dict) -> bool:
    one, other = args
    like = one if isinstance(one, UnevenDTensor) else other
    if not (_fits(one, like) and _fits(other, like)):
        return torch.equal(_whole(one), _whole(other))
    same = torch.tensor(int(torch.equal(_localized(one), _localized(other))))
    if like.axes:
        same = like.combine(same.to(like._local_tensor.device), dist.ReduceOp.MIN)
    return bool(same)


def _on_owner(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operator on the one rank that holds all of its operands; elsewhere the result has an empty part."""
    operands = _uneven((args, kwargs))
    like = operands[0]
    owner = like.owner
    plain = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    together = owner is not None and all(
        tensor.owner == owner and tensor.device_mesh == like.device_mesh and tensor._cuts.axes == like._cuts.axes
        if isinstance(tensor, UnevenDTensor)
        else not isinstance(tensor, DTensor) and tensor.dim() == 0
        for tensor in plain
    )
    if not together:
        return _on_whole(func, args, kwargs)
    here = like.part == owner
    if func._schema.is_mutable:
        if here:
            func(*_localized(args), **_localized(kwargs))
            _wrote(leaf for leaf in _changed(func, args, kwargs) if isinstance(leaf, DTensor))
        return kwargs.get("out", args[0])
    shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # views share versions
        values = func(*_localized(args), **_localized(kwargs)) if here else shapes

    def owned(value: Any, shape: Any) -> Any:
        return like.owned_alike(value if here else None, shape) if isinstance(shape, torch.Tensor) else shape

    return tree_map(owned, values, shapes)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, UnevenDTensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _on_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operator on replicated DTensors of the same values; torch's own rules place the result. Where it writes to
    its operands: `_write_through`."""
    if func._schema.is_mutable:
        return _write_through(func, args, kwargs)
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim():
            raise RuntimeError(
                f"{func} mixes a plain tensor with a sharded parameter of shape "
                f"{tuple(_uneven((args, kwargs))[0].shape)}: its module runs outside the sharded one that gathers it. "
                "Call the module that was passed to fully_shard, shard this module on its own, or use "
                "weft.register_fsdp_forward_method for another method"
            )

    return func(*tree_map(_as_replicated, args), **tree_map(_as_replicated, kwargs))


def _as_replicated(leaf: Any) -> Any:
    return _replicated(leaf._gathered(), leaf.device_mesh) if isinstance(leaf, UnevenDTensor) else leaf


def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view: of a tensor that one rank holds the same there, of others what `views.py` says."""
    return view_of(func, args, kwargs) if args[0].owner is None else _on_owner(func, args, kwargs)


def _on_views(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator with views of sharded tensors among its operands."""
    if torch.Tag.inplace_view in func.tags:
        return _refuse(func, args, kwargs)
    if is_view(func):
        return view_of(func, args, kwargs)
    if rule_of(func) is _new_empty:
        return _new_empty(func, args, kwargs)
    changed = _changed(func, args, kwargs)
    if any(isinstance(tensor, ShardedView) for tensor in changed):
        return _write_through(func, args, kwargs)

    def read(leaf: Any) -> Any:
        return leaf.replicated() if isinstance(leaf, ShardedView) else leaf

    args, kwargs = tree_map(read, (args, kwargs))
    if changed and rule_of(func) is _copy:
        return _copy(func, args, kwargs)
    return func(*args, **kwargs)


def _refuse(func: Any, args: tuple, kwargs: dict) -> Any:
    if func._schema.name == "aten::resize_" and tuple(args[1]) == args[0].shape:  # what out= begins with
        return args[0]
    raise TypeError(
        f"{func} would change the shape, the strides or the memory of a sharded tensor of shape "
        f"{tuple(_ruled((args, kwargs))[0].shape)}, which are those of its unit's flat buffer: use the operator "
        "without the underscore, and copy_() to write values"
    )


def _ruled(values: Any) -> list[Any]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, RuledDTensor)]


def _write_through(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that writes to a sharded tensor, or to views of it, in a way that its cuts do not allow.

    Every rank does it to the gathered tensor and keeps its own part. Operands that are the tensor, or views of it,
    share its memory, as they would in one process.
    """
    changed = _changed(func, args, kwargs)
    parents = parents_of(changed)
    if len(parents) != 1 or not all(isinstance(tensor, RuledDTensor) for tensor in changed):
        raise TypeError(
            f"{func} writes to several sharded tensors, in a way that their cuts do not allow: do it for one at a time"
            if parents
            else f"{func} writes values of a sharded tensor to one that is not: use its .full_tensor()"
        )
    (parent,) = parents
    whole = parent._gathered()

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, ShardedView):
            return leaf.of(whole if leaf._parent is parent else leaf._parent._gathered())
        return whole if leaf is parent else _whole(leaf)

    written = {id(tensor): plain(tensor) for tensor in changed}
    mine, options = tree_map(lambda leaf: written[id(leaf)] if id(leaf) in written else plain(leaf), (args, kwargs))
    func(*mine, **options)
    for tensor in changed:
        if written[id(tensor)].shape != tensor.shape:  # out= of another size
            raise ValueError(
                f"{func} has a result of shape {tuple(written[id(tensor)].shape)}: out= is of shape "
                f"{tuple(tensor.shape)}, and cannot be resized"
            )
    parent._local_tensor.copy_(parent.slice_of(whole))
    _wrote([parent])
    return None if not func._schema.returns else changed[0] if len(changed) == 1 else tuple(changed)


RuledDTensor._run = staticmethod(run)
