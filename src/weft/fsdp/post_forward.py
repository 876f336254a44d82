"""The shards that ranks keep between forward and backward, with an integer `reshard_after_forward`.

ranks of the shard axis          0      1      2      3
sharded                          a      b      c      d        a quarter each
forward                          abcd   abcd   abcd   abcd     gathered over four ranks
until backward, with 2           ab     cd     ab     cd       half each, copied from the gathered weights
backward                         abcd   abcd   abcd   abcd     gathered over two adjacent ranks, usually of one node
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.comm import collectives
from weft.comm.lanes import Lane, Ticket
from weft.memory.pool import Pool, Transient


class PostForwardShard:
    """This rank's shard, of `group.size()` equal ones, of a parameter group's gathered weights, `numel` in total."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        describe: Callable[[], str],
    ) -> None:
        if dtype.itemsize == 1:
            raise ValueError(
                f"reshard_after_forward={group.size()} for {describe()}: shards of weights that remain quantized "
                'cannot be gathered again; choose True or False, or compute="dequantize"'
            )
        self.transient = Transient(numel // group.size(), dtype, device, describe=describe)
        self.held = False
        self._group = group

    def keep(self, full: torch.Tensor, pool: Pool) -> None:
        """Copy this rank's shard of the gathered weights."""
        if not self.held:
            self.held = True
            pool.take(self.transient).copy_(full.view(self._group.size(), -1)[self._group.rank()])

    def gather_into(self, full: torch.Tensor, lane: Lane, channel: int) -> Ticket:
        """Start to gather the full weights `full` from the shards of the group."""
        return lane.run(collectives.all_gather, full, self.transient.tensor, self._group, channel=channel)

    def drop(self) -> None:
        """Free the memory of the shard."""
        self.held = False
        self.transient.give()
