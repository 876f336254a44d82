"""The formats in which weights are gathered: main weights are converted to a payload, and payloads to full weights.

`Plain` payloads have elements of the compute dtype. Payloads of `weft.quantize.payload` have one byte or half a byte
per element. `write` converts main weights to a payload before they are sent, and `open` converts a received payload to
full weights. Code outside of these classes only moves or casts elements.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import collectives
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.plan import GroupPlan
from weft.memory.pool import Pool, Transient


class Plain:
    """The format without quantization: weights are gathered in the compute dtype."""

    refreshes = False  # whether the payload is computed once per step and stored beside the main weights
    tail = 0  # how many extra elements full weights have, after the layout's elements
    copies = 1  # 2 if forward and backward use different payloads, each with a separate gather; otherwise 1
    staging: Transient | None = None  # memory that `write` or `land` takes from a pool and `open` gives back

    def __init__(self, plan: GroupPlan) -> None:
        self._uploads = plan.offload is not None
        self.layout, self.dtype = plan.layout, plan.recipe.compute
        self.sent = plan.layout.numel * self.dtype.itemsize if plan.moves else 0  # the number of bytes of a gather
        if self._uploads and plan.recipe.main != plan.recipe.compute:
            numel = plan.numel(plan.placements.optimizer)
            self.staging = plan.transient(numel, plan.recipe.main, "weights on their way")

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """Return a function to run on the message's lane: it copies `source` to `own`, this rank's part of the message,
        with a cast and an upload as needed. Return None if `source` itself can be sent."""
        if source.data_ptr() == own.data_ptr() or (source.dtype == own.dtype and not self._uploads):
            return None
        staging = pool.take(self.staging) if self.staging is not None and source.dtype != own.dtype else None
        return functools.partial(collectives.move, own, source, staging)

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool) -> torch.Tensor:
        """Return the tensor into which the ranks' parts are gathered; `open` then converts it to the full weights.
        `Plain` returns `full` itself. `Narrow` returns staging memory, or `source` if each rank has all parts."""
        return full

    def made_from(self, version: int) -> int:
        """Return the version to record for a payload that is made from the main weights at `version`."""
        return version

    def open(self, full: torch.Tensor, copy: int) -> None:
        """Convert the gathered payload to the full weights `full` that modules use, and free staging memory."""
        self.drop()

    def drop(self) -> None:
        """Free staging memory, and forget a payload that `open` has not read."""
        if self.staging is not None:
            self.staging.give()


class PostForwardShard:
    """The shard that a rank keeps between forward and backward if `reshard_after_forward` is an integer n: 1/n of a
    parameter group's gathered weights. `group`: the process group of the n adjacent ranks. With n = 2:

    ranks of the shard axis          0      1      2      3
    sharded                          a      b      c      d        a quarter each
    forward                          abcd   abcd   abcd   abcd     gathered over four ranks
    until backward                   ab     cd     ab     cd       half each, copied from the gathered weights
    backward                         abcd   abcd   abcd   abcd     gathered over two adjacent ranks, usually of one node
    """

    def __init__(self, plan: GroupPlan, group: dist.ProcessGroup) -> None:
        numel = plan.layout.numel // group.size()
        self.transient = plan.transient(numel, plan.recipe.gathered, "the kept shard of the weights")
        self.held = False
        self.version: int | None = None
        self._group = group

    @torch.no_grad()
    def keep(self, full: torch.Tensor, version: int | None, pool: Pool) -> None:
        """Keep this rank's shard of `full`, gathered from this `version` of the main weights, for the next gather."""
        if not self.held:
            self.held, self.version = True, version
            pool.take(self.transient).copy_(full.view(self._group.size(), -1)[self._group.rank()])

    def gather_into(self, full: torch.Tensor, lane: Lane, channel: int) -> Ticket:
        """Start to gather the full weights `full` from the shards that the ranks keep."""
        return lane.run(collectives.all_gather, full, self.transient.tensor, self._group, channel=channel)

    def drop(self) -> None:
        self.held = False
        self.transient.give()
