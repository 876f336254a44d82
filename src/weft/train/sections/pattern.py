"""Checks a model that a pattern describes against the other sections."""

from weft.models import HybridConfig
from weft.models.shared import check_context, check_shared, least_row
from weft.train.errors import ConfigError
from weft.train.sections.data import DataConfig
from weft.train.sections.loop import LoopConfig
from weft.train.sections.rules import require
from weft.train.sections.sharding import ShardingConfig
from weft.train.toml_values import show


def check_pattern(model: HybridConfig, data: DataConfig, loop: LoopConfig, sharding: ShardingConfig) -> None:
    """Raise ConfigError for settings that do not fit `model` or its pattern, or that have no effect on `model`."""
    require(
        "data.factory",
        data.factory,
        not data.factory,
        "has no effect on a model described by a pattern, which reads tokens; set model.factory too, or leave it out",
    )
    require("model.pattern", model.pattern, bool(model.pattern), f"has no layer; try {show('[*-][*-]')}")
    _check_experts(model, loop, sharding.ep)
    fixed = "experts" not in sharding.graphs or model.pad_to_capacity
    rule = (
        'must not contain "experts", whose number of rows changes between calls, without model.pad_to_capacity = true'
    )
    require("sharding.graphs", list(sharding.graphs), fixed, rule)
    _check_shared_layers(model, data, sharding)
    _check_stages(model, loop, sharding.pp)


def _check_experts(model: HybridConfig, loop: LoopConfig, ep: int) -> None:
    require(
        "sharding.ep",
        ep,
        ep == 1 or "E" in model.pattern,
        f"model.pattern = {show(model.pattern)} has no experts (E) to distribute; set sharding.ep = 1",
    )
    fits = [size for size in range(1, model.num_experts + 1) if model.num_experts % size == 0]
    require("sharding.ep", ep, ep in fits, f"must divide model.num_experts = {model.num_experts}; choose from {fits}")
    require(
        "train.overlap",
        loop.overlap,
        ep > 1 or not loop.overlap,
        "hides the exchange of tokens between ranks, but sharding.ep = 1 has no exchange; set sharding.ep = 2 or "
        "more, or "
        "train.overlap = false",
    )
    require(
        "train.halves",
        loop.halves,
        not loop.halves or model.moe_rows_per == "rank",
        f'needs one row per rank, but model.moe_rows_per = {show(model.moe_rows_per)}; set that to "rank", or '
        "train.halves = false",
    )
    has_bias = model.expert_bias and "E" in model.pattern
    require(
        "train.expert_bias_rate",
        loop.expert_bias_rate,
        has_bias or loop.expert_bias_rate == LoopConfig.expert_bias_rate,
        "has no effect on a model without expert biases; set model.expert_bias = true, or leave it out",
    )


def _check_shared_layers(model: HybridConfig, data: DataConfig, sharding: ShardingConfig) -> None:
    tp, cp, length = sharding.tp, sharding.cp, data.sequence_length
    how, used = model.context_attention, set(model.pattern) & set("*P")
    exchanged = how != "heads" or (cp > 1 and bool(used))
    rule = "has no effect without layers * or P, or with sharding.cp = 1; leave it out"
    require("model.context_attention", how, exchanged, rule)
    try:
        check_context(model, cp, tp)
        if tp > 1:
            check_shared(model, tp, sharding.expert_ranks)
    except ValueError as error:
        axes = {"sharding.tp": tp, "sharding.cp": cp}
        shared = ", ".join(f"{name} = {size}" for name, size in axes.items() if size > 1)
        raise ConfigError(f"{shared}: model.{error}") from error
    least = least_row(model, cp)
    rule = f"must be at least {least} with sharding.cp = {cp}, so that a convolution needs only one other slice"
    require("data.sequence_length", length, length >= least, rule)
    if tp == 1:
        return
    fits = length % tp == 0 or sharding.cp > 1
    rule = f"must be a multiple of sharding.tp = {tp}, over which positions are cut"
    require("data.sequence_length", length, fits, rule)


def _check_stages(model: HybridConfig, loop: LoopConfig, pp: int) -> None:
    segments = len(model.parsed.segments)
    schedule = loop.pipeline_schedule
    without = 'has no effect with sharding.pp = 1; leave it out, or choose "paired" with train.overlap = true'
    fits = pp > 1 or not schedule or (schedule == "paired" and loop.overlap)
    require("train.pipeline_schedule", schedule, fits, without)
    require(
        "sharding.pp",
        pp,
        segments == 1 or segments % pp == 0,
        f"must divide the {segments} segments of model.pattern = {show(model.pattern)}, or the pattern must have "
        f"no '|'",
    )
    require(
        "train.activation_checkpointing",
        loop.activation_checkpointing,
        pp == 1 or not loop.activation_checkpointing,
        "recomputes whole layers, but with sharding.pp they run in stages; leave it out and recompute inside the "
        'stages: model.recompute = ["attend", "experts"]',
    )
    require(
        "train.compile",
        loop.compile,
        pp == 1 or not loop.compile,
        "compiles whole layers, but with sharding.pp they run in stages; leave it out",
    )
