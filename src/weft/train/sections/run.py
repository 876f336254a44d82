"""[checkpoint] and [run]: checkpoints, and the run's directory, loggers and report."""

from dataclasses import dataclass, field
from pathlib import Path

from weft.train.record.names import is_own
from weft.train.sections.rules import require
from weft.train.toml_values import show
from weft.words import nearest


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: checkpoints on disk and copies in memory."""

    every: int = 100
    """Steps between two checkpoints; 0: only at the end and when the run is interrupted."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Save after each validation with a new lowest loss, and also keep the best checkpoint."""
    asynchronous: bool = True
    """Write checkpoints while training continues."""
    memory_every: int = 0
    """Steps between two copies of the state in host memory, from which `weft train --restarts` resumes; 0: none."""

    def __post_init__(self) -> None:
        require("checkpoint.every", self.every, self.every >= 0, "must not be negative")
        require("checkpoint.memory_every", self.memory_every, self.memory_every >= 0, "must not be negative")
        require("checkpoint.keep", self.keep, self.keep >= 1, "must be at least 1")


@dataclass(frozen=True)
class RunConfig:
    """[run]: the run's name, directory, loggers and report."""

    directory: str = "runs"
    """Folder of all runs, relative to the working directory."""
    name: str = "default"
    """Name of the run, and of its folder in `directory`. Folders of later runs with this name get a number."""
    resume: bool = False
    """Resume from the newest intact checkpoint of the newest run with this name."""
    patience: float = 1800.0
    """Seconds that a rank waits for the other ranks at the start."""
    report_every: float = 60.0
    """Least seconds between two reports during training, written by a separate process; 0: only one, at the end."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Loggers in addition to metrics.jsonl: "tensorboard", "wandb", or any "package.module:Class"."""
    units: dict = field(default_factory=dict)
    """Units of measurement of the named scalars that your loss returns: {accuracy = "%"}."""
    renumber: bool = False
    """Allow resuming with a pattern that groups the same layers differently, such as `*-*E` after `[*-][*E]`."""
    weights: str = ""
    """Weights that a new run starts from: a run, a checkpoint or a model directory; empty: freshly initialized."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.loggers if name not in ("tensorboard", "wandb") and ":" not in name]
        near = nearest(unknown[0], ("tensorboard", "wandb")) if unknown else []
        meant = f"; did you mean {show(near[0])}?" if near else ""
        rule = f'must contain only "tensorboard", "wandb" and "package.module:Class", not {unknown}{meant}'
        require("run.loggers", list(self.loggers), not unknown, rule)
        taken = [name for name in self.units if not is_own(name)]
        rule = f"must name numbers that your loss returns; {taken} are weft's own"
        require("run.units", self.units, not taken, rule)
        wrong = [unit for unit in self.units.values() if not isinstance(unit, str)]
        rule = f'must map the name of each number to a text, such as {{accuracy = "%"}}; {wrong} is not a text'
        require("run.units", self.units, not wrong, rule)
        require("run.report_every", self.report_every, self.report_every >= 0, "must not be negative")
        require("run.patience", self.patience, self.patience > 0, "must be positive")
        require(
            "run.name",
            self.name,
            self.name not in ("", ".", "..") and not set(self.name) & set("/\\\0"),
            "must be the name of one folder; put the path into run.directory",
        )
        require("run.name", self.name, len(self.name.splitlines()) == 1, "must be one line; leave the line break out")

    @property
    def path(self) -> Path:
        """The folder of the first run with this name. Later runs with this name add a number: `name-2`."""
        return Path(self.directory) / self.name
