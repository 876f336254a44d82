"""Attention over context ranks: a block gathers keys and values of other ranks, or exchanges positions for heads.

    gathered    forward     gather keys and values     meanwhile: queries              attention
                backward    gather them again          meanwhile: last projection      recompute attention, its backward

    exchanged   forward     send keys and values       meanwhile: queries, send them   attention, send its output back

With gathered keys and values, a rank saves only its own positions for backward. It saves no gathered tensors, and no
masks or scores over whole rows. With exchanged heads, a rank saves its heads at all positions. Both save about the same
number of bytes if the number of ranks divides the number of key heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.models.context import Slices
from weft.models.layers.positions import Positions


class Gathered:
    """Keys and values from all context ranks. The constructor starts to gather them: it calls `gather(*parts)` with
    this rank's `parts` [B, S, ...].

    Autograd saves only `parts` and the queries. Backward gathers again and recomputes attention. Other saved-tensor
    hooks that are already active, such as those of a checkpoint around the block, take precedence: they decide what is
    saved.
    """

    def __init__(self, gather: Callable[..., Callable[[], list[Tensor]]], *parts: Tensor) -> None:
        self._gather = gather
        self._parts: tuple[Tensor, ...] = ()
        self._coming: Callable[[], list[Tensor]] | None = gather(*parts)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _others_keep():
            self._parts = parts

    def attend(self, attention: Callable[..., Tensor], queries: Tensor) -> Tensor:
        """Return `attention(queries, *gathered)`. `gathered`: the gathered tensors, one for each of `parts`."""
        if not self._parts:
            assert self._coming is not None
            return attention(queries, *self._coming())

        def run(queries: Tensor, *parts: Tensor) -> Tensor:
            coming, self._coming = self._coming, None
            return attention(queries, *(coming or self._gather(*parts))())

        return checkpoint(run, queries, *self._parts, use_reentrant=False, preserve_rng_state=False)

    def before(self, output: Tensor) -> Tensor:
        """Return `output` unchanged, and let backward gather early. `output` was computed from the result of `attend`.

        If backward gathers keys and values again, the transfer starts as soon as the gradient of `output` is known,
        before backward reaches `attend`.
        """
        if self._parts and output.requires_grad:
            output.register_hook(self._send)
        return output

    def _send(self, gradient: Tensor) -> None:
        if self._parts:  # empty in a second backward, which gathers when it recomputes attention
            with torch.enable_grad():
                self._coming = self._gather(*self._parts)
            self._parts = ()


class Exchanged:
    """Attention in which each context rank computes an equal part of the heads, at all positions.

    The constructor starts to send keys and values, `parts`, to the ranks that compute their heads. Each of `parts` is
    [B, 2 width, key heads, C]: this rank's two slices, with `width` positions each. `heads`: the number of query heads,
    a multiple of the number of ranks. If the number of ranks does not divide the number of key heads, several ranks get
    the same key head.
    """

    def __init__(self, slices: Slices, heads: int, *parts: Tensor) -> None:
        self._slices = slices
        known = parts[0].shape[2]
        if heads % slices.ranks:
            raise ValueError(f"{heads} heads on {slices.ranks} context ranks: each must have the same number")
        copies = slices.ranks // math.gcd(known, slices.ranks)
        if copies > 1:
            parts = tuple(part.repeat_interleave(copies, dim=2) for part in parts)
        self._coming = slices.exchanging(*parts)

    def attend(self, attention: Callable[..., Tensor], queries: Tensor) -> Tensor:
        """Return the result of `attention` for `queries` [B, S, heads, C], in the shape of `queries`.

        The queries are exchanged too. `attention(queries, *parts)` is called with this rank's heads at all positions,
        [B, T, heads / ranks, C]. Its result is sent back to the ranks that have the positions.
        """
        coming = self._slices.exchanging(queries)
        parts = self._coming()
        return self._slices.exchanging_back(attention(*coming(), *parts))()

    def before(self, output: Tensor) -> Tensor:
        """Return `output` unchanged. Unlike `Gathered.before`, this method starts no transfer in backward."""
        return output


def _others_keep() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Positions)
