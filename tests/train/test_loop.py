import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp import nets
from tests.train.command import metrics, write_config
from weft.checkpoint import committed_steps
from weft.models import HybridModel
from weft.moe import load_statistics
from weft.train.config import OptimizerConfig, ScheduleConfig, load_config
from weft.train.data import Batches, Validation, load_corpus
from weft.train.errors import ConfigError
from weft.train.loop import Trainer, train
from weft.train.optimizers import make_optimizer
from weft.train.run.failures import Interrupted
from weft.train.run.runs import CONFIG, Run, open_run, remove_if_unused
from weft.train.run.stop import StopRequest
from weft.train.schedule import Schedule


class StopAt(StopRequest):
    """A person who presses Ctrl-C while step `step` runs, on the last rank only."""

    def __init__(self, step):
        super().__init__()
        self.step, self.trainer, self.runs = step, None, False

    @property
    def requested(self):
        if not self.runs:  # asked before the first step: nothing was pressed yet
            self.runs = True
            return False
        return dist.get_rank() == dist.get_world_size() - 1 and self.trainer.position.step + 1 >= self.step


def train_on(path, directory, overrides=(), *, stop_at, resume_from=None):
    """One rank's part of a run that ends after step `stop_at`; returns its numbers and what it said."""
    config = load_config(path, overrides)
    stop, said = StopAt(stop_at), []
    trainer = Trainer(config, Run(directory, resume_from), stop=stop, say=said.append)
    stop.trainer = trainer
    trainer.run()
    model = nets.whole(trainer.model.state_dict())
    moments = nets.whole(
        {
            f"{name}/{key}": value
            for name, parameter in trainer.model.named_parameters()
            for key, value in trainer.optimizer.state.get(parameter, {}).items()
        }
    )
    return metrics(directory), metrics(directory, "validation"), model, moments, said


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def reference(path, steps):
    """The plain loop: one process, no sharding, whole global batches."""
    config = load_config(path)
    corpus = load_corpus(config.data)
    sizes = {
        "sequence_length": config.data.sequence_length,
        "microbatch_size": config.train.global_batch_size,
        "global_batch_size": config.train.global_batch_size,
    }
    batches = Batches(corpus.train, seed=config.data.seed, **sizes)
    validation = Validation(corpus.validation, batches=config.train.validation_batches, **sizes)
    torch.manual_seed(config.train.seed)
    model = HybridModel(config.model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
    )
    records = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * config.schedule.factor(step, config.train.steps)
        (tokens, labels) = next(batches)
        loss = model(tokens, labels=labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip)
        lr = optimizer.param_groups[0]["lr"]
        records.append({"loss": loss.item(), "gradient_norm": norm.item(), "lr": lr})
        optimizer.step()
        optimizer.zero_grad()
        for name, load in load_statistics(model).items():
            model.get_submodule(name).router.update_bias(load, config.train.expert_bias_rate)
    model.eval()
    with torch.no_grad():
        losses = [model(tokens, labels=labels).item() for tokens, labels in validation]
    return records, sum(losses) / len(losses), model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("ranks, strategy", [(1, "no_shard"), (2, "no_shard"), (2, "optim_grads_params")])
