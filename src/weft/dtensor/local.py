"""Operators that run on local parts. They communicate only to gather an operand with other cuts.

caller                           operator                                   function
-------------------------------  -----------------------------------------  -------------------------------------
torch's optimizers, one          element-wise, on operands of one spec      the fast path of `element_wise`
  parameter at a time              and plain scalars
all others                       element-wise, on operands that are cut     `on_parts`
                                   or can be sliced in the same way
foreach and fused optimizers     on lists, all tensors at once              `on_lists`

The fast path and `on_lists` do not call the operator, but torch's method or function of the same name, if there is one:
it parses its arguments faster.

A rule (`rules.py`) that cannot run the operator on local parts returns `NotImplemented` or raises TypeError. The rules
run below autograd, so they increment the version counters of the local parts that they write to.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from weft.dtensor.uneven import UnevenDTensor, local_of


def parts_of(values: Iterable[Any]) -> list[Any]:
    """Return the local tensor of each DTensor, and other values unchanged."""
    return [getattr(each, "_local_tensor", each) for each in values]


def holding(parts: Iterable[torch.Tensor]) -> list[bool]:
    """Return for each part whether it has elements. With empty parts, some multi-tensor kernels write out of bounds."""
    return [part.numel() > 0 for part in parts]


def filled(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts that have elements."""
    return [part for part in parts if part.numel()]


def kinds_of(parts: Iterable[torch.Tensor]) -> set[tuple[torch.device, torch.dtype]]:
    """Return the (device, dtype) pairs of `parts`. All tensors of one multi-tensor kernel must have the same pair."""
    return set(map(_KIND, parts))


_KIND = attrgetter("device", "dtype")


def uneven_in(values: Any) -> list[UnevenDTensor]:
    """Return the `UnevenDTensor`s in the pytree `values`."""
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, UnevenDTensor)]


