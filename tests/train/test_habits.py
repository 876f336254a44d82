"""Habits: spikes left out, an early end, the best checkpoint, loggers, profiler windows, utilisation."""

import json
import math
import re
import statistics
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.train.command import committed, metrics, rewind, write_config
from tests.train.test_loop import StopAt
from weft.checkpoint import CheckpointError, CheckpointManager
from weft.moe import expert_layers
from weft.train.activations import Activations
from weft.train.config import load_config
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.record.loggers import check
from weft.train.record.metrics import Metrics
from weft.train.record.profile import Operations, ProfilerWindow
from weft.train.run.runs import Run
from weft.train.spikes import Spikes
from weft.train.state import Position


def test_a_spike_is_far_above_the_median_of_what_was_none():
    spikes = Spikes(3.0)
    norms = [1.0 + 0.1 * (number % 3) for number in range(30)]
    assert not any(spikes.is_one(norm) for norm in norms)
    for norm in (10.0, math.nan, math.inf, 3.1 * statistics.median(norms)):
        assert spikes.is_one(norm)
    assert not spikes.is_one(3.2) and spikes.skipped == 4
    again = Spikes(3.0)
    again.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
    assert vars(again) == vars(spikes)
    assert [spikes.is_one(math.nan) for _ in range(11)] == [True] * 10 + [False], "not for ever"
    assert not Spikes(0.0).is_one(1e9)


def test_the_median_is_that_of_the_last_hundred_and_twenty_must_be_known():
    young = Spikes(2.0)
    for norm in [1.0] * 10 + [math.nan] * 30 + [1.0] * 9 + [9.0]:
        assert not young.is_one(norm), "fewer than twenty were known"
    assert len(young.norms) == 20
    assert young.is_one(2.1) and not young.is_one(2.0)

    steady = Spikes(2.0)
    assert not any(steady.is_one(norm) for norm in [10.0] * 50 + [1.0] * 50)
    assert not steady.is_one(3.0), "half of the last hundred were 10"
    assert not steady.is_one(1.0) and steady.is_one(3.0), "most were 1, whatever their mean is"

    again = Spikes(2.0)
    again.load_state_dict(steady.state_dict())
    assert vars(again) == vars(steady) and again.in_a_row == 1
    off = Spikes(0.0)
    off.load_state_dict(steady.state_dict())
    assert not off.is_one(1e9), "a run that goes on without"


def spiked(path, folder, stop_at, resume_from=None, poison=None):
    """A run in which the gradient of step `poison` is a thousand times too large on one rank.

    Returns its metrics, and by step whether it left the weights and the biases of experts as they were.
    """
    stop = StopAt(stop_at)
    stop.trainer = trainer = Trainer(load_config(path), Run(folder, resume_from), stop=stop, say=lambda line: None)
    passing = trainer.passes.run
    routers = [layer.router for layer in expert_layers(trainer.model).values()]

    def run(step, microbatches):
        losses = passing(step, microbatches)
        if step == poison:
            for parameter in trainer.model.parameters():
                parameter.grad.mul_(1000)
        return losses

    trainer.passes.run = run
    before = {}

    def moment(name, numbers):
        if name == "step":
            weights = [parameter.to_local().clone() for parameter in trainer.model.parameters()]
            weights += [router.expert_bias.clone() for router in routers]
            before[trainer.position.step] = weights

    trainer.moment = moment
    trainer.run()
    same = {
        step: all(map(torch.equal, before[step - 1], weights)) for step, weights in before.items() if step - 1 in before
    }
    return metrics(folder), same


@pytest.mark.long
def test_a_step_with_a_spike_changes_no_weight_and_is_counted_and_a_resumed_run_knows(pool, tmp_path):
    experts = {"model__pattern": "[*E]", "model__num_experts": 4, "model__moe_intermediate_size": 16}
    habits = {"train__skip_spikes": 5.0, "train__log_every": 1, "train__validate_every": 0, "checkpoint__every": 21}
    path = write_config(tmp_path, train__steps=26, model__expert_bias=True, **experts, **habits)
    lines, same = pool.run(2, spiked, path, tmp_path / "run", 26, poison=23)[0]
    assert [step for step, is_same in same.items() if is_same] == [23]
    assert [line["skipped_steps"] for line in lines] == [0] * 22 + [1] * 4
    rewind(tmp_path / "run", 21)
    assert pool.run(2, spiked, path, tmp_path / "run", 26, 21, poison=23)[0][0] == lines


def test_the_best_validation_and_those_since():
    position = Position()
    seen = []
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.0, 1.0, math.nan], start=1):
        position.step = step
        seen.append((position.validated(loss), position.best_step, position.worse))
    assert seen == [(True, 1, 0), (True, 2, 0), (False, 2, 1), (False, 2, 2), (True, 5, 0), (False, 5, 1)]
    first = Position()
    assert [first.validated(loss) for loss in (math.nan, 2.0, 3.0)] == [False, True, False], "NaN is never the best"


