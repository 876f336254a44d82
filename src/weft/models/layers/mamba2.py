"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state space model with one decay per head and position.

h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T      h [P, N] for each head, in at least fp32
y_t = h_t C_t + D x_t

`ssd_stepwise` computes these two lines, without the term D x. Heads in a group share B and C. If document numbers are
given, the decay into the first position of each document is 0.

`ssd_chunked` computes the same in chunks of L positions. Within a chunk, the computation is attention with a decay:
y = (C B^T * exp(sums of dt A)) (dt x). The state carries the effect of earlier chunks to the next chunk.

Suffixes of names: H heads, P width of a head, G groups, N state, K chunks, L positions of a chunk, R heads of a group.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fsdp import keep_dtype
from weft.models.config import HybridConfig
from weft.models.context import Borders, Slices
from weft.models.layers.block import Beside, Block, State
from weft.models.layers.chunks import between, chunked_numbers, chunks, entering, summed
from weft.models.layers.convolution import CausalConvolution
from weft.models.layers.kernels import fast_scan
from weft.models.layers.norm import GatedNorm
from weft.models.tensor_parallel import TensorRanks
from weft.moe.linear import Linear
from weft.moe.parts import part
from weft.moe.source import WeightSource


class Mamba2(Block):
    """The Mamba-2 layer: projection, short convolution, state space, gated norm, projection.

    `in_proj` gives the gate, x, B, C, and one number for each head. The time step is dt =
    softplus(number + dt_bias), clamped to the range from `time_step_limit_min` to `time_step_limit_max`. For decoding,
    the layer caches the recurrent state h [B, H, P, N] and the state of the convolution.
    """

    graph_scopes: ClassVar = {"forward": ("mamba", None)}
    multipliers: Sequence[float] | None = None
    """Factors that multiply the parts of the projection: gate, x, B, C and step. None: all are 1."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        heads, width = cfg.mamba_num_heads, cfg.mamba_head_dim
        inner, shared = heads * width, cfg.mamba_n_groups * cfg.ssm_state_size
        self.heads, self.groups = heads, cfg.mamba_n_groups
        self.chunk_size = cfg.chunk_size
        self.scan = fast_scan(cfg.mamba_kernel, ssd_chunked)
        self.steps = cfg.time_step_min, cfg.time_step_max, cfg.time_step_floor
        self.limit = cfg.time_step_limit_min, cfg.time_step_limit_max
        self.source = source
        self.widths = inner, inner + 2 * shared, heads
        self.inner_widths = inner, shared, shared
        self.in_proj = Linear(cfg.hidden_size, sum(self.widths), source / "in_proj", bias=cfg.mamba_bias)
        self.conv1d = CausalConvolution(self.widths[1], cfg.conv_kernel, source / "conv1d", bias=cfg.conv_bias)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.gated_norm = None
        if cfg.mamba_norm != "none":
            gate_first = cfg.mamba_norm == "gate_first"
            self.gated_norm = GatedNorm(inner, cfg.rms_norm_eps, groups=self.groups, gate_first=gate_first)
        self.out_proj = Linear(inner, cfg.hidden_size, source / "out_proj", bias=cfg.mamba_bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize A = -exp(A_log) with -1, -2, ..., -H for the H heads. Initialize D with 1.

        Initialize dt_bias so that the time step softplus(dt_bias) is log-uniform from `time_step_min` to
        `time_step_max`, but at least `time_step_floor`.
        """
        for parameter in (self.A_log, self.D, self.dt_bias):
            keep_dtype(parameter)
        self.A_log.copy_(torch.arange(1, len(self.A_log) + 1, device=self.A_log.device).log())
        nn.init.ones_(self.D)
        low, high, floor = self.steps
        (self.source / "dt_bias").uniform_(self.dt_bias, math.log(low), math.log(high))
        step = self.dt_bias.exp().clamp(min=floor)
        self.dt_bias.copy_(step + (-(-step).expm1()).log())  # the inverse of softplus

    def share(self, ranks: TensorRanks) -> None:
        """Divide heads and groups over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        size, groups = ranks.size, self.groups
        inner, shared, _ = self.inner_widths
        self.heads, self.groups = self.heads // size, max(1, groups // size)
        inner, shared = inner // size, shared * self.groups // groups
        self.widths, self.inner_widths = (inner, inner + 2 * shared, self.heads), (inner, shared, shared)
        if self.gated_norm is not None:
            self.gated_norm.groups = self.groups
        if groups < size and self.gated_norm is not None:  # ranks share a group
            count = size // groups
            self.gated_norm.mean_over_ranks = partial(ranks.mean, first=ranks.rank // count * count, count=count)

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before the residual sum (see `Block.mix`)."""
        z, xBC, dt_BSH = self._projected(x_BSD)
        x, B, C = self.conv1d(xBC, state, documents).split(self.inner_widths, dim=-1)
        x_BSHP = x.unflatten(-1, (self.heads, -1))
        B_BSGN, C_BSGN = (each.unflatten(-1, (self.groups, -1)) for each in (B, C))
        dt_bias = part(self, "dt_bias")
        dt_BSH = F.softplus(dt_BSH.to(dt_bias.dtype) + dt_bias).clamp(*self.limit)
        known = state.get("ssm") if state is not None else None
        given = x_BSHP, dt_BSH, -part(self, "A_log").exp(), B_BSGN, C_BSGN, known
        if state is not None and x_BSD.shape[1] == 1:
            y_BSHP, last = ssd_stepwise(*given)
        else:
            y_BSHP, last = self.scan(*given, self.chunk_size, documents)
        if state is not None:
            state["ssm"] = last
        y_BSHP = y_BSHP + part(self, "D")[:, None] * x_BSHP
        y = y_BSHP.flatten(-2)
        return self.out_proj(
            (y * F.silu(z.to(y.dtype))).to(z.dtype) if self.gated_norm is None else self.gated_norm(y, z)
        )

    def _projected(self, x_BSD: Tensor) -> Sequence[Tensor]:
        """Return the gate, the input of the convolution, and the steps."""
        if self.multipliers is None:
            return self.in_proj(x_BSD).split(self.widths, dim=-1)
        parts = self.in_proj(x_BSD).split((self.widths[0], *self.inner_widths, self.widths[2]), dim=-1)
        z, x, B, C, dt = (each * multiplier for each, multiplier in zip(parts, self.multipliers))
        return z, torch.cat((x, B, C), dim=-1), dt


