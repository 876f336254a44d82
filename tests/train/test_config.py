import dataclasses
import inspect
import itertools
import re
import textwrap
import tomllib

import numpy
import pytest
import torch

from weft.cli import main
from weft.train.config import (
    SECTIONS,
    ConfigError,
    LoopConfig,
    ScheduleConfig,
    TrainConfig,
    load_config,
    parse_config,
    to_dict,
    to_toml,
)
from weft.train.settings import as_markdown
from weft.train.trainer import _configuration

MODEL = '[model]\npattern = "[*-][*-]"\n'


def parse(text="", *overrides):
    return parse_config(MODEL + text, overrides)


def test_a_file_and_its_overrides_become_typed_sections(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MODEL + "[train]\nsteps = 7\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n")
    config = load_config(path, ["train.steps=20", "run.name=first try", 'data.paths=["a.txt", "b"]'])
    assert config.train.steps == 20
    assert config.run.name == "first try"
    assert config.data.paths == ("a.txt", "b")
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (1.0, float)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.model.pattern == "[*-][*-]"


@pytest.mark.parametrize("name", ["7", "true", "1e3", "[*-]", '"quoted" text', "a\nb = 1"])
def test_an_override_of_a_text_setting_is_taken_as_it_is_typed(name):
    assert parse("", f"data.tokenizer={name}").data.tokenizer == name


def test_scalars_of_numpy_and_torch_are_the_numbers_that_they_hold():
    tables = {
        "train": {"steps": numpy.int64(3)},
        "optimizer": {
            "lr": torch.tensor(0.5),
            "betas": (numpy.float32(0.5), 0.75),
            "options": {"a": numpy.bool_(True)},
        },
    }
    plain = {"train": {"steps": 3}, "optimizer": {"lr": 0.5, "betas": (0.5, 0.75), "options": {"a": True}}}
    assert to_toml(_configuration(tables)) == to_toml(_configuration(plain))


def test_an_override_in_quotes_is_read_as_toml():
    assert parse("", 'run.name="7"').run.name == "7"


def test_the_resolved_configuration_reads_back_equal():
    config = parse(
        "[data]\npaths = ['a \"b\" \\', 'ü\\n']\n",
        "optimizer.eps=1e-30",
        "model.head_dim=8",
        "run.name=tab\there\x7f",
        "train.activation_checkpointing=true",
    )
    assert parse_config(to_toml(config)) == config
    plain = to_dict(config)
    assert plain["data"]["paths"] == list(config.data.paths)
    assert plain["model"]["head_dim"] == 8


