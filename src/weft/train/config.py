"""The configuration of a run: one TOML file, read into frozen dataclasses.

    [section]          ->  TrainConfig.section
    name = value           .name

Every field except `model.factory` has a default, so a configuration lists only the values that differ from the
defaults. An unknown name, a value of the wrong type and a value out of range each raise `ConfigError`.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import NotReadable
from weft.models import HybridConfig
from weft.pipeline import SCHEDULES, Table, table
from weft.train.errors import ConfigError
from weft.train.files import parse_toml, read_bounded
from weft.train.sections import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    OptimizerConfig,
    OwnModelConfig,
    RunConfig,
    ScheduleConfig,
    ShardingConfig,
)
from weft.train.sections.pattern import check_pattern
from weft.train.sections.rules import microbatches_per_step, require
from weft.train.sections.sizes import check_sizes
from weft.train.tokenizer import load_tokenizer
from weft.train.toml_values import override_value, plain, show, typed
from weft.words import counted, nearest

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
class TrainConfig:
    """The configuration of a run. Its sections are the tables of the TOML file."""

    model: HybridConfig | OwnModelConfig = field(default_factory=lambda: _build(HybridConfig, _DEFAULT_MODEL, "model"))
    """The model: the fields of `weft.models.HybridConfig` or, with `model.factory`, the fields of `OwnModelConfig`."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training and validation data."""
    train: LoopConfig = field(default_factory=LoopConfig)
    """Steps, batches and precision."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its options."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """How the model is spread over the ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints and copies in memory."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run's name, directory, loggers and report."""
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Lines about settings that were adjusted when the configuration was read. A run prints them when it begins."""

    def __post_init__(self) -> None:
        self.schedule.check(self.train.steps)
        crosses, packs = self.train.cross_documents, self.data.packing == "whole"
        rule = (
            'has no effect with data.packing = "stream", which always does this; set it to "whole", or leave this out'
        )
        require("train.cross_documents", crosses, packs or not crosses, rule)
        if isinstance(self.model, HybridConfig):
            check_pattern(self.model, self.data, self.train, self.sharding)
        else:
            self.check_own_model()

    def check_own_model(self) -> None:
        """Raise ConfigError if a setting without effect on your own model (model.factory) differs from its default."""
        for name, value, default in (
            ("sharding.cp", self.sharding.cp, 1),
            ("sharding.ep", self.sharding.ep, 1),
            ("sharding.tp", self.sharding.tp, 1),
            ("sharding.etp", self.sharding.etp, None),
            ("sharding.pp", self.sharding.pp, 1),
            ("train.pipeline_schedule", self.train.pipeline_schedule, ""),
            ("train.overlap", self.train.overlap, False),
            ("train.check", self.train.check, False),
            ("train.expert_bias_rate", self.train.expert_bias_rate, LoopConfig.expert_bias_rate),
        ):
            require(name, value, value == default, "has no effect on your own model; leave it out")

    @property
    def hybrid(self) -> HybridConfig:
        """The section `model`. It must describe a HybridModel by a pattern, not your own model (model.factory)."""
        assert isinstance(self.model, HybridConfig)
        return self.model

    @property
    def schedule_name(self) -> str:
        """The name of the pipeline schedule."""
        if self.train.pipeline_schedule:
            return self.train.pipeline_schedule
        return "combined" if self.train.overlap else "interleaved" if self._own_chunks > 1 else "1f1b"

    @property
    def chunks(self) -> int:
        """The number of pipeline stages on each rank."""
        if self._own_chunks:
            return self._own_chunks
        return SCHEDULES[self.schedule_name].chunks if self.schedule_name in SCHEDULES else 1

    @property
    def _own_chunks(self) -> int:
        """The number of pipeline stages on each rank: `sharding.chunks` or, if that is unset, the number of the
        pattern's segments per rank. 0 if neither determines the number: the schedule's default then applies."""
        segments = len(self.hybrid.parsed.segments)
        return self.sharding.chunks or (max(1, segments // self.sharding.pp) if segments > 1 else 0)

    def table(self, world_size: int) -> Table:
        """Return the pipeline schedule of a step. `world_size`: the number of all ranks. Raises ConfigError if the
        schedule does not support these numbers of pipeline ranks, stages per rank (chunks) and microbatches."""
        pp = self.sharding.pp
        count = self.microbatches_per_step(world_size // pp // self.sharding.tp // self.sharding.cp)
        try:
            return table(self.schedule_name, ranks=pp, microbatches=count, chunks=self.chunks)
        except ValueError as error:
            raise ConfigError(
                f"train.pipeline_schedule = {show(self.schedule_name)} with sharding.pp = {pp}, chunks = {self.chunks} "
                f"and {counted(count, 'microbatch')} of each pipeline in a step: {error}"
            ) from error

    def validate(self, world_size: int) -> None:
        """Check the settings against the number of all ranks, the memory of this host and the tokenizer's file.

        Raises ConfigError for

        - a sharding size or a pipeline schedule that does not fit the number of ranks
        - a global batch that cannot be divided into equally many microbatches for each data-parallel rank
        - `train.overlap` with only one microbatch per step on each rank
        - a weight, the tokens of a microbatch or the positions of a step's sequences that do not fit into memory
        - a tokenizer that cannot be read, or a `model.vocab_size` smaller than its vocabulary
        - a `train.sample` whose text has no token
        - any `train.sample` with your own model, data without a tokenizer, or `pp`, `cp` or `tp` above 1
        """
        pp = self.sharding.pp
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        require("sharding.pp", pp, pp in fits, f"must divide the number of ranks, {world_size}; choose from {fits}")
        tp, world = self.sharding.tp, world_size // pp
        fits = [size for size in range(1, world + 1) if world % size == 0]
        require("sharding.tp", tp, tp in fits, f"must divide the number of ranks, {world}; choose from {fits}")
        self.sharding.check(world // tp)
        if pp > 1:
            self.table(world_size)
        world_size //= pp * tp * self.sharding.cp
        microbatches = self.microbatches_per_step(world_size)
        least = 2 * world_size * self.train.microbatch_size
        require(
            "train.overlap",
            self.train.overlap,
            microbatches > 1 or not self.train.overlap,
            "overlaps two microbatches, but a step of each rank has one, so it would hide nothing; set "
            f"train.global_batch_size = {least} or more, a smaller train.microbatch_size, or train.overlap = false",
        )
        self._check_sample()
        check_sizes(self.model, self.data, self.train)
        if self.data.kind == "tokens" or self.data.factory:
            return
        tokenizer = load_tokenizer(self.data.tokenizer)
        if isinstance(self.model, OwnModelConfig):
            return
        require(
            "model.vocab_size",
            self.model.vocab_size,
            self.model.vocab_size >= tokenizer.vocab_size,
            f"must be at least the vocabulary size of the tokenizer {self.data.tokenizer!r}; "
            f"set model.vocab_size = {tokenizer.vocab_size}",
        )
        prompt = self.train.sample
        has_token = not prompt or len(tokenizer.encode(prompt.encode())) > 0
        require("train.sample", prompt, has_token, "has no token; set it to some text")

    def _check_sample(self) -> None:
        prompt = self.train.sample
        fits = not prompt or (isinstance(self.model, HybridConfig) and self.data.kind != "tokens")
        require("train.sample", prompt, fits, "needs a model described by [model] and a tokenizer; leave it out")
        for name in ("pp", "cp", "tp"):
            size = getattr(self.sharding, name)
            rule = f"each rank needs the whole model and whole sequences, and sharding.{name} = {size}; leave it out"
            require("train.sample", prompt, not prompt or size == 1, rule)

    def microbatches_per_step(self, world_size: int) -> int:
        """Return the number of microbatches of one optimizer step on each of `world_size` data-parallel ranks."""
        return microbatches_per_step(self.train.global_batch_size, self.train.microbatch_size, world_size)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration from a TOML file. `overrides` such as "train.steps=20" take precedence over the file.

    The value of an override is written as in TOML, but text needs no quotes ("run.name=first").

    If an override of `train.steps` is too low for the file's `schedule.warmup_steps`, unsets the warmup steps, and says
    so in `notes` of the result.

    Raises ConfigError for a file that cannot be read, and for unknown or invalid settings.
    """
    try:
        text = read_bounded(path, _LARGEST).decode("utf-8-sig")  # some editors put a byte order mark first
    except OSError as error:
        raise ConfigError(
            f"configuration {str(path)!r}: cannot be read ({error.strerror}); pass the path of a TOML file"
        ) from error
    except NotReadable as error:
        raise ConfigError(f"configuration {str(path)!r}: {error}; pass the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {str(path)!r}: is not UTF-8 text; pass a TOML file") from error
    return parse_config(text, overrides, name=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "configuration") -> TrainConfig:
    """Parse TOML text as `load_config` parses a file. `name`: the name of the text in errors."""
    try:
        tables = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: is not valid TOML: {error}; correct that line") from error
    except NotReadable as error:
        raise ConfigError(f"{name}: cannot be read: {error}; nest its tables less deeply") from error
    changed = {_apply_override(tables, override) for override in overrides}
    shortened = "train.steps" in changed and "schedule.warmup_steps" not in changed
    notes = _unpin_warmup(tables) if shortened else ()
    return dataclasses.replace(from_tables(tables), notes=notes)


