"""A run that goes on with other settings: refused, printed or silent, as the table in docs/training.md says."""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tests.train.command import metrics, write_config
from tests.train.test_loop import StopAt, train_on
from weft.cli.parser import make_parser
from weft.train.config import SECTIONS, RunConfig, load_config, to_toml
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.optimizers import check_loaded_state, configured_options
from weft.train.run.changes import changed, treatment
from weft.train.run.runs import CONFIG, Run, open_run, recorded_name, run_directory
from weft.train.sections import OptimizerConfig

CHANGED = {
    "model.num_attention_heads=4 & model.num_key_value_heads=4": "refused",  # the same shapes, another function
    "model.rope_theta=500.0": "refused",
    "model.rms_norm_eps=1e-2": "refused",
    "model.aux_loss_coef=0.1": "printed",
    'model.recompute=["attend"]': "silent",
    "data.seed=3": "refused",
    "data.validation_fraction=0.3": "refused",
    "data.sequence_length=8": "refused",
    "train.seed=5": "refused",
    "train.steps=9": "printed",
    "train.global_batch_size=4": "printed",
    "train.precision=bf16": "printed",
    "train.gradient_clip=0.1": "printed",
    "train.validation_batches=1": "printed",
    "train.microbatch_size=4": "silent",
    "train.log_every=1": "silent",
    "train.activation_checkpointing=true": "silent",
    "optimizer.lr=0.01": "printed",
    "optimizer.betas=[0.5, 0.6]": "printed",
    "optimizer.eps=0.01": "printed",
    "optimizer.weight_decay=0.7": "printed",
    "optimizer.name=SGD": "refused",
    "train.skip_spikes=4.0": "refused",
    "checkpoint.keep_best=true": "silent",
    "optimizer.flat=true": "silent",
    "schedule.warmup_steps=1": "printed",
    "schedule.shape=linear": "printed",
    "schedule.min_lr_ratio=0.5": "printed",
    "sharding.strategy=no_shard": "silent",
    "sharding.reshard_after_forward=false": "silent",
    "train.compile=eager": "silent",
    "checkpoint.keep=1": "silent",
}


def stopped(pool, tmp_path):
    path = write_config(tmp_path, train__steps=6, train__validate_every=0, model__num_key_value_heads=2)
    pool.run(1, train_on, path, tmp_path / "run", stop_at=3)
    return path


def resumed(path, directory, overrides):
    """What a run that goes on says before its first step, and the options of its optimizer then; or why it does not."""
    config = load_config(path, overrides)
    said = []
    try:
        trainer = Trainer(config, Run(directory, 3), say=said.append)
    except ConfigError as error:
        return str(error), None, None
    groups = [
        {name: group[name] for name in ("betas", "eps", "weight_decay")} for group in trainer.optimizer.param_groups
    ]
    rate = trainer.schedule.set_rates(trainer.position.step)
    trainer.saves.close()
    return said, groups, rate


def all_resumed(path, directory):
    return {setting: resumed(path, directory, setting.split(" & ")) for setting in CHANGED}


@pytest.mark.long
def test_each_changed_setting_is_refused_printed_or_silent_as_the_table_says(pool, tmp_path):
    path = stopped(pool, tmp_path)
    before = metrics(tmp_path / "run")
    for setting, (said, groups, rate) in pool.run(1, all_resumed, path, tmp_path / "run")[0].items():
        name = setting.partition("=")[0]
        assert treatment(name) == CHANGED[setting], setting
        if CHANGED[setting] == "refused":
            assert groups is None and name in said and "\n" not in said, (setting, said)
            continue
        assert said[0] == f"resuming {tmp_path / 'run'} from step 3"
        if CHANGED[setting] == "silent":
            assert said[1:] == [], setting
            continue
        assert said[1].startswith(f"{name} = ") and "from here on, was " in said[1], (setting, said)
        config = load_config(path, [setting])
        for group in groups:
            assert tuple(group["betas"]) == config.optimizer.betas and group["eps"] == config.optimizer.eps
        assert [group["weight_decay"] for group in groups] == [config.optimizer.weight_decay, 0.0]
        assert rate == pytest.approx(config.optimizer.lr * config.schedule.factor(3, config.train.steps))
        jump = [line for line in said if line.startswith("learning rate of step 4: ")]
        assert bool(jump) == (name.startswith(("schedule.", "train.steps", "optimizer.lr"))), (setting, said)
    assert metrics(tmp_path / "run") == before, "a refused or closed run writes nothing"