def losses_told(path, folder, losses, resume_from=None):
    """A run whose validations find `losses`, one after the other."""
    said = []
    trainer = Trainer(load_config(path), Run(folder, resume_from), say=said.append)
    found = iter(losses)
    trainer.task.validation_values = lambda loss: {"loss": next(found)}
    trainer.run()
    return trainer.position.step, said, (folder / "report.html").is_file()


@pytest.mark.long
def test_a_run_ends_early_keeps_its_best_checkpoint_and_has_nothing_to_do_afterwards(pool, tmp_path):
    path = write_config(
        tmp_path,
        train__steps=50,
        train__validate_every=1,
        train__stop_after=3,
        checkpoint__every=0,
        checkpoint__keep=1,
        checkpoint__keep_best=True,
    )
    losses = [5.0, 4.0, 3.0, 3.5, 3.5, 3.5]
    step, said, report = pool.run(2, losses_told, path, tmp_path / "run", losses)[0]
    line = "3 validations in a row did not lower the loss below 3.0000 of step 3 (train.stop_after)"
    assert step == 6 and f"ended early: {line}" in said and report
    assert committed(tmp_path / "run") == [3, 6], "the best beside the newest"
    step, said, _ = pool.run(2, losses_told, path, tmp_path / "run", losses, 6)[0]
    assert step == 6 and f"nothing to do: {line}; to train further, set a higher train.stop_after, or 0" in said


class Recorded:
    """A logger that remembers, and takes part as a stand-in for the module `wandb`."""

    calls = []

    def __init__(self, folder, resumed_step, settings):
        self.calls.append(("open", folder.name, resumed_step, settings["train"]["steps"]))

    def scalars(self, step, values):
        self.calls.append(("scalars", step, dict(values)))

    def histogram(self, step, name, counts):
        self.calls.append(("histogram", step, name, list(counts)))

    def close(self):
        self.calls.append(("close",))


def test_a_custom_logger_receives_everything(tmp_path):
    Recorded.calls.clear()
    names = [f"{__name__}:Recorded"]
    check(names)
    with Metrics(tmp_path / "run", resumed_step=0, loggers=names, settings={"train": {"steps": 3}}) as numbers:
        numbers.log(1, "train", loss=2.0, lr=0.1)
        numbers.log_experts(1, {"layer": [3, 4]})
        numbers.log_norms(1, {"weight": 1.0}, {"weight": 0.5})
    assert Recorded.calls == [
        ("open", "run", 0, 3),
        ("scalars", 1, {"train/loss": 2.0, "train/lr": 0.1}),
        ("histogram", 1, "experts/layer", [3, 4]),
        ("scalars", 1, {"weight_norm/weight": 1.0}),
        ("scalars", 1, {"gradient_norm/weight": 0.5}),
        ("close",),
    ]


def test_weights_and_biases_is_called_as_it_wants_to_be(tmp_path, monkeypatch):
    called = []
    module = types.ModuleType("wandb")
    for name in ("init", "log", "finish"):
        setattr(module, name, lambda *values, called_as=name, **options: called.append((called_as, values, options)))
    module.Histogram = lambda np_histogram: np_histogram
    monkeypatch.setitem(sys.modules, "wandb", module)
    for resumed_step in (0, 1):
        with Metrics(tmp_path / "run", resumed_step=resumed_step, loggers=["wandb"], settings={"a": 1}) as numbers:
            numbers.log(1 + resumed_step, "train", loss=2.0)
            numbers.log_experts(1 + resumed_step, {"layer": [3, 4]})
    first, second = (options for name, _, options in called if name == "init")
    assert first == second and first["resume"] == "allow" and first["config"] == {"a": 1}, "the same run there"
    assert ("log", ({"train/loss": 2.0},), {"step": 1}) in called
    assert ("log", ({"experts/layer": ([3, 4], [-0.5, 0.5, 1.5])},), {"step": 2}) in called
    assert [name for name, _, _ in called].count("finish") == 2


