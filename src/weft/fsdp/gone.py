"""Weights that are not here cannot be read.

Autograd saves parameters for backward, and checks when it reads them that their version is the one they had then. While
the memory of gathered weights is given back, they have a version with which nothing was ever saved:

    weights      version                          autograd
    -----------  -------------------------------  ----------------------------------------------------------------------
    gathered     that of the main weights         reads them
    gone         1,000,000,000 + a number of the  refuses, whatever way the backward came: by an inner tensor that was
                 group                            kept on a module, by a feature that a hook captured

The refusal knows no names. So torch's function that runs a backward is wrapped, once, to say whose weights are meant.
"""

import functools
import itertools
import re
import weakref
from typing import Any

import torch
from torch import nn

_numbers = itertools.count(1_000_000_000)
_groups: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_REFUSAL = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\].* is at version (\d+); expected version", re.DOTALL)


class WeightsGone(RuntimeError):
    """A backward came into a unit by a way that its forward did not show; the message names unit and parameter."""


def version_when_gone(group: Any) -> int:
    """The version of the full parameters of `group`, a `ParameterGroup`, while they are not here."""
    version = next(_numbers)
    _groups[version] = group
    return version


def set_version(parameters: tuple[nn.Parameter, ...], version: int) -> None:
    """Let autograd read only what was saved from `parameters` when they had this version."""
    torch._C._autograd._unsafe_set_version_counter(parameters, (version,) * len(parameters))


def _explained(refusal: str) -> str:
    """What a refusal of autograd means, "" if it is about something else."""
    found = _REFUSAL.search(refusal)
    group = _groups.get(int(found[2])) if found else None
    if found is None or group is None:
        return ""
    shape = tuple(int(size) for size in found[1].split(", ") if size)
    alike = [slot.name for slot, p in zip(group.slots, group.full_parameters) if shape in (p.shape, p.shape[::-1])]
    return (
        f"backward reads {' or '.join(map(repr, alike)) or 'weights'} of {group.owner()} after its weights went: it "
        "came in by a tensor that forward did not return, such as one that was kept on a module or captured by a hook. "
        "Return that tensor too, in whatever structure, or let the unit keep its weights until backward: "
        "fully_shard(..., reshard_after_forward=False)"
    )


def install() -> None:
    """Wrap torch's function that runs a backward, once."""
    run = torch.autograd._engine_run_backward
    if hasattr(run, "__wrapped__"):
        return

    @functools.wraps(run)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if why := _explained(str(error)):
                raise WeightsGone(why) from error
            raise

    torch.autograd._engine_run_backward = explained  # type: ignore[attr-defined]