def resume_at_once(path, directory):
    config = load_config(path, ["optimizer.weight_decay=0.7"])
    stop = StopAt(5)  # a request that is there at the start ends it before a step
    stop.trainer = Trainer(config, Run(directory, 3), say=lambda line: None, stop=stop)
    stop.trainer.run()
    return [group["weight_decay"] for group in stop.trainer.optimizer.param_groups]


@pytest.mark.slow
def test_a_changed_option_is_used_and_recorded(pool, tmp_path):
    path = stopped(pool, tmp_path)
    assert pool.run(1, resume_at_once, path, tmp_path / "run")[0] == [0.7, 0.0]
    assert load_config(tmp_path / "run" / CONFIG).optimizer.weight_decay == 0.7


def written(directory):
    return {name: (directory / name).read_text() for name in (CONFIG, "facts.json")}


def resume_in_vain(path, directory):
    """What is written of a run before and after resumes that save nothing, and after one that does."""
    found = [written(directory)]
    for stop, overrides in (("done", ["train.steps=3", "optimizer.lr=0.5"]), ("diverges", ["optimizer.lr=0.1"])):
        said: list[str] = []
        trainer = Trainer(load_config(path, overrides), Run(directory, 3), say=said.append)
        if stop == "done":
            assert trainer.run()
            assert not any("from here on" in line for line in said), "nothing is left to train"
        else:
            trainer.passes.run = lambda step, microbatches: torch.full((4,), torch.nan, requires_grad=True)
            with pytest.raises(RuntimeError, match="is nan"):
                trainer.run()
        found.append(written(directory))
    resume_at_once(path, directory)
    return [*found, written(directory)]


@pytest.mark.long
def test_a_resume_that_saves_nothing_keeps_the_recorded_settings(pool, tmp_path):
    path = stopped(pool, tmp_path)
    before, done, diverged, saved = pool.run(1, resume_in_vain, path, tmp_path / "run")[0]
    assert done[CONFIG] == diverged[CONFIG] == before[CONFIG]
    for after in (done, diverged):  # what is complete at step 3 has a report now
        now = json.loads(after["facts.json"])
        assert all(now[name] == value for name, value in json.loads(before["facts.json"]).items())
    assert saved != before and json.loads(saved["facts.json"])["resumed"] == [3]


def test_the_table_of_the_documentation_has_every_setting_with_what_happens_to_it(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "training.md").read_text()
    table = text.partition("| changed setting |")[2].partition("\n\n")[0]
    found = {}
    for row in table.splitlines()[2:]:
        settings, what = row.strip("| ").split(" | ")[:2]
        found |= dict.fromkeys(re.findall(r"`([a-z_.*]+)`", settings), what.split(":")[0])
    for section, fields in SECTIONS.items():
        for field in dataclasses.fields(fields):
            name = f"{section}.{field.name}"
            assert found.get(name, found.get(f"{section}.*")) == treatment(name), name


def test_the_commands_of_the_readme_change_no_setting_and_keep_the_learning_rate_continuous(pytestconfig, tmp_path):
    root = pytestconfig.rootpath
    block = (root / "README.md").read_text().partition("## Train, stop, resume")[2].split("```")[1]
    commands = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("weft train")]
    assert len(commands) >= 2
    before = None
    for command in commands:
        options = make_parser().parse_args(command[1:])
        path = root / options.config if options.config else tmp_path / CONFIG
        now = load_config(path, options.overrides)
        if options.resume:
            assert changed(tmp_path, now, 100) == [] and now == before
        before = now
        (tmp_path / CONFIG).write_text(to_toml(now))


def test_a_run_without_its_configuration_is_an_error(tmp_path):
    config = load_config(write_config(tmp_path))
    assert "no longer exists: these settings cannot be compared" in changed(tmp_path, config, 3)[0]