def test_a_logger_without_its_package_is_refused():
    with pytest.raises(ConfigError, match='"wandb" needs the package `wandb`; install it'):
        check(["wandb"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        check(["nowhere:Logger"])


def beside_another(path, folder):
    """What a trainer says whose directory another run writes to."""
    lines = []
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointManager(folder / "checkpoints") as other,
        pytest.raises(CheckpointError, match="in use by another run"),
    ):
        patch.setattr("weft.checkpoint.manager._LOCK_TIMEOUT_S", 0.2)
        other.claim()
        patch.setattr("weft.checkpoint.locking._held", weakref.WeakSet())  # as in another process
        Trainer(load_config(path), Run(folder), say=lines.append)
    return lines


@pytest.mark.slow
def test_a_run_whose_directory_another_one_writes_to_says_what_it_waits_for(pool, tmp_path):
    lines = pool.run(1, beside_another, write_config(tmp_path), tmp_path / "run")[0]
    (line,) = (each for each in lines if "another run" in each)
    assert "waiting up to 0.2 s" in line


class Deaf:
    """A logger that takes half of what it is told."""

    def __init__(self, folder, resumed_step, settings):
        pass

    def scalars(self, step, values):
        pass


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("os:path", 'run.loggers: "os:path": a module cannot be called; give the class of a logger'),
        ("string:Formatter", "the class Formatter is called with (folder, resumed_step, settings)"),
        (f"{__name__}:Deaf", "has no histogram; a logger has the methods scalars, histogram, close"),
    ],
)
def test_what_is_no_logger_is_refused_before_the_run_begins(place, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        check([place])


def looked_at(path, folder):
    trainer = Trainer(load_config(path), Run(folder), say=lambda line: None)
    trainer.run()
    return trainer.passes.operations.total, trainer.position.seconds


@pytest.mark.slow
def test_a_window_of_steps_leaves_a_trace_of_each_rank_and_utilisation_is_logged(pool, tmp_path):
    changes = {"train__profile_step": 3, "train__profile_steps": 2, "train__peak_tflops": 0.001}
    path = write_config(tmp_path, train__steps=6, train__validate_every=0, checkpoint__every=0, **changes)
    total, seconds_of_steps = pool.run(2, looked_at, path, tmp_path / "run")[0]
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"steps-3-4-rank-{rank}.json").read_text())
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if line["kind"] == "train"):
        seconds = 8 * 16 / line["tokens_per_second"]
        assert line["mfu"] == pytest.approx(total / seconds / 1e9, rel=1e-3)
    steps = [line["step_seconds"] for line in lines if line["kind"] == "train"]
    assert sum(steps) == pytest.approx(seconds_of_steps)
    assert "10^12 operations (" in json.loads((tmp_path / "run" / "facts.json").read_text())["operations"]


def test_a_run_that_stops_within_the_window_records_the_rest_when_it_resumes(tmp_path):
    for steps in (range(1, 5), range(5, 9)):
        window, noted = ProfilerWindow(tmp_path, 3, 4, 0), []
        for step in steps:
            window.before(step)
            window.after(step, noted.append)
        window.close(noted.append)
        assert len(noted) == 1
    assert sorted(path.name for path in tmp_path.glob("profile/*")) == [
        "steps-3-4-rank-0.json",
        "steps-5-6-rank-0.json",
    ]


def test_activations_are_what_operations_make_and_leave_again():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(6)))
    x, kept = torch.ones(100, 16), torch.empty(5000)
    peaks = []
    for recomputed in (False, True):
        with Activations() as found:
            value = x
            for block in model:
                value = checkpoint(block, value, use_reentrant=False) if recomputed else block(value)
            kept.view(50, 100).add_(1)  # memory that was there before
            value.sum().backward()
        peaks.append(found.peak)
    one = 100 * (64 + 16) * 4  # what a block keeps: of the ReLU, and its output
    assert 6 * one <= peaks[0] < 6 * one + 4 * 100 * 64 * 4 + 1000
    assert peaks[1] < peaks[0] / 2
    with Activations():
        nn.functional.embedding(torch.tensor([1]), torch.ones(3, 4, requires_grad=True), sparse=True).sum().backward()


def test_operations_are_those_of_the_products_and_of_attention():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    with Operations() as found:
        model(torch.ones(3, 8)).sum().backward()
    weights = 8 * 16 + 16 * 4
    assert found.total == 2 * 3 * weights + 2 * 3 * weights + 2 * 3 * 16 * 4, "the input needs no gradient"
    experts, ends = torch.ones(3, 16, 8, requires_grad=True), torch.tensor([4, 8, 12], dtype=torch.int32)
    with Operations() as found:
        torch._grouped_mm(torch.ones(12, 16, requires_grad=True), experts, ends).backward(torch.ones(12, 8))
    assert found.total == 3 * 2 * 12 * 16 * 8
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    with Operations() as found:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    forward = 2 * 2 * (2 * 4) * 16 * 16 * 8
    assert found.total == pytest.approx(3.5 * forward) and "attention" in str(found)
    few = torch.ones(2, 2, 16, 8, requires_grad=True)
    with Operations() as found:
        nn.functional.scaled_dot_product_attention(query, few, few, enable_gqa=True).sum().backward()
    assert found.total == pytest.approx(3.5 * forward)
    for kernel, beside in (("flash", ()), ("efficient", (None, True)), ("cudnn", (None, True))):
        attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        with Operations() as found:
            attention(*(each.detach().to("meta") for each in (query, few, few)), *beside)
        assert found.total == forward


def test_a_hundred_norms_are_kept():
    steady = Spikes(2.0)
    for _ in range(150):
        steady.is_one(1.0)
    assert len(steady.norms) == 100