def from_tables(tables: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from `tables`, section -> name -> value, as parsed from a TOML file. Raises ConfigError for
    unknown or invalid settings."""
    sections = {}
    for section, values in tables.items():
        if section not in SECTIONS:
            raise ConfigError(_unknown(section, None))
        if not isinstance(values, dict):
            raise ConfigError(_no_table(section, values))
        if section == "model" and "factory" in values:
            sections[section] = _build(OwnModelConfig, values, section)
            continue
        defaults = _DEFAULT_MODEL if section == "model" else {}
        sections[section] = _build(SECTIONS[section], {**defaults, **values}, section)
    return TrainConfig(**sections)


def to_dict(config: TrainConfig, *, own_task: bool = False) -> dict[str, dict[str, Any]]:
    """Return the configuration, defaults included, as plain data: section -> name -> value. Tuples become lists.
    Settings that are None are left out.

    `own_task`: leave out [model] and [data], for a program with its own model and data.
    """
    return {
        section: {
            f.name: plain(getattr(getattr(config, section), f.name))
            for f in dataclasses.fields(getattr(config, section))
            if getattr(getattr(config, section), f.name) is not None
        }
        for section in SECTIONS
        if not (own_task and section in OF_TASK)
    }


def to_toml(config: TrainConfig, *, own_task: bool = False) -> str:
    """Return the settings of `to_dict` as TOML text. Without `own_task`, `parse_config` makes an equal
    configuration from the text."""
    tables = []
    for section, values in to_dict(config, own_task=own_task).items():
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
OF_TASK = ("model", "data")
"""The sections that describe the model and its data."""


_LARGEST = 16 << 20
"""The largest size of a configuration file in bytes."""
_DEFAULT_MODEL: dict[str, Any] = {"pattern": "[*-][*-][*-][*-]"}


def _build(section_class: Any, values: Mapping[str, Any], section: str) -> Any:
    """Build the dataclass of a section from a TOML table. Raises ConfigError with the name of the section."""
    hints = typing.get_type_hints(section_class)
    known = {f.name for f in dataclasses.fields(section_class) if f.init}
    checked = {}
    for name, value in values.items():
        if name not in known:
            own = section_class is OwnModelConfig
            raise ConfigError(_unknown_beside_factory(name) if own else _unknown(section, name))
        checked[name] = typed(f"{section}.{name}", value, hints[name])
    try:
        return section_class(**checked)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{section}]: {' '.join(str(error).split())}") from error


def _unknown(section: str, name: str | None) -> str:
    """Return the message for an unknown setting, or for an unknown section if `name` is None.

    The message suggests a similar name. If there is none, it lists the known names."""
    every = {s: [f.name for f in dataclasses.fields(c) if f.init] for s, c in SECTIONS.items()}
    word, known, shown = (section, list(every), "[{}]") if name is None else (name, every[section], section + ".{}")
    homes = [f"{s}.{word}" for s, names in every.items() if word in names]
    near = [shown.format(each) for each in nearest(word, known)]
    what = f"{section}: unknown section" if name is None else f"{section}.{name}: unknown setting"
    if meant := homes + near:
        return f"{what}; did you mean {meant[0]}?"
    return f"{what}; {'sections: ' if name is None else f'[{section}] knows '}{', '.join(known)}"


def _unknown_beside_factory(name: str) -> str:
    known = ", ".join(f.name for f in dataclasses.fields(OwnModelConfig))
    return f"model.{name}: unknown together with model.factory; known: {known}; pass it to the factory in model.options"


def _no_table(section: str, value: Any) -> str:
    return f"{section} = {show(value)}: this is a section; write [{section}] and its settings below it"


def _unpin_warmup(tables: dict[str, Any]) -> tuple[str, ...]:
    """Unset `schedule.warmup_steps` if an override sets `train.steps` too low for that many warmup steps.

    A configuration with a long warmup can then be tried for a few steps. Returns the lines to print.
    """
    schedule, steps = tables.get("schedule"), tables["train"].get("steps")
    if not isinstance(schedule, dict) or type(steps) is not int or type(schedule.get("warmup_steps")) is not int:
        return ()
    try:
        _build(ScheduleConfig, schedule, "schedule").check(steps)
    except ConfigError:
        pinned = schedule.pop("warmup_steps")
        rise = _build(ScheduleConfig, schedule, "schedule").warmup(steps)
        return (
            f"schedule.warmup_steps = {pinned} does not fit into train.steps = {steps}; this run has the default for "
            f"its length, {counted(rise, 'warmup step')}",
        )
    return ()


def _apply_override(tables: dict[str, Any], override: str) -> str:
    """Apply `override`, "section.name=value", to `tables`. Return the name of the changed setting."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {override}: must be SECTION.NAME=VALUE, such as --set train.steps=20")
    if section not in SECTIONS:
        raise ConfigError(_unknown(section, None))
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(_no_table(section, table))
    hint = typing.get_type_hints(SECTIONS[section]).get(name)
    table[name] = override_value(text.strip(), hint)
    return f"{section}.{name}"
