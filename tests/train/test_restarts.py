"""`weft train --restarts`: from the beginning where nothing is saved, and never the same error again and again."""

import errno
import os
import signal
import subprocess
from pathlib import Path
from tempfile import gettempdir

import pytest

from tests.train.command import committed, metrics, weft, write_config
from weft.checkpoint import storage
from weft.errors import StorageError
from weft.train.run.launch import launch
from weft.train.run.runs import Run


class FailsOnce:
    """A logger that ends its rank at step 4, where no earlier start has."""

    def __init__(self, folder, resumed_step, settings):
        self.mark = Path(folder) / "failed"

    def scalars(self, step, values):
        if step == 4 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("the first start fails")

    def histogram(self, step, name, counts):
        pass

    def close(self):
        pass


@pytest.mark.long
def test_a_restart_without_a_checkpoint_begins_again_and_keeps_no_number_of_the_first_start(tmp_path):
    changes = {"train__steps": 6, "train__validate_every": 0, "checkpoint__every": 0, "train__log_every": 1}
    config = write_config(tmp_path, **changes, run__loggers=["tests.train.test_restarts:FailsOnce"])
    done = weft("train", config, "--ranks", 2, "--restarts", 2, timeout=300)
    run = tmp_path / "runs" / "tiny"
    assert done.returncode == 0 and "RuntimeError: the first start fails" in done.stderr
    assert "weft train: restart 1 of 2, from the beginning" in done.stderr and "restart 2" not in done.stderr
    assert [line["step"] for line in metrics(run)] == list(range(1, 7))
    assert done.stdout.count("a new run in") == 1, "it is new once"
    assert committed(run) == [6]


def supervisor_that(runs, errors, asked_to_stop=0):
    """Stands for what starts the ranks: start N fails with the N-th error. `runs`: ranks and run of each start."""

    class Fails:
        def __init__(self, arguments, ranks, run, resume_command, memory, requests):
            requests.count += asked_to_stop
            self.error = errors[len(runs)]
            runs.append((ranks, run))

        def run_all(self):
            return 1

        def _say(self, line):
            print(line)

    return Fails


@pytest.mark.parametrize(
    ("errors", "starts"),
    [
        (["a", "a", "a", "a"], 2),  # the same again: a third start would fail as well
        (["a", "b", "a", "b"], 4),
        (["a", "", "a", ""], 4),  # "": a rank was killed
        (["", "", "", ""], 4),
    ],
)
def test_a_restart_that_fails_as_the_start_before_it_is_the_last_one(tmp_path, monkeypatch, capsys, errors, starts):
    runs = []
    monkeypatch.setattr("weft.train.run.launch._Supervisor", supervisor_that(runs, errors))
    assert launch([], 4, Run(tmp_path), "", restarts=3, restart_ranks=2) == 1
    assert [ranks for ranks, _ in runs] == [4, 2, 2, 2][:starts]
    ends = "the restart failed with the same error as the previous start, so the ranks are not restarted again"
    assert (ends in capsys.readouterr().out) == (starts == 2)


@pytest.mark.parametrize(("name", "part"), [("mkdir", "logs"), ("mkdir", gettempdir()), ("open", "rank-1.log")])
def test_what_starts_the_ranks_names_the_file_that_it_cannot_make_and_leaves_no_run(tmp_path, monkeypatch, name, part):
    def before(operation, path):
        if operation == name and path.endswith(part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "before", before)
    monkeypatch.setattr("sys.executable", "/bin/true")  # rank 0
    monkeypatch.setattr("weft.train.run.launch.on_stop_signals", lambda handler: {})
    (tmp_path / "run").mkdir()
    with pytest.raises(StorageError, match=f"{name} of .*{part}: No space left on device"):
        launch([], 2, Run(tmp_path / "run"), "")
    assert not (tmp_path / "run").exists()


def test_a_rank_that_was_started_ends_if_another_cannot_be(tmp_path, monkeypatch):
    started, real = [], subprocess.Popen

    def starting(command, **options):
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(real(["sleep", "60"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", starting)
    monkeypatch.setattr("weft.train.run.launch.on_stop_signals", lambda handler: {})
    with pytest.raises(OSError, match="temporarily unavailable"):
        launch([], 2, Run(tmp_path / "run"), "")
    ended = started[0].poll()
    started[0].kill()
    assert ended == -signal.SIGKILL


def test_ranks_for_restarts_that_do_not_fit_are_refused_before_there_is_a_run(tmp_path):
    done = weft("train", write_config(tmp_path), "--ranks", 2, "--restarts", 1, "--restart-ranks", 3)
    assert done.returncode == 2 and "3 x 2 = 6" in done.stderr
    assert not (tmp_path / "runs").exists()
