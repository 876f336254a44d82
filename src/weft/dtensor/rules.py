"""The rules of operators on tensors that are cut unevenly over ranks.

operator                                        | runs
------------------------------------------------+------------------------------------------------------------
element-wise, foreach, fused optimizer steps    | on the local parts; may gather operands with other cuts: `local.py`
full norms, sum, mean, max, min, any, all       | on the local parts, then one small all-reduce per mesh axis
copy_ from a full tensor or from other cuts     | on this rank's slice; other cuts are gathered first
random values, as of normal_ and rand_like      | on this rank's slice of the values, which every rank draws
operators on tensors that one rank has whole    | on that rank, without communication, as in a step of Muon
views                                           | lazily: see `views.py`
all others, if they write to no argument        | on the gathered tensor; the result is replicated (communicates)
all others that write to a tensor or its view   | on the gathered tensor; then each rank keeps its part (communicates)
changes of shape, strides or memory             | never: TypeError, as for collectives of torch.distributed
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_map

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.dtensor.deferred import DeferredDTensor, bring_all
from weft.dtensor.local import (
    changed_by,
    element_wise,
    filled,
    fits,
    on_lists,
    parts_of,
    refuse_plain,
    uneven_in,
    whole_of,
    wrote,
)
from weft.dtensor.norms import combined_norms, foreach_norm, part_norm, replicated, wide
from weft.dtensor.uneven import RuledDTensor, UnevenDTensor, local_of
from weft.dtensor.views import ShardedView, decomposed, is_view, like_of, parents_of, view_of

Rule = Callable[[Any, tuple, dict], Any]
"""Runs an operator. It is called with the operator, `args` and `kwargs`."""
_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators that do not declare what they write to
_ELEMENT_WISE = {"clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "fill_", "zero_", "lerp_"}
"""Names of element-wise operators that torch does not tag as such."""


def run(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Run the operator `func` on arguments that contain unevenly cut tensors. `types`: the classes of the tensors."""
    kwargs = kwargs or {}
    if DeferredDTensor in types:
        bring_all((args, kwargs))
    if ShardedView in types:
        return _on_views(func, args, kwargs)
    rule = _known.get(func._op)
    if rule is None:
        rule = _known[func._op] = rule_of(func)
    result = rule(func, args, kwargs)
    return _on_owner(func, args, kwargs) if result is NotImplemented else result


_known: dict[Any, Rule] = {}  # the rules by `func._op`, which is hashed faster than `func`


