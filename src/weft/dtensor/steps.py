"""Chooses `foreach=True` for torch's optimizers if they step over small sharded parameters on CPU.

On CPU torch steps tensor by tensor, because lists of plain tensors are no faster. With sharded tensors, each operator
on each tensor calls from torch into Python, which costs more than a small tensor's arithmetic. An operator on a list is
one such call, and on a list of local parts there is none.

weft chooses lists for Adam, AdamW, SGD and Adagrad with neither `foreach` nor `fused`, if all parameters of the group
are sharded, on CPU, in fp32 or fp64 like their gradients and states, and have on average at most `SMALL` elements on a
rank. The values are bitwise the same. torch chooses if `foreach=True` would raise or have a side effect: with
hyperparameters that are tensors, with Nesterov momentum, which then changes the gradients, and with differentiable
steps.

weft wraps the functions that torch's optimizers call with the parameters of a group, so that it sees what the user's
hooks have changed, and stores nothing in the optimizer.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.dtensor.local import kinds_of, parts_of
from weft.dtensor.uneven import UnevenDTensor

_EXACT = [{(torch.device("cpu"), dtype)} for dtype in (torch.float32, torch.float64)]
"""The device and dtype that all tensors must have. With narrower dtypes, torch's steps over lists round differently."""
SMALL = 4096
"""Elements of a tensor above which arithmetic dominates, and intermediate results of a list take much memory."""


def choosing_lists(step: Callable[..., None]) -> Callable[..., None]:

    @functools.wraps(step)
    def choosing(params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not _goes_over_lists(params, args, kwargs):
            step(params, *args, **kwargs)
        elif _are_cut_alike(params, args):
            _step_parts(step, params, args, kwargs | {"foreach": True})
        else:
            step(params, *args, **kwargs | {"foreach": True})

    return choosing


def _goes_over_lists(parameters: Sequence[Any], lists: Sequence[Any], options: dict[str, Any]) -> bool:
    """Return whether to step over lists. The answer must not depend on local parts: ranks must agree, as lists may
    gather tensors in another order."""
    if options.get("foreach", True) is not None or options.get("fused") is not None:
        return False
    if options.get("nesterov") or options.get("differentiable") or torch.is_grad_enabled():
        return False  # SGD's step has no option `differentiable`: it is called with gradients enabled then
    if any(isinstance(value, (torch.Tensor, list, tuple)) for value in options.values()):
        return False
    if set(map(type, parameters)) != {UnevenDTensor} or not all(isinstance(values, list) for values in lists):
        return False
    sharded = [each for values in (parameters, *lists) for each in values if type(each) is UnevenDTensor]
    if kinds_of(parts_of(sharded)) not in _EXACT:
        return False
    return sum(each._cuts.mean_size for each in parameters) <= SMALL * len(parameters)


def _are_cut_alike(parameters: Sequence[Any], lists: Sequence[list[Any]]) -> bool:
    """Return whether each of `lists` has tensors with the parameters' cuts, or only 0-D tensors and None."""
    cuts, shaped = [each._cuts for each in parameters], any(each.dim() for each in parameters)
    for values in lists:
        if len(values) not in (0, len(parameters)):
            return False
        found = [getattr(each, "_cuts", None) for each in values]
        if any(found):
            if not all(map(operator.is_, found, cuts)):
                return False
        elif any(each is not None and (each.dim() or not shaped) for each in values):
            return False
    return True


def _step_parts(step: Callable, parameters: Sequence[Any], lists: Sequence[list[Any]], options: dict[str, Any]) -> None:
    """Run `step` on local parts. A momentum buffer that it creates becomes a sharded tensor in its list."""
    parts = [parts_of(values) for values in (parameters, *lists)]
    _, *states = lists  # steps do not change gradients
    written = [each for values in (parameters, *states) for each in values if type(each) is UnevenDTensor]
    torch.autograd.graph.increment_version(written)  # torch increments those of the parts only
    before = [list(values) for values in parts]
    step(*parts, **options)
    for values, old, new in zip(lists, before[1:], parts[1:]):
        for place, part in enumerate(new):
            if part is not old[place]:
                values[place] = part if type(values[place]) is torch.Tensor else parameters[place].like(part)