def changed_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that operator `func` writes to if it is called with these arguments."""
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
    """Increment the version counters of the local parts of `tensors`, after a write."""
    torch.autograd.graph.increment_version([tensor._local_tensor for tensor in tensors])


@cache
def _facts(func: Any) -> tuple[Callable[..., Any], tuple[str, ...], frozenset[str]]:
    """Return an operator's function for plain tensors, the names of its arguments, and the names of the arguments that
    it writes to."""
    arguments = func._schema.arguments
    name = func._schema.name.removeprefix("aten::")
    run = func
    if name.startswith(("_foreach_", "_fused_")):
        run = getattr(torch, name, func)
    elif arguments[0].name == "self":  # the operator may be a method
        method = getattr(torch._C.TensorBase, name, None)
        run = method if callable(method) else func
    written = frozenset(argument.name for argument in arguments if argument.is_write)
    return run, tuple(argument.name for argument in arguments), written


def element_wise(func: Any) -> Callable[[Any, tuple, dict], Any]:
    """Return the rule that runs the element-wise operator `func`: on the fast path if possible, else by `on_parts`."""
    run, increment, writes = _facts(func)[0], torch.autograd.graph.increment_version, func._schema.is_mutable
    if writes and not func._schema.arguments[0].is_write:  # out=
        return on_parts

    def rule(func: Any, args: tuple, kwargs: dict) -> Any:
        # `on_parts` handles dtype and memory_format of a new tensor.
        plain = not kwargs or (writes and _SCALARS.issuperset(map(type, kwargs.values())))
        mine = _beside(args) if plain else None
        if mine is None:
            return on_parts(func, args, kwargs)
        if not writes:
            return args[0].like(run(*mine))
        increment(mine[0])
        run(*mine, **kwargs)
        return args[0]

    return rule


_SCALARS = frozenset((float, int, bool, type(None)))


def _beside(operands: tuple) -> list[Any] | None:
    """Return the operands' local parts, and scalars unchanged. Return None if an operand that is not a scalar lacks the
    spec and cuts of the first operand."""
    first = operands[0]
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
    """Run an element-wise operator on the local parts. Return `NotImplemented` for an operand that is none of these:

    - A scalar, or an operand with the result's cuts: used without change.
    - A DTensor with the result's shape but other cuts: gathered, then sliced by the result's cuts.
    - If the operator writes to a sharded tensor, a plain tensor of the result's shape: sliced by the result's cuts.
    """
    # Optimizers call these operators once per parameter, so avoid slow pytree functions: the operators take no lists.
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
                return NotImplemented  # for example, the activation of a module that runs outside of its unit
            each = like.slice_of(whole_of(each))
        mine.append(each._local_tensor if isinstance(each, DTensor) else each)
    try:
        result = func(*mine[: len(args)], **dict(zip(kwargs, mine[len(args) :])))
    except RuntimeError as error:
        explain_dtypes(func, {leaf.dtype for leaf in uneven_in(given)}, error)
        raise
    if changed is None:
        return like.like(result)
    wrote([changed])
    return changed


def explain_dtypes(func: Any, dtypes: set[torch.dtype], error: Exception) -> None:
    """Raise TypeError from `error` if the operands have several dtypes: they are the likely cause of `error`."""
    if len(dtypes) > 1:
        raise TypeError(
            f"{func} takes tensors of one dtype, not {' and '.join(sorted(map(str, dtypes)))}: Adam and fused "
            "optimizers need gradients in the weights' dtype; leave out main_grads_dtype, set main_params_dtype to the "
            "same, or for narrower gradients use weft.optim.flat"
        ) from error


def refuse_plain(func: Any, plain: torch.Tensor, sharded: torch.Tensor) -> NoReturn:
    """Raise TypeError: `func` writes values of a sharded tensor to a plain tensor, such as a loaded optimizer state."""
    raise TypeError(
        f"{func} writes values of a sharded tensor of shape {tuple(sharded.shape)} to a plain one of shape "
        f"{tuple(plain.shape)}: use its .full_tensor(). If the plain one is an optimizer's state, load whole states "
        "with set_optimizer_state_dict and StateDictOptions(full_state_dict=True). An optimizer whose states have "
        "other shapes than parameters, such as Adafactor, needs parameters that are whole: weft.TensorAtomic()"
    )


def fits(operand: torch.Tensor, like: UnevenDTensor) -> bool:
    """Return whether the local parts of `operand` and `like` fit: `operand` is a scalar, or both have equal cuts."""
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
    """Return the full tensor if `value` is a DTensor; this is collective. Return any other tensor unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_lists(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a foreach or fused operator on the local parts of its lists, all tensors at once. Empty parts are left out.
    If the operator returns results, a second call computes the results of the empty parts. On torch's DTensors in the
    lists, the operator runs by torch's rules."""
    run, names, written = _facts(func)
    given = dict(zip(names, args)) | kwargs
    lists = [value for value in given.values() if isinstance(value, (list, tuple))]
    first = next(values for values in lists if UnevenDTensor in map(type, values))
    if DTensor in map(type, first):
        return _on_two_kinds(func, args, kwargs, [type(each) is DTensor for each in first])
    cuts, own = _cuts_of(first), parts_of(first)
    parts = {
        name: own if value is first else _localized(_fitting(func, value, first, cuts, name in written))
        for name, value in given.items()
    }
    here = holding(own)

    def on_those(keep: Sequence[bool] | None) -> Any:
        """Run the operator on those tensors of the lists for which `keep` is true. If `keep` is None: on all."""
        mine = parts if keep is None else {name: _kept(value, name, keep) for name, value in parts.items()}
        try:
            return run(*(mine[name] for name in names[: len(args)]), **{name: mine[name] for name in kwargs})
        except RuntimeError as error:
            explain_dtypes(func, {leaf.dtype for leaf in uneven_in(lists)}, error)
            raise

    for name in written:  # empty parts too: they share the version counter of a buffer that has other parts
        if isinstance(given.get(name), (list, tuple)):
            changed = [pair for pair in zip(parts[name], given[name]) if operator.is_not(*pair)]
            torch.autograd.graph.increment_version([*chain.from_iterable(changed)])
    results = on_those(None if all(here) else here) if any(here) else []
    if written:
        return None
    if not all(here):
        each = {True: iter(results), False: iter(on_those([not holds for holds in here]))}
        results = [next(each[holds]) for holds in here]
    return [like.like(value) if isinstance(like, UnevenDTensor) else value for like, value in zip(first, results)]


def _on_two_kinds(func: Any, args: tuple, kwargs: dict, torchs: Sequence[bool]) -> Any:
    """Run `func` twice: on torch's DTensors, at the places of the lists where `torchs` is true, and on the others."""
    names, results = _facts(func)[1], {}
    for kind in (True, False):
        keep = [each is kind for each in torchs]
        mine = [_kept(value, name, keep) for name, value in zip(names, args)]
        results[kind] = func(*mine, **{name: _kept(value, name, keep) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        return None
    each = {kind: iter(values) for kind, values in results.items()}
    return [next(each[kind]) for kind in torchs]


def _fitting(func: Any, values: Any, first: Sequence[Any], cuts: Sequence[Any], written: bool) -> Any:
    """Return the argument `values`, with each tensor cut like the tensor at its place in the list `first`. `cuts`: the
    cuts of `first`. A tensor with other cuts is sliced; if the operator writes to it (`written`), raise TypeError
    instead. Equal cuts are replaced by the same object, because the next comparison is then faster."""
    if not isinstance(values, (list, tuple)) or not any(isinstance(value, torch.Tensor) for value in values[:1]):
        return values
    if all(map(operator.is_, found := _cuts_of(values), cuts)):
        return values
    fitting = list(values)
    for number in [number for number, (own, cut) in enumerate(zip(found, cuts)) if own is not cut]:
        value, like = values[number], first[number]
        if not isinstance(like, UnevenDTensor):
            if func._schema.is_mutable:
                refuse_plain(func, like, value)
            raise TypeError(
                f"{func} takes a plain tensor of shape {tuple(like.shape)} with a sharded one: pass its .full_tensor()"
            )
        if not fits(value, like):
            if written and not isinstance(value, DTensor):
                refuse_plain(func, value, like)
            if written or value.shape != like.shape:
                raise TypeError(
                    f"{func}: operands of shape {tuple(like.shape)} are cut differently "
                    f"({getattr(value, '_cuts', None)} and {like._cuts}); use tensors of one sharded parameter"
                )
            fitting[number] = like.slice_of(whole_of(value))
        elif isinstance(value, UnevenDTensor):
            value._cuts = like._cuts
    return fitting


def _cuts_of(values: Sequence[Any]) -> list[Any]:
    return [getattr(each, "_cuts", None) for each in values]


def _localized(value: Any) -> Any:
    return parts_of(value) if isinstance(value, (list, tuple)) else local_of(value)


def _kept(local: Any, name: str, keep: Sequence[bool]) -> Any:
    """Return those values of the argument `name` that `keep` selects. If the argument does not have one value for each
    tensor, return it unchanged."""
    if isinstance(local, (list, tuple)):
        return list(compress(local, keep))
    if name == "scalars" and isinstance(local, torch.Tensor):
        return local[torch.tensor(keep, dtype=torch.bool, device=local.device)]  # one per tensor, in a tensor
    return local
