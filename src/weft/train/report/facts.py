"""Facts about a run that are not metrics, kept in the run's folder for the report.

Written at the start:

parameters, ranks, device, versions, command, commit, units, resumed, pattern
mark: for each import path in the configuration, an HMAC that shows that this user trusts it (`weft.train.run.trust`)

Written at the end:

description: the text of `weft.describe`
memory: the result of `weft.memory_report`, or a list of them for the ranks of a pipeline
baseline: the validation loss of the bigram table in nats per byte
graphs: the counts of `weft.graph_report` on the first rank
operations: the number of operations in a step of the first rank, as text
seconds: the time spent in steps
computed: the seconds that each rank spent computing in the last step, if a timeline was recorded
reported: the step at which the final report was written
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import weft
from weft.train.files import parse_json, read_bounded, replace_text
from weft.train.run.world import torchrun_of

FILE = "facts.json"
_LARGEST = 64 << 20


def read_facts(folder: Path) -> dict[str, Any]:
    """Read the facts.json of a run. Return an empty dictionary if the file is missing or cannot be read."""
    try:
        facts = parse_json(read_bounded(folder / FILE, _LARGEST))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def keep_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add `facts` to the facts.json of a run. New facts replace old ones of the same names."""
    replace_text(folder / FILE, json.dumps({**read_facts(folder), **facts}, indent=1) + "\n")


def versions() -> str:
    """Return the versions of weft, torch and Python."""
    return f"weft {weft.__version__}, torch {version('torch')}, Python {python_version()}"


def commit() -> str | None:
    """Return the current directory's git commit, or None if git finds none. Changed tracked files add "-dirty"."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def command() -> str:
    """Return the shell command that started this run. A rank that `weft train` started returns its parent's command,
    because both have the same arguments."""
    program = Path(sys.argv[0])
    is_weft = program.name == "weft" or program.parts[-2:] == ("weft", "__main__.py")
    words = ["-m", "weft"] if is_weft else [sys.argv[0]]
    if launcher := torchrun_of(os.environ):
        start = [*launcher, *words]
    else:
        start = ["weft"] if is_weft else ["python", *words]
    return shlex.join([*start, *sys.argv[1:]])
