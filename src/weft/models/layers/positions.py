"""Gathers a block's input from tensor-parallel ranks, and gathers it again in backward instead of saving it.

forward     gather the input, compute, scatter the output; save this rank's part of the input
backward    start to gather the input again, meanwhile run backward down to the first projections, whose weight
            gradients need the input

Megatron-LM's linear layers do the same (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from weft.models.gathering import Gathering
from weft.models.tensor_parallel import LANE, TensorRanks


class Positions:
    """A context manager that gathers a block's input from tensor-parallel ranks.

    `part` [B, S / tp, D]: this rank's positions of the input. The attribute `whole` [B, S, D] has all positions, and
    exists until the context ends. If `ranks` is None, `whole` is `part`, and nothing is gathered.

    Autograd saves a reference to `part` in place of `whole`, and backward gathers `whole` again. Other saved-tensor
    hooks that are already active, such as those of a checkpoint, take precedence: they decide what is saved.
    """

    knows_graphs = True
    """Allows `weft.Graphs` to capture modules inside this context. The graphs read a copy of `whole`."""
    _dim = 1

    def __init__(self, ranks: TensorRanks | None, part: Tensor) -> None:
        self._begin(ranks, part.detach(), part if ranks is None else ranks.gather(part))

    def _begin(self, ranks: TensorRanks | None, part: Tensor, whole: Tensor) -> None:
        self._ranks, self._part, self.whole = ranks, part, whole
        self._memory = 0
        self._kept = self._asked = 0
        self._coming: Gathering | None = None
        self._again: Tensor | None = None
        self._hooks: Any = None

    def __enter__(self) -> "Positions":
        keeps = self._ranks is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if keeps and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            self._memory = self.whole.untyped_storage().data_ptr()
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*exception)
            self._hooks = None
        del self.whole

    def scatter(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks and return this rank's positions of the sum. Without ranks, return `x`.

        `x`: a tensor that was computed from `whole`. See `before` for when backward gathers `whole` again.
        """
        return x if self._ranks is None else self._ranks.scatter(self.before(x))

    def before(self, x: Tensor) -> Tensor:
        """Return `x` unchanged, and let backward gather early. `x` was computed from `whole`.

        If backward must gather `whole` again, the transfer starts as soon as the gradient of `x` is known.
        """
        if self._kept and x.requires_grad:
            x.register_hook(self._send)
        return x

    def _pack(self, saved: Tensor) -> Any:
        if (
            isinstance(saved, DTensor)
            or saved.layout != torch.strided
            or saved.untyped_storage().data_ptr() != self._memory
        ):
            return saved
        self._kept += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            self._send()
            assert self._coming is not None and self._ranks is not None
            self._again = torch.cat(self._coming.receive()[0].unbind(), dim=self._dim)
            self._coming = None
        found = self._again.as_strided(*kept)
        self._asked += 1
        if self._asked == self._kept:  # all saved tensors were unpacked: free `whole`; a second backward gathers again
            self._asked, self._again = 0, None
        return found

    def _send(self, gradient: Tensor | None = None) -> None:
        if self._coming is None and self._again is None:
            assert self._ranks is not None
            self._coming = Gathering(self._ranks.group, [self._part.shape], LANE)
            self._coming.send([self._part])


class Rows(Positions):
    """`Positions` for an input `whole` [rows, D] that every rank already has.

    Forward gathers nothing. Each rank saves an equal part of the rows, and backward gathers all of them.
    """

    _dim = 0

    def __init__(self, ranks: TensorRanks | None, whole: Tensor) -> None:
        part = whole.detach()
        if ranks is not None and len(whole):
            share = -(-len(whole) // ranks.size)
            part = part[ranks.rank * share : (ranks.rank + 1) * share]
            part = torch.cat((part, part.new_zeros(share - len(part), part.shape[1])))
        self._begin(ranks if len(whole) else None, part, whole)
