import os
import socket
import subprocess
import sys

import pytest

from tests.forks import Forked
from tests.train.command import WITHOUT_PICTURES, alone, metrics, weft, write_config
from tests.train.test_source import run_of
from weft.train.errors import ConfigError
from weft.train.run.world import STORE, first_host, place_from


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack-1-gpu[3-5]-ib,x", "rack-1-gpu3-ib"),
        ("a.cluster.example", "a.cluster.example"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_nobody_started_this_process():
    assert place_from({}) is None


def test_under_torchrun_a_process_takes_the_place_it_was_given():
    place = place_from(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "host1",
            "MASTER_PORT": "1234",
        }
    )
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (5, 8, 1, 4)
    assert (place.launcher, place.init_method) == ("torchrun", "tcp://host1:1234")


def test_under_slurm_the_ranks_meet_on_the_first_host():
    place = place_from(
        {
            "SLURM_PROCID": "3",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "3",
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": "gpu[11-12]",
            "SLURM_JOB_ID": "4711",
        }
    )
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (3, 8, 3, 4)
    assert (place.launcher, place.init_method) == ("slurm", "tcp://gpu11:24711")


def test_under_slurm_the_ranks_of_a_part_of_a_job_meet_on_the_first_host_of_that_part():
    job = {"SLURM_NNODES": "4", "SLURM_NODELIST": "gpu[11-14]", "SLURM_JOB_ID": "4711"}
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[13-14]", "SLURM_STEP_ID": "0"}
    place = place_from({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", **job, **step})
    assert (place.local_ranks, place.init_method) == (4, "tcp://gpu13:24711")
    beside = place_from(
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", **job, **step, "SLURM_STEP_ID": "1"}
    )
    assert beside.init_method not in (place.init_method, "tcp://gpu13:24712"), "nor that of the next job"


def test_a_slurm_job_of_one_task_starts_its_own_processes():
    assert place_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}) is None


def test_ranks_that_weft_started_meet_over_a_file():
    place = place_from({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", STORE: "/tmp/somewhere"})
    assert (place.launcher, place.init_method) == ("weft", "file:///tmp/somewhere")


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    place = place_from({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    with pytest.raises(ConfigError, match="2 ranks on this host, which has 1 GPU"):
        place.device()


@pytest.mark.long
def test_torchrun_slurm_and_weft_itself_give_the_same_losses(tmp_path):
    changes = {"train__steps": 3, "train__validate_every": 0, "checkpoint__every": 0}
    config = write_config(tmp_path, **changes)
    assert weft("train", config, "--ranks", 2).returncode == 0

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    quick = {**os.environ, "PYTHONPATH": WITHOUT_PICTURES}
    command = [*torchrun, "-m", "weft", "train", str(config)]
    done = subprocess.run(command, env=quick, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [
        Forked(
            [sys.executable, "-m", "weft", "train", str(config)],
            env={
                **quick,
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_NODELIST": "localhost",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [task.communicate(timeout=60)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert outputs[1] == ""

    runs = [metrics(tmp_path / "runs" / name) for name in ("tiny", "tiny-2", "tiny-3")]
    assert len(runs[0]) == 3
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.long
def test_under_torchrun_a_configuration_that_is_refused_leaves_no_directory(tmp_path):
    assert weft("train", write_config(tmp_path), "--set", 'data.paths=["none"]', **alone()).returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["weft", "torchrun"])
def test_a_run_whose_weights_are_damaged_is_refused_and_leaves_no_directory(tmp_path, launcher):
    run = run_of(tmp_path, 1)
    (run / "checkpoints" / "step-00000001" / "__0_0.distcp").write_bytes(b"")
    done = weft("train", tmp_path / "tiny.toml", "--from", run, **(alone() if launcher == "torchrun" else {}))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "is damaged" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_rank_that_fails_ends_the_run_with_its_traceback_and_exit_code_1(tmp_path):
    config = write_config(tmp_path, optimizer__lr=1e30, schedule__warmup_steps=0, train__gradient_clip=0.0)
    done = weft("train", config, "--ranks", 2)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "RuntimeError: the gradient norm after step" in done.stderr
    assert "nothing was saved yet" in done.stderr
    assert not list((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))
