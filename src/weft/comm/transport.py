"""What moves bytes between ranks: the protocol that each transport implements, and what a transport can do.

    transport             tags   helpers   bundles           averages   direct sends
    -------------------   ----   -------   ---------------   --------   ------------
    `gloo.Gloo`           yes    yes       one message       no         yes
    `builtin.BuiltIn`     no     no        one group call    NCCL       no

The engine asks for a capability and never for the name of a backend. `weft.comm.backends` chooses the transport.
A transport has no state: one instance serves all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.pending import Pending
from weft.comm.sums import add_scaled

Several = Sequence[Tensor]
Wanted = Sequence[Tensor | None]
Sizes = Sequence[int]
Scales = Sequence[float]
Adds = Sequence[bool]


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, and what a message costs.

    `tags`: collectives of different lanes and channels over one group never pair with each other, in any order of
    calls. `helpers`: a thread can take part in a gather that its rank skipped, while the rank waits.
    `bundles`: several tensors travel at the cost of one message. `averages`: a reduction can average in place of a sum.
    `direct_sends`: each pair of ranks exchanges messages, so that sums are taken here, in rank order.
    `latency`: seconds that a message of any size takes. `bandwidth`: bytes per second of one rank.
    """

    tags: bool
    helpers: bool
    bundles: bool
    averages: bool
    direct_sends: bool
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(
                f"latency={self.latency}, bandwidth={self.bandwidth}: a message takes no negative time, and some bytes "
                "move in a second; pass measured values"
            )

    @property
    def bundle_bytes(self) -> int:
        """The size at which moving a message takes as long as its latency: smaller messages are worth bundling."""
        return int(self.latency * self.bandwidth)


class Sum(NamedTuple):
    """What becomes of a sum over the ranks: an output (+)= `scale` times it.

    `accumulate`: the output is added to. `inbox`: memory of `inbox_numel` elements in the dtype of what is sent.
    `sum_only`: the backend never averages; what it sums is scaled here.
    """

    scale: float
    accumulate: bool
    inbox: Tensor
    sum_only: bool = False

    def take(self, output: Tensor, total: Tensor, scale: float) -> None:
        """`output` (+)= `scale` times `total`; the backend has scaled what `scale` leaves out."""
        add_scaled(output, total, scale, self.accumulate)


class Transport(Protocol):
    """Collectives over one backend. Each call starts its transfers and returns what is `Pending`.

    Tensors are contiguous, and 1-D but for the rows of `all_to_all`. `tag` keeps the messages of a lane apart from
    those of another where the transport has tags.
    """

    capabilities: Capabilities

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
        """Fill `full` with every rank's `source`, in rank order. `source` may be this rank's own slice of `full`."""
        ...

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending:
        """Fill each of `fulls` with every rank's own of `sources`, cast to `dtype`; None: that one is not kept."""
        ...

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending:
        """Fill `parts[r]`, 1-D and of any size, with rank r's `parts[rank]`."""
        ...

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """`output` (+)= the sum over ranks of their slice of `partial` for this rank, as `how` says."""
        ...

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending:
        """`reduce_scatter` of each; `adds`: which outputs are added to."""
        ...

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """`output` (+)= the sum of `partial` over the ranks, as `how` says; `partial` is overwritten."""
        ...

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending:
        """Send the r-th part of `source` to rank r; sizes are in rows."""
        ...

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int:
        """Elements that a reduction over `size` > 1 ranks needs beside the partial tensor."""
        ...
