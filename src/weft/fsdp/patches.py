"""What weft replaces in torch: one table, applied at the first `fully_shard`, for as long as the process lives.

    attribute of torch                               what weft's does besides                                      why
    -----------------------------------------------  ------------------------------------------------------------  ---
    autograd._engine_run_backward                    names the weights of a refusal; ends a backward                1
    optim.adam.adam, optim.sgd.sgd,                  steps over lists of small sharded parameters                   2
      optim.adagrad.adagrad
    nn.utils.clip_grad._get_total_norm,              takes the norm of sharded tensors at once, and multiplies      2
      ._clip_grads_with_norm_; nn.utils.             them at once
      get_total_norm, .clip_grads_with_norm_
    distributed.tensor.DTensor.from_local,           takes placements that know their cuts                          3
      .redistribute
    distributed.checkpoint.state_dict.               cuts full tensors as parameters are cut                        3
      _broadcast_state_dict, _distribute_state_dict
    distributed.fsdp...FSDPParam.__init__,           refuses a sharded parameter                                    4
      nn.utils.parametrize.ParametrizationList
      .__init__

1. Autograd's refusals know no names, and no hook runs at the end of every backward.
2. torch's way asks for a call into Python, or a message, for each tensor.
3. torch computes even cuts from placements, and has no hook for others.
4. They take every parameter for a replica, or for their own.

All hold for torch 2.11 to 2.13. Besides, one global hook refuses modules of other libraries around sharded ones.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from weft.dtensor.clipping import clipping_at_once, norm_at_once
from weft.dtensor.placements import taking_even, taking_parts
from weft.dtensor.state_dict import slicing
from weft.dtensor.steps import choosing_lists
from weft.fsdp.autograd import explaining
from weft.fsdp.composition import refuse_wrappers, refusing_sharded
from weft.fsdp.construction.forgotten import look_around
from weft.fsdp.runtime.joint_backward import finish_backwards


@dataclass(frozen=True)
class Patch:
    """`name` of the module or class `of`, below torch, becomes `replacing(torch's)`.

    `parameters`: those that torch's function must have, where weft's depends on them.
    """

    of: str
    name: str
    replacing: Callable[[Any], Any]
    parameters: tuple[str, ...] = ()

    def owner(self) -> Any:
        """Where torch has it; None in a torch that has no such place."""
        module, _, cls = f"torch.{self.of}".partition(":")
        try:
            found = import_module(module)
        except ImportError:
            return None
        return getattr(found, cls, None) if cls else found

    @property
    def fits(self) -> bool:
        """Whether this torch has it."""
        theirs = getattr(self.owner(), self.name, None)
        return theirs is not None and (
            not self.parameters or tuple(inspect.signature(theirs).parameters) == self.parameters
        )

    def __str__(self) -> str:
        listed = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"torch.{self.of.replace(':', '.')}.{self.name}{listed}"


_FSDP_PARAM = "distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_STATE_DICT = "distributed.checkpoint.state_dict"
_FULL = ("full_state_dict", "local_state_dict", "device", "pg")

PATCHES = (
    Patch(
        "autograd",
        "_engine_run_backward",
        partial(explaining, look_around=look_around, settle=finish_backwards),
    ),
    Patch("optim.adam", "adam", choosing_lists),
    Patch("optim.sgd", "sgd", choosing_lists),
    Patch("optim.adagrad", "adagrad", choosing_lists),
    Patch("nn.utils.clip_grad", "_get_total_norm", norm_at_once),
    Patch("nn.utils", "get_total_norm", norm_at_once),
    Patch("nn.utils.clip_grad", "_clip_grads_with_norm_", clipping_at_once),
    Patch("nn.utils", "clip_grads_with_norm_", clipping_at_once),
    Patch("distributed.tensor:DTensor", "from_local", lambda theirs: staticmethod(taking_parts(theirs))),
    Patch("distributed.tensor:DTensor", "redistribute", taking_even),
    Patch(_STATE_DICT, "_broadcast_state_dict", slicing, (*_FULL, "strict", "cpu_offload")),
    Patch(_STATE_DICT, "_distribute_state_dict", slicing, _FULL),
    Patch(
        _FSDP_PARAM,
        "__init__",
        partial(
            refusing_sharded,
            at=0,
            why="torch's fully_shard around {}: call weft.fully_shard there too, or weft.drop_in() before anything is "
            "sharded",
        ),
    ),
    Patch(
        "nn.utils.parametrize:ParametrizationList",
        "__init__",
        partial(
            refusing_sharded,
            at=1,
            why="a parametrization of {}: what it makes of the weight would be lost in the flat buffer; register it "
            "before fully_shard, which then shards what it is computed from",
        ),
    ),
)

_undo: list[Callable[[], None]] = []


def apply() -> None:
    """Replace what is in the table, once. Raises RuntimeError, and replaces nothing, where torch lacks any of it."""
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
        before = vars(owner)[patch.name]  # a staticmethod as it is
        setattr(owner, patch.name, patch.replacing(getattr(owner, patch.name)))
        _undo.append(partial(setattr, owner, patch.name, before))
    _undo.append(register_module_module_registration_hook(refuse_wrappers).remove)


def undo() -> None:
    """Put back what torch had. Models that are sharded do not run correctly after that."""
    while _undo:
        _undo.pop()()
