"""The layers that patterns are made of, and the parts they share.

Shapes in names: B batch, S sequence, D hidden size, H heads, C width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.moe import AllToAll, Dispatcher, Handle, MoE
from weft.moe.linear import Linear
from weft.moe.source import INITIAL_STD, WeightSource
from weft.moe.swiglu import swiglu
from weft.overlap import Crossing

FIRST_POSITIONS = 1024


class Embedding(nn.Embedding):
    """One vector per token; [...] int64 -> [..., hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, source: WeightSource) -> None:
        self.source = source  # torch's constructor resets the weight
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Set the initial weight."""
        self.source.normal_(self.weight, INITIAL_STD)


class RMSNorm(nn.Module):
    """Root mean square layer normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weight: ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), the two halves of a head forming the
    pairs.

    One instance serves all layers of a stack. Its tables are buffers [positions, head_dim] that checkpoints
    leave out; they grow when a longer sequence comes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.register_buffer("cos", torch.empty(FIRST_POSITIONS, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(FIRST_POSITIONS, head_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables anew, on the device and in the dtype that they have."""
        self._fill(self.cos.shape[0])

    @torch.no_grad()
    def _fill(self, positions: int) -> None:
        # A table made in inference mode could not be used by a training step afterwards.
        with torch.inference_mode(False):
            device, dtype = self.cos.device, self.cos.dtype
            even = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
            frequency = 1.0 / self.theta ** (even / self.head_dim)
            angle = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequency)
            cos, sin = angle.cos(), angle.sin()
            self.cos = torch.cat((cos, cos), dim=-1).to(dtype)
            self.sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def forward(self, x_BSHC: Tensor) -> Tensor:
        """Rotate the heads of positions 0, 1, ...; [B, S, H, C] -> [B, S, H, C]."""
        positions = x_BSHC.shape[1]
        if positions > self.cos.shape[0]:
            self._fill(1 << (positions - 1).bit_length())
        cos = self.cos[:positions, None].to(x_BSHC.dtype)
        sin = self.sin[:positions, None].to(x_BSHC.dtype)
        # The first half of `sin` is negative: (a, b) turns into (a cos - b sin, b cos + a sin).
        return torch.addcmul(x_BSHC * cos, x_BSHC.roll(self.head_dim // 2, -1), sin)


class Block(nn.Module):
    """A pre-norm residual layer: `x + mix(norm(x))`. The residual stream passes through `forward` only."""

    def __init__(self, cfg: HybridConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def mix(self, x_BSD: Tensor) -> Tensor:
        """What the layer adds to the residual stream, from its normalised input; [B, S, D] -> [B, S, D]."""
        raise NotImplementedError

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return x_BSD + self.mix(self.norm(x_BSD))


class Attention(Block):
    """Causal self-attention, groups of query heads sharing a key and value head (GQA, arXiv:2305.13245)."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, rotary: RotaryEmbedding) -> None:
        super().__init__(cfg)
        width = cfg.attention_head_dim
        self.heads = cfg.num_attention_heads
        self.key_value_heads = cfg.num_key_value_heads
        self.q_proj = Linear(cfg.hidden_size, self.heads * width, source / "q_proj")
        self.k_proj = Linear(cfg.hidden_size, self.key_value_heads * width, source / "k_proj")
        self.v_proj = Linear(cfg.hidden_size, self.key_value_heads * width, source / "v_proj")
        self.o_proj = Linear(self.heads * width, cfg.hidden_size, source / "o_proj")
        self.rotary = rotary

    def mix(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q_BSHC = self.rotary(self.q_proj(x_BSD).unflatten(-1, (self.heads, -1)))
        k_BSHC = self.rotary(self.k_proj(x_BSD).unflatten(-1, (self.key_value_heads, -1)))
        v_BSHC = self.v_proj(x_BSD).unflatten(-1, (self.key_value_heads, -1))
        mixed_BHSC = F.scaled_dot_product_attention(
            q_BSHC.transpose(1, 2),
            k_BSHC.transpose(1, 2),
            v_BSHC.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.key_value_heads,
        )
        return self.o_proj(mixed_BHSC.transpose(1, 2).flatten(-2))


class MLP(Block):
    """Gated MLP with SiLU (SwiGLU; Shazeer 2020, arXiv:2002.05202). It may end a logical layer."""

    dispatcher: Dispatcher | None = None

    def __init__(self, cfg: HybridConfig, source: WeightSource) -> None:
        super().__init__(cfg)
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, source / "gate_proj")
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, source / "up_proj")
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, source / "down_proj")

    def mix(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.down_proj(swiglu(self.gate_proj(x_BSD), self.up_proj(x_BSD)))

    def split(self, x_BSD: Tensor) -> Crossing:
        """The layer up to its experts, which are the MLP itself."""
        return Crossing(self.norm(x_BSD), {"residual": x_BSD})

    def run_experts(self, rows: Tensor, handle: None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.mix(rows)

    def expert_modules(self) -> list[nn.Module]:
        """What only `run_experts` calls."""
        return [self.gate_proj, self.up_proj, self.down_proj]

    def join(self, rows: Tensor, kept: dict[str, Tensor], handle: None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return kept["residual"] + rows


class Experts(MoE):
    """Mixture of experts as a pre-norm residual layer that ends a logical layer: `x + moe(norm(x))`."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, dispatcher: Dispatcher | None) -> None:
        super().__init__(
            cfg.hidden_size,
            cfg.moe_intermediate_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            dispatcher=dispatcher,
            shared_intermediate_size=cfg.shared_expert_intermediate_size,
            source=source,
            score=cfg.router_score,
            norm_topk_prob=cfg.norm_topk_prob,
            scaling_factor=cfg.routed_scaling_factor,
            num_groups=cfg.n_group,
            topk_groups=cfg.topk_group,
            expert_bias=cfg.expert_bias,
            aux_loss_coef=cfg.aux_loss_coef,
            z_loss_coef=cfg.z_loss_coef,
            capacity_factor=cfg.capacity_factor,
        )
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def split(self, x_BSD: Tensor) -> Crossing:
        """The layer up to its experts: norm, router, shared expert, rows sorted for sending."""
        rows, weights, shared, loss, handle = self.send(self.norm(x_BSD))
        kept = {"residual": x_BSD, "weights": weights}
        if shared is not None:
            kept["shared"] = shared
        return Crossing(rows, kept, handle, loss)

    def expert_modules(self) -> list[nn.Module]:
        """What only `run_experts` calls."""
        return [self.experts]

    def join(self, rows: Tensor, kept: dict[str, Tensor], handle: Handle) -> Tensor:
        """The weighted rows and the residual stream; -> [B, S, D]."""
        return kept["residual"] + self.receive(rows, kept["weights"], kept.get("shared"), handle)


def dispatcher_of(cfg: HybridConfig, meshes: Meshes | None) -> Dispatcher | None:
    """What moves tokens to experts on other ranks; None where every expert is here."""
    if meshes is None or meshes.ep is None:
        return None
    return AllToAll(meshes.ep, cfg.num_experts)
