"""Weights on disk: continued by `weft sample`, and where `weft train --from` starts."""

import dataclasses
import json
import shutil
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.train.command import weft, write_config
from tests.train.test_loop import train_on
from weft.checkpoint import CheckpointManager, ModelState
from weft.cli import main
from weft.models import HybridConfig, HybridModel, hf
from weft.train.config import load_config, to_toml
from weft.train.errors import ConfigError
from weft.train.evaluate import evaluate
from weft.train.loop import Trainer
from weft.train.run.runs import Run
from weft.train.source import Source
from weft.train.tokenizer import BytesTokenizer


@pytest.fixture
def published(tmp_path):
    """A directory as others publish it, with a tokenizer of single bytes."""
    torch.manual_seed(0)
    directory = tmp_path / "published"
    hf.save(HybridModel(HybridConfig(pattern="[*-]", hidden_size=16)), directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.slow
def test_a_directory_and_what_it_is_converted_to_continue_a_text_alike(published, tmp_path, capsys):
    hf.convert(published, tmp_path / "ours")
    texts = []
    for source in (published, tmp_path / "ours"):
        assert main(["sample", str(source), "--prompt", "def", "--tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def") and len(texts[0]) > 8
    assert "".join(Source(published).continued("def", tokens=20, seed=1)) != texts[0].rstrip("\n")


def test_a_text_ends_where_the_model_ends_it(published):
    best = list(Source(published).continued("a", tokens=5, temperature=0))
    (ending,) = Source(published).tokenizer.encode(best[1].encode())
    fields = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**fields, "eos_token_id": [int(ending)]}))
    assert list(Source(published).continued("a", tokens=5, temperature=0)) == ["a"]


def test_a_directory_without_a_tokenizer_is_refused(published, capsys):
    (published / "tokenizer.json").unlink()
    assert main(["sample", str(published)]) == 2
    output, line = capsys.readouterr()
    assert (output, line.count("\n")) == ("", 1)
    assert line.startswith(
        f"weft sample: {published}: has no tokenizer.json; put the model's tokenizer.json there, or name the"
    )


def test_fields_to_ignore_are_refused_where_no_config_json_is_read(tmp_path, capsys):
    run = run_of(tmp_path, 1)
    for command, target in ((["config", "--from"], []), (["sample"], []), (["convert"], [str(tmp_path / "new")])):
        assert main([*command, str(run), *target, "--ignore-field", "mystery"]) == 2
        assert "--ignore-field mystery: has no effect on a run" in capsys.readouterr().err


def test_a_directory_that_is_nothing_of_weft_is_told_all_that_it_could_be(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        for command, target in ((["config", "--from"], []), (["sample"], []), (["convert"], [str(tmp_path / "new")])):
            assert main([*command, str(tmp_path / name), *target]) == 2
            line = capsys.readouterr().err
            assert " a run" in line and "checkpoint" in line and "a model's directory" in line


def run_of(folder, *steps, **changes):
    """The directory of a run that was never trained, with these checkpoints of its weights."""
    run = folder / "run"
    run.mkdir()
    config = load_config(write_config(folder, **changes))
    (run / "config.toml").write_text(to_toml(config))
    torch.manual_seed(0)
    with CheckpointManager(run / "checkpoints", keep=9) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"model": ModelState(HybridModel(config.hybrid))}, asynchronous=False)
    return run