@pytest.mark.parametrize(
    "override, says",
    [
        (f"optimizer.lr=1{400 * '0'}", ["optimizer.lr = 1000", "must be a finite number"]),
        ("train.step=3", ["train.step:", "did you mean train.steps?"]),
        ("model.hiden_size=3", ["model.hiden_size:", "did you mean model.hidden_size?"]),
        ("train.lr=1", ["train.lr:", "did you mean optimizer.lr?"]),
        ("trian.steps=3", ["trian:", "did you mean [train]?"]),
        ("zzz.steps=3", ["zzz:", "optimizer"]),
        ("data.zzz=3", ["data.zzz:", "sequence_length"]),
        ("steps=3", ["--set steps=3: ", "SECTION.NAME=VALUE"]),
        ("train.steps", ["--set train.steps: ", "SECTION.NAME=VALUE"]),
        ("train.steps=ten", ['train.steps = "ten"', "whole number"]),
        ("train.steps=1.5", ["train.steps = 1.5", "whole number"]),
        ("train.steps=true", ["train.steps = true", "whole number"]),
        ("train.activation_checkpointing=1", ["train.activation_checkpointing = 1", "true or false"]),
        ("train.precision=bf61", ['train.precision = "bf61"', '"fp32", "bf16"', 'did you mean "bf16"?']),
        ("sharding.strategy=optim_grad", ['did you mean "optim_grads"?']),
        ("data.paths=a.txt", ['data.paths = "a.txt"', 'write data.paths = ["a.txt"]']),
        ("data.paths=[1]", ["data.paths = [1]", "list"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas = [0.9]", "2 numbers"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas = [0.9, 1.0]", "less than 1"]),
        ("optimizer.lr=0", ["optimizer.lr = 0.0", "positive"]),
        ("optimizer.lr=nan", ["optimizer.lr = nan", "finite"]),
        ("optimizer.lr=inf", ["optimizer.lr = inf", "finite"]),
        ("schedule.min_lr_ratio=2", ["schedule.min_lr_ratio = 2.0", "between 0 and 1"]),
        ("train.steps=0", ["train.steps = 0", "at least 1"]),
        ("train.gradient_clip=-1", ["train.gradient_clip = -1.0", "negative"]),
        ("data.sequence_length=0", ["data.sequence_length = 0", "at least 1"]),
        ("data.validation_fraction=1", ["data.validation_fraction = 1.0", "between 0 and 1"]),
        ('data.include=["*.md"]', ["data.include", "no effect", "data.paths"]),
        ("sharding.dp_shard=0", ["sharding.dp_shard = 0", "-1"]),
        ("checkpoint.keep=0", ["checkpoint.keep = 0", "at least 1"]),
        ("run.name=a/b", ['run.name = "a/b"', "run.directory"]),
        ("model.hidden_size=-4", ["hidden_size", "-4"]),
        ("sharding.ep=0", ["sharding.ep = 0", "number of ranks"]),
        ("sharding.ep=2", ["sharding.ep = 2", 'model.pattern = "[*-][*-]" has no experts', "set sharding.ep = 1"]),
        ("train.overlap=true", ["train.overlap = true", "sharding.ep = 1 has no exchange", "set sharding.ep = 2"]),
        ("train.delay_wgrad=true", ["train.delay_wgrad = true", "no effect without train.overlap"]),
        ("train.early_release=true", ["train.early_release = true", "no effect without train.overlap"]),
        ("train.expert_bias_rate=0", ["train.expert_bias_rate = 0.0", "positive"]),
        ("train.expert_bias_rate=0.1", ["train.expert_bias_rate = 0.1", "no effect", "model.expert_bias = true"]),
        ("train.global_batch_size=20", ["train.global_batch_size = 20", "1 x 8 = 8", "16 or 24"]),
        ("train.global_batch_size=3", ["train.global_batch_size = 3", "nearest valid: 8"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_value_the_rule_and_the_fix(override, says):
    with pytest.raises(ConfigError) as caught:
        parse("", override).validate(1)
    message = str(caught.value)
    assert "\n" not in message
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    ("setting", "value", "meant"),
    [
        ("optimizer.betas", "0.9,0.95", "[0.9, 0.95]"),
        ("optimizer.betas", "[0.9,0.95", "[0.9, 0.95]"),
        ("data.paths", '["a/text.txt"', '["a/text.txt"]'),
        ("data.paths", '"a.txt", "b.txt"', '["a.txt", "b.txt"]'),
        ("data.paths", "[a.txt, b.txt]", '["a.txt", "b.txt"]'),
        ("data.paths", "a,b.txt", '["a,b.txt"]'),
        ("train.validate_every", "[5]", None),
        ("optimizer.betas", "0.9", None),
        ("optimizer.betas", "0.9,x", None),
        ("data.weights", "much", None),
        ("data.paths", "3", None),
    ],
)
def test_a_list_that_is_suggested_is_one_that_is_taken(setting, value, meant):
    with pytest.raises(ConfigError, match=re.escape(f"{setting} = ")) as caught:
        parse("", f"{setting}={value}")
    suggested = str(caught.value).partition(f"; write {setting} = ")[2]
    assert suggested == (meant or "")
    if meant:
        section, _, name = setting.partition(".")
        found = getattr(getattr(parse("", f"{setting}={suggested}"), section), name)
        assert list(found) == tomllib.loads(f"value = {meant}")["value"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("[train\n", ["TOML", "line"]),
        ("train = 3\n", ["train = 3", "[train]"]),
        ("steps = 3\n", ["steps", "train.steps"]),
    ],
)
def test_a_file_of_the_wrong_shape_is_one_line(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_a_file_that_begins_with_a_byte_order_mark_is_read_as_one_that_does_not(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_config(path).train.steps == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [6, 12, 24, 30, 84])
def test_a_batch_is_valid_exactly_when_the_ranks_share_it_in_whole_microbatches(ranks, batch):
    config = parse("", f"train.global_batch_size={batch}", "train.microbatch_size=3")
    if batch % (3 * ranks) == 0:
        config.validate(ranks)
        assert config.microbatches_per_step(ranks) * ranks * 3 == batch
    else:
        with pytest.raises(ConfigError, match=rf"{ranks} x 3 = {3 * ranks}.*nearest valid") as caught:
            config.validate(ranks)
        nearest = str(caught.value).split("nearest valid: ")[1].split(" or ")
        for value in nearest:
            parse("", f"train.global_batch_size={value}", "train.microbatch_size=3").validate(ranks)


EXPERTS = ["model.pattern=[*E]", "sharding.ep=2"]


def test_experts_and_overlap_that_do_not_fit_are_refused():
    parse("", *EXPERTS, "train.overlap=true", "train.delay_wgrad=true").validate(2)
    parse("", *EXPERTS, "model.expert_bias=true", "train.expert_bias_rate=0.1").validate(4)
    with pytest.raises(ConfigError, match=r"sharding\.ep = 2: must divide model\.num_experts = 9; .*\[1, 3, 9\]"):
        parse("", *EXPERTS, "model.num_experts=9")
    with pytest.raises(ConfigError, match=r"sharding\.ep = 2: must divide the number of ranks, 1; .*\[1\]"):
        parse("", *EXPERTS).validate(1)
    checkpointed = [*EXPERTS, "train.overlap=true", "train.activation_checkpointing=true"]
    with pytest.raises(
        ConfigError, match=r"train\.overlap = true: runs layers in stages.* recomputes whole layers.*model\.recompute"
    ):
        parse("", *checkpointed)
    with pytest.raises(
        ConfigError, match=r'train\.halves = true: .* model\.moe_rows_per = "expert"; set that to "rank"'
    ):
        parse("", *EXPERTS, "train.overlap=true", "train.halves=true", "model.moe_rows_per=expert")
    parse("", *EXPERTS, "train.overlap=true", "train.pipeline_schedule=paired")
    with pytest.raises(ConfigError, match=r'no effect with sharding\.pp = 1; leave it out, or choose "paired" with'):
        parse("", *EXPERTS, "train.pipeline_schedule=paired")
    alone = [*EXPERTS, "train.overlap=true", "train.global_batch_size=16"]
    with pytest.raises(ConfigError, match=r"train\.overlap = true: .*hide nothing; set train\.global_batch_size = 32"):
        parse("", *alone).validate(2)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    parse("", "model.vocab_size=256").validate(1)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 255: .*set model\.vocab_size = 256"):
        parse("", "model.vocab_size=255").validate(1)


def test_a_shard_size_that_is_not_the_number_of_ranks_is_refused():
    config = parse("", "sharding.dp_shard=4")
    config.validate(4)
    with pytest.raises(ConfigError, match=r"sharding\.dp_shard = 4: .* 2"):
        config.validate(2)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_end():
    schedule = ScheduleConfig(warmup_steps=10, min_lr_ratio=0.25)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert factors[99] == pytest.approx(0.25)
    assert factors[54] == pytest.approx((1 + 0.25) / 2)
    flat = ScheduleConfig(warmup_steps=10, shape="constant")
    assert {flat.factor(step, 100) for step in range(9, 100)} == {1.0}


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "inverse_sqrt"])
def test_every_shape_goes_up_to_the_peak_and_down_from_there_in_small_steps(shape):
    schedule = ScheduleConfig(warmup_steps=10, shape=shape)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert max(factors) == factors[9] == 1
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert max(a - b for a, b in itertools.pairwise(factors)) < 0.06
    assert factors[99] == pytest.approx({"inverse_sqrt": 10**-0.5}.get(shape, 0.1))
    assert schedule.factor(120, 100) <= factors[99], "a run that goes on after its planned end stays low"
    if shape == "wsd":
        assert set(factors[9:79]) == {1.0} and factors[89] == pytest.approx(0.1 + 0.9 / 2)
    if shape == "linear":
        assert factors[54] == pytest.approx((1 + 0.1) / 2)


def test_a_warmup_that_reaches_into_the_decay_is_refused_and_the_longest_that_does_not_is_no_cliff():
    wsd = ["train.steps=10", "schedule.shape=wsd"]
    says = r"schedule\.warmup_steps = 8: must end before the decay begins.* set it to at most 5"
    with pytest.raises(ConfigError, match=says):
        parse_config("", [*wsd, "schedule.decay_fraction=0.5", "schedule.warmup_steps=8"])
    with pytest.raises(ConfigError, match="set it to at most 0"):
        parse_config("", [*wsd, "schedule.decay_fraction=1.0"])
    for steps, fraction, most in ((10, 0.5, 5), (10, 0.25, 7), (10, 1.0, 0), (30, 0.1, 27)):
        words = [*wsd, f"train.steps={steps}", f"schedule.decay_fraction={fraction}", f"schedule.warmup_steps={most}"]
        schedule = parse_config("", words).schedule
        factors = [schedule.factor(step, steps) for step in range(steps)]
        falls = [a - b for a, b in itertools.pairwise([1.0, *factors[max(0, most - 1) :]])]
        assert max(falls) <= 0.9 / (fraction * steps) + 1e-9
        with pytest.raises(ConfigError, match=f"set it to at most {most},"):
            parse_config("", [*words, f"schedule.warmup_steps={most + 1}"])


def test_the_printed_configuration_is_the_default_one_and_explains_each_setting(capsys):
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert parse_config(text) == TrainConfig()
    for section, fields in SECTIONS.items():
        table = text.partition(f"[{section}]")[2].partition("\n\n")[0]
        for field in dataclasses.fields(fields):
            assert f"\n{field.name} = " in table or f"\n# {field.name} =" in table, field.name
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_of_settings_is_made_from_their_definitions(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "settings.md").read_text()
    assert as_markdown() in page, "write it anew: weft config --markdown"


@pytest.mark.slow
def test_a_file_is_checked_without_running_it(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nglobal_batch_size = 8\n")
    assert main(["config", "--check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: fine on 1 rank\n"
    assert main(["config", "--check", str(path), "--ranks", "3"]) == 2
    assert "train.global_batch_size = 8" in capsys.readouterr().err
    path.write_text('[data]\npaths = ["absent"]\n')
    assert main(["config", "--check", str(path)]) == 2
    assert "data.paths: 'absent' is not a file or folder; correct it (relative paths" in capsys.readouterr().err
    path.write_text('[model]\nfactory = "a:b"\n[data]\ntokenizer = "absent.json"\n')
    assert main(["config", "--check", str(path)]) == 2
    assert "data.tokenizer = 'absent.json': cannot be read" in capsys.readouterr().err


def test_every_setting_is_documented_by_one_line_below_it():
    for section in [*SECTIONS.values(), TrainConfig]:
        if not section.__module__.startswith("weft.train."):
            continue
        lines = textwrap.dedent(inspect.getsource(section)).splitlines()
        for setting in dataclasses.fields(section):
            (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(f"{setting.name}: ")]
            below = lines[at + 1].strip()
            assert below.startswith('"""') and below.endswith('"""'), (section.__name__, setting.name)


@pytest.mark.parametrize("name", ["stdlib.toml", "stdlib-moe.toml", "stdlib-hybrid.toml", "stdlib-pipeline.toml"])
def test_the_shipped_configurations_run_on_two_ranks(pytestconfig, name):
    config = load_config(pytestconfig.rootpath / "configs" / name)
    config.validate(2)
    assert config.data.paths == ()


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    config = LoopConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
