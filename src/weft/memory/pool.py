"""Memory of transient buffers: gathered weights and partial gradients.

    allocator   first step                        later steps
    ---------   --------------------------------  ------------------------------------------------------------------
    "trace"     own memory, lifetimes recorded    a fixed place in one slab: nothing is allocated
    "caching"   memory from torch's allocator, allocated and freed each time

A step is a forward with its backward, an evaluation, or a schedule.

Autograd saves views of gathered weights. These views must be valid again in the backward, so a buffer has one fixed
place in the slab. A buffer with separate memory keeps one storage, which is resized to 0 and back.

If a step uses buffers in a new way (a pass in another order, a block used twice), a buffer without a free place takes
separate memory. This counts as a fallback and leads to a new plan after the step. A plan covers all steps so far or, if
it would then take more than `PATIENCE` times the peak of live bytes, only the last step.

A buffer that must return to its place may find another buffer there, for example if a user unshards all layers between
a forward and its backward. If no computation uses the other buffer, its values move out into separate memory, and move
back when they are needed at their address:

    take(one)       the place is free, or the buffer in it `is_evictable` and moves out
    come_back(one)  the buffer that is now in its place moves out in turn
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weft.comm import streams
from weft.debug import guard
from weft.layout.slab_plan import SlabPlan, plan_slab
from weft.memory.blank import blank

_UNKNOWN = object()
PATIENCE = 1.5
"""The largest ratio of a plan's bytes to the peak of live bytes, for a plan that covers several steps."""


class Transient:
    """A flat buffer that is alive (has memory) only between `Pool.take` and `Pool.give`. If `take` gives it memory at
    the same address as before, earlier views of `tensor` are valid again.

    - `on_move`: called with the new `tensor` after the buffer has moved to another address.
    - `is_fixed()`: whether views of the buffer are in use, so that `take` must not move it.
    - `is_evictable()`: whether its values may leave the slab for a while, because no computation uses them.
    - `describe()`: returns its name in errors.
    - `filled`: whether it also has memory from the start until `empty` is called. Without memory, torch could not make
      views of the buffer.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        describe: Callable[[], str] = lambda: "a buffer",
        filled: bool = False,
    ) -> None:
        self.own = torch.empty(numel, dtype=dtype, device=device)
        self.tensor = self.own
        self.nbytes = self.own.nbytes
        self.on_move: Callable[[torch.Tensor], None] = lambda tensor: None
        self.is_fixed = self.is_evictable = lambda: False
        self.describe = describe
        self.moves = 0
        self.pool: Callable[[], Pool | None] = lambda: None
        """Returns the pool that gave it memory, or None. A weak reference, because the pool refers to its buffers."""
        self.place: torch.Tensor | None = None
        """If it has moved out of the slab, the place to which its views refer; otherwise None."""
        if not filled:
            self.empty()

    def empty(self) -> None:
        _resize(self.own, 0)

    def live_in(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.on_move(tensor)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` begins in the memory of this buffer."""
        start = self.tensor.data_ptr()
        return start <= tensor.data_ptr() < start + self.nbytes

    def give(self) -> None:
        """Return the memory to its pool, if this buffer has any."""
        if (pool := self.pool()) is not None:
            pool.give(self)


