"""Gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

S_t = exp(g_t) S_(t-1)                       the state [dk, dv] of each head decays (at least fp32)
S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T   the value stored under key k_t moves towards v_t
o_t = S_t^T q_t

`delta_stepwise` computes these three lines. If document numbers are given, the decay into the first position of each
document is 0.

`delta_chunked` computes the same in chunks of L positions. The updates in a chunk depend on each other through a
triangular system (the UT transform, arXiv:2406.06484, section 3). The systems of all chunks are solved at once. The
states are computed one chunk after another.

The log of the decay, g, is one number per head, or one number per channel of a head's key (`kimi_delta`).

Suffixes of names: H key heads, R value heads per key head, K chunks, L positions of a chunk, C width of keys or values,
D decays per head (1 or C).
"""

import math
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
from weft.models.layers.kernels import fast_rule
from weft.models.layers.norm import GatedNorm
from weft.models.tensor_parallel import TensorRanks
from weft.moe.linear import Linear
from weft.moe.parts import part
from weft.moe.source import WeightSource

CHUNK = 64
CHUNK_OF_CHANNELS = 16
"""The chunk length if each channel has its own decay. It is smaller than `CHUNK`, because the decay between two
positions is then a vector."""
TINY = 1e-6
"""Added to the squared length of a key or query before the square root is taken."""


