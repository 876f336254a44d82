"""`weft train` as a person uses it, for tests: real processes on a tiny model and text."""

import contextlib
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_flatten

from tests.forks import Forked
from tests.pool import Pool
from weft.checkpoint import committed_steps, verify
from weft.checkpoint.loading import LoadPlanner
from weft.cli import main
from weft.train.config import load_config
from weft.train.loop import train

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {
        "pattern": "[*-]",
        "vocab_size": 256,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    "data": {"sequence_length": 16, "validation_fraction": 0.2},
    "train": {
        "steps": 20,
        "global_batch_size": 8,
        "microbatch_size": 2,
        "validate_every": 5,
        "validation_batches": 2,
        "log_every": 5,
    },
    "schedule": {"warmup_steps": 3},
    "checkpoint": {"every": 10},
    "run": {"name": "tiny"},
}


def write_config(folder: Path, **changes: Any) -> Path:
    """A TOML file in `folder`, with its text and runs beside it; changes as in `train__steps=5`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {n} of {n * n % 97} words, mod {n % 7}\n" for n in range(400)))
    tables = {section: dict(values) for section, values in SETTINGS.items()}
    tables["data"] |= {"paths": [str(text)], "cache_dir": str(folder / "cache")}
    tables["run"] |= {"directory": str(folder / "runs")}
    for name, value in changes.items():
        section, _, setting = name.partition("__")
        tables.setdefault(section, {})[setting] = value
    tables["schedule"]["warmup_steps"] = min(tables["schedule"]["warmup_steps"], tables["train"]["steps"])
    path = folder / "tiny.toml"
    path.write_text(
        "".join(
            f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
            for section, values in tables.items()
        )
    )
    return path


WITHOUT_PICTURES = os.pathsep.join(
    [str(Path(__file__).parents[1] / "without_pictures"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
"""A PYTHONPATH with which reports are written in no time."""


def weft(
    *arguments: Any, timeout: float = 60, pictures: bool = False, real: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """Run `python -m weft` to its end. `real`: in new interpreters, see tests/forks.py."""
    quick = {} if pictures else {"PYTHONPATH": WITHOUT_PICTURES}
    with started(*arguments, real=real, env={**os.environ, **quick, **environment}) as process:
        output, errors = process.communicate(timeout=timeout)
    print(output, errors, sep="")  # what pytest shows of a test that fails
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def forked(pool: Pool, *arguments: Any, folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code of `weft` and what it says to stderr, run in `folder` by a process that has imported it before."""
    return pool.template.fork(partial(_main, [*map(str, arguments)], str(folder), environment)).recv()


def _main(arguments: list[str], folder: str, environment: Mapping[str, str], pipe: Any) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update(environment)
    with redirect_stderr(io.StringIO()) as said:
        code = main(arguments)
    pipe.send((code, said.getvalue()))


def train_here(config: Path, overrides: Sequence[str] = ()) -> None:
    """What `weft train` does, on these ranks: of a test's `pool`, which has imported everything."""
    train(load_config(config, overrides))


@contextmanager
def started(*arguments: Any, real: bool = False, **options: Any) -> Iterator[subprocess.Popen]:
    """`python -m weft` in the background; nothing of it is left afterwards. `real`: in new interpreters."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    quick = {"env": {**os.environ, "PYTHONPATH": WITHOUT_PICTURES}}
    process = (subprocess.Popen if real else Forked)(
        [sys.executable, "-m", "weft", *map(str, arguments)], **{**usual, **quick, **options}
    )
    try:
        yield process
    finally:
        ranks = ranks_of(process.pid) if process.poll() is None else {}
        process.kill()
        for pid in ranks.values():  # they may hold the pipe that is read below
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.communicate()


def alone() -> dict[str, str]:
    """What torchrun tells the only process that it starts."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**place, "MASTER_PORT": str(free_port())}


def free_port() -> int:
    """One of this host that no process listens on. It is none of those that the system gives to connections, one of
    which could take it before it is used."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 20000 + secrets.randbelow(10000)))
            return free.getsockname()[1]


def ranks_of(supervisor: int) -> dict[int, int]:
    """Rank -> process of the ranks that process `supervisor` started."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    except FileNotFoundError:
        return {}
    found = {}
    for pid in children:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables.append(Path(f"/proc/{pid}/comm").read_bytes().strip().replace(b"rank-", b"RANK="))  # if forked
        except (FileNotFoundError, ProcessLookupError):
            continue
        for variable in variables:
            if variable.startswith(b"RANK="):
                found[int(variable.removeprefix(b"RANK="))] = int(pid)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], Any], timeout: float = 60, what: str = "") -> Any:
    """Poll until `condition` is true; returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s in vain for {what or condition}"
        time.sleep(0.01)
    return value


_SPEEDS = ("tokens_per_second", "samples_per_second", "step_seconds", "memory_bytes", "mfu")


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """What the run has logged so far; what depends on the machine's speed is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
    return [
        {key: value for key, value in record.items() if key not in _SPEEDS}
        for record in records
        if record["kind"] == kind
    ]


def contents(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint, unsharded."""
    verify(checkpoint)
    reader = dcp.FileSystemReader(checkpoint)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    planner = LoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return {**state, **planner.loaded}


def assert_same_contents(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Bit for bit, apart from the time that training took."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        if key != "position.seconds":
            (leaves, shape), (others, other_shape) = tree_flatten(value), tree_flatten(second[key])
            assert shape == other_shape and all(map(_same, leaves, others)), key


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(np.all(one == other))


def committed(run: Path) -> list[int]:
    """Steps of the run's checkpoints."""
    return committed_steps(run / "checkpoints")


def rewind(run: Path, step: int) -> None:
    """Take away what a run saved after `step`: it goes on from there as if it had been stopped."""
    for later in committed(run):
        if later > step:
            shutil.rmtree(run / "checkpoints" / f"step-{later:08d}")
