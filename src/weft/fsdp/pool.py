"""Memory that lives for a moment: gathered weights, partial gradients.

    allocator   first step                        later steps
    ---------   --------------------------------  ------------------------------------------------------------------
    "trace"     own memory, lifetimes recorded    a fixed place in one slab: nothing is allocated
    "caching"   own memory from torch's allocator, taken and given back each time

Autograd saves views of gathered weights, so a buffer's address must not change between a forward and its backward. In
the slab it never does; a buffer with its own memory keeps one storage for life, which is emptied and refilled. What no
step has shown before (a pass in another order, a block used twice) takes its own memory for that time, is counted as a
fallback, and leads to a new plan when the step is over.
"""

from collections.abc import Callable

import torch

from weft.fsdp.slab_plan import SlabPlan, plan_slab


class Transient:
    """A flat buffer with memory only between `Pool.take` and `Pool.give`.

    Views of `tensor` stay valid from one take to the next unless the take moved it: then `on_move` gets the new tensor.
    `is_fixed`: whether such views are in use, so that it must not move. `evict`: give the buffer back if it is only
    held in advance, and say whether that was so.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_move: Callable[[torch.Tensor], None] = lambda tensor: None,
        is_fixed: Callable[[], bool] = lambda: False,
        evict: Callable[[], bool] = lambda: False,
    ) -> None:
        self.own = torch.empty(numel, dtype=dtype, device=device)
        self.tensor = self.own
        self.nbytes = self.own.nbytes
        self.on_move = on_move
        self.is_fixed = is_fixed
        self.evict = evict
        self.moves = 0

    def settle(self) -> None:
        """The first views are made, for which torch wants memory; give it back until the first take."""
        self.own.untyped_storage().resize_(0)

    def move(self, tensor: torch.Tensor) -> None:
        """Live in `tensor` from now on."""
        self.tensor = tensor
        self.moves += 1
        self.on_move(tensor)


class Pool:
    """Gives the transients of one role their memory, plans it, and counts."""

    def __init__(self, planned: bool) -> None:
        self.planned = planned
        self.plan: SlabPlan | None = None
        self.allocations = 0
        self.fallbacks = 0
        self.live = 0
        self.peak = 0
        self._slab: torch.Tensor | None = None
        self._alive: list[Transient] = []
        self._met: dict[Transient, set[Transient]] = {}
        self._stale = False

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.nbytes if self._slab is not None else 0

    def take(self, transient: Transient) -> torch.Tensor:
        """Give `transient` memory, with unspecified contents."""
        tensor = self._planned_place(transient)
        if tensor is None:
            transient.own.untyped_storage().resize_(transient.nbytes)
            self.allocations += 1
            tensor = transient.own
        if tensor.data_ptr() != transient.tensor.data_ptr() or tensor.numel() != transient.tensor.numel():
            transient.move(tensor)
        if self.planned:
            self._meet(transient)
        self._alive.append(transient)
        self.live += transient.nbytes
        self.peak = max(self.peak, self.live)
        return transient.tensor

    def give(self, transient: Transient) -> None:
        """Take the memory back; what was computed from it is ordered before what will be written there."""
        self._alive.remove(transient)
        self.live -= transient.nbytes
        if transient.tensor is transient.own:
            transient.own.untyped_storage().resize_(0)

    def end_step(self, never_share: Callable[[Transient, Transient], bool] = lambda one, other: False) -> None:
        """Everything is at rest: plan anew if something happened that the plan did not know.

        `never_share`: whether two buffers may be alive together although that was not seen yet.
        """
        if not (self.planned and self._stale) or self._alive or any(each.is_fixed() for each in self._met):
            return
        self._stale = False
        self.plan = plan_slab(
            {each: each.nbytes for each in self._met},
            lambda one, other: other in self._met[one] or never_share(one, other),  # type: ignore[index,arg-type]
        )
        if self._met and self.slab_bytes < self.plan.nbytes:
            device = next(iter(self._met)).own.device
            self._slab = torch.empty(self.plan.nbytes, dtype=torch.uint8, device=device)
            self.allocations += 1

    def _planned_place(self, transient: Transient) -> torch.Tensor | None:
        """The place of `transient` in the slab, if it has one that nobody else is in."""
        if self.plan is None or self._slab is None or transient not in self.plan.offsets:
            self._stale = True
            return None
        start = self.plan.offsets[transient]
        place = self._slab[start : start + transient.nbytes].view(transient.own.dtype)
        moves = place.data_ptr() != transient.tensor.data_ptr()
        if moves and transient.is_fixed():
            return None
        for other in [each for each in self._alive if _overlap(each.tensor, place)]:
            # Freeing what was gathered ahead costs a second gather, which other ranks may not do: the last resort.
            if transient.is_fixed() and other.evict():
                continue
            self._stale = True
            self.fallbacks += 1
            if transient.is_fixed():
                raise RuntimeError(
                    "two units that never were gathered together before are in use at once, and backward needs both "
                    "where they were in forward: pass runtime=weft.RuntimeOptions(allocator='caching') to the root"
                )
            return None
        return place

    def _meet(self, transient: Transient) -> None:
        met = self._met.get(transient)
        if met is None:
            met = self._met[transient] = set()
        for other in self._alive:
            if other not in met:
                met.add(other)
                self._met[other].add(transient)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, start = one.data_ptr(), other.data_ptr()
    return begin < start + other.nbytes and start < begin + one.nbytes
