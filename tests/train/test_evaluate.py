import re

import pytest
import torch

from tests.train.command import metrics, write_config
from weft.cli import main
from weft.train.config import load_config, parse_config
from weft.train.errors import ConfigError
from weft.train.evaluate import evaluate, for_one_process, validate
from weft.train.loop import train
from weft.train.sections.sharding import ShardingConfig


def train_to_the_end(path):
    train(load_config(path))


def ask(*words):
    """In a rank of the pool: what the command prints ends up in a file, the process group is there already."""
    assert main([str(word) for word in words]) == 0


def evaluated(run, options):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ask("eval", run, *options)
    return {name: float(value) for name, value in re.findall(r"([a-z][a-z ]*) ([\d.]+)", said.getvalue())}


@pytest.mark.slow
def test_eval_gives_the_validation_loss_that_the_run_had(pool, tmp_path):
    path = write_config(tmp_path, train__steps=4, train__validate_every=2, checkpoint__every=2, train__ema_decay=0.5)
    pool.run(2, train_to_the_end, path)
    run = tmp_path / "runs" / "tiny"
    for record, options in zip(metrics(run, "validation"), (["--step", "2"], [])):
        found = pool.run(1, evaluated, run, options)[0]
        assert found["step"] == record["step"]
        assert found["validation loss"] == pytest.approx(record["loss"], rel=1e-5)
    averaged = pool.run(1, evaluated, run, ["--ema"])[0]
    assert averaged["validation loss"] == pytest.approx(record["ema_loss"], rel=1e-5)


def said_about_texts(path):
    """What evaluations say about the text: of the run, a longer one, and one that is named."""
    train(load_config(path))
    run, text = path.parent / "runs" / "tiny", path.parent / "text.txt"
    lines = []
    for added, overrides in (("", []), ("more text\n" * 200, []), ("", [f"data.paths=['{text}']"])):
        text.write_text(text.read_text() + added)
        said = []
        evaluate(run, overrides=overrides, say=said.append)
        lines.append([line for line in said if line.startswith("the validation text")])
    return lines


