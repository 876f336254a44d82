"""Copies of a run's state in the memory of its host: a rank that is lost costs the steps since the newest copy."""

import os
import random
import re
import shutil
import signal
import time
from collections import namedtuple

import pytest

from tests.train.command import (
    assert_same_contents,
    committed,
    contents,
    metrics,
    ranks_of,
    started,
    train_here,
    wait_until,
    weft,
    write_config,
)
from weft.checkpoint import committed_steps
from weft.train.config import load_config
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.run import memory
from weft.train.run.runs import Run

KILLS = int(os.environ.get("WEFT_RESTARTS", "3"))
SETTINGS = {"checkpoint__every": 10, "checkpoint__memory_every": 3, "train__validate_every": 4, "train__steps": 17}


class Dies(Trainer):
    """Its ranks end after step `after`, and what is being written is finished."""

    after = 14

    def moment(self, name, numbers):
        if name == "step" and self.position.step == self.after:
            raise ZeroDivisionError


def train_once(path, run, folder, *, dies, step=None):
    """What the run says; `step`: of the newest checkpoint or copy, where there is one."""
    said = []
    trainer = (Dies if dies else Trainer)(load_config(path), Run(run, step), say=said.append, memory=folder)
    trainer.progress._line = said.append
    try:
        assert trainer.run() and not dies
    except ZeroDivisionError:
        assert dies
    return said


