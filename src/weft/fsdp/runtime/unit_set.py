"""Operations on all units of a model: when a pass begins, when it ends, after a failure.

A unit whose module was replaced remains in the set, because ranks may collect the module at different times, and all
ranks must send the same messages.
"""

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_NEXT_PASS, Driver
from weft.fsdp.gradients.group import Where
from weft.fsdp.unit import Unit


class UnitSet:
    """All units of a model.

    `units`: in order of their numbers, the root first. `drivers`: the drivers around their modules.
    """

    def __init__(self, units: Sequence[Unit], drivers: Sequence[Driver]) -> None:
        self.units = tuple(units)
        self.groups = [group for unit in units for group in unit.groups]
        self.parameters = [each for group in self.groups for each in group.parameters]
        self.process_groups: list[dist.ProcessGroup] = list(
            dict.fromkeys(each for group in self.groups for each in group.groups)
        )
        """The process groups of the mesh axes of all units, which together connect all ranks of the model."""
        self._drivers = [weakref.ref(driver) for driver in drivers]
        self._offloaded = [group for group in self.groups if group.offload is not None]

    def begin_pass(self) -> None:
        """End the holds of an earlier pass on all units."""
        for unit in self.units:  # holds of all units first: a holder of a unit also holds units tied to it
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD, RETURNED, *((UNTIL_NEXT_PASS,) if unit.reshard_after_backward else ()))
        for unit in self.units:
            unit.begin_pass()

    def renew(self) -> None:
        """Gather again, at the beginning of a pass, those held weights that are older than the main weights."""
        for unit in self.units:
            if unit.holders and unit.is_stale:
                unit.renew()
            elif unit.holders:
                unit.sync_versions()

    def end_backward(self, deferring: Sequence[bool]) -> None:
        """End the holds for backward. `deferring`: for each unit, whether its gradients wait for another backward."""
        for unit, defers in zip(self.units, deferring):
            for group in unit.groups:
                group.gradients.is_owed = group.agreed and defers
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD)
            unit.forget()

    def come_to_rest(self, stays: Callable[[Unit], bool] | None, *, complete: bool) -> None:
        """Free the weights of all units, except those for which `stays` returns True.

        `complete`: whether no call is running; then raises RuntimeError if a computation still holds weights.
        """
        if self._offloaded:
            self.finish_uploads()
        for unit in self.units if complete else ():
            if unit.holders and unit.computes:
                leaked = ", ".join(holder.name for holder in unit.holders if holder.computes)
                raise RuntimeError(f"{unit}: its weights are still held by {leaked} at the end of the pass")
        for unit in self.units:
            if unit.resident and (stays is None or not stays(unit)):
                unit.free()

    def finish_uploads(self) -> None:
        """Wait on the host for uploads that read weights in CPU memory, because the caller may write them next."""
        for group in self._offloaded:
            group.finish_upload()

    def publish(self) -> None:
        """Publish the reduced gradients as `.grad`."""
        try:
            for group in self.groups:
                if group.gradients.where is Where.REDUCED:
                    group.gradients.publish()
        except BaseException:  # raised by a user's hook
            self.drop_gradients()
            raise

    def drop_gradients(self) -> None:
        """Clear all gradients after a failed backward."""
        for group in self.groups:
            group.gradients.drop()

    def abandon_forwards(self) -> None:
        """Abandon forwards of units with several modules, of which only some have run."""
        for ref in self._drivers:
            if (driver := ref()) is not None:
                driver.abandon()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Clean up after a failed pass; the user's holds stay.

        `keeps_gradients`: whether gradients of earlier backwards that wait for their reduction stay, too.
        """
        self.abandon_forwards()
        if not keeps_gradients:
            for group in self.groups:
                group.gradients.discard()
        for unit in self.units:
            unit.reset()
