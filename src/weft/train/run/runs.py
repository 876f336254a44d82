"""Run directories. A new run never overwrites an old run, and a run resumes only on request.

runs/stdlib/          the first run named "stdlib"
runs/stdlib-2/        the second one
    config.toml       the complete configuration
    metrics.jsonl     the numbers of each step
    checkpoints/
    logs/             output of ranks that do not write to the terminal
    origin/           other files of a loaded model: configuration, tokenizer, generation settings
    facts.json        what the report is made from, with metrics.jsonl, timeline.json and stages.json
    report.html       and its pictures, *.svg
"""

import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.directory import RUN as IDENTITY
from weft.checkpoint.directory import committed_steps
from weft.checkpoint.locking import LEASE, LOCK
from weft.checkpoint.storage import require_exists
from weft.train.config import OF_TASK, RunConfig
from weft.train.errors import ConfigError
from weft.train.files import parse_toml, read_bounded

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
ORIGIN = "origin"
_LARGEST = 16 << 20
"""The largest size of a configuration file in bytes."""


@dataclass(frozen=True)
class Run:
    """The directory of a run, and the step of its newest checkpoint."""

    directory: Path
    step: int | None = None
    """The step of the newest committed checkpoint or, after a restart, of a newer copy in memory. None for a new run.

    It is determined when the directory is chosen. The run chooses the checkpoint to load later, when it has locked the
    directory.
    """
    note: str = ""
    """A line to print about the choice of directory."""
    made: tuple[Path, ...] = ()
    """The parent folders that were created for this run, innermost first."""

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that is committed now, on disk. None without one."""
        return [None, *committed_steps(self.checkpoints)][-1]


def open_run(
    config: RunConfig, resume: str | bool, command: str | None, *, or_start: bool = False, own_task: bool = False
) -> Run:
    """Choose the directory of a run. For a new run, create the directory.

    - `resume`: True resumes the newest run named `config.name` that has a committed checkpoint. A string names the run
      to resume: its directory, or its config.toml. False starts a new run, or acts as True if `config.resume` is true.
    - `or_start`: start a new run if there is no checkpoint to resume from.
    - `command`: a command line such as "weft train --ranks 2", for messages, which add `--resume RUN_DIRECTORY`. None
      if a script opens the run.
    - `own_task`: whether a program passes model and data to `weft.train.Trainer`.

    Raises ConfigError if there is no checkpoint to resume from and `or_start` is False, if `own_task` was different
    when the run was started, or if the directory of a new run cannot be created.
    """
    asked = "run.resume = true" if not resume else f"resume={resume!r}" if command is None else "--resume"
    resume = resume or config.resume
    if resume is False:
        return _new_run(config, command)
    if isinstance(resume, str) and not or_start:
        named, shown = run_directory(resume), f"{asked} {resume}" if command is not None else asked
        require_exists(named, "name the directory of a run", shown)
        refuse_other_directories(named, shown)
    if (run := find_run(config, resume)) is not None:
        if own_task:
            refuse_described_task(run.directory)
        else:
            refuse_own_task(run.directory, goes_on=True)
        return run
    if or_start:
        return _new_run(config, command)
    where = f"{resume} holds no" if isinstance(resume, str) else f"no run {config.name!r} in {config.directory} has a"
    raise ConfigError(
        f"{asked}: {where} committed checkpoint to resume; name the directory of another run, or leave {asked} out to "
        "start a new run"
    )


def find_run(config: RunConfig, resume: str | bool) -> Run | None:
    """Return the run that `open_run` resumes with these arguments, or None if there is no such run."""
    resume = resume or config.resume
    if resume is False:
        return None
    for directory in [run_directory(resume)] if isinstance(resume, str) else _runs_of_name(config)[::-1]:
        if steps := committed_steps(directory / CHECKPOINTS):
            return Run(directory, steps[-1])
    return None


def run_directory(named: str | Path) -> Path:
    """Return the directory of a run: `named` itself or, if `named` is the config.toml of a run, the folder of that
    file."""
    path = Path(named)
    return path.parent if path.name == CONFIG and path.is_file() and (path.parent / CHECKPOINTS).is_dir() else path


def is_run(folder: str | Path) -> bool:
    """Return whether `folder` is the directory of a run that has begun to train."""
    return (Path(folder) / CHECKPOINTS / IDENTITY).is_file()


def read_tables(directory: Path) -> dict[str, Any]:
    """Read the tables of a run's config.toml. Raises OSError if it cannot be read, and ValueError if it is not TOML."""
    return parse_toml(read_bounded(directory / CONFIG, _LARGEST).decode())


