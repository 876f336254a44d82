"""Operators that run on the local parts alone, without communication.

who calls                        what                                       runs
-------------------------------  -----------------------------------------  -------------------------------------
torch's optimizers, for each     element-wise, on operands of one spec      the short way: `in_place` and
  parameter by itself              and plain scalars                          `element_wise`
anybody                          element-wise, on what is cut alike or      `on_parts`
                                   can be sliced alike
foreach and fused optimizers     on lists, tensor by tensor                 `on_lists`

What cannot run so is `NotImplemented`. Whatever writes to local parts says so to their version counters: autograd's own
code, which does that elsewhere, lies above these rules.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from weft.dtensor.uneven import UnevenDTensor


def uneven_in(values: Any) -> list[UnevenDTensor]:
    """The tensors that are cut unevenly among `values`, a pytree."""
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, UnevenDTensor)]


def changed_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
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


def wrote(tensors: Iterable[DTensor]) -> None:
    """Say that the local parts of `tensors` have changed."""
    torch.autograd.graph.increment_version([tensor._local_tensor for tensor in tensors])


def in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """`on_parts` for an operator that writes to its first operand, by the short way if it can."""
    mine = _beside(args[0], args)
    if mine is None or (kwargs and not _SCALARS.issuperset(map(type, kwargs.values()))):
        return on_parts(func, args, kwargs)
    func._op(*mine, **kwargs)
    torch._C._increment_version(mine[:1])
    return args[0]


def element_wise(func: Any, args: tuple, kwargs: dict) -> Any:
    """`on_parts` for an operator that writes nothing, by the short way if it can."""
    mine = _beside(args[0], args) if not kwargs else None  # a dtype, a memory format
    return on_parts(func, args, kwargs) if mine is None else args[0].like(func._op(*mine))


_SCALARS = frozenset((float, int, bool, type(None)))


def _beside(first: Any, operands: tuple) -> list[Any] | None:
    """The short way: the parts of operands that all are plain scalars or of the spec of the first; else None.

    So are those of what torch's optimizers do to each parameter by itself.
    """
    if type(first) is not UnevenDTensor:
        return None
    spec, cuts, mine = first._spec, first._cuts, []
    for each in operands:
        kind = type(each)
        if kind is UnevenDTensor:
            if each._spec is not spec or each._cuts is not cuts:
                return None
            each = each._local_tensor
        elif kind not in _SCALARS:
            return None
        mine.append(each)
    return mine


def on_parts(func: Any, args: tuple, kwargs: dict) -> Any:
    """An element-wise operator on the parts, where operands are scalars, cut alike, or can be sliced alike."""
    # Such operators have no lists of tensors; and torch's optimizers call them for each parameter: no pytrees.
    changed = kwargs.get("out", args[0]) if func._schema.is_mutable else None
    given = (*args, *kwargs.values())
    like = next(each for each in given if isinstance(each, UnevenDTensor)) if changed is None else changed
    if not isinstance(like, UnevenDTensor):
        return NotImplemented
    if kwargs.get("memory_format") is torch.contiguous_format and not like.is_contiguous():
        return NotImplemented  # the strides change
    mine = []
    for each in given:
        if isinstance(each, torch.Tensor) and not fits(each, like):
            if each.shape != like.shape or not (isinstance(each, DTensor) or changed is not None):
                return NotImplemented  # such as what a module computes that runs outside of its unit
            each = like.slice_of(whole_of(each))
        mine.append(each._local_tensor if isinstance(each, DTensor) else each)
    try:
        result = func(*mine[: len(args)], **dict(zip(kwargs, mine[len(args) :])))
    except RuntimeError as error:
        _explain_dtypes(func, {leaf.dtype for leaf in uneven_in(given)}, error)
        raise
    if changed is None:
        return like.like(result)
    wrote([changed])
    return changed


def _explain_dtypes(func: Any, dtypes: set[torch.dtype], error: Exception) -> None:
    """Raise TypeError where several dtypes are the likely reason of `error`."""
    if len(dtypes) > 1:
        raise TypeError(
            f"{func} takes tensors of one dtype, not {' and '.join(sorted(map(str, dtypes)))}: Adam and fused "
            "optimizers need gradients in the weights' dtype; leave out main_grads_dtype, or set main_params_dtype to "
            "the same"
        ) from error


def fits(operand: torch.Tensor, like: UnevenDTensor) -> bool:
    """Whether what lies here of `operand` goes with what lies here of `like`."""
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


def whole_of(value: torch.Tensor) -> torch.Tensor:
    """The full tensor. Collective for what is cut."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_lists(func: Any, args: tuple, kwargs: dict) -> Any:
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

    def parts_of(without: bool) -> Any:
        """The operator on what is filled, or `without` it on what is empty."""
        keep = [each is without for each in empty] if some else None
        mine = [_part_of(value, name, keep) for value, name in zip(args, names)]
        options = {name: _part_of(value, name, keep) for name, value in kwargs.items()}
        try:
            return func(*mine, **options)
        except RuntimeError as error:
            _explain_dtypes(func, {leaf.dtype for leaf in uneven_in(lists)}, error)
            raise

    filled = parts_of(False) if not all(empty) else []
    if func._schema.is_mutable:
        wrote(each for each in changed_by(func, args, kwargs) if isinstance(each, DTensor))
        return None
    if some:
        rest = {False: iter(filled), True: iter(parts_of(True))}
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
            alike = fits(value, like)
        elif value._cuts is like._cuts:
            continue
        elif alike := fits(value, like):
            value._cuts = like._cuts
        if not alike:
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
