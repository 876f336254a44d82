"""`python -m weft` without its imports, which take three seconds of a core for each process.

this process        started tests; has a template (tests/pool.py), which has imported everything and computed nothing
  the supervisor    forked from the template, then a child of this process: a `subprocess.Popen`, with its own pid,
                    signals, exit status, environment, directory and output
    its ranks       forked from the supervisor, where it would start them

What a new interpreter has, the forked one gets: its arguments, standard streams, signal handlers, warnings, threads. It
has more modules, and `/proc/PID/environ` is that of the template. Tests of such things start real processes.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import inspect
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.pool import BUCKET_BYTES, Template
from weft.fsdp.runtime import options

ROOT = Path(__file__).parents[1]
STUBS = str(ROOT / "tests" / "without_pictures")
_BECOME_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
FREE_FD = 64  # duplicates for a moment, above those that are replaced


class Forked(subprocess.Popen):
    """Forks `python -m weft` on Linux; starts every other command."""

    template: Template | None = None
    forks_itself = False
    """Whether this process was forked here, and so may be."""

    def _execute_child(self, *given: Any) -> None:
        how = inspect.signature(super()._execute_child).bind(*given).arguments
        command = list(how["args"])
        can = sys.platform == "linux" and (self.template is not None or self.forks_itself)
        if not can or command[:3] != [sys.executable, "-m", "weft"] or how["preexec_fn"]:
            return super()._execute_child(*given)
        ends = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        ends = [number if end == -1 else end for number, end in enumerate(ends)]
        environment = dict(os.environ if how["env"] is None else how["env"])
        become = functools.partial(_become, command[3:], environment, str(how["cwd"] or os.getcwd()))
        if self.template is not None:
            self.pid = _adopted(self.template, become, ends)
        else:  # nothing has computed here: it is a supervisor, with one thread
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if not self.pid:
                become(*ends, kept=how["pass_fds"], process_group=how["process_group"])
        self._child_created = True
        self._close_pipe_fds(
            *(how[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _adopted(template: Template, become: Any, ends: Sequence[int]) -> int:
    """The pid of a new child of this process, forked by a process that the template has forked, and that has ended."""
    ctypes.CDLL(None).prctl(_BECOME_PARENT_OF_ORPHANS, 1, 0, 0, 0)
    pipe = template.fork(functools.partial(_orphan, become), ends)
    pid = pipe.recv()
    while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != str(os.getpid()):
        time.sleep(0.001)
    return pid


def _orphan(become: Any, pipe: Any, *ends: int) -> None:
    if pid := os.fork():
        pipe.send(pid)
        return
    become(*ends)


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    *ends: int,
    kept: Sequence[int] = (),
    process_group: int = -1,
) -> None:
    """Be what `python -m weft *arguments` would be; never returns."""
    code = 70
    try:
        _forget_the_process_before(ends, kept, process_group)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if "RANK" in environment:
            Path("/proc/self/comm").write_text(f"rank-{environment['RANK']}")
        paths = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in (*paths, str(ROOT)))]
        if STUBS in paths:
            for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
                del sys.modules[name]
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
        options.BUCKET_BYTES = BUCKET_BYTES
        subprocess.Popen, Forked.template, Forked.forks_itself = Forked, None, True  # type: ignore[misc]
        sys.argv[:] = ["weft", *arguments]
        code = _run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget_the_process_before(ends: Sequence[int], kept: Sequence[int], process_group: int) -> None:
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    if process_group >= 0:
        os.setpgid(0, process_group)
    copies = [fcntl.fcntl(end, fcntl.F_DUPFD, FREE_FD) for end in ends]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (*kept, nothing):
            with contextlib.suppress(OSError):  # that of the listing
                os.fstat(int(name))
                os.dup2(nothing, int(name))  # not closed: an object that has it may close it later
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    faulthandler.disable()
    atexit._clear()
    logging.getLogger().handlers.clear()
    gc.set_threshold(700, 10, 10)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings._showwarnmsg_impl = lambda said: sys.stderr.write(warnings._formatwarnmsg(said))  # type: ignore[attr-defined]


def _run() -> int:
    """Run the module, and all that an interpreter runs at its end. Return the exit status."""
    code: Any = 0
    try:
        runpy.run_module("weft", run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code if isinstance(code, int) else 1