def damage(folder, step):
    (file,) = (folder / f"step-{step:08d}").glob("__0_*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def never_ended(pool, tmp_path_factory):
    """A configuration and a run with it that nothing ended."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_config(folder, **SETTINGS)
    pool.run(2, train_once, path, folder / "run", folder / "memory", dies=False)
    return path, folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("state_of_copy", ["intact", "damaged"])
def test_a_run_resumes_from_the_newer_copy_and_from_the_disk_where_that_is_damaged(
    pool, tmp_path, never_ended, state_of_copy
):
    (path, whole), run, folder = never_ended, tmp_path / "run", tmp_path / "memory"
    pool.run(2, train_once, path, run, folder, dies=True)
    assert committed(run) == [10] and committed_steps(folder) == [12]
    if state_of_copy == "damaged":
        damage(folder, 12)
    said = "\n".join(pool.run(2, train_once, path, run, folder, dies=False, step=12)[0])
    if state_of_copy == "intact":
        assert "step 12 is in memory, but the newest checkpoint on disk is from step 10" in said
        assert f"resuming {run} from step 12" in said
    else:
        assert "the checksum of __0_0.distcp differs; this copy in memory is removed" in said
        assert f"resuming {run} from step 10" in said
    for kind in ("train", "validation"):
        assert metrics(run, kind) == metrics(whole, kind)
    last = "checkpoints/step-00000017"
    assert_same_contents(contents(run / last), contents(whole / last))
    assert committed_steps(folder) == [15], "one copy stays"


def refused(path, run, folder):
    with pytest.raises(ConfigError) as error:
        Trainer(load_config(path), Run(run), memory=folder)
    return str(error.value)


Usage = namedtuple("Usage", "free")


def refused_without_room(path, run, folder):
    shutil.disk_usage, before = lambda path: Usage(free=40_000), shutil.disk_usage
    try:
        return refused(path, run, folder)
    finally:
        shutil.disk_usage = before


def test_copies_without_a_place_or_without_room_are_refused_in_one_line(pool, tmp_path):
    path = write_config(tmp_path, **SETTINGS)
    line = pool.run(1, refused, path, tmp_path / "run", None)[0]
    assert line.startswith("checkpoint.memory_every = 3: only `weft train --ranks N --restarts M` keeps copies")
    line = pool.run(1, refused_without_room, path, tmp_path / "run", tmp_path / "memory")[0]
    assert re.fullmatch(
        r"checkpoint\.memory_every = 3: two copies of [\d.]+ kB do not fit into the 40\.0 kB that they may take in .*; "
        r"free space there, or set checkpoint\.memory_every = 0",
        line,
    ), line


def test_folders_in_memory_are_removed_at_the_end_and_those_of_killed_processes_at_the_next_start(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "HOST_MEMORY", tmp_path)
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    left, running, foreign = (tmp_path / name for name in (f"weft-{gone}-x", "weft-1-x", "other"))
    for folder in (left, running, foreign):
        folder.mkdir()
    with pytest.raises(KeyError), memory.folder_in_memory() as made:
        assert made.stat().st_mode & 0o777 == 0o700
        (made / "step-00000001").mkdir()
        assert sorted(tmp_path.iterdir()) == sorted([running, foreign, made])
        raise KeyError
    assert sorted(tmp_path.iterdir()) == sorted([running, foreign])
    monkeypatch.setattr(memory, "HOST_MEMORY", tmp_path / "none")
    with (
        pytest.raises(ConfigError, match=r"no folder can be created in .*; mount a tmpfs there"),
        memory.folder_in_memory(),
    ):
        pass


@pytest.mark.slow
def test_copies_without_restarts_are_refused_before_there_is_a_run(tmp_path):
    done = weft("train", write_config(tmp_path, **SETTINGS), "--ranks", 2)
    assert done.returncode == 2
    assert "checkpoint.memory_every = 3: has no effect without restarts; add --restarts 5" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_however_many_ranks_are_killed_the_run_ends_by_itself_as_if_none_was(pool, tmp_path):
    """Kills a random rank KILLS times: while ranks start, while they train, and while a copy is written."""
    changes = {"train__steps": 16 * KILLS + 60, "train__validate_every": 7, "run__loggers": []}
    changes |= {"checkpoint__every": 40, "checkpoint__memory_every": 2, "checkpoint__keep": 1, "train__watchdog": 60.0}
    config = write_config(tmp_path, **changes)
    chance, moments = random.Random(KILLS), ("training", "starting", "copying")
    run, whole = (tmp_path / "runs" / name for name in ("tiny", "whole"))
    said = tmp_path / "said"
    arguments = ("train", config, "--ranks", 2, "--restarts", KILLS)
    with said.open("w") as stream, started(*arguments, stdout=stream, stderr=stream) as process:

        def folder():
            return next(memory.HOST_MEMORY.glob(f"weft-{process.pid}-*"))

        def is_copying():
            return any(".tmp-" in path.name for path in folder().iterdir())

        wait_until(lambda: len(ranks_of(process.pid)) == 2, 120)
        for number in range(KILLS):
            moment = moments[number % 3]
            before = max(committed_steps(folder()), default=0)
            if moment == "starting":
                time.sleep(chance.uniform(0, 1))
            else:
                wait_until(lambda b=before: max(committed_steps(folder()), default=0) > b, 240, said)
                wait_until(lambda m=moment: m == "training" or is_copying(), 60)
            assert process.poll() is None, "it ended before the last kill"
            ranks = ranks_of(process.pid)
            os.kill(chance.choice(list(ranks.values())), signal.SIGKILL)
            wait_until(
                lambda old=ranks: (new := ranks_of(process.pid)) and not set(new.values()) & set(old.values()), 120
            )
        process.wait(timeout=300)
        errors = said.read_text()
        assert process.returncode == 0, errors
        assert not list(memory.HOST_MEMORY.glob(f"weft-{process.pid}-*"))
    assert errors.count("was killed by SIGKILL") == KILLS
    from_memory = re.findall(r"restart \d+ of \d+, from step \d+ in memory", errors)
    print(f"{KILLS} kills of random ranks, {len(from_memory)} restarts from a copy in memory")
    assert len(from_memory) >= KILLS // 2
    pool.run(2, train_here, config, ["run.name=whole", "checkpoint.memory_every=0"])
    for kind in ("train", "validation"):
        assert metrics(run, kind) == metrics(whole, kind)
    last = f"checkpoints/step-{changes['train__steps']:08d}"
    assert_same_contents(contents(run / last), contents(whole / last))
