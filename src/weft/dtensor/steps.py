"""How torch's optimizers step over small sharded parameters where nobody says how.

On CPU torch steps tensor by tensor, since a list of tensors is no faster there. Of sharded tensors every operator on
every tensor is a call from torch into Python, which costs more than a small tensor's arithmetic; on lists it is one,
and on lists of what lies here there is none.

    whose step           parameters of the group           foreach, fused    steps
    -------------------  --------------------------------  ----------------  -----------------------------------
    Adam's, AdamW's,     all sharded, fp32 or fp64, on     None, None        over lists, as with `foreach=True`:
      SGD's, Adagrad's     CPU, on average at most                             the same values bit for bit; of parts
                           `SMALL` elements for a rank                         where all of a parameter's are cut alike
    anybody's            anything else                     anything          as torch chooses

Left to torch as well is what `foreach=True` would refuse or do with a side effect: numbers that are tensors, and
Nesterov's momentum, which then changes the gradients.

torch makes this choice in the functions that its optimizers call with the parameters of a group. There it is made here,
behind whatever the user's hooks change, and nothing tells of it in the optimizer, which may be saved at any time.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.optim import adagrad, adam, sgd

from weft.dtensor.local import explain_dtypes, uneven_in
from weft.dtensor.uneven import UnevenDTensor

_EXACT = {torch.float32, torch.float64}
"""Of narrower numbers torch's steps over lists round otherwise."""
SMALL = 4096
"""Elements of a tensor above which arithmetic is what costs, and a list's intermediate results take memory."""


def _choose_in(module: ModuleType, name: str) -> None:
    """Let the step `name` of torch's `module` go over lists where that is right."""
    step: Callable[..., None] = getattr(module, name)

    @functools.wraps(step)
    def choosing(params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not _goes_over_lists(params, kwargs):
            step(params, *args, **kwargs)
        elif _are_cut_alike(params, args):
            _step_parts(step, params, args, kwargs | {"foreach": True})
        else:
            step(params, *args, **kwargs | {"foreach": True})

    setattr(module, name, choosing)


def _goes_over_lists(parameters: Sequence[torch.Tensor], options: dict[str, Any]) -> bool:
    if options.get("foreach", True) is not None or options.get("fused") is not None:
        return False
    if options.get("nesterov") or options.get("differentiable"):
        return False
    if any(isinstance(options.get(number), torch.Tensor) for number in ("lr", "beta1", "beta2")):
        return False
    if not parameters or set(map(type, parameters)) != {UnevenDTensor}:
        return False
    if parameters[0].device.type != "cpu" or not _EXACT.issuperset(each.dtype for each in parameters):
        return False
    # The same on all ranks, whatever lies where: on the way over lists, tensors may be gathered in another order.
    return sum(each.numel() // each._cuts.parts for each in parameters) <= SMALL * len(parameters)  # type: ignore[attr-defined]


def _are_cut_alike(parameters: Sequence[Any], lists: Sequence[Any]) -> bool:
    """Whether each of `lists` has, for each parameter, a tensor that is cut as it is, or numbers or None for all."""
    cuts, shaped = [each._cuts for each in parameters], any(each.dim() for each in parameters)
    for values in lists:
        if not isinstance(values, list) or len(values) not in (0, len(parameters)):
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
    given = (parameters, *lists)
    parts = [[getattr(each, "_local_tensor", each) for each in values] for values in given]
    try:
        step(*parts, **options)
    except RuntimeError as error:
        explain_dtypes(step.__name__, {each.dtype for each in uneven_in(given)}, error)
        raise
    _, *states = lists  # the gradients stay as they are
    written = [each for values in (parameters, *states) for each in values if type(each) is UnevenDTensor]
    torch._C._increment_version(written)  # of the parts it has been done
    for values, mine in zip(lists, parts[1:]):
        if values and values[0] is None:
            values[:] = [None if part is None else each.like(part) for each, part in zip(parameters, mine)]


for _module, _name in ((adam, "adam"), (sgd, "sgd"), (adagrad, "adagrad")):
    _choose_in(_module, _name)
