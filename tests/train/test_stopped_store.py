"""Rank 0 holds the TCP store of a job and stops: the others name it within the limit, though no store answers."""

import os
import signal
import time

import pytest

from tests.train.command import free_port, metrics, wait_until, write_config
from tests.train.kills import Starts, train_at

LIMIT_S = 4.0
"""train.watchdog of these runs."""
SLACK_S = 30.0

pytestmark = pytest.mark.long


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
