"""Kimi delta attention (Kimi Linear, arXiv:2510.26692): a gated delta net in which each channel of a key has a decay.

S_t = exp(g_t) S_(t-1)                       g_t is a vector as wide as a key: row c of S decays by exp(g_tc)
S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T   as in `weft.models.layers.delta_net`
o_t = S_t^T q_t
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fsdp import keep_dtype
from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.layers.block import Beside, Block, State
from weft.models.layers.convolution import CausalConvolution
from weft.models.layers.delta_net import delta_chunked, delta_stepwise
from weft.models.layers.kernels import fast_rule
from weft.models.layers.norm import GatedNorm
from weft.models.tensor_parallel import TensorRanks
from weft.moe.linear import Linear
from weft.moe.parts import part
from weft.moe.source import WeightSource

STEPS = 1e-3, 1e-1
"""The smallest and largest initial step of a channel."""


class KimiDelta(Block):
    """The Kimi delta attention layer: projection, short convolution, delta rule, gated norm, projection.

    `in_proj` gives q, k, v, one number b for each head, and two latents, one for the decay and one for the output gate.
    The strength of an update is beta = sigmoid(b). The log of the decay of each channel is g = -exp(A_log)
    softplus(f_proj(decay latent) + dt_bias). The output gate is g_proj(gate latent). Each key vector is scaled to
    length 1, and each query vector to length C^-0.5. C is the width of a head.

    For decoding, the layer caches the recurrent state S [B, H, C, C] and the state of the convolution.
    """

    graph_scopes: ClassVar = {"forward": ("mamba", None)}

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        self.heads, width = cfg.kda_num_heads, cfg.kda_head_dim
        inner = self.heads * width
        self.rule = fast_rule("torch", delta_chunked)
        self.source = source
        self.widths = 3 * inner, self.heads, width, width
        self.in_proj = Linear(cfg.hidden_size, sum(self.widths), source / "in_proj")
        self.conv1d = CausalConvolution(3 * inner, cfg.kda_conv_kernel, source / "conv1d", bias=False)
        self.f_proj = Linear(width, inner, source / "f_proj")
        self.g_proj = Linear(width, inner, source / "g_proj")
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.gated_norm = GatedNorm(width, cfg.rms_norm_eps, gate_first=False, sigmoid=True)
        self.out_proj = Linear(inner, cfg.hidden_size, source / "out_proj")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize exp(A_log) uniformly between 1 and 16, and dt_bias so that softplus(dt_bias) is log-uniform
        between the two numbers of `STEPS`."""
        for parameter in (self.A_log, self.dt_bias):
            keep_dtype(parameter)
        (self.source / "A_log").uniform_(self.A_log, 1.0, 16.0)
        self.A_log.log_()
        low, high = STEPS
        (self.source / "dt_bias").uniform_(self.dt_bias, math.log(low), math.log(high))
        step = self.dt_bias.exp()
        self.dt_bias.copy_(step + (-(-step).expm1()).log())  # the inverse of softplus

    def share(self, ranks: TensorRanks) -> None:
        """Divide the heads over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        inner, heads, of_decay, of_gate = self.widths
        self.heads //= ranks.size
        self.widths = inner // ranks.size, heads // ranks.size, of_decay, of_gate

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before the residual sum (see `Block.mix`)."""
        qkv, b, decay, gate = self.in_proj(x_BSD).split(self.widths, dim=-1)
        q, k, v = self.conv1d(qkv, state, documents).chunk(3, dim=-1)
        q_BSHC, k_BSHC, v_BSHC = (each.unflatten(-1, (self.heads, -1)) for each in (q, k, v))
        dt_bias = part(self, "dt_bias")
        steps = F.softplus(self.f_proj(decay).to(dt_bias.dtype) + dt_bias)
        g_BSHC = -part(self, "A_log").exp()[:, None] * steps.unflatten(-1, (self.heads, -1))
        known = state.get("delta") if state is not None else None
        if state is not None and x_BSD.shape[1] == 1:
            o_BSHC, last = delta_stepwise(q_BSHC, k_BSHC, v_BSHC, g_BSHC, b.sigmoid(), known)
        else:
            o_BSHC, last = self.rule(q_BSHC, k_BSHC, v_BSHC, g_BSHC, b.sigmoid(), known, documents)
        if state is not None:
            state["delta"] = last
        return self.out_proj(self.gated_norm(o_BSHC, self.g_proj(gate).unflatten(-1, (self.heads, -1))).flatten(-2))
