"""What the ranks of one model agree on: which groups they reduce, which parameters have gradients, in which order.

    when                 a rank says                                     then holds on all
    -------------------  ----------------------------------------------  -----------------------------------------------
    before the first     which units it has, and which groups it trains  a group is reduced if any rank trains it
      pass
    at the end of a      what it issued, what got gradients, who waits   a parameter has a gradient if it has one
      backward           for a turn, what it trains now, which graphs    anywhere; who waited anywhere is reduced; the
                         failed                                          order of the units, if all had the same

Where ranks do not tell each other (`check_collectives=False`), each takes what is safe: what there may be, there is.
"""

from collections.abc import Sequence

from weft.comm.watch.agreement import Agreement
from weft.fsdp.driver import USER
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime.captures import CaptureTable
from weft.fsdp.runtime.helper import GatherHelper
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.runtime.unit_set import UnitSet
from weft.fsdp.unit import Unit


class Consensus:
    """`agreement`: what was issued, and the words of the ranks. `checked`: whether they tell each other."""

    def __init__(self, every: UnitSet, reductions: Reductions, agreement: Agreement, *, checked: bool) -> None:
        self._every = every
        self._reductions = reductions
        self._agreement = agreement
        self._checked = checked
        self.is_alone = all(group.size() == 1 for group in every.process_groups)
        self._reduced: Sequence[bool] = [group.agreed for group in every.groups]

    def ask(self, helper: GatherHelper) -> list[bool] | None:
        """A pass begins, in which `helper` watches: before the first one, which groups any rank trains."""
        if self.is_alone or not self._checked:
            return None
        return helper.begin_pass(self._every.units, self._agreement, self._every.process_groups)

    def take(self, trains: Sequence[bool] | None) -> None:
        """What `ask` has said holds from here on; without a word, what the user has frozen here."""
        if self.is_alone or not self._checked:
            self._reduce([group.trainable for group in self._every.groups])
        elif trains is not None:
            self._reduce(trains)

    def pack_unheard(self) -> list[Unit]:
        """Pack what arrived for groups that only some ranks have unfrozen: the others have yet to hear of them. Returns
        the units that have such groups."""
        late = [
            unit for unit in self._every.units if unit.others and any(unit.groups[n].trainable for n in unit.others)
        ]
        for unit in late:
            arrived = [number for number in unit.others if unit.groups[number].gradients.arrived]
            self._reductions.pack(unit.number, arrived)
        return late

    def reach(self, graphs: CaptureTable | None) -> None:
        """A backward is over here: start the reductions that are missing here, and hear from the other ranks what is
        missing elsewhere."""
        reductions, units, groups = self._reductions, self._every.units, self._every.groups
        reductions.complete()
        if not self._checked:
            if graphs is not None:
                graphs.agree(graphs.failed)
            for group in (group for group in groups if group.trainable):
                own = group.gradients.present
                group.gradients.present = [p.requires_grad or here for p, here in zip(group.sharded_parameters, own)]
            return
        agreed = self._agreement.reach(
            [flag for group in groups for flag in group.gradients.present],
            reductions.arrived,
            reductions.waiting,
            [unit.name for unit in units],
            self._every.process_groups,
            trains=[group.trains or self._keeps(unit, group) for unit in units for group in unit.groups],
            resharded=[unit.resharded for unit in units],
            uncaptured=graphs.failed if graphs is not None else (),
        )
        if graphs is not None:
            graphs.agree(agreed.uncaptured)
        present = agreed.present
        for group in groups:
            group.gradients.present, present = present[: len(group.slots)], present[len(group.slots) :]
        reductions.add(agreed.waiting)
        others = [(unit, unit.others) for unit in reversed(units) if unit.others]
        self._reduce(agreed.trains)
        for unit, numbers in others:
            if not reductions.defers(unit):
                reductions.start(unit.number, [number for number in numbers if unit.groups[number].agreed])
        for unit, resharded in zip(units, agreed.resharded):
            unit.resharded = False
            if resharded and USER in unit.holders:  # the unit did not run here
                unit.release(USER)
        if agreed.same_order and reductions.arrived:
            reductions.agreed = tuple(reductions.arrived)

    def _keeps(self, unit: Unit, group: ParameterGroup) -> bool:
        """Whether gradients of the group, which is frozen here, wait for their reduction somewhere."""
        if not group.agreed:
            return group.trainable
        return not (unit.requires_all_reduce and self._reductions.is_last) or self._reductions.defers(unit)

    def _reduce(self, trains: Sequence[bool]) -> None:
        """From now on reduce the gradients of these groups."""
        if trains != self._reduced:
            self._reduced = trains
            numbered = iter(trains)
            for unit in self._every.units:
                unit.agree([next(numbered) for _ in unit.groups])
