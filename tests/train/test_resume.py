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
    wait_until,
    weft,
    write_config,
)

pytestmark = pytest.mark.slow


def test_ten_steps_and_ten_more_in_new_processes_are_bit_for_bit_twenty_steps(tmp_path):
    config = write_config(tmp_path, train__steps=20, checkpoint__every=10)
    run = tmp_path / "runs" / "tiny"
    assert weft("train", config, "--ranks", 2).returncode == 0
    losses, validations = metrics(run), metrics(run, "validation")
    whole = contents(run / "checkpoints" / "step-00000020")
    assert [record["step"] for record in losses] == list(range(1, 21))
    assert len({record["loss"] for record in losses}) == 20

    shutil.rmtree(run / "checkpoints" / "step-00000020")
    resumed = weft("train", config, "--ranks", 2, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"going on with {run} from step 10" in resumed.stdout
    assert metrics(run) == losses
    assert metrics(run, "validation") == validations
    assert_same_contents(contents(run / "checkpoints" / "step-00000020"), whole)


def test_a_second_run_takes_a_new_directory_and_says_how_to_resume_the_first(tmp_path):
    config = write_config(tmp_path, train__steps=4, train__validate_every=0)
    assert weft("train", config, "--ranks", 1).returncode == 0
    before = contents(tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000004")
    second = weft("train", config, "--ranks", 1)
    assert second.returncode == 0
    first_run, second_run = tmp_path / "runs" / "tiny", tmp_path / "runs" / "tiny-2"
    assert f"a new run in {second_run}; {first_run} is left as it is" in second.stdout
    assert f"weft train {config} --ranks 1 --resume {first_run}" in second.stdout
    assert_same_contents(contents(first_run / "checkpoints" / "step-00000004"), before)
    assert len(metrics(second_run)) == 4

    longer = ("train", config, "--ranks", 1, "--set", "train.steps=6")
    newest = weft(*longer, "--resume")
    assert f"going on with {second_run} from step 4" in newest.stdout
    assert [len(metrics(run)) for run in (first_run, second_run)] == [4, 6]
    again = weft(*longer, "--resume")
    assert again.returncode == 0
    assert "nothing to do: the run is at step 6 of 6; raise train.steps" in again.stdout


def test_ctrl_c_saves_and_the_printed_command_goes_on_to_the_same_end(tmp_path):
    config = write_config(tmp_path, train__steps=60, checkpoint__every=0, train__validate_every=0)
    assert weft("train", config, "--ranks", 2).returncode == 0
    whole = tmp_path / "runs" / "tiny"

    interrupted = tmp_path / "runs" / "tiny-2"
    with started("train", config, "--ranks", 2) as process:
        wait_until(lambda: len(metrics(interrupted)) >= 3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "stopping after this step and saving a checkpoint" in output
    said = re.search(r"stopped at step (\d+) of 60, which is saved; go on with: weft (.*)", output)
    assert said, output
    step = int(said[1])
    assert 3 <= step < 60
    assert [path.name for path in (interrupted / "checkpoints").glob("step*")] == [f"step-{step:08d}"]

    resumed = weft(*shlex.split(said[2]))
    assert resumed.returncode == 0, resumed.stderr
    assert f"going on with {interrupted} from step {step}" in resumed.stdout
    assert metrics(interrupted) == metrics(whole)
    ends = [contents(run / "checkpoints" / "step-00000060") for run in (whole, interrupted)]
    assert_same_contents(*ends)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with started("train", write_config(tmp_path), "--ranks", 2) as process:
        ranks = wait_until(lambda: len(found := ranks_of(process.pid)) == 2 and found)

        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert errors == "weft train: ended at once\nweft train: nothing was saved yet\n"
    wait_until(lambda: not any(map(is_alive, ranks.values())), timeout=10)


def test_a_checkpoint_of_another_model_is_refused_in_one_line_and_stays(tmp_path):
    config = write_config(tmp_path, train__steps=2, train__validate_every=0)
    assert weft("train", config, "--ranks", 1).returncode == 0
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000002"
    before = contents(checkpoint)
    other = write_config(tmp_path, train__steps=4, model__pattern="[*-]-")
    refused = weft("train", other, "--ranks", 2, "--resume")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "missing in the checkpoint: model.decoder.layers.1.mlp" in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout
    assert_same_contents(contents(checkpoint), before)


def test_nothing_to_resume_is_an_error_and_leaves_nothing_behind(tmp_path):
    refused = weft("train", write_config(tmp_path), "--ranks", 1, "--resume")
    assert refused.returncode == 2
    assert refused.stderr.startswith("weft train: no run 'tiny' in ")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_with_another_number_of_ranks_and_another_strategy(tmp_path):
    config = write_config(tmp_path, train__steps=6, checkpoint__every=3, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    assert weft("train", config, "--ranks", 2).returncode == 0
    losses = [record["loss"] for record in metrics(run)]
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    resumed = weft("train", config, "--ranks", 1, "--resume", "--set", "sharding.strategy=optim")
    assert resumed.returncode == 0, resumed.stderr
    # Other ranks add the same numbers in another order.
    assert [record["loss"] for record in metrics(run)] == pytest.approx(losses, rel=1e-5)


def test_sigterm_saves_too(tmp_path):
    config = write_config(tmp_path, train__steps=5000, checkpoint__every=0, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    with started("train", config, "--ranks", 1, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: len(metrics(run)) >= 2)
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    step = len(metrics(run))
    assert (run / "checkpoints" / f"step-{step:08d}").is_dir()
