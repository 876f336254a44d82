"""The protocol that each transport implements to move tensors between ranks, and the capabilities of a transport.

    transport                    tags   helpers   bundles                         sums
    --------------------------   ----   -------   -----------------------------   -------------------------------
    `gloo.Gloo`                  yes    yes       one message for small tensors   in rank order
    `gloo.copying.CopyingGloo`   no     no        one message for small tensors   in rank order
    `builtin.BuiltIn`            no     no        one group call                  by the backend; NCCL can average

Code outside of `weft.comm` asks for a capability, not for the name of a backend. `weft.comm.backends` chooses the
transport. A transport has no state: one instance serves all groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Several = Sequence[Tensor]
Wanted = Sequence[Tensor | None]
Sizes = Sequence[int]
Scales = Sequence[float]
Adds = Sequence[bool]


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a transport, and the cost of a message.

    - `tags`: messages of different lanes (`weft.comm.lanes`) and channels (`weft.comm.groups`) over one group never
      match, even if ranks issue them in different orders.
    - `helpers`: while a rank waits, a thread can take part in a gather that the rank skipped.
    - `bundles`: several tensors can be sent at the cost of one message.
    - `latency`: the seconds that an empty message takes.
    - `bandwidth`: the bytes per second that one rank sends.
    """

    tags: bool
    helpers: bool
    bundles: bool
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError(
                f"latency={self.latency}, bandwidth={self.bandwidth}: the latency must not be negative, and the "
                f"bandwidth must be positive; pass measured values"
            )

    @property
    def bundle_bytes(self) -> int:
        """The bytes that one rank sends in the time of one latency. Messages of fewer bytes are worth bundling."""
        return int(self.latency * self.bandwidth)


@dataclass
class Pending:
    """Transfers in flight: their work handles, and the work of this rank that follows them.

    `finish`: called after the transfers. `second`: called instead of `finish` if a second round of transfers follows;
    it starts that round and returns its `Pending`.
    """

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    second: Callable[[], "Pending"] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for and no work left."""
        return not self.works and self.finish is None and self.second is None

    def complete(self) -> None:
        """Wait for the transfers (on CUDA: make the current stream wait), and do the work that follows."""
        for work in self.works:
            work.wait()
        if self.second is not None:
            self.second().complete()
        if self.finish is not None:
            self.finish()

    def followed_by(self, work: Callable[[], None]) -> "Pending":
        """Return a `Pending` that has the same transfers and calls `work` last."""
        finish, second = self.finish, self.second
        if second is not None:
            return Pending(self.works, None, lambda: second().followed_by(work))

        def both() -> None:
            if finish is not None:
                finish()
            work()

        return Pending(self.works, both)


class Sum(NamedTuple):
    """How a reduction writes its sum over the ranks to the output.

    - `scale`: the sum is multiplied by it.
    - `accumulate`: the sum is added to the output.
    - `inbox`: memory for received data, `inbox_numel` elements in the dtype of the messages.
    - `sum_only`: the backend must sum, not average; the transport scales the sum.
    """

    scale: float
    accumulate: bool
    inbox: Tensor
    sum_only: bool = False


class Transport(Protocol):
    """Collectives over one backend. Each collective does what the function of the same name in `weft.comm.collectives`
    does: it starts its transfers and returns a `Pending`. Reductions may overwrite `partial`. Reductions and
    `inbox_numel` are called only for groups of more than one rank."""

    capabilities: Capabilities

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending: ...

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending: ...

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending: ...

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending: ...

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending: ...

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending: ...

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending: ...

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int: ...


def add_scaled(output: Tensor, value: Tensor, scale: float, accumulate: bool) -> None:
    """Write `scale` times `value` to `output`, or add it to `output` if `accumulate`."""
    if accumulate:
        output.add_(value, alpha=scale)
    elif scale == 1.0:
        output.copy_(value)
    elif output.dtype != value.dtype and torch.promote_types(output.dtype, value.dtype) == output.dtype:
        output.copy_(value).mul_(scale)  # in the wider dtype
    else:
        torch.mul(value, scale, out=output)
