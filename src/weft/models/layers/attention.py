"""Causal grouped-query attention: groups of query heads share a key and value head (GQA; arXiv:2305.13245).

q, k, v = W_q x, W_k x, W_v x      per head; then norms, over one head or all heads, and rotation of q and k
o       = softmax(scale q k^T) v   over positions up to the query's, optionally in a window; a sink takes part in the
                                   softmax like a position whose value is 0 (arXiv:2309.17453)
y       = W_o (o * sigmoid(g))     the optional gate g is the second half of each head's part of W_q x
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.graphs.places import constant
from weft.models.config import HybridConfig
from weft.models.context import Borders, Slices
from weft.models.documents import Documents
from weft.models.layers.block import Beside, Block, State
from weft.models.layers.gathered import Exchanged, Gathered
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import rotary_for
from weft.models.tensor_parallel import TensorRanks
from weft.moe.linear import Linear
from weft.moe.parts import part
from weft.moe.source import INITIAL_STD, WeightSource

Where = tuple[int, Borders | None]
"""The positions of a layer's input: the arguments `start` and `documents` of `RotaryEmbedding.forward`."""


class Attention(Block):
    """Grouped-query attention. For decoding, it caches keys and values of T earlier positions, [B, T, key heads, C]."""

    graph_scopes: ClassVar = {"forward": ("attn", None)}

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        width, bias = cfg.attention_head_dim, cfg.attention_bias
        self.heads = cfg.num_attention_heads
        self.key_value_heads = cfg.num_key_value_heads
        self.scale = cfg.attention_scale
        self.window = cfg.window_of(beside.attentions)
        self.gated = cfg.attention_output_gate
        self.exchanges = cfg.context_attention == "heads"
        queries, keys = self.heads * width, self.key_value_heads * width
        of_queries = queries * (2 if self.gated else 1)
        self.q_proj = Linear(cfg.hidden_size, of_queries, source / "q_proj", bias=bias != "none")
        self.k_proj = Linear(cfg.hidden_size, keys, source / "k_proj", bias=bias != "none")
        self.v_proj = Linear(cfg.hidden_size, keys, source / "v_proj", bias=bias != "none")
        self.o_proj = Linear(queries, cfg.hidden_size, source / "o_proj", bias=bias == "all")
        self.norm_of = cfg.qk_norm
        self.q_norm, self.k_norm = (self._norm(cfg, size) for size in (queries, keys))
        self.rotary = rotary_for(cfg, beside.rotary, beside.attentions)
        self.source = source
        self.sinks = nn.Parameter(torch.empty(self.heads)) if cfg.attention_sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the sinks, if this layer has them. Parameters of submodules are unchanged."""
        if self.sinks is not None:
            (self.source / "sinks").normal_(self.sinks, INITIAL_STD)

    def share(self, ranks: TensorRanks) -> None:
        """Divide the heads over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        self.heads //= ranks.size
        self.key_value_heads = max(1, self.key_value_heads // ranks.size)
        if self.norm_of == "full":
            # If ranks share key heads, the mean over all ranks is still right, because each head is on the same number
            # of ranks.
            for norm in (self.q_norm, self.k_norm):
                assert norm is not None
                norm.mean_over_ranks = partial(ranks.mean, first=0, count=ranks.size)

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before the residual sum (see `Block.mix`)."""
        how: dict[str, Any] = {"scale": self.scale, "window": self.window, "sinks": part(self, "sinks")}
        where = positions_of(documents, state["k"].shape[1] if state else 0, x_BSD)
        others = None
        if isinstance(documents, Slices):
            others, attention = self._over(documents, self._keys_and_values(x_BSD, where), how)
            q_BSHC, gate_BSHC = self._queries(x_BSD, where)  # during the transfer of keys and values
            o_BSHC = others.attend(attention, q_BSHC)
        else:
            q_BSHC, gate_BSHC = self._queries(x_BSD, where)
            k_BSHC, v_BSHC = self._keys_and_values(x_BSD, where)
            k_BTHC, v_BTHC = remembered(state, k=k_BSHC, v=v_BSHC)
            o_BSHC = attention_within(documents, q_BSHC, k_BTHC, v_BTHC, **how)
        if gate_BSHC is not None:
            o_BSHC = o_BSHC * gate_BSHC.sigmoid()
        y_BSD = self.o_proj(o_BSHC.flatten(-2))
        return y_BSD if others is None else others.before(y_BSD)

    def _over(
        self, slices: Slices, parts: tuple[Tensor, Tensor], how: dict[str, Any]
    ) -> tuple[Gathered | Exchanged, Callable[..., Tensor]]:
        """Start to gather or exchange keys and values, `parts`. Return two results. The first: the transfer. The
        second: the attention function to pass to the transfer's `attend`."""
        if not self.exchanges:
            if self.window is None or not 1 < self.window <= slices.width:
                return Gathered(slices.gathering, *parts), partial(attention_over, slices, **how)
            before = self.window - 1  # the positions that a slice sees before itself, all in the previous slice
            halo = partial(slices.haloing, before)
            return Gathered(halo, *parts), partial(attention_over, slices, before=before, **how)
        if how["sinks"] is not None:
            how = {**how, "sinks": how["sinks"].chunk(slices.ranks)[slices.rank]}
        return Exchanged(slices, self.heads, *parts), partial(attention_within, slices.whole, **how)

    def _queries(self, x_BSD: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """Return two results. The first: the queries [B, S, H, C], after norm and rotation. The second: the gate of the
        same shape, or None."""
        q_BSHC, gate_BSHC = self.q_proj(x_BSD).unflatten(-1, (self.heads, -1)), None
        if self.gated:
            q_BSHC, gate_BSHC = q_BSHC.chunk(2, dim=-1)
        q_BSHC = self._normed(self.q_norm, q_BSHC)
        return q_BSHC if self.rotary is None else self.rotary(q_BSHC, *where), gate_BSHC

    def _keys_and_values(self, x_BSD: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        k_BSHC = self.k_proj(x_BSD).unflatten(-1, (self.key_value_heads, -1))
        v_BSHC = self.v_proj(x_BSD).unflatten(-1, (self.key_value_heads, -1))
        k_BSHC = self._normed(self.k_norm, k_BSHC)
        return k_BSHC if self.rotary is None else self.rotary(k_BSHC, *where), v_BSHC

    def _norm(self, cfg: HybridConfig, size: int) -> RMSNorm | None:
        widths = {"none": None, "head": cfg.attention_head_dim, "full": size}
        width = widths[cfg.qk_norm]
        return None if width is None else RMSNorm(width, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm)

    def _normed(self, norm: nn.Module | None, x_BSHC: Tensor) -> Tensor:
        if norm is None:
            return x_BSHC
        return norm(x_BSHC) if self.norm_of == "head" else norm(x_BSHC.flatten(-2)).view_as(x_BSHC)


def remembered(state: State | None, **new: Tensor) -> list[Tensor]:
    """Append each tensor of `new` [B, S, ...] to the tensor of the same name in `state`, along dimension 1.

    Return the results [B, T, ...], in the order of `new`. A name that is not yet in `state` is added. If `state` is
    None, return the tensors of `new`.
    """
    if state is None:
        return list(new.values())
    for name, tensor in new.items():
        state[name] = torch.cat((state[name], tensor), dim=1) if name in state else tensor
    return [state[name] for name in new]


def positions_of(documents: Borders | None, start: int, x_BSD: Tensor) -> Where:
    """Return the arguments `start` and `documents` of `RotaryEmbedding.forward` for the positions of `x_BSD`.

    `start`: the number of earlier positions in the state. With `Slices`, the returned `start` is the row's length - S
    instead, because `forward` requires all positions to be less than `start` + S.
    """
    if isinstance(documents, Slices):  # positions in a slice may be anywhere in the row
        start = documents.whole.seq - x_BSD.shape[1]
    return start, documents


def attention_over(
    slices: Slices, q_BSHC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor, *, before: int | None = None, **how: Any
) -> Tensor:
    """Compute attention of the queries in this rank's slices to the keys and values of the same documents.

    `before`: None if `k_BTHC` and `v_BTHC` have whole rows. Otherwise these two tensors come from `Slices.haloing`:
    they have this rank's slices, with `before` earlier positions in front of each slice. `how`: keyword arguments of
    `causal_attention`. Returns [B, S, H, C], with the C of `v_BTHC`.
    """
    q_NHC, k_NHC, v_NHC = (each.flatten(0, 1) for each in (q_BSHC, k_BTHC, v_BTHC))
    found, places = [q_NHC.new_zeros(0, q_BSHC.shape[2], v_BTHC.shape[3])], []
    for queries, keys in slices.pieces(q_BSHC.device, before):
        if (window := how.get("window")) is not None:  # the keys in the windows of all queries
            keys = keys[:, -(queries.shape[1] + window - 1) :]
        found.append(causal_attention(q_NHC[queries], k_NHC[keys], v_NHC[keys], **how).flatten(0, 1))
        places.append(queries.flatten())
    o_NHC = torch.cat(found)
    if places:
        o_NHC = o_NHC.new_zeros(len(q_NHC), *o_NHC.shape[1:]).index_copy(0, torch.cat(places), o_NHC)
    else:  # only padding: depend on all inputs, so that backward runs its collectives on this rank too
        nothing = (k_NHC.sum() + v_NHC.sum() + q_NHC.sum()) * q_NHC.new_zeros(())
        o_NHC = o_NHC.new_zeros(len(q_NHC), *o_NHC.shape[1:]) + nothing
    return o_NHC.unflatten(0, q_BSHC.shape[:2])


def attention_within(documents: Documents | None, q_BSHC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor, **how: Any) -> Tensor:
    """Compute `causal_attention`, separately for each document if `documents` are given.

    Documents of the same length are computed together. Without a window, the cost grows with the sum of the squared
    lengths of documents. At padding positions the result is 0. `how`: keyword arguments of `causal_attention`.
    """
    if documents is None:
        return causal_attention(q_BSHC, k_BTHC, v_BTHC, **how)
    order, groups = documents.attention(q_BSHC.device)
    flat = [each.flatten(0, 1) for each in (q_BSHC, k_BTHC, v_BTHC)]
    if order is not None:
        flat = [each.index_select(0, order) for each in flat]
    sizes = [count * length for count, length in groups]
    found = []
    for (count, length), *parts in zip(groups, *(each.split(sizes) for each in flat)):
        q_NLHC, k_NLHC, v_NLHC = (part.unflatten(0, (count, length)) for part in parts)
        found.append(causal_attention(q_NLHC, k_NLHC, v_NLHC, **how).flatten(0, 1))
    o_NHC = torch.cat(found) if found else flat[0].new_zeros(0, q_BSHC.shape[2], v_BTHC.shape[3])
    if order is not None:
        o_NHC = o_NHC.new_zeros(q_BSHC.shape[:2].numel(), *o_NHC.shape[1:]).index_copy(0, order, o_NHC)
    return o_NHC.unflatten(0, q_BSHC.shape[:2])


def causal_attention(
    q_BSHC: Tensor,
    k_BTHC: Tensor,
    v_BTHC: Tensor,
    *,
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention. The queries belong to the last S of the T positions. Each query sees its own position
    and all earlier positions, up to `window` positions.

    `scale`: multiplies the dot products. None: C^-0.5. `window`: the number of positions that a query sees,
    including its own. None: all. `sinks` [H]: a score per head, which takes part in the softmax like a position whose
    value is 0. Returns [B, S, H, C], with the C of `v_BTHC`.
    """
    queries, seen = q_BSHC.shape[1], k_BTHC.shape[1]
    if window is not None:
        seen = min(seen, queries + window - 1)  # no query sees earlier keys
        k_BTHC, v_BTHC = k_BTHC[:, -seen:], v_BTHC[:, -seen:]
        if window < seen and queries > 1:
            return _in_blocks(q_BSHC, k_BTHC, v_BTHC, window, scale=scale, sinks=sinks)
    if queries == 1 < seen and sinks is None:
        return _step(q_BSHC, k_BTHC, v_BTHC, scale)
    mask = None
    if queries < seen:
        first = int(sinks is not None)
        mask = torch.ones(queries, first + seen, dtype=torch.bool, device=q_BSHC.device).tril(first + seen - queries)
    return _attend(q_BSHC, k_BTHC, v_BTHC, mask, scale=scale, sinks=sinks)


def _in_blocks(
    q_BSHC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor, window: int, *, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute `causal_attention` in a window, at a cost that grows with S x window: each block of queries sees its own
    keys and the `window` - 1 keys before it.

    All blocks and layers share one mask. Drawn along the keys, with a window of 4 and blocks of 7 queries:

    head    ===                       the first queries, which see all earlier keys
    block   ---=======                =: the keys at the positions of the block's queries
    block          ---=======         -: the `window` - 1 keys before them
    tail                  ---====     the remaining queries, fewer than a block
    """
    how: dict[str, Any] = {"scale": scale, "sinks": sinks}
    queries, before, size = q_BSHC.shape[1], window - 1, max(window, LEAST_BLOCK)
    head = before - (k_BTHC.shape[1] - queries)
    blocks, tail = divmod(queries - head, size)
    ahead, middle, last = q_BSHC.split((head, blocks * size, tail), dim=1)
    first = int(sinks is not None)
    band = _band(window, size, first, q_BSHC)
    found = []
    if head:
        found.append(causal_attention(ahead, k_BTHC[:, :before], v_BTHC[:, :before], **how))
    if blocks:
        end = blocks * size + before
        keys, values = (
            each[:, :end].unfold(1, size + before, size).movedim(-1, 2).flatten(0, 1) for each in (k_BTHC, v_BTHC)
        )
        o_NLHC = _attend(middle.unflatten(1, (blocks, size)).flatten(0, 1), keys, values, band, **how)
        found.append(o_NLHC.unflatten(0, (-1, blocks)).flatten(1, 2))
    if tail:
        seen = tail + before
        found.append(_attend(last, k_BTHC[:, -seen:], v_BTHC[:, -seen:], band[:tail, : first + seen], **how))
    return torch.cat(found, dim=1)


LEAST_BLOCK = 64
"""The smallest number of queries in a block, used for windows up to this size."""
_bands: dict[tuple[int, int, int, torch.dtype, torch.device], Tensor] = {}


def _band(window: int, size: int, first: int, like: Tensor) -> Tensor:
    """Return the mask added to a block's scores, [size, first + size + window - 1]: 0 in the window, otherwise -inf.

    The first `first` columns, for sinks, are all 0. Layers and steps with equal arguments share one mask, so autograd
    saves no copy per layer.
    """
    key = window, size, first, like.dtype, like.device
    if type(like) is not Tensor or torch.compiler.is_compiling():  # tracing and subclasses cannot use the cache
        return _made_band(window, size, first, like)
    if key not in _bands:
        with torch.inference_mode(False):
            made = _made_band(window, size, first, like)
        if torch._C._functorch.is_functorch_wrapped_tensor(made):  # invalid after the transform
            return made
        _bands[key] = constant(made)
    return _bands[key]


def _made_band(window: int, size: int, first: int, like: Tensor) -> Tensor:
    ones = torch.ones(size, size + window - 1, dtype=torch.bool, device=like.device)
    seen = F.pad(ones.tril(window - 1).triu(), (first, 0), value=True)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)


def _attend(
    q_BSHC: Tensor,
    k_BTHC: Tensor,
    v_BTHC: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention. `mask`: which positions are visible (bool), or numbers that are added to the scores. None: the
    causal mask.

    With sinks, the first column of the mask is for the sinks.
    """
    queries, width = q_BSHC.shape[1], v_BTHC.shape[3]
    if sinks is not None:
        scale = q_BSHC.shape[3] ** -0.5 if scale is None else scale
        q_BSHC, k_BTHC, v_BTHC = _with_sinks(sinks / scale, mask is None, q_BSHC, k_BTHC, v_BTHC)
    o_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BTHC.transpose(1, 2),
        v_BTHC.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_BSHC.shape[2] != k_BTHC.shape[2],
    )
    o_BSHC = o_BHSC.transpose(1, 2)
    return o_BSHC if sinks is None else o_BSHC[:, -queries:, :, :width]


def _step(q_B1HC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor, scale: float | None) -> Tensor:
    """Compute attention of one position to all keys, without a mask. Queries that share a key head are rows
    of one matrix product."""
    shared = q_B1HC[:, 0].unflatten(1, (k_BTHC.shape[2], -1))
    o_BGRC = F.scaled_dot_product_attention(shared, k_BTHC.transpose(1, 2), v_BTHC.transpose(1, 2), scale=scale)
    return o_BGRC.flatten(1, 2).unsqueeze(1)


CHANNELS = 8
"""The number of channels added to a head for its sink. It is a multiple of 8, because CUDA kernels copy heads whose
width is not a multiple of 8."""


def _with_sinks(
    scores_H: Tensor, causal: bool, q_BSHC: Tensor, k_BTHC: Tensor, v_BTHC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one more key for the sink, before all other keys. The product of a query
    with this key is the score of the head's sink. The value of this key is 0. Each head gets `CHANNELS` more channels:

        q = [q ; score ; 0]     k = [0 ; 1 ; 0], [k ; 0 ; 0], ...     v = [0 ; 0], [v ; 0], ...

    Without this key, the scores of sinks would need a mask as large as all scores. `causal`: also add a query that sees
    only the sink, so that the causal mask remains triangular.
    """
    width = q_BSHC.shape[3]
    scores_HC = F.pad(scores_H.to(q_BSHC.dtype).unsqueeze(-1), (width, CHANNELS - 1))
    unit_C = F.pad(k_BTHC.new_ones(1), (width, CHANNELS - 1))
    q_BSHC = F.pad(q_BSHC, (0, CHANNELS, 0, 0, int(causal), 0)) + scores_HC
    k_BTHC = F.pad(k_BTHC, (0, CHANNELS))
    k_BTHC = torch.cat((unit_C.expand(len(k_BTHC), 1, k_BTHC.shape[2], -1), k_BTHC), dim=1)
    return q_BSHC, k_BTHC, F.pad(v_BTHC, (0, width + CHANNELS - v_BTHC.shape[3], 0, 0, 1, 0))
