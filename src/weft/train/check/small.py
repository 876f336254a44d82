"""Shrinks a configuration: the same kinds of layers and mesh axes with smaller sizes.

in the configuration              in the small copy
sizes split over an axis          few heads, groups, experts or columns per rank
heads in groups                   fewer groups of the same size; if none fits, the same number of groups with few heads
layers                            one of each kind in each segment; if there is only one segment, also at least two in
                                  total and one per stage. All layers if settings name layers by number
more than `_FEW` ranks            at most 2 replicas, 2 shards and 2 expert-parallel ranks, if that fits
precision                         fp64, without quantized weights
router losses                     off with context parallelism, where each rank would average over its part of a row
compile, graphs, offload,         off: layers use torch's operations
kernels, capacity of experts
"""

import dataclasses
from collections.abc import Callable, Iterator
from math import gcd

from weft.models import HybridConfig
from weft.models.pattern import LogicalLayer
from weft.models.shared import check_context, check_shared
from weft.train.config import ShardingConfig, TrainConfig
from weft.train.errors import ConfigError

_FEW = 8
"""Up to this number of ranks, all axes keep their sizes."""
_WIDTHS = {
    "head_dim": (8, 16, 32),
    "hidden_size": (16, 32, 64),
    "q_lora_rank": (12,),
    "kv_lora_rank": (8,),
    "qk_nope_head_dim": (8,),
    "qk_rope_head_dim": (4, 8, 16),
    "v_head_dim": (8,),
    "mamba_head_dim": (4,),
    "ssm_state_size": (4,),
    "chunk_size": (4,),
    "linear_key_head_dim": (4,),
    "linear_value_head_dim": (4,),
    "kda_head_dim": (4,),
    "moe_latent_size": (12,),
    "sliding_window": (5,),
    "num_experts_per_tok": (2,),  # with 1, scores are scaled to 1, and the router gets no gradient
    "vocab_size": (61, 97),
}
"""Sizes that no axis needs to divide, each with the smaller values to try."""
_HEADS = {
    "num_attention_heads": "num_key_value_heads",
    "mamba_num_heads": "mamba_n_groups",
    "linear_num_value_heads": "linear_num_key_heads",
}
"""Setting with a number of heads -> setting with the number of groups over which these heads are spread."""
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Widths that are split over tensor-parallel ranks."""


def smaller(config: TrainConfig, ranks: int) -> tuple[TrainConfig, int]:
    """Return the small configuration and the number of its ranks."""
    config = _with_plain_options(config)
    config, ranks = _on_fewer_ranks(config, ranks)
    model = _with_fewer_layers(config)
    model = _with_smaller_sizes(model, config.sharding)
    config = dataclasses.replace(config, model=model)
    return _with_fewer_rows(config, ranks), ranks


def data_ranks(config: TrainConfig, ranks: int) -> int:
    """Return the number of ranks over which a batch is split."""
    sharding = config.sharding
    return ranks // (sharding.pp * sharding.tp * sharding.cp)


def _with_plain_options(config: TrainConfig) -> TrainConfig:
    loop = dataclasses.replace(
        config.train,
        steps=max(config.train.steps, 2),  # with 1 the only step would be the last, whose timeline is recorded
        precision="fp32",
        unquantized_ends=0,
        compile="",
        check=False,
        peak_tflops=0.0,
    )
    sharding = dataclasses.replace(config.sharding, offload=False, graphs=(), graphs_backend="cuda")
    model = dataclasses.replace(config.hybrid, mamba_kernel="torch", delta_kernel="torch")
    return dataclasses.replace(config, model=model, train=loop, sharding=sharding)


def _on_fewer_ranks(config: TrainConfig, ranks: int) -> tuple[TrainConfig, int]:
    sharding = config.sharding
    if ranks <= _FEW:
        return config, ranks
    copies, ep = min(sharding.dp_replicate, 2), sharding.ep
    per_copy = data_ranks(config, ranks) // sharding.dp_replicate
    beside = sharding.cp * sharding.tp // sharding.expert_ranks
    """The number of ranks of each data-parallel shard over which experts are spread."""
    within = per_copy * beside % ep == 0
    """Whether an expert-parallel group lies inside one replica."""
    alone = per_copy * beside * sharding.dp_replicate == ep
    for fewer in dict.fromkeys((min(ep, 2), ep)):
        for shards in range(min(per_copy, 2), per_copy + 1):
            everyone = shards * beside * copies
            fits = everyone % fewer == 0 and (shards * beside % fewer == 0) == within
            if fits and (fewer == 1 or (everyone == fewer) == alone):
                return _sized(config, copies, shards, fewer)
    return config, ranks


def _sized(config: TrainConfig, copies: int, shards: int, ep: int) -> tuple[TrainConfig, int]:
    before = config.sharding
    kept = before.reshard_after_forward
    if kept is not None and not isinstance(kept, bool):
        spread = shards * before.cp * before.tp // before.expert_ranks
        least = spread // ep if ep > 1 and spread % ep == 0 else shards * before.cp
        kept = gcd(kept, gcd(least, shards * before.cp))
    outer = before.outer_strategy if copies > 1 else "no_shard"
    after = dataclasses.replace(
        before, dp_replicate=copies, dp_shard=-1, ep=ep, reshard_after_forward=kept, outer_strategy=outer
    )
    model = config.model
    ranks = before.pp * copies * shards * before.cp * before.tp
    rows = config.train.microbatch_size * config.train.global_batch_size * shards * copies
    loop = dataclasses.replace(config.train, global_batch_size=rows)
    return dataclasses.replace(config, sharding=after, model=model, train=loop), ranks


# --- the model --------------------------------------------------------------------------------------------------------


def _with_fewer_layers(config: TrainConfig) -> HybridConfig:
    model = config.hybrid
    _, slash, depths = model.pattern.partition("/")
    segments = model.parsed.segments
    numbered = model.windowed is not None or model.unrotated
    stages = config.sharding.pp * config.chunks
    if len(segments) > 1:
        kept = [_kinds(segment) for segment in segments]
    else:
        kinds = _kinds(segments[0])
        while len(kinds) < max(stages, 2) and len(kinds) < len(segments[0]):
            kinds += kinds
        kept = [kinds]
    if numbered or sum(map(len, kept)) >= len(model.parsed.layers):
        return model
    written = "|".join("".join(f"[{each}]" if len(each) > 1 else each for each in segment) for segment in kept)
    return dataclasses.replace(model, pattern=written + slash + depths)


def _kinds(layers: tuple[LogicalLayer, ...]) -> list[str]:
    return list(dict.fromkeys(layer.symbols for layer in layers))


def _with_smaller_sizes(model: HybridConfig, sharding: ShardingConfig) -> HybridConfig:
    tp, ep = sharding.tp, sharding.ep
    model = dataclasses.replace(model, capacity_factor=None, pad_to_capacity=False)
    for many, few in _HEADS.items():
        model = _first(model, sharding, _heads(model, many, few, tp))
    if model.head_dim is None:
        model = _first(model, sharding, [{"head_dim": width} for width in (8, 16, model.attention_head_dim)])
    for name, sizes in _WIDTHS.items():
        model = _first(model, sharding, _below(model, name, sizes))
    least = max(2 * model.n_group, model.num_experts_per_tok + 1)
    model = _first(
        model, sharding, _below(model, "num_experts", (ep * each for each in range(1, 65) if ep * each >= least))
    )
    for name in _INNER:
        if getattr(model, name):
            model = _first(model, sharding, _below(model, name, (2 * tp, 4 * tp, 8 * tp)))
    return model


def _below(model: HybridConfig, name: str, sizes: object) -> Iterator[dict[str, int]]:
    now = getattr(model, name)
    return ({name: size} for size in sizes if now is not None and size < now)  # type: ignore[attr-defined]


def _heads(model: HybridConfig, many: str, few: str, tp: int) -> Iterator[dict[str, int]]:
    before = getattr(model, many), getattr(model, few)
    if before[1] == 0 or before[0] % before[1]:
        return
    for groups in range(1, before[1]):
        heads = before[0] // before[1] * groups
        if (groups < tp) == (before[1] < tp) and (groups % tp == 0) == (before[1] % tp == 0):
            yield {many: heads, few: groups}
    smallest = max(tp // before[1], 2)
    yield {many: smallest * before[1], few: before[1]}


def _first(model: HybridConfig, sharding: ShardingConfig, candidates: object) -> HybridConfig:
    """Return `model` with the first of `candidates` (field -> size) that can be divided over the ranks. If none can,
    return `model`."""
    for changes in candidates:  # type: ignore[attr-defined]
        try:
            changed = dataclasses.replace(model, **changes)
            check_context(changed, sharding.cp, sharding.tp)
            if sharding.tp > 1:
                check_shared(changed, sharding.tp, sharding.expert_ranks)
        except ValueError:
            continue
        return changed
    return model


# --- the batch --------------------------------------------------------------------------------------------------------


def _with_fewer_rows(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return `config` with short rows, at most 2 per microbatch, and as few microbatches as the pipeline's schedule
    accepts.

    The length of a row is a multiple of 2 x cp x tp. Each data-parallel rank keeps at least 2 microbatches if it has 2
    or more. With context parallelism, router losses are off.
    """
    sharding, dp = config.sharding, data_ranks(config, ranks)
    unit = 2 * sharding.cp * sharding.tp
    length = unit * -(-24 // unit)
    model = config.hybrid
    if sharding.cp > 1:
        model = dataclasses.replace(model, aux_loss_coef=0.0, z_loss_coef=0.0)
    size, most = min(config.train.microbatch_size, 2), config.microbatches_per_step(dp)

    def made(count: int) -> TrainConfig:
        loop = dataclasses.replace(config.train, microbatch_size=size, global_batch_size=size * count * dp)
        data = dataclasses.replace(config.data, sequence_length=length)
        return dataclasses.replace(config, model=model, train=loop, data=data)

    fits: Callable[[TrainConfig], object] = lambda found: sharding.pp == 1 or found.table(ranks)  # noqa: E731
    for count in range(min(2, most), most):
        try:
            fits(found := made(count))
        except ConfigError:
            continue
        return found
    return made(most)
