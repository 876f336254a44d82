"""Loggers, which receive numbers of a run in addition to metrics.jsonl.

"tensorboard"             event files in tensorboard/ of the run's folder
"wandb"                   Weights & Biases; a resumed run continues the same run of Weights & Biases
"package.module:Class"    Class(folder, resumed_step, settings), with the methods of `Logger`
"""

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.train.errors import ConfigError
from weft.train.imported import imported
from weft.train.task.callables import check_callable

NO_TENSORBOARD = "no TensorBoard output: install weft[train] for it"


class Logger(Protocol):
    """The protocol of a logger. Only rank 0 creates and calls loggers."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, such as "train/loss"."""
        ...

    def histogram(self, step: int, name: str, counts: Sequence[int]) -> None:
        """Log a histogram. `counts[i]`: how often item i, such as an expert, was chosen."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files for TensorBoard. TensorBoard hides the old entries of steps that a resumed run repeats."""

    def __init__(self, folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, counts: Sequence[int]) -> None:
        numbers = range(len(counts))
        self._board.add_histogram_raw(
            name,
            min=0,
            max=len(counts),
            num=sum(counts),
            sum=sum(number * count for number, count in zip(numbers, counts)),
            sum_squares=sum(number**2 * count for number, count in zip(numbers, counts)),
            bucket_limits=[number + 0.5 for number in numbers],
            bucket_counts=list(counts),
            global_step=step,
        )

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """Logs to Weights & Biases. Environment variables of Weights & Biases choose the project, the mode and so on."""

    def __init__(self, folder: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "weft"),
            name=folder.name,
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._wandb.log(dict(values), step=step)

    def histogram(self, step: int, name: str, counts: Sequence[int]) -> None:
        borders = [number - 0.5 for number in range(len(counts) + 1)]
        self._wandb.log({name: self._wandb.Histogram(np_histogram=(list(counts), borders))}, step=step)

    def close(self) -> None:
        self._wandb.finish()


_METHODS = ("scalars", "histogram", "close")
_KNOWN = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger in `names` cannot be used. It is not an error if TensorBoard is not installed."""
    for name in names:
        if ":" in name:
            found = imported("run.loggers", name)
            check_callable(
                f'run.loggers: "{name}"', found, ["folder", "resumed_step", "settings"], "the class of a logger"
            )
            missing = [method for method in _METHODS if isinstance(found, type) and not hasattr(found, method)]
            if missing:
                raise ConfigError(
                    f'run.loggers: "{name}" has no {missing[0]}; a logger has the methods {", ".join(_METHODS)}'
                )
        elif name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError('run.loggers: "wandb" needs the package `wandb`; install it, or leave it out')


def open_loggers(
    names: Sequence[str], folder: Path, resumed_step: int, settings: Mapping[str, Any]
) -> tuple[list[Logger], str | None]:
    """Return (loggers, line to print). The line is None, unless `names` contains "tensorboard" and TensorBoard is not
    installed."""
    found: list[Logger] = []
    note = None
    for name in names:
        make: Any = imported("run.loggers", name) if ":" in name else _KNOWN[name]
        try:
            found.append(make(folder, resumed_step, settings))
        except ImportError:
            if name != "tensorboard":
                raise
            note = NO_TENSORBOARD
    return found, note
