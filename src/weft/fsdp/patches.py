"""The table `PATCHES`: the functions of torch that the first `fully_shard` replaces, until the process ends.

All exist in torch 2.11 to 2.13. In addition, a global hook raises an error if `DistributedDataParallel` or
`DataParallel` wraps sharded modules.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from weft.dtensor.norms import clipping_at_once, norm_at_once
from weft.dtensor.placements import taking_even, taking_parts
from weft.dtensor.state_dict import slicing
from weft.dtensor.steps import over_parts
from weft.fsdp.autograd import explaining
from weft.fsdp.composition import refuse_wrappers, refusing_gathered, refusing_sharded
from weft.fsdp.runtime.inventory import look_around
from weft.fsdp.runtime.joint_backward import finish_backwards


@dataclass(frozen=True)
class Patch:
    """Replaces the attribute `name` by `replacing(original)`. `of`: its owner in torch, "module" or "module:Class".
    `parameters`: the parameter names that torch's function must have, if the replacement depends on them."""

    of: str
    name: str
    replacing: Callable[[Any], Any]
    parameters: tuple[str, ...] = ()

    def owner(self) -> Any:
        """Return torch's module or class with the attribute; None if this version has no such module or class."""
        module, _, cls = f"torch.{self.of}".partition(":")
        try:
            found = import_module(module)
        except ImportError:
            return None
        return getattr(found, cls, None) if cls else found

    @property
    def fits(self) -> bool:
        """Whether this version of torch has the attribute, with exactly these `parameters` if any are given."""
        theirs = getattr(self.owner(), self.name, None)
        return theirs is not None and (
            not self.parameters or tuple(inspect.signature(theirs).parameters) == self.parameters
        )

    def __str__(self) -> str:
        listed = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"torch.{self.of.replace(':', '.')}.{self.name}{listed}"


_STATE_DICT = "distributed.checkpoint.state_dict"
_WHY = "torch's fully_shard around {}: call weft.fully_shard there too, or weft.drop_in() before anything is sharded"
_WHY_MADE = (
    "a parametrization of {}: the weight that it computes would be lost in the flat buffer; register it before "
    "fully_shard, which then shards the tensors that the weight is computed from"
)
_FULL = ("full_state_dict", "local_state_dict", "device", "pg")

PATCHES = (
    # Autograd's errors contain no names of weights, and no hook runs at the end of every backward.
    Patch("autograd", "_engine_run_backward", partial(explaining, look_around=look_around, settle=finish_backwards)),
    # torch would call into Python, or send a message, for each tensor. weft takes local parts, and combines norms.
    Patch("optim.adam", "adam", over_parts),
    Patch("optim.sgd", "sgd", over_parts),
    Patch("optim.adagrad", "adagrad", over_parts),
    Patch("nn.utils.clip_grad", "_get_total_norm", norm_at_once),
    Patch("nn.utils", "get_total_norm", norm_at_once),
    Patch("nn.utils.clip_grad", "_clip_grads_with_norm_", clipping_at_once),
    Patch("nn.utils", "clip_grads_with_norm_", clipping_at_once),
    # torch derives the cuts of a DTensor from its placements. weft's DTensors store their cuts, which may be uneven.
    Patch("distributed.tensor:DTensor", "from_local", lambda theirs: staticmethod(taking_parts(theirs))),
    Patch("distributed.tensor:DTensor", "redistribute", taking_even),
    Patch(_STATE_DICT, "_broadcast_state_dict", slicing, (*_FULL, "strict", "cpu_offload")),
    Patch(_STATE_DICT, "_distribute_state_dict", slicing, _FULL),
    # An optimizer over gathered parameters would train nothing.
    Patch("optim:Optimizer", "add_param_group", refusing_gathered),
    # These constructors would treat a sharded parameter as a plain one.
    Patch("distributed.fsdp._fully_shard._fsdp_param:FSDPParam", "__init__", partial(refusing_sharded, at=0, why=_WHY)),
    Patch("nn.utils.parametrize:ParametrizationList", "__init__", partial(refusing_sharded, at=1, why=_WHY_MADE)),
)

_undo: list[Callable[[], None]] = []


def apply() -> None:
    """Apply all patches once. Raises RuntimeError, and applies none, if one does not fit this version of torch."""
    if _undo:
        return
    missing = [str(patch) for patch in PATCHES if not patch.fits]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', no '.join(missing)}, which weft builds on: use a version from 2.11 "
            "to 2.13"
        )
    for patch in PATCHES:
        owner = patch.owner()
        before = vars(owner)[patch.name]  # not getattr, which would unwrap a staticmethod
        setattr(owner, patch.name, patch.replacing(getattr(owner, patch.name)))
        _undo.append(partial(setattr, owner, patch.name, before))
    _undo.append(register_module_module_registration_hook(refuse_wrappers).remove)


def undo() -> None:
    """Restore torch's attributes. Sharded models do not run correctly afterwards."""
    while _undo:
        _undo.pop()()
