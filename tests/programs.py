"""Programs that share one import of weft: each runs in a process forked behind it, and ends as an interpreter ends.

    leaves, raises = run_programs(["print('hello')", "raise ValueError('no')"])
    assert leaves.stdout == "hello\n" and raises.returncode == 1

An import of torch and weft takes three seconds, which most of such a test would be.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DRIVER = """
import gc, json, os, sys
folder, programs = sys.argv[1], json.loads(sys.argv[2])
exec(sys.argv[3])
sys.stdout.flush()
gc.freeze()
pids = []
for number, (program, environment) in enumerate(programs):
    pid = os.fork()
    if not pid:
        break
    pids.append(pid)
else:
    statuses = {}
    while set(pids) - set(statuses):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if pid in pids and statuses[pid] and sys.argv[4] == "together":
            for other in set(pids) - set(statuses):
                os.kill(other, 9)
    with open(f"{folder}/statuses", "w") as file:
        json.dump([statuses[pid] for pid in pids], file)
    os._exit(0)
for stream in (1, 2):
    os.dup2(os.open(f"{folder}/{number}-{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
os.environ.update(environment)
sys.argv[1:] = []
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """A program that has ended. `returncode`: negative where a signal ended it."""

    returncode: int
    stdout: str
    stderr: str


def run_programs(
    programs: Sequence[str],
    imports: str = "import torch.distributed, weft.fsdp",
    environments: Sequence[Mapping[str, str]] | None = None,
    timeout: float = 100,
    together: bool = False,
) -> list[Ended]:
    """Run all `programs` at once, each with its own variables, behind one execution of `imports`.

    With `together` they are ranks: when one fails, the others are killed.
    """
    given = [[program, dict(own)] for program, own in zip(programs, environments or [{}] * len(programs), strict=True)]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, folder, json.dumps(given), imports, "together" if together else "apart"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = driver.communicate(timeout=timeout)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, 9)
                driver.wait()
        assert driver.returncode == 0, said
        statuses = json.loads(Path(folder, "statuses").read_text())
        texts = [[Path(folder, f"{number}-{stream}").read_text() for stream in (1, 2)] for number in range(len(given))]
    return [Ended(status, *both) for status, both in zip(statuses, texts)]