def recorded_name(directory: Path) -> str | None:
    """Return the `run.name` with which a run was started, from its config.toml. None if the file has no name or
    cannot be read."""
    try:
        return str(read_tables(directory)["run"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_other_directories(folder: Path, asked: str) -> None:
    """Raise ConfigError for a directory that is not a run, but contains runs or is inside a run.

    `asked`: the option and path that named the directory, for the message.
    """
    if (folder / CONFIG).is_file() or not folder.is_dir() or committed_steps(folder / CHECKPOINTS):
        return
    runs = sorted(path for path in folder.iterdir() if committed_steps(path / CHECKPOINTS))
    if runs:
        named = ", ".join(map(str, runs[:5])) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
        raise ConfigError(f"{asked}: is not a run, but a folder of runs; name one of them: {named}")
    for run in folder.resolve().parents[:2]:
        if (run / CONFIG).is_file() and committed_steps(run / CHECKPOINTS):
            raise ConfigError(
                f"{asked}: is not a run, but lies inside one; a run resumes from its newest checkpoint, so name the "
                f"run: {run}"
            )


def refuse_no_run(folder: Path, asked: str) -> None:
    """Raise ConfigError for a directory without a config.toml. `asked`: as in `refuse_other_directories`."""
    if (folder / CONFIG).is_file():
        return
    if committed_steps(folder / CHECKPOINTS):
        raise ConfigError(
            f"{asked}: its {CONFIG} is missing; name its configuration too: weft train CONFIG.toml --resume "
            f"{as_argument(folder)}"
        )
    raise ConfigError(
        f"{asked}: is not a run, because it has no {CONFIG} and no checkpoint; name the directory of a run"
    )


def refuse_own_task(directory: Path, *, goes_on: bool = False) -> None:
    """Raise ConfigError for a run whose config.toml lacks model and data, because a program passed them to `Trainer`.

    `goes_on` chooses the advice in the message: True if the run was to be resumed, False if only its weights were to be
    read.
    """
    if _describes_task(directory) is False:
        checkpoints = str(directory / CHECKPOINTS)
        way = (
            f"run that program again (with resume={str(directory)!r} it resumes)"
            if goes_on
            else "its weights can be loaded into the model that the program builds: "
            f"weft.checkpoint.CheckpointManager({checkpoints!r}).load({{'model': weft.checkpoint.ModelState(model)}})"
        )
        raise ConfigError(
            f"{directory}: is a run of a program that passed its own model and data to weft.train.Trainer, and they "
            f"are not in {CONFIG}; {way}"
        )


def refuse_described_task(directory: Path) -> None:
    """Raise ConfigError for a run whose configuration describes the model and the data, which a program cannot
    replace."""
    if _describes_task(directory):
        raise ConfigError(
            f"{directory}: its {CONFIG} describes the model and the data, which a program cannot replace; resume "
            f"with: weft train --resume {as_argument(directory)}"
        )


def _describes_task(directory: Path) -> bool | None:
    """Return whether the configuration of a run describes its model or data. Return None if the file cannot be read,
    which other functions report."""
    try:
        tables = read_tables(directory)
    except (OSError, ValueError):
        return None
    return any(section in tables for section in OF_TASK)


def resuming(command: str | None, directory: Path) -> str:
    """Return text for messages that tells how to resume a run: a command line or, if `command` is None, `resume=...`.

    `command`: the command line without `--resume`.
    """
    if command is None:
        return f"resume={str(directory)!r}"
    return f"{command} --resume {as_argument(directory)}"


def as_argument(directory: Path) -> str:
    """Return `directory` as an argument of a printed command, which neither the shell nor `weft` takes for something
    else."""
    return shlex.quote(f"./{directory}" if str(directory).startswith("-") else str(directory))


def remove_if_unused(run: Run) -> None:
    """Delete the directory of a new run, and the parent folders that were created for it.

    Keeps a directory that contains a checkpoint, or any entry besides the configuration, logs, origin and checkpoints.
    Keeps parent folders that contain something else.
    """
    if run.step is not None:
        return
    if run.directory.is_dir():
        left = {path.name for path in run.directory.iterdir()}
        saved = {path.name for path in run.checkpoints.iterdir()} if run.checkpoints.is_dir() else set()
        if not (left <= {CONFIG, LOGS, CHECKPOINTS, ORIGIN} and saved <= {LOCK, LEASE, IDENTITY}):
            return
        shutil.rmtree(run.directory)
    with suppress(OSError):  # not empty
        for folder in run.made:
            folder.rmdir()


def _new_run(config: RunConfig, command: str | None) -> Run:
    earlier = _runs_of_name(config)
    number = _number(earlier[-1], config.name) + 1 if earlier else 1
    made = tuple(folder for folder in config.path.parents if not folder.exists())
    while True:
        directory = config.path if number == 1 else config.path.with_name(f"{config.name}-{number}")
        try:
            directory.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"run.directory = {config.directory!r}: {directory} cannot be created ({error.strerror}); name a "
                f"writable folder"
            ) from error
    if not earlier:
        return Run(directory, None, f"a new run in {directory}", made)
    steps = committed_steps(earlier[-1] / CHECKPOINTS)
    go_on = f"; it resumes from step {steps[-1]} with: {resuming(command, earlier[-1])}" if steps else ""
    return Run(directory, None, f"a new run in {directory}; {earlier[-1]} is unchanged{go_on}")


def _runs_of_name(config: RunConfig) -> list[Path]:
    """Return the directories of the existing runs named `config.name`, oldest first.

    The config.toml of a run records its name, so a directory `exp-2` can be the second run of `exp` or the first run of
    `exp-2`.
    """
    folder = Path(config.directory)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _number(path, config.name)]
    own = [path for path in found if (recorded_name(path) or path.name) == config.name]
    return sorted(own, key=lambda path: _number(path, config.name))


def _number(path: Path, name: str) -> int:
    """Return the number in the path of a run (1 for the first run), or 0 if `path` is not a run of that name."""
    match = re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name)
    return int(match[1] or 1) if match else 0
