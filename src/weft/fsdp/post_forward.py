"""What a rank keeps of gathered weights from a forward to its backward, with an integer `reshard_after_forward`.

ranks of the shard axis          0      1      2      3
at rest                          a      b      c      d        a quarter each
forward                          abcd   abcd   abcd   abcd     gathered over four ranks
until backward, with 2           ab     cd     ab     cd       half each, cut from what was gathered
backward                         abcd   abcd   abcd   abcd     gathered over two neighbours, on one node if need be
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.comm import collectives
from weft.comm.lanes import Lane, Ticket
from weft.memory.pool import Pool, Transient


class PostForwardShard:
    """One of `group.size()` equal shards of a group's gathered weights, of `numel` elements in all."""

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
                f"reshard_after_forward={group.size()} for {describe()}: shards of weights that stay quantized cannot "
                'be gathered again; choose True or False, or compute="dequantize"'
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
        """Start filling the gathered weights from the shards of the group."""
        return lane.run(collectives.all_gather, full, self.transient.tensor, self._group, channel=channel)

    def drop(self) -> None:
        """Give the memory back."""
        self.held = False
        self.transient.give()
