"""Updates of model weights that are kept separately from the main weights.

    event since the last update                              next update, on all ranks
    -------------------------------------------------------  ---------------------------------------------------------
    no update yet, or the last backward of a step            in the next pass: an optimizer step is expected
    main weights were written, on any rank                   in the next pass: ranks compare version counters and agree
    none                                                     not needed: the passes of a step share one update

For frozen weights that are kept only as a payload (`weft.quantize.payload_only`), no optimizer step is expected. In
each pass the ranks agree whether any rank has written to these weights or has unfrozen them.

With `check_collectives=False`, the ranks do not agree on updates: each rank sees only its own writes.

Weights without separate model weights need no update: gathers read the current main weights.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from weft.comm.agreement import Agreement, agree
from weft.comm.collectives import reduce_now
from weft.fsdp.channels import Channels
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import ShardedParameter
from weft.fsdp.unit import State, Unit
from weft.layout.refreshes import RefreshOrder
from weft.quantize.payload import Narrow
from weft.quantize.payload_only import PayloadOnly


class Freshness(RefreshOrder):
    """During a pass, updates the model weights (the copies that gathers read) from the main weights."""

    def __init__(self, channels: Channels, agreement: Agreement) -> None:
        super().__init__()
        self._channels = channels
        self._agreement = agreement
        self.certain = True  # whether all ranks know, without an exchange, that the weights must be updated

    def begin_pass(self, units: Sequence[Unit], inside: Sequence[Unit], groups: Sequence[dist.ProcessGroup]) -> None:
        """Begin a pass. Agree over the process groups `groups` whether any of `units` need updates. `inside`: the units
        that the pass may run; they are added to `ahead`."""
        following = [group for unit in units for group in unit.groups if group.refreshes]
        if not following:
            return
        ordinary = [group for group in following if group.payload_only is None]
        resting = [group for group in following if group.payload_only is not None]
        words = [int(self.certain or any(group.main_changed for group in ordinary)), *map(_word_of, resting)]
        if self._agreement.checks and (resting or not self.certain):
            words = agree(words, groups, "beginning of a pass", channel=self._agreement.channel)
        self.certain = False
        due = ordinary if words[0] else []
        for group, word in zip(resting, words[1:]):
            due = [*due, group] if word else due
            if word == PayloadOnly.NEEDED:
                group.keep_main_weights()
        for group in due:
            group.outdate(agreed=True)
        if due:
            agree_on_maxima(due)  # before the first of them is quantized
        self.begin(inside)

    def is_outdated(self, unit: Unit) -> bool:
        return any(group.is_outdated for group in unit.groups)

    def refresh(self, unit: Unit) -> None:
        for group in unit.groups:
            group.refresh(self._channels)

    def finish(self) -> None:
        """At the end of a pass, update the units left in `ahead`, whether they ran or not, and wait for all updates."""
        for unit in self.update_rest():
            for group in unit.groups:
                group.await_refresh()
                if unit.state is not State.ON_THE_WAY:  # otherwise a lane may still quantize
                    group.rest()

    def forget(self) -> None:
        """After an abandoned pass, treat weights as changed, because the ranks may have updated different units. This
        does not apply to weights that are kept only as a payload."""
        super().forget()
        self.certain = True


def _word_of(group: ParameterGroup) -> int:
    """Return this rank's message about weights that are kept only as a payload: 0, or WRITTEN or NEEDED of
    `PayloadOnly`."""
    resting = group.payload_only
    assert resting is not None
    rewritten = group.main_changed and not group.is_outdated  # if outdated, a failed pass is the cause, not a write
    needed = resting.is_unfrozen or (rewritten and resting.has_passed)
    resting.has_passed = True
    return PayloadOnly.NEEDED if needed else PayloadOnly.WRITTEN * group.main_changed


def agree_on_maxima(groups: Iterable[ParameterGroup]) -> None:
    """For each matrix that is quantized with one scale, all-reduce its largest magnitude over the ranks that have parts
    of the matrix. Collective if any of `groups` has such matrices. Call it after weights have changed, before they are
    quantized."""
    found: list[tuple[torch.Tensor, dist.ProcessGroup]] = []
    with torch.no_grad():
        for group in groups:
            payload = group.payload
            if not isinstance(payload, Narrow) or payload.maxima is None:
                continue
            payload.maxima.copy_(payload.local_maxima(group.main_weight.local))
            payload.maxima_version = group.version
            found += [(payload.maxima, group.groups[axis]) for axis in group.main_weight.axes]
            for each in group.parameters:
                if each.slices is not None and _divides_matrices(each):
                    found.append((payload.maxima_of(each.number), each.slices))
        for ranks in dict.fromkeys(each for _, each in found):
            parts = [part for part, own in found if own is ranks]
            packed = reduce_now(torch.cat(parts), dist.ReduceOp.MAX, ranks, "the maxima of quantized weights")
            for part, whole in zip(parts, packed.split([part.numel() for part in parts])):
                part.copy_(whole)


def _divides_matrices(parameter: ShardedParameter) -> bool:
    """Return True if tensor parallelism splits each matrix of the parameter, False if each slice has whole matrices."""
    dims = len(parameter.extent.shape)
    beyond = parameter.parallel.beyond if parameter.parallel is not None else ()
    return any(isinstance(each, Shard) and each.dim % dims >= dims - 2 for each in beyond)
