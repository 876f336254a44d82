"""`python -m weft` without its imports, which take three seconds of a core for each process.

this process        started tests; has a template (tests/pool.py), which has imported everything and computed nothing
  the supervisor    forked from the template, then a child of this process: a `subprocess.Popen`, with its own pid,
                    signals, exit status, environment, directory and output
    its ranks       forked from the supervisor, where it would start them

A forked process has the arguments, directory, environment, standard streams, signals, hooks and warnings of a new
interpreter. It has more modules, the hash seed and the random numbers of the template, and the template's
`/proc/PID/environ`. Tests of such things start real processes, as do all tests where there is a GPU.
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
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from tests.pool import BUCKET_BYTES, Template
from weft.fsdp.runtime import options

ROOT = Path(__file__).parents[1]
STUBS = str(ROOT / "tests" / "without_pictures")
ADOPTS = 36  # PR_SET_CHILD_SUBREAPER
FREE_FD = 64  # duplicates for a moment, above those that are replaced
COLLECTS_AT = gc.get_threshold()
LIKE_A_PLAIN_CALL = {"preexec_fn": None, "close_fds": True, "start_new_session": False, "umask": -1, "gid": None}
"""Arguments of `subprocess.Popen` that are not imitated, with the values that need no imitation."""


class Forked(subprocess.Popen):
    """Forks `python -m weft` on Linux; starts every other command."""

    template: Template | None = None
    forks_itself = False
    """Whether this process was forked here, and so may be."""

    def _can_fork(self) -> bool:
        if sys.platform != "linux" or torch.cuda.is_available():
            return False
        return self.template is not None or (self.forks_itself and len(os.listdir("/proc/self/task")) == 1)

    def _execute_child(self, *given: Any) -> None:
        how = inspect.signature(super()._execute_child).bind(*given).arguments
        command = list(how["args"])
        is_weft = command[:3] == [sys.executable, "-m", "weft"]
        plain = all(how[name] == value for name, value in LIKE_A_PLAIN_CALL.items())
        if self.template is not None:
            plain = plain and not how["pass_fds"] and how["process_group"] == -1
        if not is_weft or not plain or not self._can_fork():
            return super()._execute_child(*given)
        ends = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        ends = [number if end == -1 else end for number, end in enumerate(ends)]
        environment = dict(os.environ if how["env"] is None else how["env"])
        ignored = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
        become = functools.partial(_become, command[3:], environment, str(how["cwd"] or os.getcwd()), ignored)
        if self.template is not None:
            self.pid = _adopted(self.template, become, ends)
        else:
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
    with _adopting():
        pid = template.fork(functools.partial(_orphan, become), ends).recv()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid()):
            assert time.monotonic() < deadline, f"process {pid} is no child of this one"
            time.sleep(0.001)
    return pid


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside, processes whose parent ends become children of this one; afterwards, of `init`, which waits for them."""
    control = ctypes.CDLL(None, use_errno=True).prctl
    if control(ADOPTS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        control(ADOPTS, 0, 0, 0, 0)


def _orphan(become: Any, pipe: Any, *ends: int) -> None:
    if pid := os.fork():
        pipe.send(pid)
        return
    become(*ends)


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    ignored: Set[int],
    *ends: int,
    kept: Sequence[int] = (),
    process_group: int = -1,
) -> None:
    """Be what `python -m weft *arguments` would be; never returns."""
    code = 70
    try:
        _forget_the_process_before(ignored, ends, kept, process_group)
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
        is_rank = "RANK" in environment or "SLURM_PROCID" in environment
        subprocess.Popen, Forked.template, Forked.forks_itself = Forked, None, not is_rank  # type: ignore[misc]
        sys.argv[:] = ["weft", *arguments]
        code = _run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget_the_process_before(ignored: Set[int], ends: Sequence[int], kept: Sequence[int], process_group: int) -> None:
    # What the process that asks ignores is ignored, as in a new program; all else has its default.
    usual = {signal.SIGINT: signal.default_int_handler}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = signal.SIG_IGN if number in ignored else usual.get(number, signal.SIG_DFL)
        if signal.getsignal(number) not in (None, wanted):
            signal.signal(number, wanted)
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
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    atexit._clear()
    logging.getLogger().handlers.clear()
    gc.set_threshold(*COLLECTS_AT)
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
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    return code
