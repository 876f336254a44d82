"""What a block has from context ranks: positions that it gathers, or heads that it exchanges.

    gathered    forward     gather keys and values     queries meanwhile            attention
                backward    gather them again          the last projection's        attention again, then its backward

    exchanged   forward     send keys and values       queries meanwhile, sent          attention, sent back

What is gathered is not kept, and nor are masks and scores over the whole rows: a rank keeps its own positions only. Of
what is exchanged it keeps its heads of all positions, which are as many numbers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.models.context import Slices
from weft.models.layers.positions import Positions


class Gathered:
    """What `gather` begins to bring here of `parts` [B, S, ...] of the slices of every context rank.

    Where hooks on saved tensors are active, such as those of a checkpoint around the block, they say what is kept.
    """

    def __init__(self, gather: Callable[..., Callable[[], list[Tensor]]], *parts: Tensor) -> None:
        self._gather = gather
        self._parts: tuple[Tensor, ...] = ()
        self._coming: Callable[[], list[Tensor]] | None = gather(*parts)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _others_keep():
            self._parts = parts

    def attend(self, attention: Callable[..., Tensor], queries: Tensor) -> Tensor:
        """`attention(queries, *found)`, where `found` is what came for each of the parts."""
        if not self._parts:
            assert self._coming is not None
            return attention(queries, *self._coming())

        def run(queries: Tensor, *parts: Tensor) -> Tensor:
            coming, self._coming = self._coming, None
            return attention(queries, *(coming or self._gather(*parts))())

        return checkpoint(run, queries, *self._parts, use_reentrant=False, preserve_rng_state=False)

    def before(self, output: Tensor) -> Tensor:
        """`output`, made from what `attend` gave: as soon as its gradient is there the parts begin to travel again."""
        if self._parts and output.requires_grad:
            output.register_hook(self._send)
        return output

    def _send(self, gradient: Tensor) -> None:
        if self._parts:  # a second backward sends where it computes
            with torch.enable_grad():
                self._coming = self._gather(*self._parts)
            self._parts = ()


class Exchanged:
    """Keys and values [B, 2 width, heads, C] of this rank's slices, on their way to the ranks that have their heads.

    `heads`: how many query heads there are. Where there are too few key heads for the ranks, several ranks get one.
    """

    def __init__(self, slices: Slices, heads: int, *parts: Tensor) -> None:
        self._slices = slices
        known = parts[0].shape[2]
        if heads % slices.ranks:
            raise ValueError(f"{heads} heads on {slices.ranks} context ranks: each has as many")
        copies = slices.ranks // math.gcd(known, slices.ranks)
        if copies > 1:
            parts = tuple(part.repeat_interleave(copies, dim=2) for part in parts)
        self._coming = slices.exchanging(*parts)

    def attend(self, attention: Callable[..., Tensor], queries: Tensor) -> Tensor:
        """`attention(queries, *parts)` of this rank's heads, [B, T, heads / ranks, C] each; -> as `queries`."""
        coming = self._slices.exchanging(queries)
        parts = self._coming()
        return self._slices.exchanging_back(attention(*coming(), *parts))()

    def before(self, output: Tensor) -> Tensor:
        """`output`: everything that backward needs is here."""
        return output


def _others_keep() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Positions)
