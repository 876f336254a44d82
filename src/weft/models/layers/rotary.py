"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Pair i of a head's elements at position p is rotated by the angle p * f_i, f_i = theta^(-2i / width). A pair has the
elements i and i + width / 2, or with `interleave` 2i and 2i + 1. `scaling` changes f so that contexts can exceed the
"first context", the length with which the model was first trained (`original_max_position_embeddings`):

    none      f
    linear    f / factor
    llama3    f / factor for long wavelengths, f for short ones, interpolated in between (Llama 3.1, arXiv:2407.21783)
    yarn      like llama3, but interpolated linearly in i; cos and sin are scaled too (arXiv:2309.00071)
    dynamic   f with a larger theta, which grows with the length of sequences beyond the first context
    longrope  f / s_i, with a second list s for sequences longer than the first context; cos and sin are scaled too
              (arXiv:2402.13753)
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.kinds import classes_of
from weft.models.kinds.attention import AnyAttention, Attention

FIRST_POSITIONS = 1024
BY_LENGTH = ("dynamic", "longrope")
"""The values of `rope_type` whose rotation depends on the length of a sequence beyond the first context."""


class RotaryEmbedding(nn.Module):
    """Rotates the first `width` elements of each head, and leaves the others unchanged.

    - `scaling`: a dict like `HybridConfig.rope_scaling`. Its "rope_type" is a name in the table at the top of this
      file, and its other entries are the parameters of this type. None: no scaling.
    - `interleave`: whether a pair has the elements 2i and 2i + 1, not i and i + width / 2.
    - The attribute `local`: the `RotaryEmbedding` of layers with a window, or None if these layers use this instance.

    The attention layers of a stack share one instance. `cos` and `sin` are buffers [positions, width] that are not
    saved in checkpoints. They grow when a sequence is longer than the buffers. They stay in fp32 if the module is cast
    to half precision, or if torch's default dtype is a half-precision one.
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
        self.local: RotaryEmbedding | None = None
        self._spelled = self.extra_repr()
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(FIRST_POSITIONS, width, dtype=dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recompute `cos` and `sin`, on their device and in their dtype."""
        self._fill(self.cos.shape[0])

    def _apply(self, *args: Any, **options: Any) -> "RotaryEmbedding":
        super()._apply(*args, **options)
        if torch.finfo(self.cos.dtype).bits < 32:  # a cast back would not restore the precision
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self

    @torch.no_grad()
    def _fill(self, positions: int) -> None:
        # A table made in inference mode could not be used by a training step afterwards.
        with torch.inference_mode(False):
            self.cos, self.sin = self._table(0, positions)

    def _table(self, start: int, end: int, length: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions `start` to `end`, [positions, width]. `length`: see `frequencies`."""
        device, dtype = self.cos.device, self.cos.dtype
        frequency, factor = frequencies(self.width, self.theta, self.scaling, device, length)
        angle = torch.outer(torch.arange(start, end, dtype=torch.float32, device=device), frequency)
        cos, sin = angle.cos() * factor, angle.sin() * factor
        join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if self.interleave else _beside
        return join(cos, cos).to(dtype), join(-sin, sin).to(dtype)  # (a, b) turns into (a cos - b sin, b cos + a sin)

    @property
    def is_by_length(self) -> bool:
        """Whether the rotation depends on the length of a sequence."""
        return self.scaling is not None and self.scaling["rope_type"] in BY_LENGTH

    def _rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions `start` to `end`, [positions, width]. The sequence so far has the length
        `end`."""
        if self.is_by_length and end > self.scaling["original_max_position_embeddings"]:  # type: ignore[index]
            return self._table(start, end, end)
        if end > self.cos.shape[0]:
            self._fill(1 << (end - 1).bit_length())
        return self.cos[start:end], self.sin[start:end]

    def _rows_of(self, documents: Borders, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each position, [B, S, width] in `dtype`. All positions in documents are below `end`.

        cos and sin are computed once per batch. Queries and keys of all layers with this rotation share them, in
        forward and backward.
        """
        name = f"{self._spelled}, {self.cos.dtype} as {dtype}"  # everything that the tables depend on
        both = documents.kept(self.cos.device, name, lambda: torch.stack(self._turns(documents, end)).to(dtype))
        return both[0], both[1]

    def _turns(self, documents: Borders, end: int) -> tuple[Tensor, Tensor]:
        position_ids = documents.position_ids(self.cos.device)
        if not self.is_by_length:
            cos, sin = self._rows(0, end)
            return cos[position_ids], sin[position_ids]
        first = self.scaling["original_max_position_embeddings"]  # type: ignore[index]
        cos, sin = (rows[position_ids.clamp(max=len(rows) - 1)] for rows in self._rows(0, min(first, end)))
        reaches = documents.reaches(self.cos.device)
        for length in reaches[reaches > first].unique().tolist():
            of_it = (reaches == length).unsqueeze(-1)
            at = position_ids.clamp(max=length - 1)
            cos, sin = (new[at].where(of_it, old) for new, old in zip(self._table(0, length, length), (cos, sin)))
        return cos, sin

    def forward(self, x_BSHC: Tensor, start: int = 0, documents: Borders | None = None) -> Tensor:
        """Rotate the heads at each position by the angles of that position; [B, S, H, C] -> [B, S, H, C].

        Without `documents`, the positions are `start`, `start` + 1, ... With `documents`, the positions restart with 0
        in each document, and `start` only sets a limit: all positions must be less than `start` + S.
        """
        end = start + x_BSHC.shape[1]
        tables = self._rows(start, end) if documents is None else self._rows_of(documents, end, x_BSHC.dtype)
        cos, sin = (each.unsqueeze(-2).to(x_BSHC.dtype) for each in tables)
        turning, rest = x_BSHC.split((self.width, x_BSHC.shape[-1] - self.width), dim=-1)
        if self.interleave:
            partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = turning.roll(self.width // 2, -1)
        turned = torch.addcmul(turning * cos, partner, sin)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def extra_repr(self) -> str:
        return f"{self.width}, theta={self.theta}, scaling={self.scaling}, interleave={self.interleave}"


def changes_rotation(scaling: Mapping[str, Any], before: int, now: int) -> bool:
    """Return whether the rotation of the first `before` positions of a sequence changes when the sequence grows from
    `before` to `now` positions.

    `scaling`: a scaling whose "rope_type" is in `BY_LENGTH`.
    """
    first = scaling["original_max_position_embeddings"]
    return 0 < before < now and now > first and (scaling["rope_type"] == "dynamic" or before <= first)


def rotary_of(cfg: HybridConfig, symbols: str) -> RotaryEmbedding | None:
    """Return the `RotaryEmbedding` that all attention layers among `symbols` share.

    Return None if `symbols` have no attention layer, or if `cfg.rope_theta` is 0.
    """
    used = classes_of(symbols)
    if not cfg.rope_theta or AnyAttention not in used:
        return None
    width = cfg.rotary_width if Attention in used else cfg.qk_rope_head_dim
    rotary = RotaryEmbedding(width, cfg.rope_theta, scaling=cfg.rope_scaling, interleave=cfg.rope_interleave)
    if cfg.rope_local_theta is not None:
        rotary.local = RotaryEmbedding(width, cfg.rope_local_theta, interleave=cfg.rope_interleave)
    return rotary


def rotary_for(cfg: HybridConfig, rotary: RotaryEmbedding | None, attention: int) -> RotaryEmbedding | None:
    """Return the `RotaryEmbedding` of attention layer number `attention` (see `HybridConfig.window_of`).

    It is None if `rotary` is None or the layer is in `cfg.unrotated`. For a layer with a window, it is `rotary.local`,
    if there is one. In all other cases, it is `rotary`.
    """
    if rotary is None or attention in cfg.unrotated:
        return None
    return rotary.local if rotary.local is not None and cfg.window_of(attention) is not None else rotary


def frequencies(
    width: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device | None = None, length: int = 0
) -> tuple[Tensor, float]:
    """Return two results. The first: the frequency f_i of each pair, in radians per position, [width / 2] fp32. The
    second: the scale of cos and sin.

    `length`: the length of the sequence, or 0 if it is within the first context (see the top of this file).
    """
    even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    plain = 1.0 / theta ** (even / width)
    if scaling is None:
        return plain, 1.0
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    first = scaling["original_max_position_embeddings"]
    if kind == "dynamic":
        grown = theta * (factor * max(length, first) / first - (factor - 1)) ** (width / (width - 2))
        return 1.0 / grown ** (even / width), 1.0
    if kind == "longrope":
        divisors = torch.tensor(
            scaling["long_factor" if length > first else "short_factor"], dtype=even.dtype, device=device
        )
        return 1.0 / (divisors * theta ** (even / width)), longrope_factor(scaling)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = first * plain / (2 * math.pi)  # in the first context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    return _yarn(plain, theta, scaling), attention_factor(scaling)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return the number by which yarn multiplies cos and sin."""
    if (given := scaling.get("attention_factor")) is not None:
        return given
    factor, one, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    return yarn_scale(factor, one) / yarn_scale(factor, all_dim) if one and all_dim else yarn_scale(factor)


def longrope_factor(scaling: Mapping[str, Any]) -> float:
    """Return the number by which longrope multiplies cos and sin."""
    if (given := scaling.get("attention_factor")) is not None:
        return given
    factor, first = scaling["factor"], scaling["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the scale of queries and keys in yarn: 0.1 * mscale * ln(factor) + 1, or 1 if `factor` is at most 1."""
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
