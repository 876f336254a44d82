"""However a run ends, it says why in a line, and earlier files are unchanged."""

import errno
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from tests.train.command import (
    WITHOUT_PICTURES,
    committed,
    free_port,
    metrics,
    ranks_of,
    started,
    train_here,
    wait_until,
    write_config,
)
from weft.checkpoint import CheckpointError, verify
from weft.checkpoint.storage import operation
from weft.errors import RunFailed
from weft.train.report import write_report
from weft.train.run import meeting, worker
from weft.train.run.failures import INTERRUPTED, NOT_BEGUN, Interrupted, in_one_line
from weft.train.run.output import _Steady
from weft.train.run.stop import StopRequest
from weft.train.run.watchdog import Watchdog
from weft.train.run.world import place_from


class Stopped(StopRequest):
    requested = True


@pytest.mark.slow
def test_waiting_names_the_missing_ranks_and_ends_after_the_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_WORD_S", 0.2)
    said = []
    arguments = {"patience": 0.5, "stop": StopRequest(), "say": said.append}
    with pytest.raises(RunFailed, match=r"waited 0\.5 s \(run\.patience\) in vain for ranks 0, 2 of 3"):
        meeting.meet(f"file://{tmp_path / 'store'}", 1, 3, **arguments)
    assert said == ["waiting for ranks 0, 2 of 3"]
    port = free_port()
    with pytest.raises(RunFailed, match=f"in vain for rank 0, which should listen on 127.0.0.1:{port}"):
        meeting.meet(f"tcp://127.0.0.1:{port}", 1, 2, **arguments)
    with pytest.raises(RunFailed, match="in vain for rank 1 of 2"):
        meeting.meet(f"tcp://127.0.0.1:{port}", 0, 2, **arguments)
    stopped = {**arguments, "stop": Stopped()}
    with pytest.raises(Interrupted, match="stopped while waiting for rank 1 of 2"):
        meeting.meet(f"file://{tmp_path / 'other'}", 0, 2, **stopped)
    with pytest.raises(Interrupted, match="stopped while waiting for the last of 2 ranks"):
        meeting.meet(f"file://{tmp_path / 'other'}", 1, 2, **stopped)


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_waits_takes_the_others_along_and_leaves_none_of_them_alone(tmp_path):
    arguments = {"patience": 5, "say": print}
    meeting_point = f"file://{tmp_path / 'store'}"
    with pytest.raises(Interrupted, match="stopped while waiting for rank 0 of 2"):
        meeting.meet(meeting_point, 1, 2, stop=Stopped(), **arguments)
    with pytest.raises(Interrupted, match="another rank was stopped"):
        meeting.meet(meeting_point, 0, 2, stop=StopRequest(), **arguments)
    whole = f"file://{tmp_path / 'other'}"
    first = threading.Thread(target=meeting.meet, args=(whole, 0, 2), kwargs={"stop": StopRequest(), **arguments})
    first.start()
    store = dist.FileStore(str(tmp_path / "other"), 2)
    wait_until(lambda: store.add(meeting.COUNT, 0) == 1)
    meeting.meet(whole, 1, 2, stop=Stopped(), **arguments)  # all are there: too late to leave
    first.join(timeout=5)
    assert not first.is_alive()


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunFailed, match=f"rank 0 cannot listen on 127.0.0.1:{port}"):
            meeting.meet(f"tcp://127.0.0.1:{port}", 0, 2, patience=1, stop=StopRequest(), say=print)


@pytest.mark.long
@distributed(3)
def test_the_rank_that_hangs_is_named_on_every_rank():
    barks = []
    with Watchdog(0.5, barks.append) as watchdog:
        watchdog.at("step 7")
        if dist.get_rank() == 1:
            time.sleep(5)
        dist.all_reduce(torch.ones(1))
        watchdog.rest()
    assert barks, "nobody said anything"
    for line in barks:
        assert line.startswith("no progress for 0.5 s (train.watchdog): rank 1 hangs, in step 7 (test_ends.py, "), line
        assert line.count("rank ") == 1, line


@pytest.mark.long
@distributed(2)
def test_a_run_that_moves_is_left_alone():
    barks = []
    with Watchdog(1.0, barks.append) as watchdog:
        for step in range(10):
            watchdog.at(f"step {step}")
            time.sleep(0.1)
            dist.all_reduce(torch.ones(1))
        watchdog.rest()
        time.sleep(1.5)
        watchdog.at("the save of step 10")  # its main thread waits for one that writes a little now and then
        for _ in range(4):
            time.sleep(0.5)
            with operation("write", "__0_0.distcp"):
                pass
        watchdog.rest()
        dist.barrier()
    assert barks == []


@pytest.mark.parametrize(
    "error, said",
    [
        (CheckpointError("it is damaged"), "it is damaged"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/metrics.jsonl"),
            "No space left on device (/x/metrics.js",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB"), "lower train.microbatch_size"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9\n"), "out of memory"),
    ],
)
def test_errors_that_one_line_explains_print_no_traceback(error, said):
    line = in_one_line(error)
    assert said in line and "\n" not in line


def test_an_error_of_the_program_keeps_its_traceback():
    for error in (RuntimeError("a bug"), OSError(errno.ECONNRESET, "reset"), KeyError("x")):
        assert in_one_line(error) is None


def test_without_matplotlib_the_report_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 2.0}\n')
    page = write_report(tmp_path).read_text()
    assert "no pictures: they need matplotlib; install weft[train] for them" in page
    assert "training loss" in page


@pytest.mark.long
def test_a_rank_that_waits_for_rank_0_names_it_and_obeys_sigterm(tmp_path):
    config = write_config(tmp_path)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started("train", config, env={**os.environ, **variables}) as process:
        line = process.stderr.readline()
        assert "weft train: rank 1: waiting for rank 0, which should listen on 127.0.0.1" in line
        process.terminate()
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 4, errors
    assert "stopped while waiting for rank 0" in errors and "Traceback" not in errors


