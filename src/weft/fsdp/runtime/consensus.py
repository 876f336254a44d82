"""The agreement of the ranks of one model on the groups that they reduce, the parameters with gradients, and the order.

    when                 a rank sends                                    result on all ranks
    -------------------  ----------------------------------------------  -----------------------------------------------
    before the first     its units, and the groups that it trains        a group is reduced if any rank trains it
      pass
    at the end of a      its collectives, parameters with gradients,     a parameter has a gradient if it has one on any
      backward           units that wait for a turn, groups that it      rank; units that waited on a rank are reduced;
                         trains now, failed graph captures               the order of the units, if it was the same

With `check_collectives=False` the ranks exchange nothing. Each rank then assumes that every possible gradient exists.
"""

from collections.abc import Sequence
from operator import attrgetter

from weft.comm.agreement import Agreement
from weft.fsdp.driver import USER
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import SHARDED
from weft.fsdp.runtime.captures import CaptureTable
from weft.fsdp.runtime.helper import GatherHelper
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.runtime.unit_set import UnitSet
from weft.fsdp.unit import Unit

_others, _present, _resharded = map(attrgetter, ("others", "gradient.present", "resharded"))


class Consensus:
    """Exchanges the state of one model with the other ranks. `agreement`: the log of collectives, and the exchange.
    `checked`: the option `check_collectives`.
    """

    def __init__(self, every: UnitSet, reductions: Reductions, agreement: Agreement, *, checked: bool) -> None:
        self._every = every
        self._reductions = reductions
        self._agreement = agreement
        self._checked = checked
        self._names = [unit.name for unit in every.units]
        self.is_alone = all(group.size() == 1 for group in every.process_groups)
        self._reduced: Sequence[bool] = [group.agreed for group in every.groups]

    def ask(self, helper: GatherHelper) -> list[bool] | None:
        """Begin a pass of `helper`. Before the first pass, check that all ranks have the same units, and return, per
        group, whether any rank trains it; otherwise return None."""
        if self.is_alone or not self._checked or not helper.begin_pass():
            return None
        said = []
        for unit in self._every.units:
            sizes = ", ".join(
                f"{group.layout.data_numel}{' frozen and quantized' if group.payload_only else ''}"
                for group in unit.groups
            )
            said.append(f"{unit.name or 'the root'} ({unit.kind}, {sizes} elements)")
        trains = [any(p.requires_grad for p in map(SHARDED, group.parameters)) for group in self._every.groups]
        trains = self._agreement.same_structure(said, self._every.process_groups, trains)
        helper.offer(self._every.units)
        return trains

    def take(self, trains: Sequence[bool] | None) -> None:
        """Reduce the groups that `ask` has returned. Without an exchange, reduce those that train here."""
        if self.is_alone or not self._checked:
            self._reduce([group.trainable for group in self._every.groups])
        elif trains is not None:
            self._reduce(trains)

    def pack_unheard(self) -> list[Unit]:
        """Pack the gradients of groups that this rank has unfrozen and that the ranks do not reduce yet. Return the
        units that have such groups."""
        units = [*filter(_others, self._every.units)]
        late = [unit for unit in units if any(unit.groups[n].trainable for n in unit.others)] if units else units
        for unit in late:
            arrived = [number for number in unit.others if unit.groups[number].gradients.arrived]
            self._reductions.pack(unit.number, arrived)
        return late

    def reach(self, graphs: CaptureTable | None) -> None:
        """Exchange state with the other ranks at the end of a backward, and start the reductions that this rank has not
        started."""
        reductions, units, groups = self._reductions, self._every.units, self._every.groups
        reductions.complete()
        if not self._checked:
            if graphs is not None:
                graphs.agree(graphs.failed)
            for group in (group for group in groups if group.trainable):
                for each in group.parameters:
                    each.gradient.present |= each.sharded.requires_grad
            return
        agreed = self._agreement.reach(
            [*map(_present, self._every.parameters)],
            reductions.arrived,
            reductions.waiting,
            self._names,
            self._every.process_groups,
            trains=[group.trains or self._keeps(unit, group) for unit in units for group in unit.groups],
            resharded=[*map(_resharded, units)],
            uncaptured=graphs.failed if graphs is not None else (),
        )
        if graphs is not None:
            graphs.agree(agreed.uncaptured)
        for each, present in zip(self._every.parameters, agreed.present):
            each.gradient.present = present
        reductions.add(agreed.waiting)
        others = [(unit, unit.others) for unit in reversed(units) if unit.others]
        self._reduce(agreed.trains)
        for unit, numbers in others:
            if not reductions.defers(unit):
                reductions.start(unit.number, [number for number in numbers if unit.groups[number].agreed])
        for unit, resharded in zip(units, agreed.resharded):
            unit.resharded = False
            if resharded and USER in unit.holders:  # the unit did not run on this rank
                unit.release(USER)
        if agreed.same_order and reductions.arrived:
            reductions.agreed = tuple(reductions.arrived)

    def _keeps(self, unit: Unit, group: ParameterGroup) -> bool:
        """Return whether gradients of the group, which is frozen here, may wait for their reduction on some rank."""
        if not group.agreed:
            return group.trainable
        return not (unit.requires_all_reduce and self._reductions.is_last) or self._reductions.defers(unit)

    def _reduce(self, trains: Sequence[bool]) -> None:
        """Set, per group, whether its gradients are reduced."""
        if trains != self._reduced:
            self._reduced = trains
            numbered = iter(trains)
            for unit in self._every.units:
                unit.agree([next(numbered) for _ in unit.groups])