def _alias(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `detach` or `alias`, whose result shares the version counter."""
    with like_of(args[0]):
        return args[0].like(args[0]._local_tensor)


def rule_of(func: Any) -> Rule:
    """Return the `Rule` of operator `func`: a function of `func`, `args` and `kwargs` that runs the operator."""
    name = func._schema.name.removeprefix("aten::")
    if func.namespace in _COLLECTIVES or (torch.Tag.inplace_view in func.tags and name != "detach_"):
        return _refuse
    if name in _RULES:
        return _RULES[name]
    if name.startswith(("_fused_", "_foreach_")):
        return on_lists
    if torch.Tag.nondeterministic_seeded in func.tags and (func._schema.is_mutable or name.endswith("_like")):
        return _fill_randomly if func._schema.is_mutable else _draw_randomly
    if name in _ELEMENT_WISE or torch.Tag.pointwise in func.tags:
        return element_wise(func)
    if func._can_decompose():
        return decomposed
    return _view if is_view(func) else _on_owner


_localized = partial(tree_map, local_of)


def _new_empty(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Return a tensor with the same cuts for a call with a `device` and an unchanged shape, because checkpoint stagers
    copy local parts. Otherwise return a plain tensor, because `nn.init` fills it and copies it to the parameter."""
    tensor = args[0]
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if "device" in kwargs and tuple(args[1]) == tensor.shape and isinstance(tensor, UnevenDTensor):
        return tensor.like(torch.empty_like(tensor._local_tensor, **kwargs))
    kwargs = {"dtype": tensor.dtype, "device": tensor.device} | kwargs
    return torch.empty(args[1], **kwargs)


def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `copy_` if the target, the source or both are sharded. From a full tensor each rank takes its part."""
    target, source = args[:2]
    if not isinstance(target, UnevenDTensor):
        if isinstance(target, DTensor):
            source = distribute_tensor(whole_of(source), target.device_mesh, target.placements, src_data_rank=None)
        else:
            source = whole_of(source)
        return func(target, source, *args[2:], **kwargs)
    if isinstance(source, torch.Tensor) and not fits(source, target):
        try:
            whole = whole_of(source).expand(target.shape)
        except RuntimeError as error:
            raise ValueError(
                f"copy_ of a tensor of shape {tuple(source.shape)} into a parameter of shape {tuple(target.shape)}: "
                "pass a tensor of the parameter's shape, or one that can be expanded to it"
            ) from error
        source = target.slice_of(whole)
    func(target._local_tensor, _localized(source), *args[2:], **kwargs)
    wrote([target])
    return target


def _foreach_copy(func: Any, args: tuple, kwargs: dict) -> Any:
    targets, sources = args[:2]
    if all(isinstance(each, UnevenDTensor) and fits(source, each) for each, source in zip(targets, sources)):
        return on_lists(func, args, kwargs)
    for target, source in zip(targets, sources):
        target.copy_(source, *args[2:], **kwargs)


def _unscale(func: Any, args: tuple, kwargs: dict) -> None:
    """Unscale gradients for a gradient scaler. An infinity or NaN on any rank is reported on all ranks."""
    gradients, found, *rest = args
    parts = parts_of(gradients)
    torch.autograd.graph.increment_version(parts)
    if not_empty := filled(parts):
        func(not_empty, found, *rest, **kwargs)
    tensors: list[Any] = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    # Ranks of one mesh may be in different groups of another mesh, such as the mesh of experts.
    all_axes = len({tensor.device_mesh for tensor in tensors}) > 1 or len(tensors) > len(uneven_in(tensors))
    axes = [(tensor.device_mesh, range(tensor.device_mesh.ndim) if all_axes else tensor.axes) for tensor in tensors]
    for group in dict.fromkeys(group_of(mesh, axis) for mesh, here in axes for axis in here):
        reduce_now(found, dist.ReduceOp.MAX, group, "whether a gradient is infinite")


def _fill_randomly(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw all values on every rank, and keep this rank's part. With the same generator state on all ranks, the values
    are those that a single process would draw."""
    target = args[0]
    if not isinstance(target, UnevenDTensor):  # out=
        return _write_through(func, args, kwargs)
    target._local_tensor.copy_(_draw_randomly(func, args, kwargs)._local_tensor)
    wrote([target])
    return target


def _draw_randomly(func: Any, args: tuple, kwargs: dict) -> Any:
    like = args[0]
    whole = torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)
    return like.like(like.slice_of(func(whole, *args[1:], **kwargs)).clone())


def _vector_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    if tensor.owner is not None:
        return _on_owner(func, args, kwargs)
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dims not in (None, []) or keepdim or not isinstance(order, (int, float)):
        return _on_whole(func, args, kwargs)
    dtype = kwargs.get("dtype")
    norm = combined_norms(part_norm(tensor._local_tensor, float(order), dtype), float(order), tensor)
    return replicated(norm.to((dtype or tensor.dtype).to_real()), tensor.device_mesh)


_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_REDUCTIONS = {"sum": _SUM, "mean": _SUM, "all": _MIN, "any": _MAX, "max": _MAX, "min": _MIN}
"""The operation that combines the ranks' results."""


