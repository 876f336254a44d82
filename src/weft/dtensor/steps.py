"""How torch's optimizers step over small sharded parameters where nobody says how.

On CPU torch steps tensor by tensor, since a list of tensors is no faster there. Of sharded tensors every operator on
every tensor is a call from torch into Python, which costs more than a small tensor's arithmetic; on lists it is one.

    who                  parameters of the group           foreach, fused    steps
    -------------------  --------------------------------  ----------------  -----------------------------------
    Adam, AdamW, SGD,    all sharded, on CPU, on average   None, None        over lists, as with `foreach=True`:
      Adagrad              at most `SMALL` elements here                       the same values bit for bit
    anybody              anything else                     anything          as torch chooses

Left to torch as well is what `foreach=True` would refuse or do with a side effect: numbers that are tensors, and
Nesterov's momentum, which then changes the gradients.
"""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft.dtensor.uneven import UnevenDTensor

SMALL = 4096
"""Elements of a tensor above which arithmetic is what costs, and a list's intermediate results take memory."""

_STEPS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_chosen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]" = weakref.WeakKeyDictionary()
"""The groups that take their step over lists now."""


def _choose(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step."""
    _restore(optimizer)  # an earlier one may have failed
    if type(optimizer) in _STEPS and (groups := [each for each in optimizer.param_groups if _goes_over_lists(each)]):
        _chosen[optimizer] = groups
        for group in groups:
            group["foreach"] = True


def _restore(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Behind a step: the choice is nobody's again."""
    for group in _chosen.pop(optimizer, ()):
        group["foreach"] = None


def _goes_over_lists(group: dict[str, Any]) -> bool:
    if group["foreach"] is not None or group["fused"] is not None or group.get("nesterov") or group["differentiable"]:
        return False
    if any(isinstance(number, torch.Tensor) for number in (group["lr"], *group.get("betas", ()))):
        return False
    parameters = group["params"]
    if not parameters or set(map(type, parameters)) != {UnevenDTensor}:
        return False
    return parameters[0].device.type == "cpu" and (
        sum(each._local_tensor.numel() for each in parameters) <= SMALL * len(parameters)
    )


register_optimizer_step_pre_hook(_choose)
register_optimizer_step_post_hook(_restore)
