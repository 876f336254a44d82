"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Pair i of a head's width at position p turns by the angle p * f_i, f_i = theta^(-2i / width). Which elements are a
pair: i and i + width / 2, or with `interleave` 2i and 2i + 1. Longer contexts than a model was trained on change f:

    none      f
    linear    f / factor
    llama3    f / factor for long waves, f for short ones, a line in between (Llama 3.1, arXiv:2407.21783)
    yarn      the same by the number of turns in the first context; cos and sin grow a little (arXiv:2309.00071)
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.config import HybridConfig

FIRST_POSITIONS = 1024


class RotaryEmbedding(nn.Module):
    """Turns the first `width` elements of each head, and leaves the others.

    `scaling`: {"rope_type": one of those above, and its numbers}, as `HybridConfig.rope_scaling`; None: none.
    One instance serves all layers of a stack. Its tables are buffers [positions, width] that checkpoints leave out;
    they grow when a longer sequence comes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, width: int, theta: float, *, scaling: Mapping[str, Any] | None = None, interleave: bool = False
    ) -> None:
        super().__init__()
        self.width = width
        self.theta = theta
        self.scaling = scaling
        self.interleave = interleave
        self.register_buffer("cos", torch.empty(FIRST_POSITIONS, width), persistent=False)
        self.register_buffer("sin", torch.empty(FIRST_POSITIONS, width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables anew, on the device and in the dtype that they have."""
        self._fill(self.cos.shape[0])

    @torch.no_grad()
    def _fill(self, positions: int) -> None:
        # A table made in inference mode could not be used by a training step afterwards.
        with torch.inference_mode(False):
            device, dtype = self.cos.device, self.cos.dtype
            frequency, factor = frequencies(self.width, self.theta, self.scaling, device)
            angle = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequency)
            cos, sin = angle.cos() * factor, angle.sin() * factor
            join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if self.interleave else _beside
            self.cos = join(cos, cos).to(dtype)
            self.sin = join(-sin, sin).to(dtype)  # (a, b) turns into (a cos - b sin, b cos + a sin)

    def forward(self, x_BSHC: Tensor, start: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Turn the heads of positions start, start + 1, ...; [B, S, H, C] -> [B, S, H, C].

        `position_ids` [B, S]: the positions, each below `start` + S, where they do not follow one another.
        """
        positions = start + x_BSHC.shape[1]
        if positions > self.cos.shape[0]:
            self._fill(1 << (positions - 1).bit_length())
        where: Any = slice(start, positions) if position_ids is None else position_ids
        cos = self.cos[where].unsqueeze(-2).to(x_BSHC.dtype)
        sin = self.sin[where].unsqueeze(-2).to(x_BSHC.dtype)
        turning, rest = x_BSHC.split((self.width, x_BSHC.shape[-1] - self.width), dim=-1)
        if self.interleave:
            partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = turning.roll(self.width // 2, -1)
        turned = torch.addcmul(turning * cos, partner, sin)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def extra_repr(self) -> str:
        return f"{self.width}, theta={self.theta}, scaling={self.scaling}, interleave={self.interleave}"


def rotary_of(cfg: HybridConfig, symbols: str) -> RotaryEmbedding | None:
    """What the attention layers among `symbols` share; None without such layers, or without rotation."""
    if not cfg.rope_theta or not set("*+") & set(symbols):
        return None
    width = cfg.rotary_width if "*" in symbols else cfg.qk_rope_head_dim
    return RotaryEmbedding(width, cfg.rope_theta, scaling=cfg.rope_scaling, interleave=cfg.rope_interleave)


def frequencies(
    width: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Radians per position of each pair, [width / 2] fp32, and what cos and sin are multiplied with."""
    even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    plain = 1.0 / theta ** (even / width)
    if scaling is None:
        return plain, 1.0
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    first = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = first * plain / (2 * math.pi)  # in the first context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    return _yarn(plain, theta, scaling), attention_factor(scaling)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """What yarn multiplies cos and sin with."""
    if (given := scaling.get("attention_factor")) is not None:
        return given
    factor, one, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    return yarn_scale(factor, one) / yarn_scale(factor, all_dim) if one and all_dim else yarn_scale(factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, yarn's growth of what goes into the softmax."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(plain: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    pairs, first = plain.numel(), scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(first / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    line = (torch.arange(pairs, dtype=torch.float32, device=plain.device) - low) / (high - low or 0.001)
    stretched = line.clamp(0, 1)
    return stretched * plain / scaling["factor"] + (1 - stretched) * plain


def _beside(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat((left, right), dim=-1)
