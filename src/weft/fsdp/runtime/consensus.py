"""The ranks of one model agree on the groups to reduce, the parameters with gradients, and the order of the units.

    before the first pass, a rank sends                 result on all ranks
    --------------------------------------------------  --------------------------------------------------------------
    a checksum of its units                             if they differ: CollectiveMismatch
    the groups that it trains                           a group is reduced if any rank trains it

    at the end of a backward that reduces               result on all ranks
    --------------------------------------------------  --------------------------------------------------------------
    a checksum of its collectives                       if they differ: CollectiveMismatch
    a checksum of the order in which units were ready   if it is the same: later backwards reduce in this order
    the parameters with gradients                       a parameter has a gradient if it has one on any rank
    the units that wait for their turn to reduce        they are reduced
    the groups that it trains now                       a group is reduced if any rank trains it
    the parts whose graph capture has failed            they are not captured
    the units that a pass has resharded                 they are resharded

With `check_collectives=False` the ranks skip these exchanges. Each rank then assumes that every parameter that requires
gradients has one.
"""

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter

import torch.distributed as dist

from weft.comm.watch.hang_detector import HangDetector
from weft.fsdp.driver import USER
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import SHARDED
from weft.fsdp.runtime.helper import GatherHelper
from weft.fsdp.runtime.options import CaptureTable
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.unit import Unit
from weft.words import counted

_others, _present, _resharded = map(attrgetter, ("others", "gradient.present", "resharded"))


class Consensus:
    """Exchanges the state of one model with the other ranks."""

    def __init__(
        self, units: Sequence[Unit], process_groups: Sequence[dist.ProcessGroup], reductions: Reductions
    ) -> None:
        self._units = units
        self._groups = [group for unit in units for group in unit.groups]
        self._parameters = [each for group in self._groups for each in group.parameters]
        self._process_groups = process_groups
        self._reductions = reductions
        self._agreement = reductions.agreement
        self._names = [unit.name for unit in units]
        self.is_alone = all(group.size() == 1 for group in process_groups)
        self._compared_under: HangDetector | None = None
        """The hang detector under which the ranks have compared their units; None before."""

    def ask(self, helper: GatherHelper, graphs: CaptureTable | None) -> None:
        """Let `helper` begin a pass. In the first pass, check that all ranks have the same units; from then on, reduce
        the groups that any rank trains. If the check fails, the next pass checks again."""
        if self.is_alone or not self._agreement.checks or (watch := helper.begin_pass()) is self._compared_under:
            return
        said, most = [], max((group.ranks for group in self._groups), default=1)
        for unit in self._units:
            frozen = [" frozen and quantized" if group.payload_only else "" for group in unit.groups]
            sizes = [
                f"{counted(group.layout.data_numel, 'element')} of {counted(len(group.parameters), 'parameter')}{what}"
                for group, what in zip(unit.groups, frozen)
            ]
            name = unit.name or "the root"
            said.append(f"{name} ({', '.join([unit.kind, *sizes])})")
            # Ranks that share only some meshes, as those of different experts, may have other parameters there.
            groups = [group for group in unit.groups if group.ranks == most]
            said += [f"{each.name} {list(each.sharded.shape)} of {name}" for g in groups for each in g.parameters]
        if graphs is not None:
            said.append(f"{len(graphs.failed)} parts of the model that are captured")
        trains = [any(p.requires_grad for p in map(SHARDED, group.parameters)) for group in self._groups]
        trains = self._agreement.same_structure(said, self._process_groups, trains)
        helper.offer(self._units)
        self._reduce(trains)
        self._compared_under = watch

    def take(self) -> None:
        """If the ranks exchange nothing, choose the groups to reduce: those that this rank trains."""
        if self.is_alone or not self._agreement.checks:
            self._reduce([group.trainable for group in self._groups])

    def pack_unheard(self) -> list[Unit]:
        """Pack the gradients of groups that this rank has unfrozen and that the ranks have not agreed to reduce yet.
        Return the units of these groups."""
        late = []
        for unit in filter(_others, self._units):
            if any(group.trainable for group in unit.others):
                self._reductions.pack(unit.number, [group for group in unit.others if group.gradients.arrived])
                late.append(unit)
        return late

    def exchange(self, graphs: CaptureTable | None) -> None:
        """At the end of a backward, exchange state with the other ranks. Then start the reductions that are due on any
        rank and have not started on this one."""
        reductions, units, groups = self._reductions, self._units, self._groups
        reductions.complete()
        if not self._agreement.checks:
            if graphs is not None:
                graphs.agree(graphs.failed)
            for group in (group for group in groups if group.trainable):
                for each in group.parameters:
                    each.gradient.present |= each.sharded.requires_grad
            return
        flags = [
            [*map(_present, self._parameters)],
            [group.trains or self._keeps(unit, group) for unit in units for group in unit.groups],
            [*map(_resharded, units)],
            graphs.failed if graphs is not None else (),
            [unit.number in reductions.waiting for unit in units],
        ]
        (presents, trains, reshards, uncaptured, waits), same_order = self._agreement.compare(
            flags, reductions.ready_order, self._names, self._process_groups
        )
        if graphs is not None:
            graphs.agree(uncaptured)
        for each, present in zip(self._parameters, presents):
            each.gradient.present = present
        reductions.add(compress(range(len(units)), waits))
        others = [(unit, unit.others) for unit in reversed(units) if unit.others]
        self._reduce(trains)
        for unit, late in others:
            if not reductions.defers(unit):
                reductions.start(unit.number, [group for group in late if group.is_reduced])
        for unit, resharded in zip(units, reshards):
            unit.resharded = False
            if resharded and USER in unit.holders:  # a pass resharded it on another rank, and not here
                unit.release(USER)
        if same_order:
            reductions.learn()

    def _keeps(self, unit: Unit, group: ParameterGroup) -> bool:
        """Return whether some rank may have unreduced gradients of `group`, which is frozen on this rank."""
        if not group.is_reduced:
            return group.trainable
        return not self._reductions.finishes(unit)

    def _reduce(self, trains: Sequence[bool]) -> None:
        """Set, per group, whether its gradients are reduced."""
        if trains != [group.is_reduced for group in self._groups]:
            numbered = iter(trains)
            for unit in self._units:
                unit.choose_reduced([next(numbered) for _ in unit.groups])
