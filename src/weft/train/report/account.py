"""Prints facts about a run, and writes the files from which its report is made."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.comm.groups import broadcast_object
from weft.debug.timeline import Interval
from weft.models import HybridModel
from weft.models.stages import Stages
from weft.train.config import TrainConfig, to_toml
from weft.train.errors import ConfigError
from weft.train.files import replace_text
from weft.train.optimizers import optimizer_bytes
from weft.train.passes import Passes
from weft.train.record.progress import format_count
from weft.train.report.facts import command, commit, keep_facts, read_facts, versions
from weft.train.report.page import NO_PICTURES, can_draw, write_report
from weft.train.report.stages import measured, write_stages
from weft.train.report.timeline import HiddenExchange, slow_ranks, write_timeline
from weft.train.run.runs import CONFIG, as_argument, recorded_name
from weft.train.run.trust import mark_as_own
from weft.train.state import Position
from weft.train.task.task import Task
from weft.words import counted


class Account:
    """Prints facts about a run, and writes them for its report. Only the first rank writes. `say`: called with each
    line to print."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        task: Task,
        device: torch.device,
        say: Callable[[str], None],
        *,
        own_task: bool,
    ) -> None:
        """`own_task`: whether the task comes from a program, not from `config`."""
        self._folder, self._config, self._task, self._device, self._say = folder, config, task, device, say
        self._has_own_task = own_task
        self._stages, self._writes = Stages(task.model), dist.get_rank() == 0
        self._parameters = self._stages.count_parameters()
        self._facts: dict[str, Any] = {}
        """The facts that `begin` has collected; empty after `keep_start` has written them."""

    def begin(self, step: int) -> None:
        """Print and collect facts at the start of a run (`step` is 0), or when it resumes from `step`.

        For a new run, also writes these facts. For a resumed run, `keep_start` writes them later.
        """
        ranks = dist.get_world_size()
        if self._writes:
            resumed = [each for each in read_facts(self._folder).get("resumed", []) if each < step]
            self._facts = {
                "parameters": self._parameters,
                "ranks": ranks,
                "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
                "versions": versions(),
                "command": command(),
                "commit": commit(),
                "units": dict(self._config.run.units),
                "resumed": [*resumed, step] if step else [],
            }
            if isinstance(self._task.model, HybridModel):
                self._facts["pattern"] = self._task.model.cfg.pattern
            if not step:
                self.keep_start()
        self._say(
            f"{format_count(self._parameters)} parameters on {counted(ranks, 'rank')} ({self._device.type}), "
            f"{self._config.sharding.strategy}, {self._config.train.precision}"
        )
        self._say(self._task.description)
        for note in self._config.notes:
            self._say(note)

    def keep_start(self) -> None:
        """On the first rank, write the configuration and the facts that `begin` has collected. Later calls do nothing.

        In a resumed run, the first call comes when a checkpoint is committed.
        """
        if not self._facts:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # A run keeps its name, by which a resume finds the run. The configuration with which the run resumes may have
        # another name.
        run = dataclasses.replace(self._config.run, name=recorded_name(self._folder) or self._config.run.name)
        config = dataclasses.replace(self._config, run=run)
        replace_text(self._folder / CONFIG, to_toml(config, own_task=self._has_own_task))
        keep_facts(self._folder, self._facts)
        mark_as_own(self._folder, self._config)
        self._facts = {}

    def is_complete(self, position: Position) -> bool:
        """Return whether the final report of the run at `position` is already written. Collective."""
        written = not self._writes or read_facts(self._folder).get("reported") == position.step
        return broadcast_object(written, what="whether the report was written")

    def end(self, position: Position, optimizer: torch.optim.Optimizer, passes: Passes) -> None:
        """Write the report of a complete run. All ranks of rank 0's pipeline must call `end`; rank 0 writes.

        If the report cannot be written, rank 0 prints the reason and raises nothing.
        """
        memory = weft.memory_report(self._task.model)
        memory["persistent"]["optimizer state"] = optimizer_bytes(optimizer)
        if passes.activations is not None:
            memory["transient"]["activations"] = {"peak": passes.activations.peak}
        intervals = passes.timeline.intervals() if passes.timeline else []
        found = self._stages.all_of((weft.describe(self._task.model), memory, intervals))
        if not self._writes:
            return
        try:
            self._write(position, passes, *zip(*found))
        except Exception as error:  # the run is complete, even if a parser or a drawing fails
            said = f"{self._folder}: its report cannot be written ({type(error).__name__}: {error}); correct the cause"
            said = " ".join(str(error if isinstance(error, ConfigError) else said).split())
            self._say(f"{said}, then: weft report {as_argument(self._folder)}")

    def _write(
        self,
        position: Position,
        passes: Passes,
        units: tuple[str, ...],
        memories: tuple[Any, ...],
        recorded: tuple[list[Interval], ...],
    ) -> None:
        """Write the report. `units`, `memories` and `recorded` have one entry per pipeline rank: the text of its units,
        its memory and its intervals."""
        baseline = self._task.baseline()
        if baseline is not None and position.validation_loss is not None:
            self._say(
                f"validation loss {position.validation_loss:.4f} nats/byte  "
                f"bigram table of the same text {baseline:.4f} nats/byte"
            )
        if len(units) > 1:
            units = tuple(f"rank {rank} of the pipeline\n\n{each}" for rank, each in enumerate(units))
        facts: dict[str, Any] = {"description": "\n\n".join(units), "baseline": baseline, "seconds": position.seconds}
        facts["memory"] = memories if len(memories) > 1 else memories[0]
        if self._config.sharding.graphs:
            facts["graphs"] = {**weft.graph_report(self._task.model), "scopes": {}}
        if passes.operations is not None:
            facts["operations"] = str(passes.operations)
        keep_facts(self._folder, facts)
        if passes.timeline is not None:
            write_timeline(self._folder, recorded[0])
            keep_facts(self._folder, {"computed": passes.computed})
            if passes.table is not None:
                write_stages(self._folder, measured(passes.table, recorded))
            if hidden := HiddenExchange.of(recorded[0]):
                self._say(f"in the last step {hidden}")
            if slow := slow_ranks(passes.computed):
                self._say(f"slow ranks in the last step: {slow}")
        path = write_report(self._folder)
        keep_facts(self._folder, {"reported": position.step})
        self._say(f"report: {path}" + ("" if can_draw() else f" ({NO_PICTURES})"))
