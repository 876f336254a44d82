"""Lets torch's optimizers step over local parts on CPU, or over lists of tensors if these are small.

If an operator runs on a sharded tensor, torch calls into Python. This costs more than the arithmetic of a small tensor.
An operator on a list of sharded tensors makes one such call for all. An operator on plain local parts makes none.

If `foreach` and `fused` are None, weft chooses how Adam, AdamW, SGD and Adagrad step certain groups. In these groups,
all parameters are sharded and on CPU, and the parameters, gradients and states have one dtype:

    gradients and states have  | small group: fp32 or fp64, on average  | other groups
                               | at most `SMALL` elements for a rank    |
    ---------------------------+----------------------------------------+---------------------------------------
    the cuts of the parameters | over lists of local parts              | over local parts, one by one; in fp32
                               |                                        | and fp64, over large ones in pieces
    other cuts                 | over lists of sharded tensors          | as torch chooses

A step over lists is torch's step with `foreach=True`, and gives bitwise the same values as without. With Nesterov
momentum, weft does not step over lists, because such a step would change the gradients. In all other cases, such as
with hyperparameters that are tensors, or with differentiable steps, torch chooses.

torch makes its choice in the functions that its optimizers call with the parameters of a group. weft wraps these
functions. Therefore weft sees changes that the user's hooks make, and stores nothing in the optimizer.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.dtensor.local import kinds_of, parts_of
from weft.dtensor.uneven import UnevenDTensor

_EXACT = (torch.float32, torch.float64)  # with narrower dtypes, torch's steps over lists round differently
SMALL = 4096
"""The largest mean number of elements of a rank's part, over the parameters of a group, for a step over lists. With
larger tensors, arithmetic takes longer than calls, and the intermediate results of a list take much memory."""
PIECE = 1 << 16
"""The number of elements of a piece, per thread. A step reads and writes its tensors several times. Between these
accesses, the tensors of a piece stay in the cores' caches."""


def over_parts(step: Callable[..., None]) -> Callable[..., None]:
    """Wrap `step`, the function of one of torch's optimizers, to step as in the table at the top of this file."""

    @functools.wraps(step)
    def choosing(params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        dtype = None if torch.compiler.is_compiling() else _dtype_on_cpu(params, args, kwargs)
        if dtype is None:
            step(params, *args, **kwargs)
            return
        small = dtype in _EXACT and _are_small(params) and not kwargs.get("nesterov")
        options = kwargs | {"foreach": True} if small else kwargs
        if _are_cut_alike(params, args):
            _step_parts(step, params, args, options)
        else:
            step(params, *args, **options)

    return choosing


def _dtype_on_cpu(parameters: Sequence[Any], lists: Sequence[Any], options: dict[str, Any]) -> torch.dtype | None:
    """Return the common dtype of the sharded tensors, or None if torch chooses how to step."""
    if options.get("foreach", True) is not None or options.get("fused") is not None:
        return None
    if options.get("differentiable") or torch.is_grad_enabled():
        return None  # SGD's step has no option `differentiable`: instead, gradients are enabled
    if any(isinstance(value, (torch.Tensor, list, tuple)) for value in options.values()):
        return None
    if set(map(type, parameters)) != {UnevenDTensor} or not all(isinstance(values, list) for values in lists):
        return None
    sharded = [each for values in (parameters, *lists) for each in values if type(each) is UnevenDTensor]
    (device, dtype), *others = kinds_of(parts_of(sharded))
    return dtype if device.type == "cpu" and not others else None


def _are_small(parameters: Sequence[Any]) -> bool:
    """Return whether calls take longer than arithmetic. The result must be equal on all ranks, because a step over
    lists may gather tensors in another order than a step over single tensors."""
    return sum(each._cuts.mean_size for each in parameters) <= SMALL * len(parameters)


def _are_cut_alike(parameters: Sequence[Any], lists: Sequence[list[Any]]) -> bool:
    """Return whether each of `lists` has only tensors with the parameters' cuts, or only 0-D tensors and None."""
    cuts, shaped = [each._cuts for each in parameters], any(each.dim() for each in parameters)
    for values in lists:
        found = [getattr(each, "_cuts", None) for each in values]
        if any(found):
            if not all(map(operator.is_, found, cuts)):
                return False
        elif any(each is not None and (each.dim() or not shaped) for each in values):
            return False
    return True


def _step_parts(step: Callable, parameters: Sequence[Any], lists: Sequence[list[Any]], options: dict[str, Any]) -> None:
    """Run `step` on local parts. A momentum buffer that `step` creates becomes a sharded tensor in its list."""
    parts = [parts_of(values) for values in (parameters, *lists)]
    _, *states = lists  # steps do not change gradients
    written = [each for values in (parameters, *states) for each in values if type(each) is UnevenDTensor]
    torch.autograd.graph.increment_version(written)  # torch increments only the version counters of the parts
    counts, size = [1] * len(parameters), PIECE * torch.get_num_threads()
    one_by_one = not options.get("foreach") and parts[0][0].dtype in _EXACT
    if one_by_one and any(each.numel() > size for each in parts[0]):
        counts = _piece_counts(parts, size, creates=bool(options.get("momentum")))
        parts = [_divided(values, counts, size) for values in parts]
    before = [list(values) for values in parts]
    step(*parts, **options)
    for values, old, new in zip(lists, before[1:], parts[1:]):
        for place, at in enumerate(itertools.accumulate(counts[:-1], initial=0)) if values else ():
            if counts[place] == 1 and (part := new[at]) is not old[at]:
                values[place] = part if type(values[place]) is torch.Tensor else parameters[place].like(part)


def _piece_counts(lists: Sequence[list[Any]], size: int, *, creates: bool) -> list[int]:
    """Return the number of pieces of each parameter. `lists`: parameters, gradients and states. `size`: the number
    of elements of a piece. `creates`: whether the step replaces None by a buffer. If so, a parameter whose buffer is
    None is not divided, because the step would create a buffer for each piece."""
    counts, counters = [], set[int]()
    for place, parameter in enumerate(lists[0]):
        row = [values[place] for values in lists if values]
        counting = {id(each) for each in row if each is not None and not each.dim()}
        whole = creates and any(each is None for each in row)
        whole |= not all(each is None or each.is_contiguous() for each in row)
        whole |= not counters.isdisjoint(counting)  # the step of an earlier parameter increments a shared counter
        counters |= counting
        counts.append(1 if whole else max(1, -(-parameter.numel() // size)))
    return counts


def _divided(values: list[Any], counts: Sequence[int], size: int) -> list[Any]:
    """Divide each of `values` into flat pieces of `size` elements. `counts`: the number of pieces of each. A step
    increments the counter (0-D) of each piece, so all pieces but the first get copies of the parameter's counter."""
    found: list[Any] = []
    for each, count in zip(values, counts):
        if count == 1 or each is None:
            found += [each] * count
        elif each.dim():
            found += each.view(-1).split(size)
        else:
            found += [each, *(each.clone() for _ in range(count - 1))]
    return found
