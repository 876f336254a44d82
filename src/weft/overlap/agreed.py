"""Checks that ranks that communicate in a schedule called it with arguments that fit together.

    ranks                          must have the same
    -----------------------------  -------------------------------------------------------------------------------
    the ranks of a pipeline        schedule, options, mode, number of microbatches, all entries of the microbatches,
                                   which of the parameters that both ends share are frozen
    the ranks that share experts   schedule, options, mode, number of microbatches

If the arguments differ, every rank that would have waited for another rank raises an error. Without the check, ranks
could exchange messages of different sizes, or train on the tokens of one batch with the labels of another.
"""

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.agreement import agree
from weft.comm.groups import exchange_objects
from weft.comm.watch.rules import mismatch
from weft.overlap.layer import StagedLayer
from weft.overlap.microbatch import Microbatch
from weft.pipeline.placement import Cut
from weft.words import counted

_MOMENT = "beginning of a schedule"
_RULE = (
    "all ranks must call with the same schedule and options, in the same mode, with the same number of microbatches; "
    "the ranks of one pipeline also need the same tokens and labels, and must freeze the same of the parameters that "
    "its first and last stage share"
)
_NO_ENDS = (-(1 << 40), -(1 << 40))
"""The `both_ways` of a rank without shared parameters, below those of all other ranks."""
_computes_in: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""For each model, a checksum of its compute dtypes in its last schedule."""


@dataclass
class _Word:
    """A number that must be equal on all ranks. `differs`: whether it differed in any comparison so far."""

    value: int
    differs: bool = False

    @property
    def both_ways(self) -> tuple[int, int]:
        """`value` and `-value`. `agree` returns the maximum of each over the ranks, and thus the maximum and the
        (negated) minimum of `value`. All ranks have the same value if maximum and minimum are equal."""
        return self.value, -self.value

    def compare(self, highest: int, lowest: int) -> None:
        """Compare the ranks' numbers. `highest`, `lowest`: the maxima over the ranks of the two `both_ways`."""
        self.differs |= highest != -lowest


def agree_on_schedule(
    model: nn.Module,
    layers: Sequence[StagedLayer],
    cut: Cut,
    what: str,
    microbatches: Sequence[Microbatch],
    order: Any = (),
) -> bool:
    """Raise CollectiveMismatch on all ranks that communicate in a schedule if their arguments do not fit together.

    `what`: the schedule's name, or a description of the evaluation. `order`: everything that determines the order of
    exchanges (the table's entries and the options).

    Return whether the dtypes of messages between stages may have changed. The result is True in the model's first
    schedule, and if compute dtypes on any rank of the pipeline have changed since the previous schedule. Without a
    pipeline, it is False.
    """
    experts = _groups_of_experts(layers)
    if cut.group is None and not experts:
        return False
    mode = "training" if model.training else "evaluation"
    common = _Word(zlib.crc32(f"{what} {mode} {len(microbatches)} {order}".encode()))
    said = f"{what} in {mode} mode of {counted(len(microbatches), 'microbatch')}"
    converted, bad, anywhere = False, False, bool(experts)
    if cut.group is not None:
        checksum = _checksum(microbatches)
        shapes = ", ".join(each.said() for each in microbatches)
        said += f" of shape {shapes}, whose tensors have the checksum {checksum:08x}"
        own = _Word(zlib.crc32(f"{shapes} {checksum}".encode()))
        dtypes = _dtypes(model)
        trained = _trained_ends(model, cut) if order else []  # an evaluation adds up no gradients
        if trained:
            said += f", with {sum(trained)} trainable of {counted(len(trained), 'shared parameter')}"
        ends = _Word(zlib.crc32(repr(trained).encode()))
        words = [*common.both_ways, *own.both_ways, *(ends.both_ways if trained else _NO_ENDS)]
        words += [_computes_in.get(model) != dtypes, anywhere]
        high, low, first, last, *both, converts, others = agree(words, [cut.group], _MOMENT, channel=cut.channel)
        common.compare(high, low)
        own.compare(first, last)
        if tuple(both) != _NO_ENDS:
            ends.compare(*both)
        converted, anywhere = bool(converts), bool(others)
        bad = common.differs or own.differs or ends.differs
        _computes_in[model] = dtypes
    for group, channel in experts.items():
        high, low, other = agree([*common.both_ways, bad], [group], f"{_MOMENT}, experts", channel=channel)
        common.compare(high, low)
        bad = bool(other) or common.differs
    if cut.group is not None and anywhere:  # so that stages without experts also raise if the ranks of experts differ
        bad = any(agree([bad], [cut.group], f"{_MOMENT}, all stages", channel=cut.channel))
    if bad:
        _computes_in.pop(model, None)
        everyone: dict[int, str] = {}
        for group in (cut.group, *experts):
            if group is not None:
                told = exchange_objects(said, group, "arguments of a schedule")
                everyone.update(zip(dist.get_process_group_ranks(group), told))
        name = "of one pipeline" if not experts else "that exchange rows"
        raise mismatch(f"{name} called the schedule with different arguments", dict(sorted(everyone.items())), _RULE)
    return converted


def _groups_of_experts(layers: Sequence[StagedLayer]) -> dict[dist.ProcessGroup, int]:
    """Return the process groups over which `layers` exchange rows, each with a channel number."""
    found: dict[dist.ProcessGroup, int] = {}
    for layer in layers:
        group = getattr(layer.dispatcher, "group", None)
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            found.setdefault(group, getattr(layer.dispatcher, "channel", 0))
    return found


def _checksum(microbatches: Sequence[Microbatch]) -> int:
    """Return a checksum of all tensors of the microbatches. Tensors on a device are first copied to the host."""
    word = 0
    for each in microbatches:
        for tensor in each.tensors:
            word = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, word)
    return word


def _trained_ends(model: Any, cut: Cut) -> list[bool]:
    """Return whether each parameter that the first and the last stage share is trainable. Empty on other ranks."""
    modules = model.shared_ends if cut.shares_ends and (cut.is_first or cut.is_last) else ()
    return [each.requires_grad for module in modules for each in module.parameters()]


def _dtypes(model: nn.Module) -> int:
    """Return a checksum of the dtypes of parameters and of autocast."""
    device = next((each.device.type for each in model.parameters()), "cpu")
    casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return zlib.crc32(f"{casts} {[each.dtype for each in model.parameters()]}".encode())