@pytest.mark.parametrize(("step", "code"), [(None, NOT_BEGUN), (3, INTERRUPTED)])
def test_a_rank_that_is_stopped_before_the_ranks_meet_knows_whether_its_run_has_a_checkpoint(
    tmp_path, monkeypatch, capsys, step, code
):
    def join(*_, **__):
        raise Interrupted("stopped while waiting for rank 0")

    monkeypatch.setattr(worker.Place, "join", join)
    monkeypatch.setattr(worker._Rank, "end", staticmethod(sys.exit))
    monkeypatch.setattr(StopRequest, "listen", lambda *_: None)
    if step:
        (tmp_path / "runs/tiny/checkpoints" / f"step-{step:08}").mkdir(parents=True)
    place = place_from({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(SystemExit) as end:
        worker.work(place, write_config(tmp_path), [], True, "weft train", or_start=True)
    assert end.value.code == code
    state = "step 3 is still the newest checkpoint" if step else "nothing was trained and nothing was saved"
    assert capsys.readouterr().err == f"weft train: rank 1: stopped while waiting for rank 0; {state}\n"
    assert (tmp_path / "runs").exists() == bool(step)


def test_a_copy_in_memory_is_not_said_to_be_a_checkpoint(tmp_path, monkeypatch, capsys):
    def join(*_, **__):
        raise Interrupted("stopped while waiting for rank 1")

    monkeypatch.setattr(worker.Place, "join", join)
    monkeypatch.setattr(worker._Rank, "end", staticmethod(sys.exit))
    monkeypatch.setattr(StopRequest, "listen", lambda *_: None)
    restarted = {"directory": str(tmp_path / "run"), "step": 13, "note": ""}  # 13: of the copy
    monkeypatch.setenv(worker.RUN, json.dumps(restarted))
    place = place_from({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(SystemExit) as end:
        worker.work(place, write_config(tmp_path), [], False, "weft train")
    assert end.value.code == NOT_BEGUN
    assert capsys.readouterr().err.endswith("; nothing was trained and nothing was saved\n")


def listening(pid):
    """Addresses, as the kernel writes them, on which a process listens."""
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in between, as files of a run that trains are
            links.append(os.readlink(file))
    own = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    found = []
    for family in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in own:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.long
def test_a_stopped_rank_is_named_and_ranks_listen_on_loopback_only(tmp_path):
    # Not 2 s: on a loaded machine the first step takes longer, and the run ends before its rank is stopped.
    settings = {"train__watchdog": 5.0, "train__steps": 100_000, "train__validate_every": 0, "checkpoint__every": 0}
    config = write_config(tmp_path, **settings)
    with started("train", config, "--ranks", 2) as process:
        wait_until(lambda: len(metrics(tmp_path / "runs" / "tiny")) > 3)
        ranks = ranks_of(process.pid)
        addresses = [address for pid in ranks.values() for address in listening(pid)]
        assert addresses, "gloo listens somewhere"
        assert set(addresses) <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        os.kill(ranks[1], signal.SIGSTOP)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 1, output
    assert "no progress for 5 s (train.watchdog): rank 1 does not run or cannot be reached" in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_full_disk_is_a_one_line_error_and_existing_files_stay(pool, tmp_path):
    config = write_config(tmp_path, train__steps=2, train__validate_every=0, model__hidden_size=64)
    pool.run(1, train_here, config)
    run = tmp_path / "runs" / "tiny"
    lines = metrics(run)
    done = subprocess.run(
        [sys.executable, "-m", "weft", "train", "--resume", str(run), "--set", "train.steps=4"],
        capture_output=True,
        text=True,
        timeout=60,
        # As on a full disk, writing a file fails from here on; the checkpoint is the first that is as long.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "the checkpoint could not be saved: " in done.stderr and "File too large" in done.stderr
    assert "the checkpoint of step 2 is complete; resume with: weft train " in done.stderr
    assert [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")] == ["step-00000002"]
    verify(run / "checkpoints" / "step-00000002")
    assert metrics(run)[:2] == lines


def test_a_reader_of_output_that_does_not_block_is_waited_for():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as other programs on a terminal do
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    received = []

    def read():
        time.sleep(0.05)
        with open(reading, "rb") as stream:
            received.append(stream.read())

    thread = threading.Thread(target=read)
    thread.start()
    with io.BufferedWriter(_Steady(writing, "w")) as stream:
        stream.write(b"a line\n")
    thread.join()
    assert received[0].endswith(b"xa line\n")


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed():
    program = "import os\nfrom weft.train.run.output import outlive_readers\noutlive_readers()\nos._exit(os.dup(0))"
    command = ["sh", "-c", f"exec {sys.executable} -c '{program}' <&- >&- 2>&-"]
    assert subprocess.run(command, check=False).returncode == 3


@pytest.mark.long
def test_output_that_cannot_be_written_does_not_end_a_run(tmp_path):
    config = write_config(tmp_path, train__steps=2, train__validate_every=0)
    with open("/dev/full", "w") as full, started("train", config, "--ranks", 1, stdout=full) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
    assert committed(tmp_path / "runs" / "tiny") == [2]


@pytest.mark.long
def test_head_does_not_end_a_run(tmp_path):
    config = write_config(tmp_path, train__steps=3, train__validate_every=0, train__log_every=1)
    command = f"{sys.executable} -m weft train {config} | head -n 1"
    quick = {**os.environ, "PYTHONPATH": WITHOUT_PICTURES}
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, env=quick, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    assert committed(tmp_path / "runs" / "tiny") == [3]
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