@pytest.mark.slow
def test_eval_says_that_the_validation_text_has_changed(pool, tmp_path):
    same, longer, named = pool.run(1, said_about_texts, write_config(tmp_path, train__steps=1))[0]
    changed = "the validation text has changed since step 1 was saved, so the loss is not the one of the run"
    assert (same, longer, named) == ([], [changed], [])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": 1.25}, "1.25"),
        ({"loss": 1.25, "nats_per_byte": 1.25}, "1.25 nats/byte"),
        ({"loss": 2.5, "nats_per_byte": 1.25}, "2.5 nats/token, 1.25 nats/byte"),
        ({"loss": 1.25, "top_1": 0.5}, "1.25  top 1 0.5"),
    ],
)
def test_eval_prints_every_number_once_with_its_unit_and_all_digits_of_the_step(
    tmp_path, monkeypatch, capsys, values, said
):
    monkeypatch.setattr("weft.train.evaluate.evaluate", lambda *arguments, **options: {"step": 1234567, **values})
    assert main(["eval", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"step 1234567  validation loss {said}\n"


@pytest.mark.long
def test_a_report_is_written_again_the_same(pool, tmp_path, capsys):
    pool.run(1, train_to_the_end, write_config(tmp_path, train__steps=3), pictures=True)
    page = tmp_path / "runs" / "tiny" / "report.html"
    before = page.read_text()
    page.unlink()
    assert main(["report", str(page.parent)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text() == before
    for words in ("A training run of weft, 3 steps of a model with", "1 rank, CPU", "torch ", "<details><summary>"):
        assert words in before


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "its report cannot be written (rank 0: " in said and f"{tmp_path / 'report.html'}: Is a directory)" in said


class FiveMicrobatches:
    """A task whose validation set are the numbers 0 to 4, of which 3 has no labels."""

    at_once = 2
    validation_weights = [1.0, 1.0, 1.0, 0.0, 1.0]

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout().eval())
        self.validation = list(torch.arange(5.0))
        self.together = []
        self.modes = set()

    def validation_losses(self, microbatches):
        self.together.append(len(microbatches))
        self.modes |= {module.training for module in self.model.modules()}
        return [(number.where(number != 3, torch.nan), {"twice": 2 * number}) for number in microbatches]

    def validation_values(self, loss):
        return {"loss": loss}


def validated():
    task = FiveMicrobatches()
    found = validate(task, torch.device("cpu"), lambda: None)
    assert task.modes == {False}, "nothing trains meanwhile"
    assert [module.training for module in task.model.modules()] == [True, True, False], "as before"
    return found, task.together


def test_a_validation_computes_as_many_microbatches_at_once_as_its_task_says(pool):
    assert pool.run(1, validated) == [({"loss": 7 / 5, "twice": 4.0}, [2, 2, 1])]


def test_an_average_that_the_run_did_not_keep_is_refused(tmp_path):
    write_config(tmp_path).rename(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"--ema: the run kept no moving average .* leave it out"):
        evaluate(tmp_path, average=True, overrides=[])


def test_a_run_without_a_validation_set_is_told_how_to_get_one(tmp_path):
    own = '[model]\nfactory = "a:b"\nloss = "a:b"\n[data]\nfactory = "a:b"\n'
    (tmp_path / "config.toml").write_text(own)
    with pytest.raises(ConfigError, match=r"no validation set.*: pass one, with --set data\.validation_factory="):
        evaluate(tmp_path, overrides=[], trust=True)


SHARDED = [
    ("[*-]|[*-]", ("sharding.pp=2", "sharding.cp=2", "model.context_attention=heads", "sharding.dp_replicate=2")),
    ("[*E][*E]", ("sharding.ep=2", "train.overlap=true", "train.halves=true", "train.delay_wgrad=true")),
    ("[*-][*-]", ("sharding.tp=2", "sharding.strategy=optim", "train.compile=blocks", "sharding.graphs=['attn']")),
]


@pytest.mark.parametrize(("pattern", "changes"), SHARDED)
def test_what_only_a_sharded_run_may_have_is_left_out_in_one_process(pattern, changes):
    config = parse_config("", [f"model.pattern={pattern}", "train.microbatch_size=2", *changes])
    config.validate(8)
    alone = for_one_process(config)
    alone.validate(1)
    assert alone.sharding == ShardingConfig() and alone.model.pattern == pattern


@pytest.mark.parametrize("command", ["eval", "report"])
def test_what_is_no_run_is_one_line(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "name the directory of a run" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('data.paths=["other.txt"]', r'validates on data\.validation_paths = \["held\.txt"\]; set that'),
        ("data.seed=3", "leave it out"),
        ("sharding.pp=2", "leave it out"),
        ("optimizer.lr=0.5", "leave it out"),
        ("train.steps=3", "leave it out"),
    ],
)
def test_a_setting_that_does_not_affect_the_loss_is_refused(tmp_path, override, said):
    settings = {"data__validation_paths": ["held.txt"], "data__validation_fraction": 0.05}
    write_config(tmp_path, **settings).rename(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=rf"has no effect on the validation loss, .*{said}") as error:
        evaluate(tmp_path, overrides=[override])
    assert str(error.value).startswith(f"--set {override}: ")


@pytest.mark.slow
def test_another_text_can_be_validated_on_for_any_run(pool, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("".join(chr(33 + n * n % 90) for n in range(9000)))
    own = {"data__validation_paths": [str(tmp_path / "text.txt")], "data__validation_fraction": 0.05}
    for name, settings in (("apart", own), ("part", {})):
        pool.run(1, train_to_the_end, write_config(tmp_path, train__steps=2, run__name=name, **settings))
    for run, setting in (("apart", "data.validation_paths"), ("part", "data.paths")):
        options = ([], ["--set", f'{setting}=["{other}"]'])
        first, second = (pool.run(1, evaluated, tmp_path / "runs" / run, each)[0] for each in options)
        assert abs(first["validation loss"] - second["validation loss"]) > 1e-3
