"""The objects that the units of a model share, and operations on all units.

- `gathers`, `reductions`: decide the order of gathers and reductions, for the drivers.
- `channels`: the lanes and pools. `planner`: plans memory.
- `_consensus`: ranks agree on their actions.
- `_helper`, `_steps`: ranks join gathers that only other ranks need.
- `_freshness`: ranks update model weights after the main weights have changed.

A unit whose module was replaced stays among `units`, because ranks may free the module at different times, but all
ranks must send the same messages.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from weft.comm.agreement import Agreement
from weft.fsdp.channels import Channels
from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_RESHARD
from weft.fsdp.gradients.group import Where
from weft.fsdp.runtime.buckets import bundle_bytes, fill_buckets
from weft.fsdp.runtime.consensus import Consensus
from weft.fsdp.runtime.freshness import Freshness, agree_on_maxima
from weft.fsdp.runtime.helper import GatherHelper, Steps
from weft.fsdp.runtime.options import CaptureTable, RuntimeOptions
from weft.fsdp.runtime.passes import BackwardCalls, Pass, Passes
from weft.fsdp.runtime.planner import Planner
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.unit import Unit
from weft.layout.gathers import GatherOrder
from weft.weak import alive, weakly


class Shared:
    """The units under one root, ordered by number with the root first, and the objects that they share."""

    def __init__(self, units: Sequence[Unit], drivers: Sequence[Any], options: RuntimeOptions) -> None:
        for number, unit in enumerate(units):
            unit.number = number
        self.device = device = units[0].device
        self.options = options
        self.graphs: CaptureTable | None = None
        self.units = tuple(units)
        self.groups = groups = [group for unit in units for group in unit.groups]
        self.process_groups = [*dict.fromkeys(each for group in groups for each in group.groups)]
        """The process groups of the mesh axes of all units, which together connect all ranks of the model."""
        self._drivers = [weakref.ref(driver) for driver in drivers]
        self._offloaded = [group for group in groups if group.offload is not None]
        self.channels = Channels(device, planned=options.allocator == "trace")
        self.channels.separate_gathers(self.process_groups, options.separate_all_gather_group)
        budget = options.prefetch_bytes
        together = bundle_bytes(units) if options.bucket_bytes is None else options.bucket_bytes
        buckets = fill_buckets(units, self.channels, together if budget is None else min(budget, together))
        channel = min((group.channel for group in groups), default=0)
        self.passes = Passes(str(units[0]))
        self.gathers = GatherOrder(self.units, buckets, budget)
        self.use, self.keep, self.done = self.gathers.use, self.gathers.keep, self.gathers.done
        self._agreement = Agreement(options.check_collectives, channel)
        self.reductions = Reductions(
            self.units,
            self.channels,
            self._agreement,
            self.gathers,
            most_alive=options.max_live_reduce_buffers,
            bucket_bytes=together,
        )
        self.offer = self.reductions.offer
        self._calls = BackwardCalls()
        self._consensus = Consensus(self.units, self.process_groups, self.reductions)
        self._freshness = Freshness(self.channels, self._agreement)
        self._steps = Steps(groups, channel)
        self._helper = GatherHelper(self.channels, self._freshness, list(dict.fromkeys(buckets.values())), self._steps)
        self.planner = Planner(self.units, self.channels, self.gathers, self.reductions)
        addressed = options.check_collectives and all(unit.is_addressed for unit in units)
        if not addressed or any(group.refreshes for group in groups):
            self.channels.on_gather = weakly(self._before_gather)
        self.channels.on_renew = weakly(self._before_renewal)
        self.channels.gradient_to_write = weakly(self.reductions.gradient_to_write)
        for unit in units:
            unit.channels = self.channels

    def change(self, **options: Any) -> None:
        """Replace the given fields of the `RuntimeOptions`. Collective if `separate_all_gather_group` is turned on."""
        self.options = dataclasses.replace(self.options, **options)
        self.channels.separate_gathers(self.process_groups, self.options.separate_all_gather_group)
        self._helper.offer(self.units)
        self.reductions.most_alive = self.options.max_live_reduce_buffers

    # --- more calls of a driver (`weft.fsdp.driver.Engine`) -----------------------------------------------------------

    def ready(self, unit: Unit) -> None:
        """Pack the gradients of `unit`, and start their reduction if they are due and it is the unit's turn."""
        if self._calls.makes_graph and unit.awaits_reduction:
            raise RuntimeError(
                f"backward(create_graph=True) through {unit}: gradients of parameters are reduced over the ranks and "
                "cannot be differentiated; call torch.autograd.grad with respect to inputs"
            )
        self.reductions.reduce(unit)

    def expect_more(self, more: bool) -> None:
        """Set whether further microbatches of a schedule will add to the gradients."""
        self.reductions.more_to_come = more

    def _before_gather(self, unit: Unit) -> None:
        if self._freshness.ahead:
            self._freshness.update_to(unit)
        if not (self.options.check_collectives and unit.is_addressed) and self.passes.current is not Pass.EVALUATION:
            for group in unit.groups:
                if group.plan.moves:
                    self._agreement.note(unit.number, "all-gather", group.full.local.nbytes)

    def _before_renewal(self, unit: Unit) -> None:
        """Agree on the maxima of weights that were written. Log the gather, because ranks may differ: a rank starts it
        only if that rank has written to the weights."""
        written = [group for group in unit.groups if group.payload.made_from(group.version) != group.version]
        agree_on_maxima(written)  # the others are not quantized again
        if self.passes.current is not Pass.EVALUATION:
            self._agreement.note(unit.number, "renewed all-gather", unit.gathered_bytes)

    @property
    def steady_passes(self) -> int:
        """The number of backwards, evaluations and schedules since the memory plan of weights changed, or since
        weights found no place in it. 0 if the current pass has deviated from its trace."""
        return self.channels.weights.steady if self.gathers.current.on_plan else 0

    # --- all units --------------------------------------------------------------------------------------------------

    def _begin_units(self) -> None:
        """End the holds of earlier passes, but `UNTIL_RESHARD` only if the unit now reshards after backward. Free
        weights without holders, and apply changes of `requires_grad`."""
        for unit in self.units:  # first end all holds: a holder of a unit also holds units tied to it
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD, RETURNED, *((UNTIL_RESHARD,) if unit.reshard_after_backward else ()))
        for unit in self.units:
            unit.begin_pass()

    def _renew_units(self) -> None:
        """At the beginning of a pass, gather held weights again if they are older than the main weights."""
        for unit in self.units:
            if unit.holders and unit.is_stale:
                unit.renew()
            elif unit.holders:
                unit.sync_versions()

    def _end_units(self) -> None:
        """At the end of a backward, note which gradients wait for another backward. End the holds and drop the
        post-forward shards that were kept for this backward."""
        for unit in self.units:
            defers = self.reductions.defers(unit)
            for group in unit.groups:
                group.gradients.is_owed = group.is_reduced and defers
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD)
            unit.forget()

    def _come_to_rest(self, stays: Callable[[Unit], bool] | None, *, complete: bool) -> None:
        """Free the weights of all units that have no holder, except those for which `stays` is true. `complete`: no
        call is running, so raise RuntimeError if a computation still holds weights."""
        self._finish_uploads()
        for unit in self.units if complete else ():
            if unit.holders and unit.computes:
                leaked = ", ".join(holder.name for holder in unit.holders if holder.computes)
                raise RuntimeError(f"{unit}: its weights are still held by {leaked} at the end of the pass")
        for unit in self.units:
            if unit.resident and not unit.holders and (stays is None or not stays(unit)):
                unit.free()

    def _finish_uploads(self) -> None:
        """Make the host wait for uploads that read weights in CPU memory, because the caller may write to them next."""
        for group in self._offloaded:
            group.finish_upload()

    def _publish(self) -> None:
        try:
            for group in self.groups:
                if group.gradients.where is Where.REDUCED:
                    group.gradients.publish()
        except BaseException:  # raised by a user's hook
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        for group in self.groups:
            group.gradients.drop()

    def _abandon_forwards(self) -> None:
        """Abandon unfinished forwards: those of units with several modules, of which only some have run."""
        for driver in alive(self._drivers):
            driver.abandon()

    def _reset_units(self, *, keeps_gradients: bool) -> None:
        """Clean up after a failed pass. The user's holds stay. With `keeps_gradients`, unreduced gradients stay too."""
        self._abandon_forwards()
        if not keeps_gradients:
            for group in self.groups:
                group.gradients.discard()
        for unit in self.units:
            unit.reset()