def test_training_on_any_ranks_is_training_in_one_process(pool, tmp_path, ranks, strategy):
    path = write_config(tmp_path, train__gradient_clip=0.5, train__validate_every=4, checkpoint__every=0)
    records, validation_loss, weights = reference(path, 4)
    changes = [f"sharding.strategy={strategy}", "train.microbatch_size=1"]
    answers = pool.run(ranks, train_on, path, tmp_path / "run", changes, stop_at=4)
    lines, validations, model, _, _ = answers[0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, expected in zip(lines, records):
        for name, value in expected.items():
            torch.testing.assert_close(line[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert validations[-1]["loss"] == pytest.approx(validation_loss, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_all_ranks_stop_at_the_same_step_when_one_is_asked_to(pool, tmp_path):
    path = write_config(tmp_path, checkpoint__every=0, train__validate_every=0)
    for lines, *_ in pool.run(2, train_on, path, tmp_path / "run", stop_at=2):
        assert len(lines) == 2
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.long
def test_a_run_resumes_on_another_number_of_ranks_and_under_another_strategy(pool, tmp_path):
    path = write_config(tmp_path, train__microbatch_size=1, train__validate_every=0)
    whole = pool.run(2, train_on, path, tmp_path / "run", stop_at=4)[0]
    pool.run(2, train_on, path, tmp_path / "parts", stop_at=2)
    changes = ["sharding.strategy=optim"]
    parts = pool.run(4, train_on, path, tmp_path / "parts", changes, stop_at=4, resume_from=2)[0]
    # Other ranks add the same numbers in another order.
    for mine, theirs in zip(parts[0], whole[0]):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for name, value in whole[2].items():
        torch.testing.assert_close(parts[2][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.long
def test_on_the_same_ranks_a_run_resumes_bit_for_bit(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=2, train__precision="bf16")
    whole = pool.run(2, train_on, path, tmp_path / "run", stop_at=4)[0]
    pool.run(2, train_on, path, tmp_path / "parts", stop_at=2)
    parts = pool.run(2, train_on, path, tmp_path / "parts", stop_at=4, resume_from=2)[0]
    assert parts[:2] == whole[:2]
    for mine, theirs in zip(parts[2:4], whole[2:4]):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.long
def test_bf16_trains_like_fp32_within_its_precision(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=0)
    fp32, bf16 = (
        pool.run(2, train_on, path, tmp_path / precision, [f"train.precision={precision}"], stop_at=2)[0]
        for precision in ("fp32", "bf16")
    )
    assert all(value.dtype == torch.float32 for value in bf16[2].values())
    for a, b in zip(fp32[0], bf16[0]):
        assert a["loss"] != b["loss"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)


@pytest.mark.long
def test_recomputing_activations_changes_no_number(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=0)
    kept, recomputed = (
        pool.run(2, train_on, path, tmp_path / on, [f"train.activation_checkpointing={on}"], stop_at=2)[0]
        for on in ("false", "true")
    )
    assert kept[0] == recomputed[0]
    assert kept[2].keys() == recomputed[2].keys()


@pytest.mark.slow
def test_a_finished_run_says_that_there_is_nothing_to_do(pool, tmp_path):
    path = write_config(tmp_path, train__steps=4, train__validate_every=0)
    pool.run(1, train_on, path, tmp_path / "run", ["train.steps=5"], stop_at=4)
    said = pool.run(1, train_on, path, tmp_path / "run", stop_at=9, resume_from=4)[0][-1]
    reached = "the run is at step 4 of 4; to train further, set train.steps above 4"
    assert f"nothing is left to train, but the report is missing: {reached}" in said, "it was stopped at step 4 of 5"
    said = pool.run(1, train_on, path, tmp_path / "run", stop_at=9, resume_from=4)[0][-1]
    assert f"nothing to do: {reached}" in said


def told_of_microbatches(path, folder):
    """What the model was told before each backward of two steps: whether it is the last one before the optimizer."""
    stop, told = StopAt(2), []
    stop.trainer = trainer = Trainer(load_config(path), Run(folder), stop=stop, say=lambda line: None)
    trainer.model.set_is_last_backward = told.append
    trainer.run()
    return told


@pytest.mark.slow
def test_the_model_is_told_which_microbatch_is_the_last_of_a_step(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=0)
    assert pool.run(1, told_of_microbatches, path, tmp_path / "run") == [([False] * 3 + [True]) * 2]


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(decay) == 5
    for name, parameter in model.named_parameters():
        assert decay[parameter] == (0.3 if name in ("0.weight", "2.weight") else 0.0), name


def test_every_group_has_the_factor_of_the_step_times_its_own_rate():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each], "lr": rate} for each, rate in zip(weights, (1.0, 0.1))])
    schedule = Schedule(optimizer, ScheduleConfig(warmup_steps=2), steps=8)
    for step in range(8):
        factor = schedule.config.factor(step, 8)
        assert schedule.set_rates(step) == factor
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor, 0.1 * factor])
    optimizer = torch.optim.AdamW(weights[:1], lr=torch.tensor(0.5))
    assert type(Schedule(optimizer, ScheduleConfig(warmup_steps=2), steps=8).set_rates(0)) is float, "it is logged"


def train_alone(path):
    with pytest.raises(RuntimeError, match="the gradient norm after step"):
        train(load_config(path))


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(pool, tmp_path):
    path = write_config(
        tmp_path,
        optimizer__lr=1e30,
        schedule__warmup_steps=0,
        train__gradient_clip=0.0,
        train__microbatch_size=4,
        checkpoint__every=1,
        checkpoint__keep=100,
    )
    pool.run(2, train_alone, path)
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines)
    for step in (run / "checkpoints").glob("step-*"):
        assert int(step.name.removeprefix("step-")) <= len(lines)


def diverging(path):
    """A rank of a run in whose first backward one parameter's gradient is no number; returns what it raises."""
    config = load_config(path)
    trainer = Trainer(config, Run(config.run.path, None), say=lambda line: None)
    name = list(trainer.model.state_dict())[-1]
    passing = trainer.passes.run

    def poisoned(step, microbatches):
        losses = passing(step, microbatches)
        trainer.model.get_parameter(name).grad.mul_(math.nan)
        return losses

    trainer.passes.run = poisoned
    try:
        trainer.run()
    except RuntimeError as error:
        return name, str(error)
    return name, None