def _reduction(func: Any, args: tuple, kwargs: dict) -> Any:
    """Reduce all elements of a tensor. A reduction over some dimensions runs on the gathered tensor."""
    tensor, local = args[0], args[0]._local_tensor
    name = func._schema.name.removeprefix("aten::")
    op, mean = _REDUCTIONS[name], name == "mean"
    if len(args) > 1 or set(kwargs) - {"dtype"}:
        return _on_whole(func, args, kwargs)
    dtype = kwargs.get("dtype") or local.dtype
    if widened := dtype.is_floating_point and op == _SUM:
        kwargs = {"dtype": wide(dtype)}
    if local.numel() or name not in ("max", "min"):
        value = local.sum(**kwargs) if mean else func(local, **kwargs)
    else:  # the neutral element of max or min
        info = torch.iinfo(local.dtype) if not local.is_floating_point() else None
        least, most = (info.min, info.max) if info is not None else (-math.inf, math.inf)
        value = local.new_full((), least if op == _MAX else most)
    if tensor.axes:
        small = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
        value = tensor.combine(small, op).to(value.dtype)
    if mean:
        value = value / tensor.numel()
    if widened:
        value = value.to(dtype)
    return replicated(value, tensor.device_mesh)


def _equal(func: Any, args: tuple, kwargs: dict) -> bool:
    one, other = args
    if not (isinstance(one, UnevenDTensor) and isinstance(other, UnevenDTensor) and fits(other, one)):
        return torch.equal(whole_of(one), whole_of(other))
    same = int(torch.equal(one._local_tensor, other._local_tensor))
    if one.axes:
        flag = torch.tensor(same, dtype=torch.int64, device=one._local_tensor.device)
        same = int(one.combine(flag, dist.ReduceOp.MIN))
    return bool(same)


_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose result, or its shape, depends on values. Every rank needs these values."""


def _on_owner(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the operator on the owner, the rank that has all operands whole. The other ranks get empty parts. If no rank
    has all operands, use `_on_whole`."""
    operands = uneven_in((args, kwargs))
    like = operands[0]
    owner = like.owner
    plain = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    together = owner is not None and all(
        tensor.owner == owner and tensor.device_mesh == like.device_mesh and tensor._cuts.axes == like._cuts.axes
        if isinstance(tensor, UnevenDTensor)
        else not isinstance(tensor, DTensor) and tensor.dim() == 0
        for tensor in plain
    )
    if not together or _BY_VALUE.intersection(func.tags):
        return _on_whole(func, args, kwargs)
    here = like.part == owner
    if func._schema.is_mutable:
        if here:
            func(*_localized(args), **_localized(kwargs))
            wrote(leaf for leaf in changed_by(func, args, kwargs) if isinstance(leaf, DTensor))
        return kwargs.get("out", args[0])
    shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # views then share versions
        values = func(*_localized(args), **_localized(kwargs)) if here else shapes

    def owned(value: Any, shape: Any) -> Any:
        return like.owned_alike(value if here else None, shape) if isinstance(shape, torch.Tensor) else shape

    return tree_map(owned, values, shapes)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, UnevenDTensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _on_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the operator on the gathered tensors. Operators that write to operands use `_write_through`."""
    if func._schema.is_mutable:
        return _write_through(func, args, kwargs)
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim():
            raise RuntimeError(
                f"{func} mixes a plain tensor with a sharded parameter of shape "
                f"{tuple(uneven_in((args, kwargs))[0].shape)}. If its module runs outside the sharded one that gathers "
                "it: call the module that was passed to fully_shard, shard this module on its own, or use "
                "weft.register_fsdp_forward_method for another method. To compute with the values yourself: "
                "parameter.full_tensor()"
            )
    return _on_gathered(func, args, kwargs)


def _on_gathered(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the operator on the gathered values of sharded tensors and views. The result is replicated. If other DTensors
    or several meshes are involved, torch's rules determine its placements."""
    operands = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor)]
    mesh = operands[0].device_mesh

    def placed(leaf: Any) -> Any:
        return replicated(leaf, mesh) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) else leaf

    if all(isinstance(each, RuledDTensor) and each.device_mesh == mesh for each in operands):
        return tree_map(placed, func(*tree_map(_values_of, args), **tree_map(_values_of, kwargs)))
    return func(*tree_map(_as_replicated, args), **tree_map(_as_replicated, kwargs))


