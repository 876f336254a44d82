"""Lines that a run needs only when something goes wrong, each with the smallest program that meets it."""

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from tests.train.test_memory_copies import damage
from tests.train.test_restarts import supervisor_that
from weft.checkpoint import committed_steps, storage
from weft.train import files
from weft.train.config import CheckpointConfig, RunConfig, load_config
from weft.train.errors import ConfigError
from weft.train.run import launch, memory, peers, worker
from weft.train.run.failures import FAILURE, INTERRUPTED, NOT_BEGUN, SUCCESS
from weft.train.run.launch import _Supervisor
from weft.train.run.peers import Peers
from weft.train.run.runs import CONFIG, LOGS, Run, open_run, remove_if_unused
from weft.train.run.stop import Requests
from weft.train.run.trust import mark_as_own
from weft.train.run.world import STORE
from weft.train.saves import Saves


@pytest.fixture
def first_of_two(monkeypatch):
    """Rank 0 of two, which listens; `heard` is what reached it."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    world = SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
        PrefixStore=dist.PrefixStore,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
    )
    monkeypatch.setattr(peers, "dist", world)
    heard = []
    rank = Peers(lambda: {"what": "the setup"}, heard.append)
    yield rank, heard
    rank.close()


def answer_to(rank, message):
    """What a rank that listens answers to `message`; None where it closes the connection."""
    with socket.create_connection(("127.0.0.1", rank._own["port"]), timeout=5) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")
        content = connection.makefile("rb").read()
    return json.loads(content) if content else None


def test_a_stranger_is_neither_heard_nor_answered(first_of_two):
    rank, heard = first_of_two
    lie = {"kind": "tell", "said": {"rank": 1, "line": "it is over", "failed": True}}
    for secret in ({}, {"secret": ""}, {"secret": secrets.token_hex(16)}, {"secret": None}):
        assert answer_to(rank, lie | secret) is None
    assert heard == []
    assert answer_to(rank, lie | {"secret": rank._own["secret"]}) == {"what": "the setup"}
    assert heard == [lie["said"]]


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environment", "elsewhere"),
    [(SLURM, True), (TORCHRUN, True), (TORCHRUN | {STORE: "/tmp/store"}, False), ({}, False)],
    ids=["SLURM without MASTER_ADDR", "torchrun", "weft train in a shell with MASTER_ADDR", "alone"],
)
def test_ranks_are_reached_on_other_hosts_wherever_some_may_be(environment, elsewhere, monkeypatch):
    for name in {*SLURM, *TORCHRUN, STORE}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (peers._own_hosts()[1:] == [socket.gethostname()]) is elsewhere


def test_a_file_that_takes_another_one_s_place_is_flushed_before(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(storage, "before", lambda name, path: done.append(name))
    files.replace_text(tmp_path / "facts.json", "{}")
    assert done.index("write") < done.index("fsync") < done.index("rename")


def saves(folder, said, **settings):
    """Of one rank, whose state is a tensor."""
    state = {"model": {"weight": torch.arange(4.0)}}
    config = CheckpointConfig(memory_every=1, **settings)
    return Saves(config, folder / "disk", folder / "memory", state=lambda: state, say=said.append)


def test_a_copy_that_fails_is_a_line_and_the_next_one_is_made(tmp_path, monkeypatch):
    said = []
    saver = saves(tmp_path, said)

    def before(name, path):
        if name == "rename" and "memory/step-00000002" in path:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "before", before)
    for step in (1, 2, 3):
        saver.copy(step)
    saver.close()
    assert committed_steps(tmp_path / "memory") == [3]
    (line,) = [line for line in said if line.startswith("a copy in memory failed, and the previous one is kept: ")]
    assert "rename of" in line and "No space left on device" in line


def test_a_copy_waits_for_the_best_checkpoint_that_it_names(tmp_path, monkeypatch):
    done = []

    def before(name, path):
        if name == "rename" and "disk/step-" in path and ".metadata" not in path:
            time.sleep(0.1)  # a slow disk
            done.append("checkpoint")
        if name == "mkdir" and "memory/step-" in path:
            done.append("copy")

    saver = saves(tmp_path, [], keep_best=True)
    monkeypatch.setattr(storage, "before", before)
    saver.save(1, best_step=1, committed=lambda: None)
    saver.copy(1)
    saver.close()
    assert done == ["checkpoint", "copy"]


def test_the_best_checkpoint_stays_until_a_better_one_is_complete(tmp_path, monkeypatch):
    there = []

    def before(name, path):
        if name == "rename" and "disk/step-" in path and ".tmp-" in path and ".metadata" not in path:
            time.sleep(0.1 if "step-00000002" in path else 0)  # a slow disk
            there.append(committed_steps(tmp_path / "disk"))

    saver = saves(tmp_path, [], keep=1, keep_best=True)
    monkeypatch.setattr(storage, "before", before)
    for step, best in ((1, 1), (2, 1), (3, 3)):
        saver.save(step, best_step=best, committed=lambda: None)
    saver.close()
    assert there == [[], [1], [1, 2]] and committed_steps(tmp_path / "disk") == [3]


@pytest.mark.parametrize(
    ("on_disk", "copied", "broken", "step"),
    [(2, 3, False, 3), (3, 2, False, 3), (2, 3, True, 2)],
    ids=["the copy is newer", "the checkpoint is newer", "the copy is damaged"],
)
def test_a_restart_loads_the_newer_of_checkpoint_and_copy(tmp_path, on_disk, copied, broken, step):
    saver = saves(tmp_path, [])
    saver.save(on_disk, best_step=0, committed=lambda: None)
    saver.copy(copied)
    saver.close()
    if broken:
        damage(tmp_path / "memory", copied)
    said = []
    again = saves(tmp_path, said)
    weight = torch.zeros(4)
    assert again.load({"model": {"weight": weight}}) == step
    again.close()
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert again.saved_step == on_disk, "a checkpoint of the copy's step is still to be written"
    assert any("is removed, and the newest checkpoint on disk is loaded" in line for line in said) == broken
    assert committed_steps(tmp_path / "memory") == ([copied] if step == copied else []), "its steps come again"


def test_a_copy_beyond_damaged_checkpoints_is_not_in_the_way_of_the_copies_that_follow(tmp_path):
    saver = saves(tmp_path, [])
    for step in (2, 4):
        saver.save(step, best_step=0, committed=lambda: None)
        saver.copy(step)
    saver.close()
    damage(tmp_path / "disk", 4)
    again = saves(tmp_path, [])
    assert again.load({"model": {"weight": torch.zeros(4)}}) == 2
    for step in (3, 4):
        again.copy(step)
        again.copies.wait()
        assert committed_steps(tmp_path / "memory") == [step]
    again.close()


@pytest.mark.parametrize(
    ("saved", "copied", "start"),
    [([4], [6], "step 6 in memory"), ([8], [6], "step 8"), ([6], [6], "step 6"), ([], [], "the beginning")],
)
def test_a_restart_begins_at_the_newer_of_checkpoint_and_copy(tmp_path, monkeypatch, capsys, saved, copied, start):
    runs = []
    monkeypatch.setattr(memory, "HOST_MEMORY", tmp_path)
    monkeypatch.setattr(launch, "committed_steps", lambda path: saved if path.name == "checkpoints" else copied)
    monkeypatch.setattr(launch, "_Supervisor", supervisor_that(runs, ["a", "b"]))
    assert launch.launch([], 2, Run(tmp_path), "", restarts=1, keeps_copies=True) == FAILURE
    assert [run.step for _, run in runs] == [None, max([0, *saved, *copied]) or None]
    assert f"restart 1 of 1, from {start}\n" in capsys.readouterr().out


def test_a_signal_between_two_starts_is_obeyed_by_the_next_one(tmp_path, monkeypatch):
    known = []

    class Fails(supervisor_that([], ["a", "b"])):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.requests = arguments[-1]

        def run_all(self):
            known.append(self.requests.count)
            return INTERRUPTED if self.requests.count else FAILURE

        def _say(self, line):
            self.requests.note_signal()  # while the restart is announced

    monkeypatch.setattr(launch, "_Supervisor", Fails)
    assert launch.launch([], 2, Run(tmp_path), "", restarts=2) == INTERRUPTED
    assert known == [0, 1]


def test_the_first_failure_is_the_first_although_the_clock_was_set_back(tmp_path, monkeypatch):
    clock = iter((2000.0, 1000.0))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    monkeypatch.setenv(launch.STORE, str(tmp_path / "store"))
    for rank, why in ((1, "the cause"), (0, "a lost connection")):
        launch.report_failure(rank, "failure", why, ValueError(why))
    supervisor = _Supervisor([], 2, Run(tmp_path), "", None, Requests())
    supervisor.folder, supervisor.ranks = tmp_path, [SimpleNamespace(number=rank) for rank in range(2)]
    supervisor.died = [SimpleNamespace(number=0, process=SimpleNamespace(returncode=1))]
    assert supervisor._explain() == FAILURE and supervisor.error == "the cause"


def test_there_is_no_restart_after_ctrl_c(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(launch, "_Supervisor", supervisor_that(runs, ["a", "b", "c"], asked_to_stop=1))
    assert launch.launch([], 2, Run(tmp_path), "", restarts=2) == FAILURE
    assert len(runs) == 1


def test_folders_of_other_users_in_memory_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "HOST_MEMORY", tmp_path)
    monkeypatch.setattr(memory, "_runs", lambda process: False)
    foreign = tmp_path / "weft-4711-x"
    foreign.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: foreign.stat().st_uid + 1)
        memory._remove_stale()
    assert foreign.exists()
    memory._remove_stale()
    assert not foreign.exists(), "it would go if it were this user's"


def test_no_other_user_reads_the_key_that_marks_run_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / CONFIG).write_text('[data]\nsequence_length = 8\n[run]\nloggers = ["own:Logger"]\n')
    before = os.umask(0)
    try:
        mark_as_own(tmp_path, load_config(tmp_path / CONFIG))
    finally:
        os.umask(before)
    (key,) = (tmp_path / "state" / "weft").iterdir()
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    assert key.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("step", "extra", "stays"),
    [(None, "", False), (5, "", True), (None, "metrics.jsonl", True), (None, "checkpoints/step-00000001", True)],
)
def test_only_a_new_run_without_numbers_and_checkpoints_is_unused(tmp_path, step, extra, stays):
    run = Run(tmp_path / "run", step)
    for path in (LOGS, "checkpoints", extra):
        (run.directory / path).mkdir(parents=True, exist_ok=True)
    remove_if_unused(run)
    assert run.directory.exists() == stays


class Ended:
    """The process of a rank that has ended."""

    pid = 1

    def __init__(self, code):
        self.returncode = code

    def poll(self):
        return self.returncode

    wait = poll


@pytest.mark.parametrize(
    ("codes", "step", "signals", "code"),
    [
        ([SUCCESS, SUCCESS], None, 0, SUCCESS),
        ([INTERRUPTED, INTERRUPTED], None, 1, INTERRUPTED),
        ([NOT_BEGUN, INTERRUPTED], None, 1, NOT_BEGUN),  # nothing is promised that one rank does not have
        ([NOT_BEGUN, NOT_BEGUN], 5, 1, INTERRUPTED),  # a resumed run has a checkpoint
        ([SUCCESS, SUCCESS], None, 2, FAILURE),  # the second signal ends ranks in the middle
    ],
)
def test_the_exit_code_after_ctrl_c_says_whether_there_is_a_checkpoint(
    tmp_path, monkeypatch, codes, step, signals, code
):
    monkeypatch.setattr(launch, "on_stop_signals", lambda handler: {})
    monkeypatch.setattr(_Supervisor, "_ask_to_stop", lambda self, rank: None)
    run = Run(tmp_path / "run", step)
    if step:
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
    supervisor = _Supervisor([], len(codes), run, "", None, Requests())
    supervisor.requests.count = signals
    supervisor._start = lambda rank, store: launch._Rank(rank, Ended(codes[rank]), 0)
    assert supervisor.run_all() == code
    assert code != NOT_BEGUN or not (tmp_path / "run").exists()


def test_a_start_that_saved_more_before_the_same_error_is_followed_by_another(tmp_path, monkeypatch):
    starts = []

    class Fails:
        error = "always the same"

        def __init__(self, arguments, ranks, run, *_):
            self.run = run

        def run_all(self):
            starts.append(self.run.step)
            if len(starts) < 3:
                (self.run.checkpoints / f"step-{len(starts):08}").mkdir(parents=True)
            return FAILURE

        def _say(self, *lines):
            pass

    monkeypatch.setattr(launch, "_Supervisor", Fails)
    assert launch.launch([], 1, Run(tmp_path), "", restarts=9) == FAILURE
    assert starts == [None, 1, 2]


def test_an_unused_run_leaves_no_folder_behind_that_was_made_for_it(tmp_path):
    (tmp_path / "own").mkdir()
    for directory in ("own/runs/group", "own"):
        remove_if_unused(open_run(RunConfig(str(tmp_path / directory), "exp"), False, None))
    assert [path.name for path in tmp_path.rglob("*")] == ["own"]


@pytest.mark.parametrize(("complete", "code"), [(True, SUCCESS), (False, INTERRUPTED)])
def test_an_interrupted_rank_has_its_own_exit_code(tmp_path, monkeypatch, complete, code):
    path = tmp_path / CONFIG
    path.write_text("[data]\nsequence_length = 8\n")
    monkeypatch.setenv(worker.RUN, json.dumps({"directory": str(tmp_path), "step": None, "note": ""}))
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    monkeypatch.setattr(worker, "Watchdog", lambda limit, bark: SimpleNamespace(start=lambda: SimpleNamespace(at=at)))
    monkeypatch.setattr(worker, "Trainer", lambda *_, **__: SimpleNamespace(run=lambda: complete))
    monkeypatch.setattr(worker, "StopRequest", lambda: SimpleNamespace(listen=lambda pipe: None))
    monkeypatch.setattr(worker.dist, "destroy_process_group", lambda: None)
    place = SimpleNamespace(rank=1, device=lambda: None, join=lambda device, **_: None)
    with pytest.raises(SystemExit) as ended:
        worker.work(place, str(path), [], False, "weft train")
    assert ended.value.code == code


def at(what, *, loosely):
    assert what == "the setup of the run"


def test_only_the_newest_copy_stays(tmp_path):
    saver = saves(tmp_path, [])
    for number in (3, 6, 9):
        saver.copy(number)
    saver.close()
    assert committed_steps(tmp_path / "memory") == [9]


@distributed(1)
def test_two_copies_with_moments_must_fit():
    usage = namedtuple("Usage", "free")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        saver = saves(Path(folder), [])
        patch.setattr(shutil, "disk_usage", lambda path: usage(free=96))
        saver.check_room()
        patch.setattr(shutil, "disk_usage", lambda path: usage(free=95))
        with pytest.raises(ConfigError, match="two copies of 48 bytes"):
            saver.check_room()
        saver.copy(3)
        saver.close()
        saver = saves(Path(folder), [])  # restarts, and has the first copy
        patch.setattr(shutil, "disk_usage", lambda path: usage(free=48))
        saver.check_room()
        patch.setattr(shutil, "disk_usage", lambda path: usage(free=47))
        with pytest.raises(ConfigError, match="two copies of 48 bytes"):
            saver.check_room()
        saver.close()
