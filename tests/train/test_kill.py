"""What is left after `kill -9`: by whom and when does not matter."""

import faulthandler
import multiprocessing
import os
import random
import re
import shlex
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.command import (
    assert_same_contents,
    contents,
    is_alive,
    metrics,
    ranks_of,
    started,
    wait_until,
    weft,
    write_config,
)
from tests.train.kills import Starts, kill_and_resume
from weft.checkpoint import CheckpointManager, committed_steps, verify

pytestmark = pytest.mark.long

MOMENTS = 8
ROOT = Path(__file__).parents[2]


def value_of(step, rank):
    return torch.arange(400_000, dtype=torch.float32) * (step + 1) + rank


def save_for_ever(rank, store, directory):
    """Go on from the newest checkpoint, which must hold what was saved, and save without end."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    with CheckpointManager(directory, keep=3) as manager:
        state = {"numbers": {f"rank{r}": torch.zeros(400_000) for r in range(2)}, "at": {"step": 0}}
        step = manager.latest() or 0
        if step:
            manager.load(state)
            assert state["at"]["step"] == step
            for r in range(2):
                assert torch.equal(state["numbers"][f"rank{r}"], value_of(step, r))
        while True:
            step += 1
            numbers = {f"rank{r}": value_of(step, r) for r in range(2)}
            manager.save(step, {"numbers": numbers, "at": {"step": step}})


def test_every_start_after_a_kill_finds_a_complete_checkpoint_and_the_older_ones_intact(tmp_path):
    directory = tmp_path / "checkpoints"
    moments = random.Random(20)
    in_the_middle = 0
    seen = {}
    for moment in range(MOMENTS):
        before = max(seen, default=0)
        save_until_killed(directory, str(tmp_path / f"store-{moment}"), before, moments, both=moment % 2 == 0)
        in_the_middle += any(".tmp-" in path.name for path in directory.iterdir())
        now = {step: verify(directory / f"step-{step:08d}") for step in committed_steps(directory)}
        assert max(now) > before
        assert all(now[step] == manifest for step, manifest in seen.items() if step in now)
        seen = now
    assert in_the_middle >= MOMENTS // 4, "too few kills came in the middle of a save to mean something"


def save_until_killed(directory, store, before, moments, *, both):
    """Two ranks save; after a commit later than step `before`, kill one or both at a random moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.test_kill"])
    ranks = [context.Process(target=save_for_ever, args=(rank, store, directory)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        wait_until(lambda: max(committed_steps(directory), default=0) > before or died(ranks))
        assert not died(ranks), "a start after a kill failed"
        time.sleep(moments.uniform(0, 0.25))
        victims = ranks if both else [moments.choice(ranks)]
        for rank in victims:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            # The one that is left loses its partner, which ends its save with an error instead of a commit.
            rank.join(timeout=30)
            if rank.exitcode is None:
                say_where_it_waits(rank.pid)
            assert rank.exitcode == (-signal.SIGKILL if rank in victims else 1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def say_where_it_waits(pid):
    for task in Path(f"/proc/{pid}/task").iterdir():
        print((task / "comm").read_text().strip(), (task / "stat").read_text().split()[2], (task / "wchan").read_text())
    os.kill(pid, signal.SIGUSR1)  # its threads' frames, to the error output
    time.sleep(1)


def died(ranks):
    return any(rank.exitcode is not None for rank in ranks)


KILLS = int(os.environ.get("WEFT_KILLS", "4"))
"""Over all of EXAMPLES."""
SMALL = {
    "stdlib": ["model.pattern=[*-][*-]", "model.hidden_size=20", "model.intermediate_size=24"],
    "stdlib-moe": ["model.pattern=[*E][*E]", "model.hidden_size=16", "model.moe_intermediate_size=8"],
}
"""Example -> what makes it quick."""
EXAMPLES = list(SMALL) if "WEFT_KILLS" in os.environ else ["stdlib-moe"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_however_often_a_run_is_killed_it_ends_as_if_nothing_was(tmp_path, example):
    kills = KILLS // len(EXAMPLES)
    steps = 4 * kills + 24
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of {n * n % 97} words, mod {n % 7}\n" for n in range(400)))
    runs = tmp_path / "runs"

    def starts(name):
        changes = [
            *SMALL[example],
            *(f'data.paths=["{text}"]', f"data.cache_dir={tmp_path}/cache", "data.sequence_length=16"),
            *(
                f"train.steps={steps}",
                "train.global_batch_size=8",
                "train.microbatch_size=2",
                "schedule.warmup_steps=3",
                "train.log_every=2",
            ),
            *("train.validate_every=5", "train.validation_batches=1", "checkpoint.every=2", "run.loggers=[]"),
            *(f"run.directory={runs}", f"run.name={name}"),
        ]
        arguments = [str(ROOT / "configs" / f"{example}.toml"), "--resume-or-start"]
        (tmp_path / name).mkdir()
        return Starts(tmp_path / name, runs, name, [*arguments, *(part for c in changes for part in ("--set", c))])

    whole = starts("whole").to_the_end()
    killed = starts("killed")
    found = kill_and_resume(killed, kills, seed=len(example))
    print(f"{example}: {found}")
    end = killed.to_the_end()
    for kind in ("train", "validation", "experts"):
        assert metrics(end, kind) == metrics(whole, kind)
    assert [line["step"] for line in metrics(end)] == list(range(1, steps + 1))
    last = f"checkpoints/step-{steps:08d}"
    assert_same_contents(contents(end / last), contents(whole / last))
    assert found.in_flight >= kills // 6 and found.without_progress >= kills // 6


def test_when_one_rank_is_killed_the_others_end_and_the_message_names_it(tmp_path):
    """The last rank; test_hangs.py kills the first."""
    config = write_config(tmp_path, train__steps=100_000, checkpoint__every=5, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    with started("train", config, "--ranks", 2) as process:
        wait_until(lambda: committed_steps(run / "checkpoints"))
        ranks = ranks_of(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        killed_at = time.monotonic()
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - killed_at < 30
    assert process.returncode == 1
    assert not any(map(is_alive, ranks.values()))
    assert f"rank 1 (process {ranks[1]}) was killed by SIGKILL" in errors
    assert "Traceback" not in errors
    step = committed_steps(run / "checkpoints")[-1]
    said = re.search(r"the checkpoint of step (\d+) is complete; resume with: weft (.*)", errors)
    assert said and int(said[1]) == step

    resumed = weft(*shlex.split(said[2]), "--set", f"train.steps={step + 3}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {run} from step {step}" in resumed.stdout
    assert [record["step"] for record in metrics(run)] == list(range(1, step + 4))


def test_ranks_share_the_cores_and_end_when_the_starting_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = write_config(tmp_path, train__steps=100_000, checkpoint__every=0, train__validate_every=0)
    with started("train", config, "--ranks", 2, real=True) as process:
        wait_until(lambda: metrics(tmp_path / "runs" / "tiny"))
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        for pid in ranks.values():
            assert f"OMP_NUM_THREADS={threads}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, ranks.values())), timeout=30)
