import re
import shlex
import shutil
import signal
import subprocess

import pytest

from tests.train.command import (
    assert_same_contents,
    contents,
    is_alive,
    metrics,
    ranks_of,
    started,
    train_here,
    wait_until,
    weft,
    write_config,
)
from weft.checkpoint import verify

pytestmark = pytest.mark.long


def test_ten_steps_and_ten_more_in_new_processes_are_bit_for_bit_twenty_steps(pool, tmp_path):
    config = write_config(tmp_path, train__steps=20, checkpoint__every=10)
    run = tmp_path / "runs" / "tiny"
    pool.run(2, train_here, config)
    losses, validations = metrics(run), metrics(run, "validation")
    whole = contents(run / "checkpoints" / "step-00000020")
    assert [record["step"] for record in losses] == list(range(1, 21))
    assert len({record["loss"] for record in losses}) == 20

    shutil.rmtree(run / "checkpoints" / "step-00000020")
    resumed = weft("train", config, "--ranks", 2, "--resume", real=True)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {run} from step 10" in resumed.stdout
    assert metrics(run) == losses
    assert metrics(run, "validation") == validations
    assert_same_contents(contents(run / "checkpoints" / "step-00000020"), whole)


def test_ctrl_c_saves_and_the_printed_command_resumes_to_the_same_end(pool, tmp_path):
    config = write_config(tmp_path, train__steps=60, checkpoint__every=0, train__validate_every=0)
    pool.run(2, train_here, config)
    whole = tmp_path / "runs" / "tiny"

    interrupted = tmp_path / "runs" / "tiny-2"
    with started("train", config, "--ranks", 2, real=True) as process:
        wait_until(lambda: len(metrics(interrupted)) >= 3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 3, errors
    assert f"a new run in {interrupted}; {whole} is unchanged; it resumes from step 60 with: weft train" in output
    assert "stopping after this step and saving a checkpoint" in output
    said = re.search(r"stopped at step (\d+) of 60, which is saved; resume with: weft (.*)", output)
    assert said, output
    step = int(said[1])
    assert 3 <= step < 60
    assert [path.name for path in (interrupted / "checkpoints").glob("step*")] == [f"step-{step:08d}"]

    resumed = weft(*shlex.split(said[2]))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {interrupted} from step {step}" in resumed.stdout
    assert metrics(interrupted) == metrics(whole)
    ends = [contents(run / "checkpoints" / "step-00000060") for run in (whole, interrupted)]
    assert_same_contents(*ends)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with started("train", write_config(tmp_path), "--ranks", 2, real=True) as process:
        ranks = wait_until(lambda: len(found := ranks_of(process.pid)) == 2 and found)

        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)  # closer to each other, two signals are one request
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert errors == "weft train: ended immediately\nweft train: nothing was saved yet\n"
    wait_until(lambda: not any(map(is_alive, ranks.values())), timeout=10)


def test_a_checkpoint_of_another_model_is_refused_in_one_line_and_stays(pool, tmp_path):
    config = write_config(tmp_path, train__steps=2, train__validate_every=0)
    pool.run(1, train_here, config)
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000002"
    before = contents(checkpoint)
    other = write_config(tmp_path, train__steps=4, model__pattern="[*-]-")
    refused = weft("train", other, "--ranks", 2, "--resume")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert 'model.pattern = "[*-]-" (it is "[*-]"): cannot change' in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout
    assert_same_contents(contents(checkpoint), before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_also_save(tmp_path, number, request):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, by what is started as well
    request.addfinalizer(lambda: signal.signal(number, before))
    config = write_config(tmp_path, train__steps=5000, checkpoint__every=0, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    with started("train", config, "--ranks", 1, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: len(metrics(run)) >= 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    step = len(metrics(run))
    assert (run / "checkpoints" / f"step-{step:08d}").is_dir()


def test_a_run_resumes_from_the_newest_intact_checkpoint_and_is_refused_in_one_line_without_one(pool, tmp_path):
    config = write_config(tmp_path, train__steps=3, checkpoint__every=1, train__validate_every=0)
    pool.run(1, train_here, config)
    run = tmp_path / "runs" / "tiny"
    checkpoints, losses = run / "checkpoints", metrics(run)
    (checkpoints / "step-00000003" / "__0_0.distcp").write_bytes(b"")
    content = bytearray((checkpoints / "step-00000002" / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoints / "step-00000002" / "__0_0.distcp").write_bytes(content)
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"step": 1, "lo\xff\0\0\n')

    resumed = weft("train", "--resume", run, "--set", "checkpoint.keep=1")
    assert resumed.returncode == 0, resumed.stderr
    for words in (
        f"{checkpoints}/step-00000003 is damaged: __0_0.distcp has 0 bytes",
        f"{checkpoints}/step-00000002 is damaged: the checksum of __0_0.distcp differs",
        f"resuming {run} from step 1",
    ):
        assert words in resumed.stdout
    assert metrics(run) == losses
    verify(checkpoints / "step-00000001")
    verify(checkpoints / "step-00000003")

    for path in checkpoints.glob("step-????????/__0_0.distcp"):
        path.write_bytes(b"")
    refused = weft("train", "--resume", run)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "no checkpoint is intact: " in refused.stderr
