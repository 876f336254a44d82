"""Model weights that stay beside the main weights, and when they follow them.

    what happened since they were made                       they are made anew, on all ranks
    -------------------------------------------------------  ---------------------------------------------------------
    nothing yet, or the last backward of a step              at the next pass: an optimizer is expected
    main weights were written, on any rank                   at the next pass: version counters tell, the ranks agree
    nothing                                                  no: the passes of a step use what the first has made

An optimizer is not expected of weights that are frozen and rest as payload alone (`weft.fsdp.payload_only`): the ranks
agree in each pass whether one has written to them or has unfrozen them.

Weights that are gathered for each use need none of this: they are gathered from what the main weights are then.
"""

from collections.abc import Sequence

import torch.distributed as dist

from weft.comm.control import agree
from weft.fsdp.channels import Channels
from weft.fsdp.group import ParameterGroup
from weft.fsdp.payload_only import PayloadOnly
from weft.fsdp.runtime.maxima import agree_on_maxima
from weft.fsdp.unit import State, Unit


class Freshness:
    """What is still to be made anew in the pass under way, in one order on all ranks."""

    def __init__(self, channels: Channels, *, checked: bool, channel: int) -> None:
        """`channel`: keeps what the ranks say of one model apart from what they say of another."""
        self._channels = channels
        self._checked = checked
        self._channel = channel
        self._certain = True
        """Whether all ranks know without asking that the weights change."""
        self.ahead: dict[Unit, None] = {}
        """The units that are still to be made anew, in the order of all ranks."""
        self._made: list[Unit] = []

    def begin_pass(self, units: Sequence[Unit], inside: Sequence[Unit], groups: Sequence[dist.ProcessGroup]) -> None:
        """A pass over the units `inside` of `units` begins: ask whether main weights have changed."""
        following = [group for unit in units for group in unit.groups if group.refreshes]
        if not following:
            return
        ordinary = [group for group in following if group.payload_only is None]
        resting = [group for group in following if group.payload_only is not None]
        words = [int(self._certain or any(group.is_stale for group in ordinary)), *map(_word_of, resting)]
        if self._checked and (resting or not self._certain):
            words, _ = agree(words, [], groups, "beginning of a pass", channel=self._channel)
        self._certain = False
        due = ordinary if words[0] else []
        for group, word in zip(resting, words[1:]):
            due = [*due, group] if word else due
            if word == PayloadOnly.NEEDED:
                group.keep_main_weights()
        for group in due:
            group.outdate(agreed=True)
        if due:
            agree_on_maxima(due)  # before the first of them is quantized
        self.ahead.update(dict.fromkeys(inside))

    def expect_change(self) -> None:
        """A step is over: an optimizer follows."""
        self._certain = True

    def is_due(self, unit: Unit) -> bool:
        """Whether the weights of `unit` are still to be made anew: in this pass, or in that of another rank."""
        return unit in self.ahead or any(group.is_outdated for group in unit.groups)

    def reach(self, unit: Unit) -> None:
        """Make the weights of all units before `unit` anew, its own, and those of the next, whose transfer so runs
        beside the computation with its own. A unit of another rank's pass, which this one is without, by itself."""
        if unit in self.ahead:
            while self._next() is not unit:
                pass
        elif self.is_due(unit):
            self._make(unit)
        if self.ahead and self._made and self._made[-1] is unit:
            self._next()

    def finish(self) -> None:
        """The pass is over: make anew what is left, whether its unit ran here or not, and see that all has come."""
        while self.ahead:
            self._next()
        made, self._made = self._made, []
        for unit in made:
            for group in unit.groups:
                group.await_refresh()
                if unit.state is not State.ON_THE_WAY:  # a lane may still quantize
                    group.rest()

    def forget(self) -> None:
        """A pass was abandoned: it is unknown what was made anew where."""
        self.ahead.clear()
        self._made.clear()
        self._certain = True

    def _next(self) -> Unit:
        unit = next(iter(self.ahead))
        del self.ahead[unit]
        self._make(unit)
        return unit

    def _make(self, unit: Unit) -> None:
        for group in unit.groups:
            group.refresh(self._channels)
        self._made.append(unit)


def _word_of(group: ParameterGroup) -> int:
    """What a rank says of weights that rest as payload alone."""
    resting = group.payload_only
    assert resting is not None
    rewritten = group.is_stale and not group.is_outdated  # outdated: by a pass that has failed
    needed = resting.is_unfrozen or (rewritten and resting.has_passed)
    resting.has_passed = True
    return PayloadOnly.NEEDED if needed else PayloadOnly.WRITTEN * group.is_stale