def test_or_start_resumes_if_it_can_and_starts_if_it_cannot(tmp_path):
    config = load_config(write_config(tmp_path)).run
    first = open_run(config, True, "weft train x.toml", or_start=True)
    assert (first.directory, first.step) == (tmp_path / "runs" / "tiny", None)
    (first.directory / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert open_run(config, True, "weft train x.toml", or_start=True) == Run(first.directory, 7)
    with pytest.raises(ConfigError, match="no run 'tiny' in"):
        open_run(dataclasses.replace(config, directory=str(tmp_path / "other")), True, "weft train x.toml")
    with pytest.raises(ConfigError, match=r"^run\.resume = true: no run .*, or leave run\.resume = true out to start"):
        open_run(dataclasses.replace(config, directory=str(tmp_path / "other"), resume=True), False, None)


@pytest.fixture
def numbered(tmp_path):
    """`exp` and `exp-2`, each the first run of its name; returns `exp`'s configuration."""
    config = dataclasses.replace(load_config(write_config(tmp_path)), run=RunConfig(str(tmp_path / "runs"), "exp"))
    for name in ("exp", "exp-2"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000007").mkdir(parents=True)
        named = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
        (tmp_path / "runs" / name / CONFIG).write_text(to_toml(named))
    return config.run


@pytest.mark.parametrize("or_start", [False, True])
def test_a_run_is_resumed_by_its_own_name_and_not_by_that_of_its_folder(tmp_path, numbered, or_start):
    runs = tmp_path / "runs"
    assert open_run(numbered, True, "", or_start=or_start).directory == runs / "exp"
    second = dataclasses.replace(numbered, name="exp-2")
    assert open_run(second, True, "", or_start=or_start).directory == runs / "exp-2"
    assert open_run(numbered, False, "").directory == runs / "exp-3", "exp-2 is another run's"
    shutil.rmtree(runs / "exp")
    if or_start:
        assert open_run(numbered, True, "", or_start=True) == Run(runs / "exp", None, f"a new run in {runs / 'exp'}")
        return
    with pytest.raises(ConfigError, match="no run 'exp' in"):
        open_run(numbered, True, "")


def test_the_configuration_of_a_run_behind_resume_means_that_run(tmp_path, numbered):
    exp = tmp_path / "runs" / "exp"
    assert open_run(numbered, str(exp / CONFIG), "") == Run(exp, 7)
    assert run_directory(exp / CONFIG) == exp
    assert run_directory(write_config(tmp_path)) == write_config(tmp_path), "a configuration that is no run's"


@pytest.mark.slow
def test_a_run_inside_the_folder_of_its_text_resumes(pool, tmp_path):
    paths = [f"data.paths={json.dumps([str(tmp_path)])}"]
    path = write_config(tmp_path, train__steps=4, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    pool.run(1, train_on, path, run, paths, stop_at=2)
    pool.run(1, train_on, path, run, paths, stop_at=3, resume_from=2)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]


def write_tokenizer(path, first=0):
    """Of single characters; the numbers begin with `first`."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: (number + first) % 256 for number, each in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))


@pytest.mark.long
def test_texts_and_a_tokenizer_may_move_and_be_no_others(pool, tmp_path):
    path = write_config(tmp_path, train__steps=4, train__validate_every=0, data__validation_fraction=0.05)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "held.txt").write_text("what is validated on\n" * 200)
    write_tokenizer(tmp_path / "a" / "tokenizer.json")

    def places(folder):
        moved = {"data.validation_paths": [f"{folder}/held.txt"], "data.tokenizer": f"{folder}/tokenizer.json"}
        return [f"{name}={json.dumps(value)}" for name, value in moved.items()]

    pool.run(1, train_on, path, tmp_path / "run", places(tmp_path / "a"), stop_at=2)
    (tmp_path / "a").rename(tmp_path / "b")
    said = pool.run(1, train_on, path, tmp_path / "run", places(tmp_path / "b"), stop_at=3, resume_from=2)[0][-1]
    told = [line.partition(" ")[0] for line in said if "from here on, was" in line]
    assert told == ["data.validation_paths", "data.tokenizer"]
    write_tokenizer(tmp_path / "b" / "tokenizer.json", first=1)
    (line, _, _) = pool.run(1, resumed, path, tmp_path / "run", places(tmp_path / "b"))[0]
    assert "has the same length but other tokens" in line and "and its data.tokenizer, at any path" in line
    write_tokenizer(tmp_path / "b" / "tokenizer.json")
    (tmp_path / "b" / "held.txt").write_text("another text\n" * 200)
    (line, _, _) = pool.run(1, resumed, path, tmp_path / "run", places(tmp_path / "b"))[0]
    assert line.startswith("data.validation_paths = ") and "differs from the text of the checkpoint" in line


@pytest.mark.slow
def test_a_run_keeps_its_name_under_another_configuration(pool, tmp_path):
    path = write_config(tmp_path, train__steps=4, train__validate_every=0)
    pool.run(1, train_on, path, tmp_path / "run", stop_at=2)
    pool.run(1, train_on, path, tmp_path / "run", ["run.name=other"], stop_at=3, resume_from=2)
    assert recorded_name(tmp_path / "run") == "tiny"


def test_printed_commands_survive_a_shell(tmp_path):
    config = dataclasses.replace(load_config(write_config(tmp_path)).run, name="a name; with $HOME")
    first = open_run(config, False, "weft train x.toml")
    (first.directory / "checkpoints" / "step-00000007").mkdir(parents=True)
    note = open_run(config, False, "weft train x.toml").note
    assert shlex.split(note.partition("with: ")[2])[-1] == str(first.directory)
    dashed = dataclasses.replace(config, directory="-runs")
    with contextlib.chdir(tmp_path):
        (open_run(dashed, False, None).directory / "checkpoints" / "step-00000007").mkdir(parents=True)
        words = shlex.split(open_run(dashed, False, "weft train").note.partition("with: weft ")[2])
        assert (words[0], make_parser().parse_args(words).resume) == ("train", "./-runs/a name; with $HOME")


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_with_its_layers_grouped_differently(pool, tmp_path):
    """Weights, optimizer state and averages under other numbers, through both spellings and back.

    Not clipped: the norm of all gradients adds what units have, and other groups are other units.
    """
    options = {"train__steps": 6, "train__validate_every": 0, "train__ema_decay": 0.5, "train__gradient_clip": 0.0}
    path = write_config(tmp_path, model__pattern="[*-]*-", **options)
    whole = pool.run(2, train_on, path, tmp_path / "whole", stop_at=6)[0]
    pool.run(2, train_on, path, tmp_path / "run", stop_at=2)
    other = ["model.pattern='*-[*-]'"]
    with pytest.raises(
        ConfigError, match=r"same layers, grouped differently; resume with --set run\.renumber=true"
    ) as error:
        changed(tmp_path / "run", load_config(path, other), 2)
    assert "\n" not in str(error.value)
    renumber = ["run.renumber=true"]
    said = pool.run(2, train_on, path, tmp_path / "run", other + renumber, stop_at=4, resume_from=2)[0][-1]
    assert any(line.startswith("model.pattern = ") and "from here on" in line for line in said)
    parts = pool.run(2, train_on, path, tmp_path / "run", renumber, stop_at=6, resume_from=4)[0]
    for one, other in zip(whole[2:4], parts[2:4]):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert [line["loss"] for line in whole[0]] == [line["loss"] for line in parts[0]]


class Loose(torch.optim.SGD):
    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **{"momentum": 0.9, **options})


def test_which_options_a_resumed_run_takes_from_its_configuration():
    weight = [nn.Parameter(torch.ones(2))]
    assert configured_options(torch.optim.AdamW(weight, lr=0.5), None) == [{"lr": 0.5}]
    (own,) = configured_options(Loose(weight, 0.5), OptimizerConfig(name="here:Loose"))
    assert own["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "options", "lacking"),
    [
        ("AdamW", {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {"momentum": 0.5, "centered": True}, "grad_avg, momentum_buffer"),
        ("SGD", {"momentum": 0.5}, None),
        ("AdamW", {"fused": False}, None),
    ],
)
def test_options_that_need_state_which_the_checkpoint_lacks_are_refused(name, options, lacking):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = getattr(torch.optim, name)([weight])
    optimizer.step()
    check_loaded_state(optimizer, before := OptimizerConfig(name=name))
    changed = dataclasses.replace(before, options=options)
    with pytest.raises(ConfigError, match=rf"does not hold \({lacking}\)") if lacking else nullcontext():
        check_loaded_state(optimizer, changed)