@pytest.mark.slow
def test_the_error_of_a_run_that_diverges_names_the_parameters(pool, tmp_path):
    path = write_config(tmp_path)
    for name, message in pool.run(2, diverging, path):
        assert "the gradient norm after step 0 is nan" in message
        assert f"gradient of {name} on rank" in message and "NaN" in message
        assert message.count(" on rank ") <= 2, "other gradients were touched"
        assert "\n" not in message


def train_to_the_end(path):
    train(load_config(path))


@pytest.mark.slow
def test_norms_of_every_parameter_are_written_as_often_as_asked(pool, tmp_path):
    path = write_config(tmp_path, train__parameter_norms_every=2, train__steps=5, train__gradient_clip=0.01)
    pool.run(2, train_to_the_end, path)
    lines = metrics(tmp_path / "runs" / "tiny", "norms")
    assert [line["step"] for line in lines] == [2, 4]
    model = HybridModel(load_config(path).model)
    steps = {line["step"]: line for line in metrics(tmp_path / "runs" / "tiny")}
    for line in lines:
        names = {name for name, _ in model.named_parameters()}
        assert line["weight"].keys() == names == line["gradient"].keys()
        assert all(norm > 0 for norm in line["weight"].values())
        whole = math.hypot(*line["gradient"].values())
        assert math.isclose(whole, steps[line["step"]]["gradient_norm"], rel_tol=1e-4), "those before clipping"


def save_in(run):
    (run.directory / "checkpoints" / "step-00000007").mkdir(parents=True)
    (run.directory / CONFIG).write_text('[model]\n[data]\n[run]\nname = "tiny"\n')


def test_a_new_run_gets_a_new_directory_and_prints_how_to_resume_the_earlier_one(tmp_path):
    config = load_config(write_config(tmp_path)).run
    folder = tmp_path / "runs"
    first = open_run(config, False, "weft train x.toml")
    assert (first.directory, first.step) == (folder / "tiny", None)
    save_in(first)
    second = open_run(config, False, "weft train x.toml")
    assert (second.directory, second.step) == (folder / "tiny-2", None)
    assert second.note == (
        f"a new run in {folder / 'tiny-2'}; {folder / 'tiny'} is unchanged; "
        f"it resumes from step 7 with: weft train x.toml --resume {folder / 'tiny'}"
    )
    assert open_run(config, False, "weft train x.toml").directory == folder / "tiny-3"
    assert open_run(config, True, "weft train x.toml").directory == folder / "tiny"
    save_in(second)
    assert open_run(config, True, "weft train x.toml").directory == folder / "tiny-2"
    named = open_run(config, str(folder / "tiny"), "weft train x.toml")
    assert (named.directory, named.step) == (folder / "tiny", 7)


def test_a_run_that_never_began_leaves_no_directory_but_one_that_did_stays(tmp_path):
    config = load_config(write_config(tmp_path)).run
    empty, used = open_run(config, False, ""), open_run(config, False, "")
    save_in(used)
    for run in (empty, used):
        remove_if_unused(run)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-2"], "the folder of both stays"


def refused_at_its_beginning(path, setting):
    with pytest.raises(ConfigError):
        train(load_config(path, [setting]))


@pytest.mark.parametrize("setting", ['data.paths=["none"]', "run.weights=none", 'run.loggers=["none:None"]'])
def test_a_run_that_is_refused_leaves_no_directory(pool, tmp_path, setting):
    pool.run(2, refused_at_its_beginning, write_config(tmp_path), setting)
    assert not (tmp_path / "runs").exists()


class Stopped(StopRequest):
    requested = True


def interrupted_at_its_beginning(path):
    config = load_config(path)
    with pytest.raises(Interrupted, match="stopped before step 1"):
        Trainer(config, open_run(config.run, False, None), stop=Stopped(), say=lambda line: None).run()


def test_a_run_that_is_interrupted_before_its_first_step_leaves_no_directory(pool, tmp_path):
    pool.run(1, interrupted_at_its_beginning, write_config(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_the_step_is_chosen_after_the_directory_is_locked(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=0, checkpoint__every=1)
    pool.run(1, train_on, path, tmp_path / "run", stop_at=3)
    said = pool.run(1, train_on, path, tmp_path / "run", stop_at=5, resume_from=2)[0][-1]
    assert f"resuming {tmp_path / 'run'} from step 3" in said, "another run saved it since"


@pytest.mark.slow
def test_a_run_whose_report_cannot_be_written_is_complete_and_prints_a_line(pool, tmp_path):
    run = tmp_path / "run"
    (run / "report.html").mkdir(parents=True)
    path = write_config(tmp_path, train__steps=2, train__validate_every=0)
    said = pool.run(1, train_on, path, run, stop_at=99)[0][-1]
    why = f"rank 0: rename of {run / 'report.html'}: Is a directory"
    assert any(f"{run}: its report cannot be written ({why}" in line for line in said)
    assert any(f"weft report {run}" in line for line in said)
    assert committed_steps(run / "checkpoints") == [2]
