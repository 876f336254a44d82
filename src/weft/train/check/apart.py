"""Runs `weft check` before training, in a separate process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.comm.groups import broadcast_object
from weft.train.config import TrainConfig, to_toml
from weft.train.errors import ConfigError


def check_apart(config: TrainConfig, rank: int, ranks: int) -> None:
    """Run `weft check` in a separate process, which rank 0 starts. The other ranks wait for the result. Collective.

    Raises ConfigError on every rank if the check finds faults or fails.
    """
    said = broadcast_object(
        _said(config, ranks) if rank == 0 else "", what="whether the configuration passes the check"
    )
    if said:
        raise ConfigError(f"train.check = true: {said}")


def _said(config: TrainConfig, ranks: int) -> str:
    """Run the check. Return its output as one line if it finds faults or fails, otherwise ""."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "weft", "check", str(path), "--ranks", str(ranks)]
        done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return " ".join((done.stdout + done.stderr).split()) or f"weft check ended with exit code {done.returncode}"
