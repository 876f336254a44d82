"""What a person reads when something is wrong: one line that names the value, the rule and the fix."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from tests.train.command import committed, ranks_of, started, train_here, wait_until, weft, write_config
from weft.train.config import ConfigError, load_config, parse_config
from weft.train.loop import Trainer
from weft.train.record.metrics import read_metrics
from weft.train.record.progress import Progress
from weft.train.report.facts import read_facts
from weft.train.run.runs import recorded_name
from weft.train.run.stop import StopRequest
from weft.train.task.own import OwnTask, with_numbers
from weft.train.tokenizer import load_tokenizer

DEEP = 100_000


def test_what_nests_too_deeply_is_a_line_in_each_file_of_a_run(tmp_path):
    nested = "[" * DEEP + "]" * DEEP
    (tmp_path / "config.toml").write_text(f"[run]\nname = {nested}\n")
    with pytest.raises(ConfigError, match="cannot be read: it nests too deeply; nest its tables less deeply"):
        load_config(tmp_path / "config.toml")
    assert recorded_name(tmp_path) is None
    with pytest.raises(ConfigError, match=r"train\.steps"):
        parse_config("", [f"train.steps={nested}"])
    (tmp_path / "metrics.jsonl").write_text(f'{nested}\n{{"step": 1, "kind": "train", "loss": 2.0}}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "kind": "train", "loss": 2.0}]
    (tmp_path / "facts.json").write_text(f'{{"ranks": {nested}}}')
    assert read_facts(tmp_path) == {}


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "folder"])
def test_a_device_or_a_pipe_is_no_tokenizer_and_no_configuration(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    named = str(tmp_path / path)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .*(not an ordinary file|Is a directory)"):
        load_tokenizer(named)
    with pytest.raises(ConfigError, match=r"configuration .*(not an ordinary file|Is a directory)"):
        load_config(named)


@pytest.mark.parametrize(
    "setting",
    [
        "model.hidden_size=1099511627776",
        "model.vocab_size=1099511627776",
        "train.global_batch_size=8796093022208",
        "data.sequence_length=8796093022208",
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_they_take_any(setting):
    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"{name} = {value}: .* this host has .*; lower it"):
        parse_config("[model]\nnum_attention_heads = 1\nnum_key_value_heads = 1\n", [setting]).validate(1)


def test_a_name_in_another_case_suggests_the_right_one():
    with pytest.raises(ConfigError, match=r'optimizer\.name = "adamw": did you mean "AdamW"'):
        parse_config("", ["optimizer.name=adamw"])
    with pytest.raises(ConfigError, match='did you mean "bf16"'):
        parse_config("", ["train.precision=BF16"])
    with pytest.raises(ConfigError, match='did you mean "tensorboard"'):
        parse_config('[run]\nloggers = ["TensorBoard"]')
    with pytest.raises(ConfigError, match=r"did you mean \[model\]"):
        parse_config("[MODEL]\nhidden_size = 8")


def test_a_pinned_warmup_does_not_stop_a_short_experiment(tmp_path):
    pinned = "[schedule]\nwarmup_steps = 100\n[train]\nsteps = 1000\n"
    short = parse_config(pinned, ["train.steps=8"])
    assert short.schedule.warmup_steps is None
    assert short.notes == (
        "schedule.warmup_steps = 100 does not fit into train.steps = 8; this run has the default for its length, "
        "0 warmup steps",
    )
    assert parse_config(pinned, ["train.steps=500"]).schedule.warmup_steps == 100  # it fits
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps = 100: must be at most"):
        parse_config(pinned, ["train.steps=8", "schedule.warmup_steps=100"])  # both are asked for
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps = 100: must be at most"):
        parse_config(pinned.replace("1000", "8"))


@pytest.mark.parametrize("resume", ["folder", "gone"])
def test_a_resume_of_a_folder_that_is_no_run_speaks_of_runs(tmp_path, resume):
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone" / "checkpoints" / "step-00000001").mkdir(parents=True)
    done = weft("train", "--resume", tmp_path / resume)
    assert done.returncode == 2
    said = {
        "folder": "is not a run, because it has no config.toml and no checkpoint",
        "gone": "its config.toml is missing",
    }
    assert said[resume] in done.stderr and "TOML file" not in done.stderr


def test_a_tuple_that_is_no_loss_is_a_line():
    loss = torch.ones(())
    assert with_numbers((loss, {"accuracy": 1.0})) == (loss, {"accuracy": 1.0})
    for given in ((loss, torch.ones(2, 3)), (loss,), (loss, {}, 1)):
        with pytest.raises(
            ConfigError, match=rf"loss: returns a tuple of {len(given)} \(a tensor \[\].*'accuracy|mean"
        ):
            with_numbers(given)


def test_losses_in_different_units_say_theirs(capsys):
    units = {"loss": "nats/token", "validation_loss": "nats/byte"}
    with Progress(2, log_every=1, units=units) as progress:
        progress.update(1, loss=2.0)
        progress.update(2, validation_loss=0.5)
    said = capsys.readouterr().out
    assert "loss 2.0000 nats/token" in said and "validation loss 0.5000 nats/byte" in said


def test_a_request_to_stop_before_the_first_step_promises_no_checkpoint():
    said = []
    stop = StopRequest()
    stop.notify = said.append
    stop._request()
    assert said == ["stopping before the first step, without a new checkpoint; Ctrl-C again ends immediately"]


@pytest.mark.long
def test_ctrl_c_before_the_first_step_saves_nothing_and_prints_that(tmp_path):
    config = write_config(tmp_path, run__loggers=["tests.train.test_messages:SlowToBegin"])
    with started("train", config, "--ranks", 2, real=True) as process:
        wait_until(lambda: len(ranks_of(process.pid)) == 2)
        wait_until((tmp_path / "runs/tiny").exists)
        time.sleep(0.5)  # it imports torch for longer than that
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
        code = process.returncode
    assert code == 4, (out, error)
    assert "and saving a checkpoint" not in out + error
    assert not (tmp_path / "runs/tiny").exists()


class SlowToBegin:
    """A logger whose import is part of the time before the first step."""

    def __init__(self, folder, resumed_step, settings):
        pass

    def scalars(self, step, values):
        pass

    def histogram(self, step, name, counts):
        pass

    def close(self):
        pass


def test_samples_are_those_that_came():
    task = OwnTask.__new__(OwnTask)
    task._microbatch_size = 4
    batches = [(torch.zeros(3, 2), torch.zeros(3)), {"x": torch.zeros(2, 2)}, "no tensor"]
    assert task.count(batches) == 3 + 2 + 4


@pytest.mark.parametrize("has_report", [True, False])
def test_a_run_at_its_end_has_nothing_to_do_only_once_its_report_is_written(has_report):
    said, reports = [], []
    account = SimpleNamespace(is_complete=lambda position: has_report, end=lambda *_: reports.append("report.html"))
    trainer = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(steps=2)), say=said.append, account=account)
    trainer.position, trainer.command = SimpleNamespace(step=2), "weft train"
    trainer._why_complete = lambda: Trainer._why_complete(trainer)
    trainer.stages, trainer.optimizer, trainer.passes = SimpleNamespace(have_first_rank=True), None, None
    assert Trainer._run(trainer)
    begins = "nothing to do" if has_report else "nothing is left to train, but the report is missing"
    how = "to train further, set train.steps above 2: --set train.steps=N"
    assert said == [f"{begins}: the run is at step 2 of 2; {how}"]
    assert reports == ([] if has_report else ["report.html"])


@pytest.mark.long
def test_a_run_that_ended_before_its_report_writes_it_when_it_is_resumed(pool, tmp_path):
    config = write_config(tmp_path, train__steps=2, checkpoint__every=2)
    pool.run(1, train_here, config)
    run = tmp_path / "runs/tiny"
    facts = run / "facts.json"
    facts.write_text(facts.read_text().replace('"reported"', '"not_reported"'))
    (run / "report.html").unlink()
    done = weft("train", "--resume", run)
    assert done.returncode == 0 and "the report is missing" in done.stdout
    assert (run / "report.html").is_file() and committed(run) == [2]
