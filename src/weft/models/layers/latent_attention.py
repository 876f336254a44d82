"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

q         = W_qb norm(W_qa x)     per head: a part without rotation, and a rotated part
c, k_rope = W_kva x               a latent, and one rotated key that all heads share
k, v      = W_kvb norm(c)         per head: the part of the key without rotation, and the value
y         = W_o softmax(scale [q ; q_rope] [k ; k_rope]^T) v

Decoding caches only norm(c) and k_rope. A decoding step does not compute keys and values from them. For each
head, let W_kvb = [W_k; W_v]. The product of q and a key, without the rotated parts, is
q (W_k norm(c)) = (W_k^T q) norm(c). The output is W_v (softmax(...) norm(c)). The cost of a step grows with
T x kv_lora_rank for each head.

If an adapter wraps W_kvb, a step computes all keys and values instead.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from weft.models.config import HybridConfig
from weft.models.context import Borders, Slices
from weft.models.layers.attention import Where, attention_over, attention_within, positions_of, remembered
from weft.models.layers.block import Beside, Block, State
from weft.models.layers.gathered import Gathered
from weft.models.layers.norm import RMSNorm
from weft.models.tensor_parallel import TensorRanks
from weft.moe.linear import Linear
from weft.moe.source import WeightSource

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of both latents, in all families of `weft.models.hf` that have them."""


class LatentAttention(Block):
    """Multi-head latent attention.

    For decoding, it caches the normalized latents [B, T, kv_lora_rank], and the rotated keys that all heads share,
    [B, T, 1, qk_rope_head_dim]. If `q_lora_rank` is None, one projection computes the queries. Otherwise two
    projections with a norm between them compute the queries.
    """

    graph_scopes: ClassVar = {"forward": ("attn", None)}

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        self.heads = cfg.num_attention_heads
        self.scale = cfg.attention_scale
        self.key_widths = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        self.latent_widths = cfg.kv_lora_rank, cfg.qk_rope_head_dim
        self.up_widths = cfg.qk_nope_head_dim, cfg.v_head_dim
        hidden, bias, rank = cfg.hidden_size, cfg.attention_bias == "all", cfg.q_lora_rank
        queries = self.heads * sum(self.key_widths)
        if rank is None:
            self.q_proj = Linear(hidden, queries, source / "q_proj")
        else:
            self.q_a_proj = Linear(hidden, rank, source / "q_a_proj", bias=bias)
            self.q_a_norm = RMSNorm(rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(rank, queries, source / "q_b_proj")
        self.kv_a_proj = Linear(hidden, sum(self.latent_widths), source / "kv_a_proj", bias=bias)
        self.kv_a_norm = RMSNorm(cfg.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, self.heads * sum(self.up_widths), source / "kv_b_proj")
        self.o_proj = Linear(self.heads * cfg.v_head_dim, hidden, source / "o_proj", bias=bias)
        self.low_rank_queries = rank is not None
        self.rotary = beside.rotary

    def share(self, ranks: TensorRanks) -> None:
        """Divide the heads over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        self.heads //= ranks.size

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before the residual sum (see `Block.mix`)."""
        where = positions_of(documents, state["rope"].shape[1] if state else 0, x_BSD)
        if isinstance(documents, Slices):
            others = Gathered(documents.gathering, *self._latents(x_BSD, where))  # overlaps with the queries
            o_BSHC = others.attend(partial(self._over, documents), self._queries(x_BSD, where))
            return others.before(self.o_proj(o_BSHC.flatten(-2)))
        else:
            q_BSHC = self._queries(x_BSD, where)
            latent_BSC, k_rope_BS1C = self._latents(x_BSD, where)
            known = remembered(state, latent=latent_BSC, rope=k_rope_BS1C)
            if state is not None and x_BSD.shape[1] == 1 and type(self.kv_b_proj) is Linear:  # no adapter wraps it
                o_BSHC = self._step(q_BSHC, *known)
            else:
                o_BSHC = attention_within(documents, q_BSHC, *self._keys_and_values(*known), scale=self.scale)
        return self.o_proj(o_BSHC.flatten(-2))

    def _over(self, slices: Slices, q_BSHC: Tensor, *latents: Tensor) -> Tensor:
        return attention_over(slices, q_BSHC, *self._keys_and_values(*latents), scale=self.scale)

    def _queries(self, x_BSD: Tensor, where: Where) -> Tensor:
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BSD))) if self.low_rank_queries else self.q_proj(x_BSD)
        q_BSHC, q_rope_BSHC = q.unflatten(-1, (self.heads, -1)).split(self.key_widths, dim=-1)
        if self.rotary is not None:
            q_rope_BSHC = self.rotary(q_rope_BSHC, *where)
        return torch.cat((q_BSHC, q_rope_BSHC), dim=-1)

    def _latents(self, x_BSD: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Return the normalized latents and the rotated shared keys."""
        latent_BSC, k_rope_BSC = self.kv_a_proj(x_BSD).split(self.latent_widths, dim=-1)
        k_rope_BS1C = k_rope_BSC.unsqueeze(2)
        if self.rotary is not None:
            k_rope_BS1C = self.rotary(k_rope_BS1C, *where)
        return self.kv_a_norm(latent_BSC), k_rope_BS1C

    def _keys_and_values(self, latent_BTC: Tensor, k_rope_BT1C: Tensor) -> tuple[Tensor, Tensor]:
        k_BTHC, v_BTHC = self.kv_b_proj(latent_BTC).unflatten(-1, (self.heads, -1)).split(self.up_widths, dim=-1)
        return torch.cat((k_BTHC, k_rope_BT1C.expand(-1, -1, self.heads, -1)), dim=-1), v_BTHC

    def _step(self, q_B1HC: Tensor, latent_BTR: Tensor, k_rope_BT1C: Tensor) -> Tensor:
        """Return the attention of the last position without expanding the latents, [B, 1, H, C of v]."""
        of_keys_HCR, of_values_HCR = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split(self.up_widths, dim=1)
        q_BHC, q_rope_BHC = q_B1HC[:, 0].split(self.key_widths, dim=-1)
        q_BHR = torch.einsum("bhc,hcr->bhr", q_BHC, of_keys_HCR)
        scores_BHT = q_BHR @ latent_BTR.mT + q_rope_BHC @ k_rope_BT1C[:, :, 0].mT
        scale = sum(self.key_widths) ** -0.5 if self.scale is None else self.scale
        shares_BHT = (scores_BHT * scale).softmax(-1, dtype=torch.promote_types(scores_BHT.dtype, torch.float32))
        seen_BHR = shares_BHT.to(latent_BTR.dtype) @ latent_BTR
        return torch.einsum("bhr,hcr->bhc", seen_BHR, of_values_HCR).unsqueeze(1)
