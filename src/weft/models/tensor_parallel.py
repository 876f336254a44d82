"""Tensor parallelism with sequence parallelism: layers are split over the `tp` ranks of a mesh axis.

Between blocks, each of the `tp` ranks has a part of the positions, [B, S / tp, D]. In a block, a rank gathers all
positions and computes its own heads, groups or columns. The output of the last projection is reduce-scattered over the
positions:

    x [B, S/tp, D]   norm   gather   [B, S, D]   this rank's heads   last projection   sum, scatter   [B, S/tp, D]

Experts may also stay whole (see `TensorRanks.experts`). Each rank then routes only its own positions, without a gather.

`cuts_of` lists how each parameter is divided. A parameter that is not cut has a partial gradient on each rank. Norms
see only this rank's positions, and modules between the gather and the scatter see only this rank's heads. The partial
gradients are summed over the ranks. See `weft.moe.parts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.groups import group_of
from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.gathering import gathered, summed
from weft.moe.parts import Cut, place

LANE = "tensor"
CUT, ALIKE, SPREAD = "cut", "alike", "spread"


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks, over which layers are split. `mesh`: the 1-D mesh of these ranks."""

    mesh: DeviceMesh
    experts: str = CUT
    """`CUT`: each expert is split over the ranks. `ALIKE`: each rank has all experts, whole. `SPREAD`: each rank has
    some experts, whole."""

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return group_of(self.mesh, 0)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The index of this rank."""
        return self.mesh.get_local_rank()

    def gather(self, x: Tensor) -> Tensor:
        """All-gather the ranks' positions, [B, S / size, ...] -> [B, S, ...]. Backward reduce-scatters the gradient."""
        return torch.cat(self.stacked(x).unbind(), dim=1)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter `x` over positions, [B, S, ...] -> [B, S / size, ...]. Backward all-gathers the gradient."""
        return summed(self.group, torch.stack(x.chunk(self.size, dim=1)), lane=LANE)

    def stacked(self, x: Tensor) -> Tensor:
        """All-gather the ranks' `x` in rank order, [...] -> [size, ...]. Backward reduce-scatters the gradient."""
        return gathered(self.group, x, lane=LANE)[0]

    def mean(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return the mean of `x` over the `count` adjacent ranks that start at rank `first`. Every rank of `mesh` must
        call this method."""
        return self.stacked(x)[first : first + count].mean(0)

    def joined(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Concatenate `x` of all ranks along `dim`. `sizes`: the size of each rank's `x` along `dim`.

        Backward returns this rank's part of the gradient, without a sum over the ranks. Every rank must therefore
        compute the same loss from the result.
        """
        return _Joined.apply(x, self, dim, tuple(sizes))

    def shared(self, loss: Tensor) -> Tensor:
        """Return `loss`, which is equal on all ranks. Backward divides its gradient by the number of ranks, because the
        gradients of parameters are summed over the ranks."""
        return _Shared.apply(loss, self.size)

    def positions(self, x: Tensor) -> Tensor:
        """Return this rank's positions of `x`, which is equal on all ranks; [B, S, ...] -> [B, S / size, ...]."""
        return x.chunk(self.size, dim=1)[self.rank]

    def require(self, tokens: Tensor) -> None:
        """Raise `ValueError` if S, the number of positions in `tokens` [B, S], is not a multiple of the number of
        ranks."""
        if tokens.shape[1] % self.size:
            raise ValueError(
                f"{tokens.shape[1]} positions on tp={self.size} ranks, which must all have the same number: pad the "
                f"rows to a multiple of {self.size}, with labels of -100 at their end"
            )


def tensor_ranks(meshes: Meshes | None) -> TensorRanks | None:
    """Return the tensor-parallel ranks of `meshes`, or None without tensor parallelism."""
    if meshes is None or meshes.tp is None:
        return None
    return TensorRanks(meshes.tp, CUT if meshes.etp is not None else ALIKE if meshes.ep is None else SPREAD)


# --- how every parameter is divided -----------------------------------------------------------------------------------

WHOLE = None
"""Marks a parameter that is whole on every rank, with a partial gradient."""


@dataclass(frozen=True)
class Rows:
    """Marks the last projection of a block, which is row-parallel. Its weight is cut along the input features, which
    consist of `units` units (such as heads) of `width` features each. With 0 units, the weight is not cut. The outputs
    are summed over the ranks, and the bias is added once."""

    units: int
    width: int = 1


@dataclass(frozen=True)
class Elsewhere:
    """Marks a parameter of experts that `share` leaves unchanged, because `GroupedExperts.spread` distributes whole
    experts over ranks."""


Lies = Cut | Rows | Elsewhere | None


def _columns(*sections: tuple[int, int], dim: int = 0) -> Cut:
    return Cut(dim, sections)


def cuts_of(symbol: str, cfg: HybridConfig, experts: str = CUT) -> dict[str, Lies]:
    """Return how each parameter of a block with `symbol` is divided over ranks (None: it is whole).

    A key is the name of a parameter or of a module in the block. The entry of a module applies to the parameters that
    are directly in it and have no entry of their own. `experts`: see `TensorRanks`.
    """
    norms: dict[str, Lies] = {"norm": WHOLE, "post_norm": WHOLE}
    lies = norms | _KINDS[symbol](cfg)
    if symbol != "E" or experts == CUT:
        return lies
    # Each rank applies whole weights to its own positions, as it does in norms. Gradients are therefore partial.
    return {name: Elsewhere() if experts == SPREAD and name.startswith("experts.") else WHOLE for name in lies}


def _attention(cfg: HybridConfig) -> dict[str, Lies]:
    width = cfg.attention_head_dim
    queries, keys = (cfg.num_attention_heads, width), (cfg.num_key_value_heads, width)
    full = cfg.qk_norm == "full"
    return {
        "q_proj": _columns((queries[0], width * (2 if cfg.attention_output_gate else 1))),
        "k_proj": _columns(keys),
        "v_proj": _columns(keys),
        "q_norm": _columns(queries) if full else WHOLE,
        "k_norm": _columns(keys) if full else WHOLE,
        "sinks": _columns((queries[0], 1)),
        "o_proj": Rows(*queries),
    }


def _latent(cfg: HybridConfig) -> dict[str, Lies]:
    heads = cfg.num_attention_heads
    queries = _columns((heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim))
    return {
        "q_a_proj": WHOLE,
        "q_a_norm": WHOLE,
        "q_b_proj": queries,
        "q_proj": queries,
        "kv_a_proj": WHOLE,
        "kv_a_norm": WHOLE,
        "kv_b_proj": _columns((heads, cfg.qk_nope_head_dim + cfg.v_head_dim)),
        "o_proj": Rows(heads, cfg.v_head_dim),
    }


def _mamba(cfg: HybridConfig) -> dict[str, Lies]:
    heads, groups = (cfg.mamba_num_heads, cfg.mamba_head_dim), (cfg.mamba_n_groups, cfg.ssm_state_size)
    steps = (cfg.mamba_num_heads, 1)
    return {
        "in_proj": _columns(heads, heads, groups, groups, steps),
        "conv1d": _columns(heads, groups, groups),
        "A_log": _columns(steps),
        "D": _columns(steps),
        "dt_bias": _columns(steps),
        "gated_norm": _columns(heads),
        "out_proj": Rows(*heads),
    }


def _delta(cfg: HybridConfig) -> dict[str, Lies]:
    keys = (cfg.linear_num_key_heads, cfg.linear_key_head_dim)
    values, each = (cfg.linear_num_value_heads, cfg.linear_value_head_dim), (cfg.linear_num_value_heads, 1)
    return {
        "in_proj": _columns(keys, keys, values, values, each, each),
        "conv1d": _columns(keys, keys, values),
        "A_log": _columns(each),
        "dt_bias": _columns(each),
        "gated_norm": WHOLE,
        "out_proj": Rows(*values),
    }


def _kimi_delta(cfg: HybridConfig) -> dict[str, Lies]:
    heads, each, latent = (cfg.kda_num_heads, cfg.kda_head_dim), (cfg.kda_num_heads, 1), (1, cfg.kda_head_dim)
    return {
        "in_proj": _columns(heads, heads, heads, each, latent, latent),
        "conv1d": _columns(heads, heads, heads),
        "f_proj": _columns(heads),
        "g_proj": _columns(heads),
        "A_log": _columns(each),
        "dt_bias": _columns(heads),
        "gated_norm": WHOLE,
        "out_proj": Rows(*heads),
    }


def _parallel(cfg: HybridConfig) -> dict[str, Lies]:
    parts = {"attention": _attention(cfg), "mamba": _mamba(cfg)}
    return {f"{part}.{name}": how for part, lies in parts.items() for name, how in lies.items()}


def _mlp(cfg: HybridConfig) -> dict[str, Lies]:
    return _feed_forward("", cfg.intermediate_size)


def _experts(cfg: HybridConfig) -> dict[str, Lies]:
    inner = cfg.moe_intermediate_size, 1
    columns = {f"experts.{name}{bias}": _columns(inner, dim=-1) for name in _UP for bias in ("", "_bias")}
    return {
        **columns,
        "experts.down_proj": Rows(*inner),
        "experts.down_proj_bias": Rows(*inner),
        "router": WHOLE,
        "latent_in": WHOLE,
        "latent_out": Rows(0),
        **_feed_forward("shared_expert.", cfg.shared_expert_intermediate_size),
        "shared_expert_gate": WHOLE,
    }


def _feed_forward(path: str, inner: int) -> dict[str, Lies]:
    return {**{path + name: _columns((inner, 1)) for name in _UP}, path + "down_proj": Rows(inner)}


_UP = ("gate_proj", "up_proj")
_KINDS = {
    "*": _attention,
    "+": _latent,
    "P": _parallel,
    "M": _mamba,
    "G": _delta,
    "K": _kimi_delta,
    "-": _mlp,
    "E": _experts,
}


def ends_of(cfg: HybridConfig) -> dict[str, Lies]:
    """Return how each parameter outside of blocks is divided, in the form of `cuts_of`. The keys are module names."""
    tokens = _columns((cfg.vocab_size, 1))
    norms = dict.fromkeys(("final_layernorm", "embedding_norm", "hidden_norm"), WHOLE)
    return {"embedding": tokens, "output_layer": tokens, "project": WHOLE, **norms}


def share(module: nn.Module, lies: Mapping[str, Lies], ranks: TensorRanks, path: str = "") -> None:
    """Turn the parameters of `module` into DTensors over `ranks.mesh` (see `weft.moe.parts.place`). Parameters that
    `Elsewhere` marks are unchanged.

    `lies`: how each parameter is divided, a result of `cuts_of` or of `ends_of`. `path`: the key of `module` in the
    result of `ends_of`. For a result of `cuts_of`, `path` is empty, because the keys are names inside `module`.
    """
    for owner_name, owner in module.named_modules():
        where = ".".join(filter(None, (path, owner_name)))
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            full = f"{where}.{name}" if where else name
            how = lies[full] if full in lies else lies[where]
            if isinstance(how, Elsewhere):
                continue
            if isinstance(how, Rows):
                is_bias = name.endswith("bias")
                cut = None if is_bias or not how.units else Cut(1, ((how.units, how.width),))
                place(owner, name, ranks.mesh, cut, share=is_bias)
            else:
                place(owner, name, ranks.mesh, how)


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.dim, ctx.sizes = ranks, dim, sizes
        most = max(sizes)
        padded = torch.cat((x, x.new_zeros(_with(x.shape, dim, most - x.shape[dim]))), dim=dim)
        parts = gathered(ranks.group, padded, lane=LANE)[0]
        return torch.cat([each.narrow(dim, 0, size) for each, size in zip(parts, sizes)], dim=dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.split(ctx.sizes, dim=ctx.dim)[ctx.ranks.rank], None, None, None


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    found = list(shape)
    found[dim] = size
    return found


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, size: int) -> Tensor:
        ctx.size = size
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.size, None