class GatedDeltaNet(Block):
    """The gated delta net layer: projection, short convolution, delta rule, gated norm, projection.

    `in_proj` gives q, k, v, the output gate z, and two numbers b and a for each value head. The strength of an update
    is beta = sigmoid(b). The log of the decay is g = -exp(A_log) softplus(a + dt_bias). Each key vector is scaled to
    length 1, and each query vector to length dk^-0.5. dk and dv are the widths of a key head and a value head.

    For decoding, the layer caches the recurrent state S [B, value heads, dk, dv] and the state of the convolution.
    """

    graph_scopes: ClassVar = {"forward": ("mamba", None)}

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        keys, self.value_heads = cfg.linear_num_key_heads, cfg.linear_num_value_heads
        of_keys, of_values = keys * cfg.linear_key_head_dim, self.value_heads * cfg.linear_value_head_dim
        self.key_heads = keys
        self.rule = fast_rule(cfg.delta_kernel, delta_chunked)
        self.source = source
        self.widths = 2 * of_keys + of_values, of_values, self.value_heads, self.value_heads
        self.inner_widths = of_keys, of_keys, of_values
        self.in_proj = Linear(cfg.hidden_size, sum(self.widths), source / "in_proj")
        self.conv1d = CausalConvolution(self.widths[0], cfg.linear_conv_kernel_dim, source / "conv1d", bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.gated_norm = GatedNorm(cfg.linear_value_head_dim, cfg.rms_norm_eps, gate_first=False)
        self.out_proj = Linear(of_values, cfg.hidden_size, source / "out_proj")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize exp(A_log) uniformly between 0.01 and 16, and dt_bias with 1."""
        for parameter in (self.A_log, self.dt_bias):
            keep_dtype(parameter)
        (self.source / "A_log").uniform_(self.A_log, 0.01, 16.0)
        self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def share(self, ranks: TensorRanks) -> None:
        """Divide the heads over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        size, (of_keys, _, of_values), keys = ranks.size, self.inner_widths, self.key_heads
        self.value_heads, self.key_heads = self.value_heads // size, max(1, keys // size)
        of_keys, of_values = of_keys * self.key_heads // keys, of_values // size
        self.widths = 2 * of_keys + of_values, of_values, self.value_heads, self.value_heads
        self.inner_widths = of_keys, of_keys, of_values

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before the residual sum (see `Block.mix`)."""
        qkv, z, b, a = self.in_proj(x_BSD).split(self.widths, dim=-1)
        q, k, v = self.conv1d(qkv, state, documents).split(self.inner_widths, dim=-1)
        q_BSHC, k_BSHC = (each.unflatten(-1, (self.key_heads, -1)) for each in (q, k))
        v_BSHC, z_BSHC = (each.unflatten(-1, (self.value_heads, -1)) for each in (v, z))
        dt_bias = part(self, "dt_bias")
        g_BSH = -part(self, "A_log").exp() * F.softplus(a.to(dt_bias.dtype) + dt_bias)
        known = state.get("delta") if state is not None else None
        if state is not None and x_BSD.shape[1] == 1:
            o_BSHC, last = delta_stepwise(q_BSHC, k_BSHC, v_BSHC, g_BSH, b.sigmoid(), known)
        else:
            o_BSHC, last = self.rule(q_BSHC, k_BSHC, v_BSHC, g_BSH, b.sigmoid(), known, documents)
        if state is not None:
            state["delta"] = last
        return self.out_proj(self.gated_norm(o_BSHC, z_BSHC).flatten(-2))


def delta_stepwise(
    q_BSHC: Tensor,
    k_BSHC: Tensor,
    v_BSHC: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHCC: Tensor | None = None,
    numbers_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of the delta rule (see the top of this file), position after position.

    - `q`, `k`: [B, S, key heads, dk]. This function scales them (see `GatedDeltaNet`).
    - `v`: [B, S, value heads, dv]. Value head j uses key head j // (value heads / key heads).
    - `g` (at most 0): [B, S, value heads] or [B, S, value heads, dk].
    - `beta`: [B, S, value heads].
    - `numbers_BS`: the document number of each position. If given, the state is set to 0 before the first position of
      each document and of each row.

    Returns o [B, S, value heads, dv] and the last state [B, value heads, dk, dv], both in at least fp32.
    """
    q, k, v, g, beta, S = _prepared(q_BSHC, k_BSHC, v_BSHC, g_BSH, beta_BSH, state_BHCC)
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    outputs = []
    for t in range(v.shape[1]):
        key = k[:, t, :, :, None]
        if numbers_BS is not None:
            begins_B = (numbers_BS[:, t] != numbers_BS[:, t - 1]) if t else torch.ones_like(numbers_BS[:, 0]).bool()
            S = S.masked_fill(begins_B[:, None, None, None], 0.0)
        S = g[:, t, ..., None].exp() * S
        missing = v[:, t] - (S * key).sum(-2)
        S = S + key * (beta[:, t, :, None] * missing)[..., None, :]
        outputs.append((S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1), S


def delta_chunked(
    q_BSHC: Tensor,
    k_BSHC: Tensor,
    v_BSHC: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHCC: Tensor | None = None,
    numbers_BS: Tensor | None = None,
    slices: Slices | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the result of `delta_stepwise` by matrix products over chunks.

    `slices`: if given, the tensors have one row for each of this rank's slices (`Slices.rows`). The initial state of a
    slice is the state after the slice before it, which may be on another context rank. The returned last state lacks
    the effect of earlier slices.
    """
    before_B = None
    if slices is not None:
        numbers_BS, before_B = slices.numbers(q_BSHC.device), slices.before(q_BSHC.device)
    q, k, v, g, beta, S = _prepared(q_BSHC, k_BSHC, v_BSHC, g_BSH, beta_BSH, state_BHCC)
    positions, heads, width = v.shape[1], k.shape[2], v.shape[-1]
    length = min(CHUNK if g.shape[-1] == 1 else CHUNK_OF_CHANNELS, positions)
    # Padding at the end has g = 0 and beta = 0, and so does not change the state.
    q_BHKLC, k_BHKLC = (chunks(each, length).permute(0, 3, 1, 2, 4) for each in (q, k))
    v_BHRKLC = chunks(v, length).unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 2, 5)
    g_BHRKDL = chunks(g, length).unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 5, 2)
    beta_BHRKL1 = chunks(beta, length).unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 2)[..., None]
    numbers_B11K1L = states_BK = None
    if numbers_BS is not None:
        numbers_BKL = chunked_numbers(numbers_BS, length)
        numbers_B11K1L, states_BK = numbers_BKL[:, None, None, :, None], entering(numbers_BKL, before_B)
    # The log of the decay since the start of the chunk, or of the document if it starts in the chunk.
    fade_BHRKDL = summed(g_BHRKDL, numbers_B11K1L)
    total_BHRKD1 = fade_BHRKDL[..., -1:]
    decay_BHRKDLL = between(fade_BHRKDL, numbers_B11K1L)
    from_start_BHRKDL, to_end_BHRKDL, across_BHRKD1 = fade_BHRKDL, total_BHRKD1 - fade_BHRKDL, total_BHRKD1
    if numbers_B11K1L is not None and states_BK is not None:  # masked before exp, as in `between`
        before, after = (each[:, None, None, :, None, None] for each in (states_BK[:, :-1], states_BK[:, 1:]))
        from_start_BHRKDL = from_start_BHRKDL.where(numbers_B11K1L == before, -math.inf)
        to_end_BHRKDL = to_end_BHRKDL.where(numbers_B11K1L == after, -math.inf)
        across_BHRKD1 = across_BHRKD1.where(before == after, -math.inf)
    from_start_BHRKLD, to_end_BHRKLD = from_start_BHRKDL.exp().mT, to_end_BHRKDL.exp().mT
    across_BHRKD1 = across_BHRKD1.exp()

    # A chunk's updates are u - w S: (1 + tril(beta (k decay k^T), -1)) [u, w] = [beta v, beta decay k].
    k_BH1KLC = k_BHKLC.unsqueeze(2)
    system = beta_BHRKL1 * _products(k_BH1KLC, k_BH1KLC, decay_BHRKDLL)
    right = torch.cat((beta_BHRKL1 * v_BHRKLC, (beta_BHRKL1 * from_start_BHRKLD) * k_BH1KLC), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((width, solved.shape[-1] - width), dim=-1)

    # The state is carried from chunk to chunk.
    to_end = (to_end_BHRKLD * k_BH1KLC).mT.unbind(3)
    fades = across_BHRKD1.unbind(3)
    S = S.unflatten(1, (heads, -1))
    states, written = [], []
    for u_L, w_L, k_L, fade in zip(u.unbind(3), w.unbind(3), to_end, fades):
        states.append(S)
        written.append(u_L - w_L @ S)
        S = fade * S + k_L @ written[-1]

    if slices is not None:
        # The state S before a slice adds T S to each state in the slice, with another matrix T for each chunk. Like the
        # states, the matrices are computed one chunk after another.
        T = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(*S.shape[:-1], -1)
        of_first = []
        for w_L, k_L, fade in zip(w.unbind(3), to_end, fades):
            of_first.append(T)
            T = fade * T - k_L @ (w_L @ T)
        others = slices.carrying(torch.matmul, T, S)

    # The output of a chunk has two terms: one from the state before the chunk, one from the chunk's own positions.
    q_BH1KLC = q_BHKLC.unsqueeze(2)
    scores_BHRKLL = _products(q_BH1KLC, k_BH1KLC, decay_BHRKDLL)
    states_BHRKCC, written_BHRKLC = torch.stack(states, dim=3), torch.stack(written, dim=3)
    if slices is not None:
        more_BHRKCC = torch.stack(of_first, dim=3) @ others()[:, :, :, None]
        states_BHRKCC, written_BHRKLC = states_BHRKCC + more_BHRKCC, written_BHRKLC - w @ more_BHRKCC
    from_start = (from_start_BHRKLD * q_BH1KLC) @ states_BHRKCC
    o_BHRKLC = from_start + scores_BHRKLL @ written_BHRKLC
    o_BSHC = o_BHRKLC.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)
    return o_BSHC[:, :positions], S.flatten(1, 2)


def _products(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """Return the decayed dot products, [..., L, L], of the vectors in `rows` and `columns`, [..., L, C] each.

    `decay`: the decay from one position to another, [..., D, L, L].
    """
    if decay.shape[-3] == 1:
        return (rows @ columns.mT) * decay.squeeze(-3)
    return torch.einsum("...ic,...jc,...cij->...ij", rows, columns, decay)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments in at least fp32. Keys are scaled to length 1, queries to length dk^-0.5.

    A missing state becomes zeros. If each head has one decay, `g` gets an additional last dimension of size 1.
    """
    dtype = torch.promote_types(g.dtype, torch.float32)
    q, k = (each * (each.square().sum(-1, keepdim=True) + TINY).rsqrt() for each in (q.to(dtype), k.to(dtype)))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)
    g = g.to(dtype) if g.dim() == 4 else g.to(dtype)[..., None]
    return q * q.shape[-1] ** -0.5, k, v.to(dtype), g, beta.to(dtype), state.to(dtype)
