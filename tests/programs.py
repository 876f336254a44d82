"""Programs that share one import of weft: each runs in a process forked behind it, and ends as an interpreter ends.

    leaves, raises = run_programs(["print('hello')", "raise ValueError('no')"])
    assert leaves.stdout == "hello\n" and raises.returncode == 1

An import of torch and weft takes three seconds, which most of such a test would be.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DRIVER = """
import gc, json, os, sys
exec(sys.argv.pop())
sys.stdout.flush()
gc.freeze()
for line in sys.stdin:
    folder, programs, together = json.loads(line)
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
            if pid in pids and statuses[pid] and together:
                for other in set(pids) - set(statuses):
                    os.kill(other, 9)
        print(json.dumps([statuses[pid] for pid in pids]), flush=True)
        continue
    break
else:
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for stream in (1, 2):
    os.dup2(os.open(f"{folder}/{number}-{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
os.environ.update(environment)
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """A program that has ended. `returncode`: negative where a signal ended it."""

    returncode: int
    stdout: str
    stderr: str


class Imported:
    """A process that has executed `imports`, for programs of several tests; a context manager that ends it."""

    def __init__(self, imports: str) -> None:
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # until the process ends
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, imports],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def run(
        self,
        programs: Sequence[str],
        environments: Sequence[Mapping[str, str]] | None = None,
        timeout: float = 100,
        together: bool = False,
    ) -> list[Ended]:
        """See `run_programs`."""
        given = [
            [program, dict(own)] for program, own in zip(programs, environments or [{}] * len(programs), strict=True)
        ]
        with tempfile.TemporaryDirectory() as folder:
            asked, told = self._process.stdin, self._process.stdout
            assert asked is not None and told is not None
            asked.write(json.dumps([folder, given, together]).encode() + b"\n")
            asked.flush()
            if not select.select([told], [], [], timeout)[0]:
                self.end()
                raise TimeoutError(f"not done after {timeout} s")
            if not (answer := told.readline()):
                self._said.seek(0)
                raise AssertionError(self._said.read())
            numbers = range(len(given))
            texts = [[Path(folder, f"{number}-{stream}").read_text() for stream in (1, 2)] for number in numbers]
        return [Ended(status, *both) for status, both in zip(json.loads(answer), texts)]

    def end(self) -> None:
        """End the process, and programs that are under way."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.communicate()
        self._said.close()

    def __enter__(self) -> "Imported":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.end()


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
    with Imported(imports) as ready:
        return ready.run(programs, environments, timeout, together)
