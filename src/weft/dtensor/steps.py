"""How torch's optimizers step over small sharded parameters by default.

On CPU torch steps tensor by tensor, since a list of tensors is no faster there. Of sharded tensors every operator on
every tensor is a call from torch into Python, which costs more than a small tensor's arithmetic; on lists it is one,
and on lists of what lies here there is none.

    whose step           parameters of the group           foreach, fused    steps
    -------------------  --------------------------------  ----------------  -----------------------------------
    Adam's, AdamW's,     all sharded, on CPU, in fp32      None, None        over lists, as with `foreach=True`:
      SGD's, Adagrad's     or fp64 like gradients and                          the same values bit for bit; of parts
                           states, on average at most                          where all of a parameter's are cut alike
                           `SMALL` elements for a rank
    anybody's            anything else                     anything          as torch chooses

Left to torch as well is what `foreach=True` would refuse or do with a side effect: numbers that are tensors, Nesterov's
momentum, which then changes the gradients, and steps that autograd is to know.

torch makes this choice in the functions that its optimizers call with the parameters of a group. There it is made here,
behind what the user's hooks change, and nothing tells of it in the optimizer, which may be saved at any time.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.dtensor.local import kinds_of, parts_of
from weft.dtensor.uneven import UnevenDTensor

_EXACT = [{(torch.device("cpu"), dtype)} for dtype in (torch.float32, torch.float64)]
"""What all tensors are. Of narrower numbers, of some or of all, torch's steps over lists round otherwise."""
SMALL = 4096
"""Elements of a tensor above which arithmetic is what costs, and a list's intermediate results take memory."""


def choosing_lists(step: Callable[..., None]) -> Callable[..., None]:
    """`step`, that of one of torch's optimizers, going over lists where that is right."""

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
    """The same on all ranks, not by parts: on the way over lists, tensors may be gathered in another order."""
    if options.get("foreach", True) is not None or options.get("fused") is not None:
        return False
    if options.get("nesterov") or options.get("differentiable") or torch.is_grad_enabled():
        return False  # SGD's step is not told whether it is differentiable, but called with gradients enabled then
    if any(isinstance(value, (torch.Tensor, list, tuple)) for value in options.values()):
        return False
    if set(map(type, parameters)) != {UnevenDTensor} or not all(isinstance(values, list) for values in lists):
        return False
    sharded = [each for values in (parameters, *lists) for each in values if type(each) is UnevenDTensor]
    if kinds_of(parts_of(sharded)) not in _EXACT:
        return False
    return sum(each._cuts.mean_size for each in parameters) <= SMALL * len(parameters)


def _are_cut_alike(parameters: Sequence[Any], lists: Sequence[list[Any]]) -> bool:
    """Whether each of `lists` has, for each parameter, a tensor that is cut as it is, or 0-D ones or None for all."""
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
    """`step` on what lies here. A momentum that begins with it goes into its list as a sharded tensor."""
    parts = [parts_of(values) for values in (parameters, *lists)]
    _, *states = lists  # the gradients stay as they are
    written = [each for values in (parameters, *states) for each in values if type(each) is UnevenDTensor]
    torch.autograd.graph.increment_version(written)  # of the parts torch does it
    before = [list(values) for values in parts]
    step(*parts, **options)
    for values, old, new in zip(lists, before[1:], parts[1:]):
        for place, part in enumerate(new):
            if part is not old[place]:
                values[place] = part if type(values[place]) is torch.Tensor else parameters[place].like(part)