class Pool:
    """Provides and plans the memory of a model's gathered weights, or of its partial gradients.

    - `plan`: the places of the buffers in one slab of memory, or None.
    - `plans`: the number of plans made so far.
    - `lower_bound`: the peak of live bytes in the steps that the plan covers. No smaller slab suffices.
    - `peak`: the peak of live bytes in all steps.
    - `allocations`: the number of allocations; each is a slab or one buffer outside of it.
    - `fallbacks`: how often, while there was a plan, a buffer had no free place in the slab.
    - `outdated`: whether the plan no longer fits the use of the buffers.
    """

    def __init__(self, planned: bool) -> None:
        self.planned = planned
        self._myself = weakref.ref(self)
        self.plan: SlabPlan | None = None
        self.plans = self.lower_bound = self.allocations = self.fallbacks = self.live = self.peak = 0
        self._slab: torch.Tensor | None = None
        self._places: dict[Transient, torch.Tensor] = {}
        self._neighbors: dict[Transient, set[Transient]] = {}
        """Per buffer, the buffers whose planned places overlap with its own; filled on demand."""
        self._alive: dict[Transient, None] = {}
        self._met: dict[Transient, dict[Transient, int]] = {}
        """Per buffer, the buffers that were, or may be, alive together with it, each with the latest such step."""
        self._home: Any = _UNKNOWN
        """The stream that first took memory. The slab belongs to it, even if a backward ends on another stream."""
        self._step = self._changed = self._step_peak = 0
        self.outdated = False

    @property
    def steady(self) -> int:
        """The number of steps since the last plan or fallback."""
        return self._step - self._changed

    @property
    def slab_bytes(self) -> int:
        """The size of the slab in bytes."""
        return self._slab.nbytes if self._slab is not None else 0

    def take(self, transient: Transient) -> torch.Tensor:
        """Give memory to `transient`. The contents are unspecified."""
        if self._home is _UNKNOWN:
            self._home = streams.current(transient.own.device)
        tensor = self._planned_place(transient)
        if tensor is None:
            tensor = self._own_memory(transient)
        if tensor is not transient.tensor:
            transient.moves += 1
            transient.live_in(tensor)
        streams.taken(tensor, transient.describe)
        if self.planned:
            met = self._met.setdefault(transient, {})
            met[transient] = self._step
            met.update(dict.fromkeys(self._alive, self._step))
        self._alive[transient] = None
        transient.pool = self._myself
        self.live += transient.nbytes
        self._step_peak = max(self._step_peak, self.live)
        self.peak = max(self.peak, self.live)
        return tensor

    def give(self, transient: Transient) -> None:
        """Take back the memory of `transient`. Queued computation may still read it, because later writes are
        queued behind the reads."""
        transient.pool = lambda: None
        del self._alive[transient]
        self.live -= transient.nbytes
        if guard.guards:
            blank(transient.tensor)
        elif transient.tensor is transient.own:
            _resize(transient.own, 0)
        if transient.place is not None:
            place, transient.place = transient.place, None
            transient.live_in(place)

    def forget(self, transient: Transient) -> None:
        """Leave `transient`, which is no longer used, out of future plans."""
        if self._met.pop(transient, None) is not None:
            self.outdated, self.lower_bound = True, 0
        for others in self._met.values():
            others.pop(transient, None)

    def has_room(self, transient: Transient) -> bool:
        """Return False if `take` would have to move another buffer out of the place of `transient`, otherwise True."""
        return not transient.is_fixed() or not any(self._rivals(transient))

    def come_back(self, transient: Transient) -> None:
        """Move `transient` back to the place where its views are valid, if it has moved out."""
        if transient.place is None:
            return
        self._clear(transient)
        place, transient.place = transient.place, None
        place.copy_(transient.own)
        transient.live_in(place)
        _resize(transient.own, 0)

    def _own_memory(self, transient: Transient) -> torch.Tensor:
        _resize(transient.own, transient.nbytes)
        self.allocations += 1
        return transient.own

    def _clear(self, transient: Transient) -> None:
        """Move all buffers out of the planned place of `transient`. Raises RuntimeError if one of them is in use."""
        for rival in self._rivals(transient):
            if not rival.is_evictable():
                raise RuntimeError(
                    f"{transient.describe()} and {rival.describe()} share memory in the current plan because they "
                    f"were never in use at the same time; this backward needs both at their forward addresses: pass "
                    "runtime=weft.RuntimeOptions(allocator='caching') to the root"
                )
            place = rival.tensor
            self._own_memory(rival).copy_(place)
            rival.place = place
            rival.live_in(rival.own)

    def end_step(self, foreseen: Iterable[Sequence[Transient]] = (), *, learns: bool = False) -> None:
        """End a step. If the pool is `outdated`, make a new plan, unless views of a buffer are in use (`is_fixed`).
        Does nothing while a buffer is alive. `foreseen`: sets of buffers that may be alive together in later steps.
        `learns`: whether the steps that the first plan covers may have taken more memory than later steps will. If so,
        and if this step took much less than the first plan, make a new plan for this step alone."""
        if not self.planned or self._alive:
            return
        step, self._step = self._step, self._step + 1
        peak, self._step_peak = self._step_peak, 0
        self.lower_bound = max(self.lower_bound, peak)
        shrinks = learns and self.plans == 1 and 0 < PATIENCE * peak < self.slab_bytes
        if not (self.outdated or shrinks) or any(each.is_fixed() for each in self._met):
            return
        for alive in foreseen:
            self._note([each for each in alive if each in self._met], step)
        plan = self._planned()
        if shrinks or plan.nbytes > PATIENCE * self.lower_bound:
            met = {one: {other: at for other, at in others.items() if at == step} for one, others in self._met.items()}
            self._met = {one: others for one, others in met.items() if others}
            self.lower_bound = peak
            plan = self._planned()
        self._adopt(plan)

    def foresee(self, together: Iterable[Sequence[Transient]]) -> None:
        """Give the buffers in each set of `together` separate places. Does nothing while a buffer is alive or fixed."""
        if not self.planned or self._alive or any(each.is_fixed() for each in self._met):
            return
        for alive in together:
            self.lower_bound = max(self.lower_bound, sum(each.nbytes for each in alive))
            self._note(alive, self._step)
            for one in alive:
                if self._home is _UNKNOWN:
                    self._home = streams.current(one.own.device)
                if one not in self._places or any(self._share(one, other) for other in alive if other is not one):
                    self.outdated = True
        if self.outdated:
            self._adopt(self._planned())

    def drop_plan(self) -> None:
        """Let each buffer have its own memory until the end of the step, which makes a new plan. Buffers that are alive
        keep their places. Call this before a step that will hold more buffers at once than all steps before it."""
        if self.plan is not None:
            self._places = {each: self._places[each] for each in self._alive if each in self._places}
            self.outdated, self._changed = True, self._step
            self._neighbors.clear()
            if not self._places:
                self.plan = None
                self._resize_slab(0)  # otherwise it would exist beside the buffers' own memory

    def _note(self, alive: Sequence[Transient], step: int) -> None:
        """Note that these buffers are, or may be, alive together in `step`."""
        for one in alive:
            self._met.setdefault(one, {}).update(dict.fromkeys(alive, step))

    def _planned(self) -> SlabPlan:
        def meet(one: Any, other: Any) -> bool:
            return other in self._met[one] or one in self._met[other]

        return plan_slab({each: each.nbytes for each in self._met}, meet)

    @torch.inference_mode(False)  # an evaluation may make the plan that training uses
    def _adopt(self, plan: SlabPlan) -> None:
        self.plan, self.outdated = plan, False
        self.plans += 1
        self._changed = self._step
        if self._slab is None:
            self._slab = torch.empty(0, dtype=torch.uint8, device=next(iter(self._met)).own.device)
        if self.slab_bytes != plan.nbytes:
            self._resize_slab(plan.nbytes)
            self.allocations += 1
        known, self._places = self._places, {}
        self._neighbors.clear()
        for transient in self._met:
            start = plan.offsets[transient]
            place = self._slab[start : start + transient.nbytes].view(transient.own.dtype)
            old = known.get(transient)
            same = old is not None and old.storage_offset() == place.storage_offset()
            self._places[transient] = old if same else place  # type: ignore[assignment]

    def _resize_slab(self, nbytes: int) -> None:
        assert self._slab is not None
        storage = self._slab.untyped_storage()
        with streams.on(self._home):
            if storage.resizable():
                storage.resize_(0)  # so that the old and the new slab never exist together
            else:  # shared with a NumPy array: other code may still read its places, so it stays
                storage, self._places = torch.UntypedStorage(0, device=self._slab.device), {}
            storage.resize_(nbytes)
        self._slab = self._slab.new_empty(0).set_(storage)  # keeps the storage, allocates nothing else

    def _planned_place(self, transient: Transient) -> torch.Tensor | None:
        """Return the place of `transient` in the slab. None if it has no place, or cannot be there now."""
        place, evicts = self._places.get(transient), False
        if place is None or place is transient.tensor or not transient.is_fixed():  # else views need its old address
            if place is not None and not self._rivals(transient):
                return place
            self.outdated = True
            evicts = place is not None and transient.is_fixed()
        if self.plan is not None:
            self.fallbacks += 1
            self._changed = self._step
        if evicts:
            self._clear(transient)
        return place if evicts else None

    def _rivals(self, transient: Transient) -> list[Transient]:
        if transient not in self._neighbors:
            self._neighbors[transient] = {other for other in self._places if self._share(transient, other)}
        if (neighbors := self._neighbors[transient]).isdisjoint(self._alive):
            return []
        return [other for other in self._alive if other.tensor is not other.own and other in neighbors]

    def _share(self, one: Transient, other: Transient) -> bool:
        if one not in self._places or other not in self._places:
            return False
        assert self.plan is not None
        start, begin = self.plan.offsets[one], self.plan.offsets[other]
        return begin < start + one.nbytes and start < begin + other.nbytes


def _resize(tensor: torch.Tensor, nbytes: int) -> None:
    """Resize the memory of `tensor`. Memory that is shared with a NumPy array cannot be resized, and stays."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(nbytes)
