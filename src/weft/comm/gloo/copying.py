"""The transport over gloo for tensors that are not in CPU memory. Copies of them are exchanged in CPU memory.

It lets several ranks share one GPU, for instance in tests, which NCCL does not allow. Each collective makes the host
wait for the current stream, and then for the exchange, so no communication is hidden.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.gloo.transport import Gloo
from weft.comm.transport import Adds, Pending, Scales, Several, Sizes, Sum, Wanted


class CopyingGloo:
    """A `weft.comm.transport.Transport` that exchanges copies in CPU memory."""

    # Without tags: the host waits in each collective, so every rank must issue collectives in the same order.
    capabilities = replace(Gloo.capabilities, tags=False, helpers=False)

    def __init__(self) -> None:
        self._gloo = Gloo()

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
        """Gather copies. Then copy the results to `full`."""
        whole = _empty(full)
        self._gloo.all_gather(whole, _copied(source), group, tag).complete()
        full.copy_(whole)
        return Pending()

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending:
        """Gather copies in `dtype`. Then copy the results that are wanted."""
        wholes = [None if full is None else _empty(full) for full in fulls]
        copies = [_copied(source.detach().to(dtype)) for source in sources]
        self._gloo.all_gather_bundle(wholes, copies, group, tag, dtype).complete()
        for full, whole in zip(fulls, wholes):
            if full is not None and whole is not None:
                full.copy_(whole)
        return Pending()

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending:
        """Gather copies. Then copy the parts of the other ranks."""
        copies = [_copied(part) if peer == rank else _empty(part) for peer, part in enumerate(parts)]
        self._gloo.all_gather_uneven(copies, rank, group, tag).complete()
        for peer, (part, arrived) in enumerate(zip(parts, copies)):
            if peer != rank:
                part.copy_(arrived)
        return Pending()

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """Reduce-scatter a copy into a copy of `output`. Then copy the result to `output`."""
        return self._reduced(self._gloo.reduce_scatter, output, partial, group, tag, how, scatters=True)

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending:
        """Reduce-scatter copies into copies of the outputs. Then copy the results to the outputs."""
        totals = [_target(output, add) for output, add in zip(outputs, adds)]
        copies = [_copied(partial) for partial in partials]
        self._gloo.reduce_scatter_bundle(totals, copies, scales, adds, group, tag).complete()
        for output, total in zip(outputs, totals):
            output.copy_(total)
        return Pending()

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """All-reduce a copy into a copy of `output`. Then copy the result to `output`."""
        return self._reduced(self._gloo.all_reduce, output, partial, group, tag, how, scatters=False)

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending:
        """Exchange the rows of a copy of `source`. Then copy the received rows to `output`."""
        arrived = _empty(output)
        self._gloo.all_to_all(arrived, _copied(source), output_sizes, source_sizes, group, tag).complete()
        output.copy_(arrived)
        return Pending()

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int:
        """Return 0: an inbox on the device would not be used."""
        return 0

    def _reduced(
        self,
        reduction: Callable[..., Pending],
        output: Tensor,
        partial: Tensor,
        group: ProcessGroup,
        tag: int,
        how: Sum,
        *,
        scatters: bool,
    ) -> Pending:
        numel = self._gloo.inbox_numel(partial.numel(), group.size(), scatters=scatters)
        inbox = torch.empty(numel, dtype=partial.dtype, device="cpu")
        total = _target(output, how.accumulate)
        reduction(total, _copied(partial), group, tag, how._replace(inbox=inbox)).complete()
        output.copy_(total)
        return Pending()


def _empty(like: Tensor) -> Tensor:
    """Return uninitialized CPU memory of the same shape and dtype."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _target(output: Tensor, accumulate: bool) -> Tensor:
    """Return CPU memory for a result, with the values of `output` if the result is added to them."""
    return _copied(output) if accumulate else _empty(output)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in CPU memory. The host waits until it is complete."""
    return _empty(tensor).copy_(tensor)


TRANSPORT = CopyingGloo()