def ssd_stepwise(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    state_BHPN: Tensor | None = None,
    chunk_size: int | None = None,
    numbers_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence (see the top of this file), position after position.

    `numbers_BS`: the document number of each position. If given, the state is set to 0 before the first position of
    each document and of each row. `chunk_size` has no effect.

    Returns y [B, S, H, P], without the term D x, and the last state, both in at least fp32.
    """
    x, dt, A, B, C, h = _wide(x_BSHP, dt_BSH, A_H, B_BSGN, C_BSGN, state_BHPN)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (B, C))
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        if numbers_BS is not None:
            begins_B = (numbers_BS[:, t] != numbers_BS[:, t - 1]) if t else torch.ones_like(numbers_BS[:, 0]).bool()
            h = h.masked_fill(begins_B[:, None, None, None], 0.0)
        h = (step * A[:, None, None]).exp() * h + step * x[:, t, :, :, None] * B[:, t, :, None]
        outputs.append((h * C[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), h


def ssd_chunked(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    state_BHPN: Tensor | None = None,
    chunk_size: int = 128,
    numbers_BS: Tensor | None = None,
    slices: Slices | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the result of `ssd_stepwise` by matrix products over chunks.

    `slices`: if given, the tensors have one row for each of this rank's slices (`Slices.rows`). The initial state of a
    slice is the state after the slice before it, which may be on another context rank.
    """
    before_B = None
    if slices is not None:
        numbers_BS, before_B = slices.numbers(x_BSHP.device), slices.before(x_BSHP.device)
    x, dt, A, B, C, first = _wide(x_BSHP, dt_BSH, A_H, B_BSGN, C_BSGN, state_BHPN)
    positions, groups = x.shape[1], B.shape[2]
    length = min(chunk_size, positions)
    # Padding at the end has dt = 0, and so does not change the state.
    x, dt, B, C = (chunks(each, length) for each in (x * dt[..., None], dt, B, C))
    B_BKGLN, C_BKGLN = B.transpose(2, 3), C.transpose(2, 3)
    x_BKGRLP = x.transpose(2, 3).unflatten(2, (groups, -1))
    numbers_BK1L = states_BK = None
    if numbers_BS is not None:
        numbers_BKL = chunked_numbers(numbers_BS, length)
        numbers_BK1L, states_BK = numbers_BKL[:, :, None], entering(numbers_BKL, before_B)
    # The log of the decay since the start of the chunk, or of the document if it starts in the chunk.
    decay_BKHL = summed((dt * A).transpose(2, 3), numbers_BK1L)
    total_BKH = decay_BKHL[..., -1]

    # What each chunk adds to the state, then the state before each chunk. One matrix has the decays between all chunks.
    to_end_BKHL, from_start_BKHL = total_BKH[..., None] - decay_BKHL, decay_BKHL
    if numbers_BK1L is not None and states_BK is not None:  # masked before exp, as in `between`
        to_end_BKHL = to_end_BKHL.where(numbers_BK1L == states_BK[:, 1:, None, None], -math.inf)
        from_start_BKHL = from_start_BKHL.where(numbers_BK1L == states_BK[:, :-1, None, None], -math.inf)
    to_end_BKGRL1 = to_end_BKHL.exp().unflatten(2, (groups, -1)).unsqueeze(-1)
    added_BKGRPN = (x_BKGRLP * to_end_BKGRL1).mT @ B_BKGLN.unsqueeze(3)
    states = torch.cat((first.unflatten(1, (groups, -1)).unsqueeze(1), added_BKGRPN), dim=1)
    states_BHKX = states.flatten(2, 3).transpose(1, 2).flatten(-2)
    of_states = None if states_BK is None else states_BK[:, None]
    since_BHK = summed(F.pad(total_BKH.transpose(1, 2), (1, 0)), of_states)
    decays_BHKK = between(since_BHK, of_states)
    states_BHKPN = (decays_BHKK @ states_BHKX).unflatten(-1, first.shape[-2:])
    if slices is not None:
        others = slices.carrying(_carried, decays_BHKK[:, :, -1, 0], states_BHKPN[:, :, -1])

    # Within a chunk.
    scores_BKG1LL = (C_BKGLN @ B_BKGLN.mT).unsqueeze(3)
    y_BKGRLP = (scores_BKG1LL * between(decay_BKHL, numbers_BK1L).unflatten(2, (groups, -1))) @ x_BKGRLP

    if slices is not None:
        states_BHKPN = states_BHKPN + decays_BHKK[..., :1, None] * others()[:, :, None]
    before_BKGRPN = states_BHKPN[:, :, :-1].transpose(1, 2).unflatten(2, (groups, -1))
    last_BHPN = states_BHKPN[:, :, -1]

    # What the state before a chunk adds to the output at the chunk's positions.
    from_start_BKGRL1 = from_start_BKHL.exp().unflatten(2, (groups, -1)).unsqueeze(-1)
    y_BKGRLP = y_BKGRLP + (C_BKGLN.unsqueeze(3) @ before_BKGRPN.mT) * from_start_BKGRL1
    y_BSHP = y_BKGRLP.flatten(2, 3).transpose(2, 3).flatten(1, 2)
    return y_BSHP[:, :positions], last_BHPN


def _carried(decay_BH: Tensor, state_BHPN: Tensor) -> Tensor:
    return decay_BH[..., None, None] * state_BHPN


def _wide(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments in at least fp32. A missing state becomes zeros."""
    dtype = torch.promote_types(dt.dtype, torch.float32)
    batch, _, heads, width = x.shape
    if state is None:
        state = x.new_zeros(batch, heads, width, B.shape[-1], dtype=dtype)
    return x.to(dtype), dt.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype), state.to(dtype)
