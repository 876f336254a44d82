"""One stage of a gradient reduction: a buffer of packed gradients, and its reduction over one mesh axis.

    1-D    packed    --shard axis-->    main gradients
    2-D    packed    --shard axis-->    summed    --outer axis-->    main gradients

A stage that waits, for more microbatches or for its turn, accumulates in the main gradients' dtype. Messages have the
reduce dtype. If the reduce dtype has less range than the buffer's dtype, gradients are scaled before the cast, because
the average may be representable even if the terms are not. (Even bfloat16 has slightly less range than float32.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from weft.comm import collectives
from weft.comm.groups import group_of
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import has_less_range
from weft.layout.plan import StageFacts
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


class GradientStage:
    """A buffer of gradients to reduce over the mesh axis `axis`: Partial on this axis and all axes before it."""

    def __init__(self, plan: GroupPlan, axis: int) -> None:
        optimizer = plan.placements.optimizer
        self._placements = placements = (*(Partial(),) * (axis + 1), *optimizer[axis + 1 :])
        self._scatters = optimizer[axis].is_shard()
        self._reduction = collectives.reduce_scatter if self._scatters else collectives.all_reduce
        self._group = group_of(plan.mesh, axis)
        self._plan = plan
        self._numel = plan.numel(placements)
        self._memory: dict[torch.dtype, Transient] = {}
        inbox = collectives.inbox_numel(self._reduction, self._numel, self._group, plan.device)
        self._inbox = plan.transient(inbox, plan.recipe.reduce, "the gradients that other ranks send")
        self._hooked: torch.Tensor | None = None
        """The tensor that a hook on the reduction modifies: kept, because the lane still uses it after the call."""
        self.buffer: FlatBuffer | None = None
        self._latest: FlatBuffer | None = None
        """The buffer that was open last: kept, because the pool returns the same memory in each step."""
        self.views: list[torch.Tensor] = []  # the open buffer's view of each tensor
        self.padding: list[torch.Tensor] = []  # views of the open buffer's padding; none if it is cut into shards

    def open(self, pool: Pool, *, accumulating: bool) -> FlatBuffer:
        """Take memory for the buffer, in the main gradients' dtype if `accumulating`, otherwise in the reduce dtype."""
        dtype = self._plan.recipe.main_grad if accumulating else self._plan.recipe.reduce
        if dtype not in self._memory:
            self._memory[dtype] = self._plan.transient(self._numel, dtype, "the gradients")
        memory = pool.take(self._memory[dtype])
        if self._latest is None or self._latest.local is not memory:
            self._latest = FlatBuffer(self._plan.layout, self._plan.mesh, self._placements, memory)
            gaps = self._plan.layout.gaps if self._latest.pieces == 1 else ()  # a cut buffer has other gaps
            self.views, self.padding = self._latest.views(), [memory[start:stop] for start, stop in gaps]
        self.buffer = self._latest
        return self.buffer

    def facts(self) -> StageFacts:
        recipe = self._plan.recipe
        return StageFacts(
            accumulating=self._numel * recipe.main_grad.itemsize,
            traveling=self._numel * recipe.reduce.itemsize,
            inbox=self._inbox.nbytes,
            shared=recipe.main_grad == recipe.reduce,
        )

    def reduce_into(
        self,
        output: FlatBuffer,
        lane: Lane,
        pool: Pool,
        *,
        scale: float,
        sum_only: bool,
        hook: Callable[[torch.Tensor], None] | None,
        **options: Any,
    ) -> Ticket:
        """Start to reduce the buffer over the ranks of the stage's axis. Write the sum times `scale` to `output`; with
        `accumulate=True`, add it. Wait for the returned ticket, then call `close`.

        - `sum_only`: the backend must not average.
        - `hook`: called with the reduced tensor, in the reduce dtype, before it is written or added; may modify it.
        - `options`: `accumulate`, `channel` and `after`, for the collective and the lane.
        """
        assert self.buffer is not None, "open first"
        prepare, wide = None, self.buffer.local
        if wide.dtype != self._plan.recipe.reduce:
            narrow = self.open(pool, accumulating=False).local
            first = scale if has_less_range(narrow.dtype, wide.dtype) else 1.0
            scale = 1.0 if first != 1.0 else scale

            def prepare() -> None:
                narrow.copy_(wide.mul_(first) if first != 1.0 else wide)

        options |= {"scale": scale, "prepare": prepare}
        options["inbox"] = pool.take(self._inbox) if self._inbox.nbytes else self._inbox.own
        if self._scatters:
            options["sum_only"] = sum_only
        tensors = output.local, self.buffer.local, self._group
        if hook is None:
            return lane.run(self._reduction, *tensors, **options)
        if self._hooked is None:
            self._hooked = torch.empty_like(output.local, dtype=self._plan.recipe.reduce)
        return lane.run(collectives.reduce_through, hook, self._hooked, self._reduction, *tensors, **options)

    def close(self) -> None:
        if self._inbox.nbytes:
            self._inbox.give()
        for memory in self._memory.values():
            memory.give()
        self.buffer = None
