"""What a run is made of: one TOML file, read into frozen dataclasses.

    [section]          ->  TrainConfig.section
    name = value           .name

Every field has a default, so that a configuration only says what differs. Nothing is ignored: an unknown
name, a value of the wrong type and a value out of its range are each a `ConfigError`.
"""

import dataclasses
import difflib
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.models import HybridConfig
from weft.pipeline import SCHEDULES, Table, table
from weft.train.errors import ConfigError
from weft.train.tokenizer import load_tokenizer
from weft.train.toml_values import override_value, plain, show, typed

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "LoopConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShardingConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
    "to_dict",
    "to_toml",
]


@dataclass(frozen=True)
class DataConfig:
    """[data]: the text, how it becomes tokens, and how they are cut."""

    paths: tuple[str, ...] = ()
    """Text files or folders, relative to the working directory; empty: Python's standard library."""
    include: tuple[str, ...] = ("*",)
    """File name patterns that are taken from folders (files named in `paths` are always taken)."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    sequence_length: int = 256
    """Tokens per sequence."""
    validation_fraction: float = 0.05
    """The part of the text that is kept for validation, between 0 and 1; the same text for every seed."""
    seed: int = 0
    """Seed of the order in which training sequences are seen."""
    cache_dir: str = ""
    """Where token files are kept; empty: weft's folder in the user's cache directory."""

    def __post_init__(self) -> None:
        _require("data.sequence_length", self.sequence_length, self.sequence_length >= 1, "must be at least 1")
        _require(
            "data.validation_fraction",
            self.validation_fraction,
            0 < self.validation_fraction < 1,
            "must lie strictly between 0 and 1; 0.05 keeps a twentieth of the text for validation",
        )
        _require("data.seed", self.seed, 0 <= self.seed < 1 << 63, "must not be negative, and below 2**63")
        _require(
            "data.include",
            list(self.include),
            bool(self.include),
            'must name at least one pattern; ["*"] takes every text file',
        )
        _require(
            "data.include",
            list(self.include),
            bool(self.paths) or self.include == ("*",),
            "has no effect on the default text; name data.paths or leave data.include out",
        )


@dataclass(frozen=True)
class LoopConfig:
    """[train]: steps, batch sizes, precision and what happens every so many steps."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all ranks and microbatches."""
    microbatch_size: int = 8
    """Sequences that one rank takes through the model at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute and communication dtype; the weights that the optimizer updates are fp32 in both cases."""
    seed: int = 0
    """Seed of the initial weights and of every other random choice but the data order."""
    validate_every: int = 100
    """Steps between two validations; 0: only at the end."""
    validation_batches: int = 4
    """Size of the fixed validation set, in global batches."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights, which is validated and saved beside them; 0: none."""
    gradient_clip: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    log_every: int = 10
    """Steps between two lines of output when the output is no terminal."""
    parameter_norms_every: int = 0
    """Steps between two records of the norms of every parameter and of its gradient; 0: none."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward instead of keeping them."""
    schedule: str = ""
    """With `sharding.pp`: a name of `weft schedule`, or a file; empty: "1f1b", "interleaved" or "combined"."""
    overlap: bool = False
    """Run the token exchange of one microbatch under the computation of its neighbour (`weft.overlap`)."""
    delay_wgrad: bool = False
    """With `overlap`: compute weight gradients apart, under an exchange."""
    early_release: bool = False
    """With `overlap`: let a layer's activations go earlier; less memory, less overlap."""
    watchdog: float = 600.0
    """Seconds after which a run in which no microbatch ends is ended, and the rank that hangs named; 0: never."""
    expert_bias_rate: float = 1e-3
    """With `model.expert_bias`: how far one step moves an expert's bias towards a balanced load."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "microbatch_size", "validation_batches", "log_every"):
            _require(f"train.{name}", getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        for name in ("seed", "validate_every", "gradient_clip", "parameter_norms_every", "watchdog"):
            _require(f"train.{name}", getattr(self, name), getattr(self, name) >= 0, "must not be negative")
        _require("train.seed", self.seed, self.seed < 1 << 40, "must be below 2**40; choose a smaller number")
        _require("train.ema_decay", self.ema_decay, 0 <= self.ema_decay < 1, "must be at least 0 and less than 1")
        _require("train.expert_bias_rate", self.expert_bias_rate, self.expert_bias_rate > 0, "must be positive")
        for name in ("delay_wgrad", "early_release"):
            value = getattr(self, name)
            _require(f"train.{name}", value, self.overlap or not value, "has no effect without train.overlap = true")
        _require(
            "train.overlap",
            self.overlap,
            not (self.overlap and self.activation_checkpointing),
            "cannot run layers in stages that train.activation_checkpointing recomputes as a whole; leave that out and "
            'recompute inside the stages: model.recompute = ["attend"]',
        )
        _check_batch(self.global_batch_size, self.microbatch_size, 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: AdamW."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""

    def __post_init__(self) -> None:
        _require("optimizer.lr", self.lr, self.lr > 0, "must be positive")
        _require("optimizer.eps", self.eps, self.eps > 0, "must be positive")
        _require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "must not be negative")
        _require(
            "optimizer.betas",
            list(self.betas),
            all(0 <= beta < 1 for beta in self.betas),
            "must each be at least 0 and less than 1",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: the learning rate over the steps."""

    warmup_steps: int | None = None
    """Steps over which the learning rate rises linearly to its peak; unset: a tenth of the run, at most 100."""
    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """The way down from the peak; "wsd" stays there and falls in a straight line at the end."""
    min_lr_ratio: float = 0.1
    """Where "cosine", "linear" and "wsd" end, as a part of the peak learning rate."""
    decay_fraction: float = 0.2
    """The part of all steps over which "wsd" falls."""

    def __post_init__(self) -> None:
        _require("schedule.warmup_steps", self.warmup_steps, (self.warmup_steps or 0) >= 0, "must not be negative")
        _require("schedule.min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "must lie between 0 and 1")
        fraction = self.decay_fraction
        _require("schedule.decay_fraction", fraction, 0 < fraction <= 1, "must be above 0 and at most 1")
        for name, shapes in (("min_lr_ratio", ("cosine", "linear", "wsd")), ("decay_fraction", ("wsd",))):
            value, default = getattr(self, name), getattr(ScheduleConfig, name)
            without = f"has no effect with schedule.shape = {show(self.shape)}; leave it out, or choose from {shapes}"
            _require(f"schedule.{name}", value, self.shape in shapes or value == default, without)

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of the `step`-th of `steps` optimizer steps (from 0), as a part of the peak."""
        warmup = min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps
        done = step + 1
        if step < warmup:
            return done / warmup
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / done)
        left = max(0.0, (steps - done) / max(1, steps - warmup))
        if self.shape == "wsd":
            left = min(1.0, max(0, steps - done) / (self.decay_fraction * steps))
        if self.shape == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left


@dataclass(frozen=True)
class ShardingConfig:
    """[sharding]: what is cut over the ranks."""

    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What each rank keeps only its part of: nothing, optimizer state, + gradients, + weights."""
    dp_shard: int = -1
    """Ranks over which it is cut; -1: all of them."""
    ep: int = 1
    """Ranks that share one copy of the experts and exchange tokens; divides the number of ranks."""
    pp: int = 1
    """Ranks of a pipeline, over which the layers are cut: by `|` in the pattern, or into segments of equal cost."""
    chunks: int | None = None
    """With `pp`: stages of each rank; unset: as many as the pattern's segments make, or as the schedule usually has."""

    def __post_init__(self) -> None:
        _require("sharding.ep", self.ep, self.ep >= 1, "must be a number of ranks, 1 for every expert on every rank")
        _require("sharding.pp", self.pp, self.pp >= 1, "must be a number of ranks, 1 for all layers on every rank")
        _require("sharding.chunks", self.chunks, (self.chunks or 1) >= 1, "must be at least 1")
        _require(
            "sharding.chunks", self.chunks, self.chunks is None or self.pp > 1, "has no effect with sharding.pp = 1"
        )
        _require(
            "sharding.dp_shard",
            self.dp_shard,
            self.dp_shard == -1 or self.dp_shard >= 1,
            "must be a number of ranks, or -1 for all of them",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: what outlives the processes."""

    every: int = 100
    """Steps between two checkpoints; 0: only at the end and when the run is interrupted."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    asynchronous: bool = True
    """Write while training goes on."""

    def __post_init__(self) -> None:
        _require("checkpoint.every", self.every, self.every >= 0, "must not be negative")
        _require("checkpoint.keep", self.keep, self.keep >= 1, "must be at least 1")


@dataclass(frozen=True)
class RunConfig:
    """[run]: where the run lives."""

    directory: str = "runs"
    """Folder of all runs, relative to the working directory."""
    name: str = "default"
    """The run's own folder in it."""
    resume: bool = False
    """Go on from the newest intact checkpoint of the newest run of that name."""
    patience: float = 1800.0
    """Seconds that a rank waits for the others at the start."""
    renumber: bool = False
    """Go on with the same layers in other groups, such as `*-*E` after `[*-][*E]`."""
    weights: str = ""
    """What a new run's weights start from: a run, a checkpoint or a directory of a model; empty: initial weights."""

    def __post_init__(self) -> None:
        _require("run.patience", self.patience, self.patience > 0, "must be positive")
        _require(
            "run.name",
            self.name,
            self.name not in ("", ".", "..") and not set(self.name) & set("/\\\0"),
            "must be the name of one folder; put the path into run.directory",
        )
        _require("run.name", self.name, len(self.name.splitlines()) == 1, "must be one line; leave the line break out")

    @property
    def path(self) -> Path:
        """The run's folder: metrics, checkpoints, configuration and report."""
        return Path(self.directory) / self.name


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. Its sections are the tables of the TOML file."""

    model: HybridConfig = field(default_factory=lambda: _build(HybridConfig, _DEFAULT_MODEL, "model"))
    """The model: the fields of `weft.models.HybridConfig`."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    train: LoopConfig = field(default_factory=LoopConfig)
    """Steps and batches."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """What is cut over the ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What outlives the processes."""
    run: RunConfig = field(default_factory=RunConfig)
    """Where the run lives."""

    def __post_init__(self) -> None:
        model, ep = self.model, self.sharding.ep
        _require("model.pattern", model.pattern, bool(model.pattern), f"has no layer; try {show('[*-][*-]')}")
        _require(
            "sharding.ep",
            ep,
            ep == 1 or "E" in model.pattern,
            f"model.pattern = {show(model.pattern)} has no experts (E) to spread; set sharding.ep = 1",
        )
        fits = [size for size in range(1, model.num_experts + 1) if model.num_experts % size == 0]
        _require(
            "sharding.ep", ep, ep in fits, f"must divide model.num_experts = {model.num_experts}; choose from {fits}"
        )
        warmup = self.schedule.warmup_steps
        _require(
            "schedule.warmup_steps",
            warmup,
            warmup is None or warmup <= self.train.steps,
            f"must be at most train.steps = {self.train.steps}, or the learning rate never reaches its peak; lower it, "
            "or leave it out for a tenth of the steps",
        )
        _require(
            "train.overlap",
            self.train.overlap,
            ep > 1 or not self.train.overlap,
            "hides the exchange of tokens between ranks, and sharding.ep = 1 has none; set sharding.ep = 2 or more, or "
            "train.overlap = false",
        )
        self._check_stages()
        has_bias = model.expert_bias and "E" in model.pattern
        _require(
            "train.expert_bias_rate",
            self.train.expert_bias_rate,
            has_bias or self.train.expert_bias_rate == LoopConfig.expert_bias_rate,
            "has no effect on a model without expert biases; set model.expert_bias = true, or leave it out",
        )

    @property
    def schedule_name(self) -> str:
        """Of the microbatches over the stages."""
        if self.train.schedule:
            return self.train.schedule
        several = (self.sharding.chunks or len(self.model.parsed.segments) // self.sharding.pp) > 1
        return "combined" if self.train.overlap else "interleaved" if several else "1f1b"

    @property
    def chunks(self) -> int:
        """How many stages each rank of the pipeline has."""
        if self.sharding.chunks is not None:
            return self.sharding.chunks
        segments = len(self.model.parsed.segments)
        if segments > 1:
            return max(1, segments // self.sharding.pp)
        return SCHEDULES[self.schedule_name].chunks if self.schedule_name in SCHEDULES else 1

    def table(self, world_size: int) -> Table:
        """The schedule of a step on `world_size` ranks. Raises ConfigError where there is none."""
        pp = self.sharding.pp
        count = self.microbatches_per_step(world_size // pp)
        try:
            return table(self.schedule_name, ranks=pp, microbatches=count, chunks=self.chunks)
        except ValueError as error:
            raise ConfigError(
                f"train.schedule = {show(self.schedule_name)} with sharding.pp = {pp}, {self.chunks} chunks and "
                f"{count} microbatches of each pipeline in a step: {error}"
            ) from error

    def _check_stages(self) -> None:
        pp, segments, loop = self.sharding.pp, len(self.model.parsed.segments), self.train
        without = "has no effect with sharding.pp = 1; leave it out"
        _require("train.schedule", loop.schedule, pp > 1 or not loop.schedule, without)
        _require(
            "sharding.pp",
            pp,
            segments == 1 or segments % pp == 0,
            f"must divide the {segments} segments of model.pattern = {show(self.model.pattern)}, or that has no '|'",
        )
        _require(
            "train.activation_checkpointing",
            loop.activation_checkpointing,
            pp == 1 or not loop.activation_checkpointing,
            "recomputes layers as a whole, and with sharding.pp they run in stages; leave it out and recompute inside "
            'of them: model.recompute = ["attend", "experts"]',
        )

    def validate(self, world_size: int) -> None:
        """Check what depends on the number of processes and on the tokenizer's file; every process is a
        data-parallel rank, or one stage of such.

        Raises ConfigError for a batch that the ranks cannot share evenly, a sharding size that does not fit the
        number of ranks, an overlap of one microbatch with itself, and a vocabulary smaller than the tokenizer's.
        """
        pp, everyone = self.sharding.pp, world_size
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        _require("sharding.pp", pp, pp in fits, f"must divide the number of ranks, {world_size}; choose from {fits}")
        world_size //= pp
        if pp > 1:
            self.table(everyone)
        _require(
            "sharding.dp_shard",
            self.sharding.dp_shard,
            self.sharding.dp_shard in (-1, world_size),
            f"must be the number of ranks, {world_size}, or -1 for all of them",
        )
        ep = self.sharding.ep
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        _require("sharding.ep", ep, ep in fits, f"must divide the number of ranks, {world_size}; choose from {fits}")
        microbatches = self.microbatches_per_step(world_size)
        least = 2 * world_size * self.train.microbatch_size
        _require(
            "train.overlap",
            self.train.overlap,
            microbatches > 1 or not self.train.overlap,
            "runs two microbatches beside each other, and a step of each rank has one: it would hide nothing; set "
            f"train.global_batch_size = {least} or more, a smaller train.microbatch_size, or train.overlap = false",
        )
        tokenizer = load_tokenizer(self.data.tokenizer)
        _require(
            "model.vocab_size",
            self.model.vocab_size,
            self.model.vocab_size >= tokenizer.vocab_size,
            f"must be at least the vocabulary of the tokenizer {self.data.tokenizer!r}; "
            f"set model.vocab_size = {tokenizer.vocab_size}",
        )

    def microbatches_per_step(self, world_size: int) -> int:
        """How many microbatches each of `world_size` ranks accumulates in one optimizer step."""
        _check_batch(self.train.global_batch_size, self.train.microbatch_size, world_size)
        return self.train.global_batch_size // (world_size * self.train.microbatch_size)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file; `overrides` such as "train.steps=20" take precedence over it.

    An override's value is written as in TOML; text needs no quotes ("run.name=first"). Raises ConfigError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"configuration {str(path)!r}: cannot be read ({error.strerror}); give the path of a TOML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {str(path)!r}: is not UTF-8 text; give a TOML file") from error
    return parse_config(text, overrides, name=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "configuration") -> TrainConfig:
    """`load_config` for TOML text; `name` stands for it in errors."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: is not valid TOML: {error}; correct that line") from error
    for override in overrides:
        _apply_override(tables, override)
    return from_tables(tables)


def from_tables(tables: Mapping[str, Any]) -> TrainConfig:
    """A configuration from section -> name -> value, as a TOML file has them. Raises ConfigError."""
    sections = {}
    for section, values in tables.items():
        if section not in SECTIONS:
            raise ConfigError(_unknown(section, None))
        if not isinstance(values, dict):
            raise ConfigError(_no_table(section, values))
        defaults = _DEFAULT_MODEL if section == "model" else {}
        sections[section] = _build(SECTIONS[section], {**defaults, **values}, section)
    return TrainConfig(**sections)


def to_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The resolved configuration as plain data: section -> name -> value (lists for tuples, no None)."""
    return {
        section: {
            f.name: plain(getattr(getattr(config, section), f.name))
            for f in dataclasses.fields(SECTIONS[section])
            if getattr(getattr(config, section), f.name) is not None
        }
        for section in SECTIONS
    }


def to_toml(config: TrainConfig) -> str:
    """The resolved configuration as TOML; `parse_config` of it gives an equal configuration."""
    tables = []
    for section, values in to_dict(config).items():
        lines = [f"[{section}]", *(f"{name} = {show(value)}" for name, value in values.items())]
        tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n"


SECTIONS: dict[str, Any] = {
    "model": HybridConfig,
    "data": DataConfig,
    "train": LoopConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "sharding": ShardingConfig,
    "checkpoint": CheckpointConfig,
    "run": RunConfig,
}


_DEFAULT_MODEL: dict[str, Any] = {"pattern": "[*-][*-][*-][*-]"}


def _require(name: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} = {show(value)}: {rule}")


def _check_batch(global_batch_size: int, microbatch_size: int, ranks: int) -> None:
    """Each rank must get whole microbatches, the same number on every rank."""
    unit = ranks * microbatch_size
    if global_batch_size % unit == 0:
        return
    below = global_batch_size // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    raise ConfigError(
        f"train.global_batch_size = {global_batch_size}: must be divisible by data-parallel ranks x "
        f"train.microbatch_size = {ranks} x {microbatch_size} = {unit}; nearest valid: {nearest}"
    )


def _build(section_class: Any, values: Mapping[str, Any], section: str) -> Any:
    """Check names and types of a table and make its dataclass, whose own complaints get the section."""
    hints = typing.get_type_hints(section_class)
    known = {f.name for f in dataclasses.fields(section_class) if f.init}
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(_unknown(section, name))
        checked[name] = typed(f"{section}.{name}", value, hints[name])
    try:
        return section_class(**checked)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{section}]: {' '.join(str(error).split())}") from error


def _unknown(section: str, name: str | None) -> str:
    """The message for a section (`name` None) or setting that does not exist, with the nearest that does."""
    every = {s: [f.name for f in dataclasses.fields(c) if f.init] for s, c in SECTIONS.items()}
    if name is None:
        near = difflib.get_close_matches(section, every, n=1)
        homes = [f"{s}.{section}" for s, names in every.items() if section in names]
        hint = (
            f"did you mean {homes[0]}?"
            if homes
            else f"did you mean [{near[0]}]?"
            if near
            else "sections: " + ", ".join(every)
        )
        return f"{section}: unknown section; {hint}"
    near = difflib.get_close_matches(name, every[section], n=1)
    homes = [f"{s}.{name}" for s, names in every.items() if name in names]
    if homes:
        hint = f"did you mean {homes[0]}?"
    elif near:
        hint = f"did you mean {section}.{near[0]}?"
    else:
        hint = f"[{section}] knows " + ", ".join(every[section])
    return f"{section}.{name}: unknown setting; {hint}"


def _no_table(section: str, value: Any) -> str:
    return f"{section} = {show(value)}: is a section; write [{section}] and its settings below it"


def _apply_override(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"override {override!r}: must be section.name=value, for example train.steps=20")
    if section not in SECTIONS:
        raise ConfigError(_unknown(section, None))
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(_no_table(section, table))
    hint = typing.get_type_hints(SECTIONS[section]).get(name)
    table[name] = override_value(text.strip(), hint)
