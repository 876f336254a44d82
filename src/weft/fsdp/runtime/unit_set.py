"""All units of one model, where the same is done to each: when a pass begins, when it ends, after a failure.

A unit whose module was replaced stays: when it is collected is a matter of each rank, and all ranks must send the same
messages.
"""

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_NEXT_PASS, Driver
from weft.fsdp.gradients.group import Where
from weft.fsdp.unit import Unit


class UnitSet:
    """`units`: root first, and by number; `drivers`: what runs around their modules."""

    def __init__(self, units: Sequence[Unit], drivers: Sequence[Driver]) -> None:
        self.units = tuple(units)
        self.groups = [group for unit in units for group in unit.groups]
        self.parameters = [each for group in self.groups for each in group.parameters]
        self.process_groups: list[dist.ProcessGroup] = list(
            dict.fromkeys(each for group in self.groups for each in group.groups)
        )
        """Of the mesh axes of all units, which together reach every rank."""
        self._drivers = [weakref.ref(driver) for driver in drivers]
        self._offloaded = [group for group in self.groups if group.offload is not None]

    def begin_pass(self) -> None:
        """What an earlier pass left behind goes."""
        for unit in self.units:  # of all units first: a holder of one holds those that it is tied to
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD, RETURNED, *((UNTIL_NEXT_PASS,) if unit.reshard_after_backward else ()))
        for unit in self.units:
            unit.begin_pass()

    def renew(self) -> None:
        """What is held through the pass that begins is made of the main weights that there are now."""
        for unit in self.units:
            if unit.holders and unit.is_stale:
                unit.renew()
            elif unit.holders:
                unit.sync_versions()

    def end_backward(self, deferring: Sequence[bool]) -> None:
        """No backward needs what was kept for it. `deferring`: whose gradients wait for another one."""
        for unit, defers in zip(self.units, deferring):
            for group in unit.groups:
                group.gradients.is_owed = group.agreed and defers
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD)
            unit.forget()

    def come_to_rest(self, stays: Callable[[Unit], bool] | None, *, complete: bool) -> None:
        """The memory of all units goes but for those of which `stays` says so. `complete`: no call is under way. Raises
        RuntimeError if a computation still holds weights then."""
        if self._offloaded:
            self.finish_uploads()
        for unit in self.units if complete else ():
            if unit.holders and unit.computes:
                leaked = ", ".join(holder.name for holder in unit.holders if holder.computes)
                raise RuntimeError(f"{unit}: its weights are still held by {leaked} when the pass is over")
        for unit in self.units:
            if unit.resident and (stays is None or not stays(unit)):
                unit.free()

    def finish_uploads(self) -> None:
        """Make the host wait until no upload reads weights in CPU memory any more: the caller may write them next."""
        for group in self._offloaded:
            group.finish_upload()

    def publish(self) -> None:
        """Hand out the gradients that have come."""
        try:
            for group in self.groups:
                if group.gradients.where is Where.REDUCED:
                    group.gradients.publish()
        except BaseException:  # of a user's hook
            self.drop_gradients()
            raise

    def drop_gradients(self) -> None:
        """The user gets none: a backward failed."""
        for group in self.groups:
            group.gradients.drop()

    def abandon_forwards(self) -> None:
        """Units that wait for more of their modules wait no longer."""
        for ref in self._drivers:
            if (driver := ref()) is not None:
                driver.abandon()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Nothing of a failed pass stays but the user's holds, and the gradients of earlier backwards where it
        `keeps_gradients`."""
        self.abandon_forwards()
        if not keeps_gradients:
            for group in self.groups:
                group.gradients.discard()
        for unit in self.units:
            unit.reset()