def _values_of(leaf: Any) -> Any:
    return leaf._gathered() if isinstance(leaf, UnevenDTensor) else local_of(leaf)


def _as_replicated(leaf: Any) -> Any:
    return replicated(_values_of(leaf), leaf.device_mesh) if isinstance(leaf, RuledDTensor) else leaf


def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    return view_of(func, args, kwargs) if args[0].owner is None else _on_owner(func, args, kwargs)


def _on_views(func: Any, args: tuple, kwargs: dict) -> Any:
    if torch.Tag.inplace_view in func.tags or func.namespace in _COLLECTIVES:
        return _refuse(func, args, kwargs)
    if rule_of(func) is decomposed:
        return decomposed(func, args, kwargs)
    if is_view(func):
        return view_of(func, args, kwargs)
    if rule_of(func) is _new_empty:
        return _new_empty(func, args, kwargs)
    changed = changed_by(func, args, kwargs)
    if any(isinstance(tensor, ShardedView) for tensor in changed):
        return _write_through(func, args, kwargs)

    if not changed and not uneven_in((args, kwargs)):
        return _on_gathered(func, args, kwargs)

    def read(leaf: Any) -> Any:
        return leaf.replicated() if isinstance(leaf, ShardedView) else leaf

    args, kwargs = tree_map(read, (args, kwargs))
    if changed and rule_of(func) is _copy:
        return _copy(func, args, kwargs)
    return func(*args, **kwargs)


def _refuse(func: Any, args: tuple, kwargs: dict) -> Any:
    if func._schema.name == "aten::resize_" and tuple(args[1]) == args[0].shape:  # torch resizes `out=` first
        return args[0]
    ruled = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, RuledDTensor))
    if func.namespace in _COLLECTIVES:
        raise TypeError(
            f"{func} of a sharded tensor of shape {tuple(ruled.shape)}: each rank has a part of it, and backward has "
            "averaged gradients. Leave the call out, or communicate to_local(), this rank's part, or full_tensor()"
        )
    raise TypeError(
        f"{func} would change the shape, the strides or the memory of a sharded tensor of shape {tuple(ruled.shape)}, "
        "which belong to its unit's flat buffer: use the operator without the underscore, or write with copy_()"
    )


def _write_through(func: Any, args: tuple, kwargs: dict) -> Any:
    """Gather the tensor that the operator writes to, directly or through views. Run the operator on the gathered
    tensor; each rank keeps its part. Operands that are this tensor or its views share one memory, as in one process."""
    changed = changed_by(func, args, kwargs)
    parents = parents_of(changed)
    if not parents:
        refuse_plain(func, changed[0], uneven_in((args, kwargs))[0])
    if len(parents) != 1 or not all(isinstance(tensor, RuledDTensor) for tensor in changed):
        raise TypeError(
            f"{func} writes to several sharded tensors in a way that their parts do not allow: write to one at a time"
        )
    (parent,) = parents
    whole = parent._gathered()

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, ShardedView):
            return leaf.of(whole if leaf._parent is parent else leaf._parent._gathered())
        return whole if leaf is parent else whole_of(leaf)

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
    wrote([parent])
    return None if not func._schema.returns else changed[0] if len(changed) == 1 else tuple(changed)


_RULES: dict[str, Rule] = {
    "detach_": lambda func, args, kwargs: args[0],  # autograd has done it
    "detach": _alias,
    "alias": _alias,
    "new_empty": _new_empty,
    "copy_": _copy,
    "_foreach_copy_": _foreach_copy,
    "_foreach_norm": foreach_norm,
    "_foreach_max": _on_owner,
    "linalg_vector_norm": _vector_norm,
    "norm": _vector_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "equal": _equal,
    "_local_scalar_dense": lambda func, args, kwargs: args[0]._gathered().item(),
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
"""Rules by the operator's name. For other operators, `rule_of` derives the rule from the operator's tags."""

RuledDTensor.__torch_dispatch__ = classmethod(run)  # type: ignore[assignment]
