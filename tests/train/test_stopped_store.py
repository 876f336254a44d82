"""Rank 0 holds the TCP store of a job and stops: the others name it within the limit, though no store answers."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.train.command import free_port, metrics, wait_until, write_config
from tests.train.kills import Starts, train_at
from weft.errors import RunFailed
from weft.train.run import meeting
from weft.train.run.failures import Interrupted
from weft.train.run.stop import StopRequest

LIMIT_S = 4.0
"""train.watchdog of these runs."""
SLACK_S = 30.0


class OverTCP(Starts):
    """Starts of a run as under a launcher whose rank 0 listens."""

    def start(self):
        self.count += 1
        log, port = str(self.folder / f"log-{self.count}"), str(free_port())
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        made = [self.context.Process(target=train_at, args=(rank, place, log, self.arguments)) for rank in range(2)]
        for process in made:
            process.start()
        return made


STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, timedelta(minutes=1), wait_for_workers=False)
print("listens", flush=True)
time.sleep(100)
"""


@pytest.mark.long
def test_a_store_that_stops_before_or_in_the_meeting_is_named_and_the_wait_obeys_signals(monkeypatch):
    monkeypatch.setattr(meeting, "FIRST_WORD_S", 0.2)
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.1)
    port, said = free_port(), []
    silent = f"rank 0, whose store at 127.0.0.1:{port} does not answer"
    arguments = {"patience": 0.5, "say": said.append}
    stop = StopRequest()

    def meet(**changes):
        meeting.meet(f"tcp://127.0.0.1:{port}", 1, 2, **{**arguments, "stop": stop, **changes})

    holder = subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "listens\n"
        timer = threading.Timer(0.5, holder.send_signal, (signal.SIGSTOP,))
        timer.start()
        with pytest.raises(RunFailed, match=f"in vain for {silent}"):
            meet(patience=2)  # it stops while this rank waits for rank 0 to come
        assert said[0].startswith("waiting for rank 0")
        said.clear()
        with pytest.raises(RunFailed, match=f"in vain for {silent}"):
            meet()  # connections are taken as before
        assert said == [f"waiting for {silent}"]
        stop._request()
        with pytest.raises(Interrupted, match=f"stopped while waiting for {silent}"):
            meet(patience=60)
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["setup", "training"])
def test_a_stopped_rank_0_that_holds_the_store_is_named_within_the_limit(tmp_path, moment):
    changes = {"train__watchdog": LIMIT_S, "train__steps": 100_000, "train__validate_every": 0}
    config = write_config(tmp_path, **changes, checkpoint__every=0, run__loggers=[])
    starts = OverTCP(tmp_path, tmp_path / "runs", "tiny", [str(config)])
    ranks = starts.start()
    try:
        run = tmp_path / "runs" / "tiny"
        if moment == "setup":
            wait_until((run / "checkpoints").exists, 60)  # it is claimed
        else:
            wait_until(lambda: len(metrics(run)) > 3, 60)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        ranks[1].join(timeout=LIMIT_S + SLACK_S)
        assert ranks[1].exitcode == 1, (time.monotonic() - stopped, starts.said())
    finally:
        for process in ranks:
            process.kill()
            process.join()
    lines = [line for line in starts.said().splitlines() if "rank 0 does not run or cannot be reached" in line]
    assert len(lines) == 1 and lines[0].startswith("weft train: rank 1: no progress for 4 s (train.watchdog)")
    assert "Traceback" not in starts.said()
