"""What a block gathers from context ranks and computes from it, both done again in backward instead of kept.

forward     gather keys and values     queries meanwhile            attention
backward    gather them again          the last projection's        attention again, then its backward

A rank keeps its own positions only: neither those of others, nor masks and scores over the whole rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.models.context import Slices
from weft.models.layers.positions import Positions


class Gathered:
    """`parts` [B, S, ...] of the slices of every context rank, on their way here.

    Where hooks on saved tensors are active, such as those of a checkpoint around the block, they say what is kept.
    """

    def __init__(self, slices: Slices, *parts: Tensor) -> None:
        self._slices = slices
        self._parts: tuple[Tensor, ...] = ()
        self._coming: Callable[[], list[Tensor]] | None = slices.gathering(*parts)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _others_keep():
            self._parts = parts

    def attend(self, attention: Callable[..., Tensor], queries: Tensor) -> Tensor:
        """`attention(queries, *whole)`, where `whole` are the parts of all ranks, [B, T, ...]."""
        if not self._parts:
            assert self._coming is not None
            return attention(queries, *self._coming())

        def run(queries: Tensor, *parts: Tensor) -> Tensor:
            coming, self._coming = self._coming, None
            return attention(queries, *(coming or self._slices.gathering(*parts))())

        return checkpoint(run, queries, *self._parts, use_reentrant=False, preserve_rng_state=False)

    def before(self, output: Tensor) -> Tensor:
        """`output`, made from what `attend` gave: as soon as its gradient is there the parts begin to travel again."""
        if self._parts and output.requires_grad:
            output.register_hook(self._send)
        return output

    def _send(self, gradient: Tensor) -> None:
        if self._parts:  # a second backward sends where it computes
            with torch.enable_grad():
                self._coming = self._slices.gathering(*self._parts)
            self._parts = ()


def _others_keep() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Positions)