@pytest.mark.slow
def test_a_run_of_tokens_from_elsewhere_is_not_sampled_as_bytes_but_converted_and_given_a_tokenizer(
    published, tmp_path, capsys
):
    tokens = {"data__kind": "tokens", "data__paths": ["tokens.bin"], "model__vocab_size": 3000}
    run = run_of(tmp_path, 1, **tokens)
    assert main(["sample", str(run)]) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.count("\n") == 1
    assert 'data.kind = "tokens", and the tokenizer that made them is unknown' in errors and "weft convert" in errors
    converted = tmp_path / "converted"
    assert main(["convert", str(run), str(converted)]) == 0
    assert capsys.readouterr().out.startswith(f"{converted}: ")
    (published / "tokenizer.json").rename(converted / "tokenizer.json")
    assert main(["sample", str(converted), "--prompt", "def", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def")


def test_rows_of_the_model_beyond_the_tokenizer_are_never_drawn(tmp_path, monkeypatch):
    drawn = []
    decode = BytesTokenizer.decode
    monkeypatch.setattr(
        BytesTokenizer, "decode", lambda self, tokens: drawn.append(list(tokens)) or decode(self, tokens)
    )
    run = run_of(tmp_path, 1, model__vocab_size=4000)
    list(Source(run).continued("a", tokens=40, temperature=2.0, top_p=1.0))
    assert len(drawn[-1]) == len("a") + 40 and max(drawn[-1]) < 256


def test_a_prompt_that_the_model_has_no_tokens_for_is_refused(published, tmp_path):
    hf.save(HybridModel(HybridConfig(pattern="[*-]", hidden_size=16, vocab_size=9)), tmp_path / "small")
    (published / "tokenizer.json").rename(tmp_path / "small" / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"maps the prompt to token \d+, but model.vocab_size = 9; put the"):
        next(Source(tmp_path / "small").continued("some text"))
    list(Source(tmp_path / "small").added([[0, 8]], tokens=5))  # draws none of the tokenizer's other tokens


def lines_of_a_trainer(path):
    lines = []
    Trainer(load_config(path), Run(path.parent / "new"), say=lines.append)
    return lines


def lines_of_eval(run):
    lines = []
    return evaluate(run, overrides=[], say=lines.append)["step"], lines


@pytest.mark.slow
def test_whoever_reads_a_run_takes_its_newest_intact_checkpoint_and_says_so(pool, tmp_path, capsys):
    run = run_of(tmp_path, 1, 2, 3)
    damaged = run / "checkpoints" / "step-00000003"
    (damaged / "__0_0.distcp").write_bytes(b"")
    for words in (["sample", str(run), "--tokens", "2"], ["convert", str(run), str(tmp_path / "converted")]):
        assert main(words) == 0
        errors = capsys.readouterr().err
        assert errors.startswith(f"weft {words[0]}: {damaged} is damaged: ") and errors.count("\n") == 1
        assert errors.endswith("; this checkpoint is skipped\n")
    step, (line, last) = pool.run(1, lines_of_eval, run)[0]
    assert last == "computing the validation loss of step 2"
    assert step == 2 and line.startswith(f"{damaged} is damaged: ") and line.endswith("; this checkpoint is skipped")
    lines = pool.run(1, lines_of_a_trainer, write_config(tmp_path, run__weights=str(run)))[0]
    assert [each for each in lines if "skipped" in each] == [line]
    assert main(["sample", str(damaged)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_path_that_is_no_model_is_refused(tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert "must be a run with a checkpoint" in errors
    assert output == ""


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--top-p", "7", "must be more than 0 and at most 1"),
        ("--top-p", "nan", "must be more than 0 and at most 1"),
        ("--temperature", "-1", "must be at least 0; 0 chooses the most likely token"),
        ("--tokens", "-3", "must be at least 0"),
        ("--seed", str(2**70), "must be at least -2**63 and below 2**64"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_is_read_or_printed(capsys, option, value, rule):
    assert main(["sample", "nowhere", option, value]) == 2
    printed = capsys.readouterr()
    assert not printed.out and option in printed.err and value in printed.err and rule in printed.err


def test_a_prompt_that_is_no_text_is_refused_before_anything_is_read_or_printed(capsys):
    assert main(["sample", "nowhere", "--prompt", "a\udcff"]) == 2
    printed = capsys.readouterr()
    line = "weft sample: --prompt 'a\\udcff': is not UTF-8 text; pass UTF-8 text\n"
    assert printed == ("", line)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_every_seed_that_is_taken_draws(published, capsys, seed):
    assert main(["sample", str(published), "--prompt", "a", "--tokens", "1", "--seed", str(seed)]) == 0


OTHERS = {
    "num_experts_per_tok": 1,
    "router_score": "sigmoid",
    "rope_theta": 500.0,
    "zero_centered_norm": True,
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_another_function_are_refused_even_if_all_shapes_fit(tmp_path, name):
    options = {"model__pattern": "[*E]", "model__num_experts": 2, "model__moe_intermediate_size": 8}
    source = Source(run_of(tmp_path, 1, **options))
    source.load(HybridModel(dataclasses.replace(source.model_config, pattern="*E", aux_loss_coef=0.5)))
    other = HybridModel(dataclasses.replace(source.model_config, **{name: OTHERS[name]}))
    with pytest.raises(
        ConfigError, match=rf"another model: {name}={OTHERS[name]!r}, there .*; use that model in \[model\]"
    ):
        source.load(other)


def test_a_copy_of_a_checkpoint_is_not_mistaken_for_the_one_of_the_run(tmp_path):
    run = run_of(tmp_path, 1)
    checkpoint = run / "checkpoints" / "step-00000001"
    assert (Source(checkpoint).run, Source(checkpoint).step) == (run, 1)
    for place in ("kept/step-00000001", "checkpoints/step-00000002.damaged-0c4e", "checkpoints/best", "best"):
        copied = shutil.copytree(checkpoint, run / place)
        with pytest.raises(ConfigError, match=r"a checkpoint in its run's directory .*; name one of these") as error:
            Source(copied)
        assert str(copied) in str(error.value)


def test_a_checkpoint_on_another_disk_is_named_through_the_run_and_through_a_link(tmp_path, monkeypatch):
    run = run_of(tmp_path, 1)
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    source = Source(run / "checkpoints" / "step-00000001")
    assert (source.run, source.step) == (run, 1)
    (run / "checkpoints").unlink()
    (tmp_path / "disk").rename(run / "checkpoints")
    (tmp_path / "best").symlink_to(run / "checkpoints" / "step-00000001")
    monkeypatch.chdir(tmp_path)
    source = Source("best")
    assert (source.run, source.step) == (run, 1)


def trained(path, directory):
    trainer = Trainer(load_config(path), Run(directory), say=lambda line: None)
    trainer.run()
    return {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}


@pytest.mark.slow
def test_a_run_is_converted_to_a_directory_of_the_same_weights(pool, tmp_path, capsys):
    path = write_config(tmp_path, train__steps=2, train__validate_every=0, model__pattern="[*-]")
    weights = pool.run(1, trained, path, tmp_path / "run")[0]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    for number, source in enumerate((tmp_path / "run", checkpoint)):
        target = tmp_path / f"published-{number}"
        assert main(["convert", str(source), str(target)]) == 0
        model = HybridModel(hf.config_of(target))
        hf.load(model, target)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert main(["convert", str(checkpoint), str(tmp_path / "other"), "--family", "mixtral"]) == 2
    assert "mixtral" in capsys.readouterr().err
    moved = mock.patch.object(Source, "tokenizer_file", tmp_path / "moved.json")
    with moved:
        assert main(["convert", str(checkpoint), str(tmp_path / "other")]) == 2
        assert "moved.json" in capsys.readouterr().err and not (tmp_path / "other").exists()
        (tmp_path / "moved.json").write_text("{}")
        assert main(["convert", str(checkpoint), str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"


def test_a_directory_without_tokenizer_is_refused(published):
    (published / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        next(Source(published).continued("a"))


@pytest.mark.long
def test_a_run_a_checkpoint_and_a_directory_are_sampled_and_started_from(pool, tmp_path):
    """Two ranks, a hybrid with experts on both of them and a prediction depth."""
    options = {"mamba_num_heads": 2, "mamba_head_dim": 8, "num_experts": 2, "moe_intermediate_size": 8}
    model = {f"model__{name}": value for name, value in options.items()}
    shape = {"train__steps": 4, "train__overlap": True, "sharding__ep": 2, **model}
    config = write_config(tmp_path, model__pattern="[ME][*E]/[*E]", **shape)
    run = tmp_path / "runs" / "tiny"
    pool.run(2, train_on, config, run, stop_at=4)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line][-1]
    assert last["loss_depth_1"] > 0
    checkpoint = run / "checkpoints" / "step-00000004"
    texts = ["".join(Source(path).continued("line", tokens=10)) for path in (run, checkpoint)]
    cfg = Source(run).model_config
    models = [HybridModel(dataclasses.replace(cfg, pattern=pattern)) for pattern in (cfg.pattern, "ME[*E]/*E")]
    for each in models:
        Source(run).load(each)
    assert all(map(torch.equal, *(each.parameters() for each in models)))
    with pytest.raises(ConfigError, match="in any grouping"):
        Source(run).load(HybridModel(dataclasses.replace(cfg, pattern="[*E][ME]/[*E]")))
    assert texts[0] == texts[1] and texts[0].startswith("line")
    # One step of almost no length from those weights has about their loss, and less than the first step from others.
    more = ["--set", "train.steps=1", "--set", "optimizer.lr=1e-9", "--set", "schedule.warmup_steps=0"]
    assert weft("train", config, "--ranks", 2, "--from", run, *more).returncode == 0
    lines = [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[0] for name in ("tiny", "tiny-2")]
    first, started = (json.loads(line)["loss"] for line in lines)
    assert started < first
