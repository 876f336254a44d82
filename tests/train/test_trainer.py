"""`weft.train.Trainer`: the loop of the trainer with a model, data and habits of one's own."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tomllib
from collections import UserDict
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset
from transformers import BatchEncoding

import weft
from tests.fsdp import nets
from tests.programs import run_programs
from tests.train.command import WITHOUT_PICTURES, metrics, rewind
from tests.train.test_loop import StopAt
from weft.checkpoint import verify
from weft.train import Trainer
from weft.train.config import from_tables, load_config
from weft.train.errors import ConfigError
from weft.train.evaluate import evaluate, move
from weft.train.generators import Generators
from weft.train.loop import train
from weft.train.run import runs
from weft.train.source import Source
from weft.train.task.own import Stream, _samples, _Validation

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


def make_model():
    return nn.Sequential(
        nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)
    )


def batches(rank, ranks, steps=5):
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(8, 4, generator=generator) for _ in range(steps)]
    return [(x.chunk(ranks)[rank], x.chunk(ranks)[rank].sum(-1, keepdim=True).expand(-1, 2)) for x in whole]


def loss(model, batch):
    value = mse_loss(model(batch[0]), batch[1])
    return value, {"twice": 2 * value}


def settings(folder, steps=7, **train):
    return {
        "train": {
            "steps": steps,
            "global_batch_size": 8,
            "microbatch_size": 8 // dist.get_world_size(),
            "validate_every": 3,
            "gradient_clip": 0.5,
            "seed": 3,
            **train,
        },
        "schedule": {"shape": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 3},
        "run": {"directory": str(folder)},
    }


def fit(folder, steps=7, model=None, **options):
    torch.manual_seed(3)
    options = {"data": batches, "validation": batches, "config": settings(folder, steps), **options}
    trainer = Trainer(model=model or make_model(), loss=loss, say=lambda line: None, **options)
    trainer.run()
    weights = nets.whole(trainer.model.state_dict())
    return metrics(folder / "default"), metrics(folder / "default", "validation"), weights


def reference(steps=7):
    torch.manual_seed(3)
    model = make_model()
    groups = [{"params": [p for p in model.parameters() if p.ndim >= d]} for d in (2,)]
    groups.append({"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    data, losses = batches(0, 1), []
    for step in range(steps):
        value, _ = loss(model, data[step % len(data)])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    with torch.no_grad():
        validation = sum(loss(model, batch)[0].item() for batch in data) / len(data)
    return losses, validation, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_one_s_own_model_is_the_plain_loop_in_one_process(pool, tmp_path, ranks):
    losses, validation, weights = reference()
    lines, validations, trained = pool.run(ranks, fit, tmp_path)[0]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["twice"] for line in lines] == pytest.approx([2 * value for value in losses], rel=1e-5)
    assert validations[-1]["loss"] == pytest.approx(validation, rel=1e-5)
    assert validations[-1]["samples"] == 56
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "default" / "report.html").is_file()


def first_random_numbers(folder):
    options = {"data": batches, "config": settings(folder), "say": lambda line: None}
    with closing(Trainer(model=make_model(), loss=loss, **options).saves):
        return torch.rand(()).item(), numpy.random.rand(), random.random()


def test_each_rank_draws_random_numbers_that_no_other_rank_draws(pool, tmp_path):
    first, second = pool.run(2, first_random_numbers, tmp_path)
    assert all(one != other for one, other in zip(first, second, strict=True))


class Drawn(nn.Module):
    """Its weights are drawn by numpy, and its data by any generator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 4))
        self.reset_parameters()

    def reset_parameters(self):
        if not self.weight.is_meta:
            self.weight.data.copy_(torch.from_numpy(numpy.random.randn(2, 4)))

    def forward(self, x):
        return x @ self.weight.mT


def drawn(rank, ranks):
    return [(torch.randn(8, 4) * random.random(), torch.from_numpy(numpy.random.randn(8, 2)).float())]


def losses_of_drawn(folder, seed):
    for generator in (random, numpy.random):
        generator.seed(seed)
    torch.manual_seed(seed)
    options = {"data": drawn, "validation": drawn, "config": settings(folder, 2), "say": lambda line: None}
    Trainer(model=Drawn, loss=loss, **options).run()
    return [line["loss"] for kind in ("train", "validation") for line in metrics(folder / "default", kind)]


@pytest.mark.slow
def test_functions_for_data_and_model_draw_the_numbers_of_train_seed(pool, tmp_path):
    first, second = (pool.run(1, losses_of_drawn, tmp_path / f"{seed}", seed)[0] for seed in (1, 2))
    assert first == second


def go_on(folder, steps, resume):
    return fit(folder, steps, resume=resume)


class Counting:
    """Data that knows where it is, as a loader with state does."""

    def __init__(self, rank=0):
        self.at, self.rank = 0, rank

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            yield batches(self.rank, dist.get_world_size())[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(rank, ranks):
    return Counting(rank)


def go_on_stateful(folder, steps, resume):
    return fit(folder, steps, resume=resume, data=stateful)


def go_on_shuffled(folder, steps, resume):
    """A loader without a state, in the second of its passes; the model draws random numbers too."""

    def shuffled(rank, ranks):
        x, y = (torch.cat(parts) for parts in zip(*batches(rank, ranks)))
        return DataLoader(TensorDataset(x, y), batch_size=8 // ranks, shuffle=True)

    torch.manual_seed(3)
    model = nn.Sequential(make_model(), nn.Dropout(0.1))
    return fit(folder, steps, model, resume=resume, data=shuffled)


@pytest.mark.long
@pytest.mark.parametrize("how", [go_on, go_on_stateful, go_on_shuffled])
def test_a_run_of_a_program_resumes_bit_for_bit(pool, tmp_path, how):
    whole = pool.run(2, how, tmp_path, 7, False)[0]
    rewind(tmp_path / "default", 6)
    parts = pool.run(2, how, tmp_path, 7, "or-start")[0]
    assert parts[0] == whole[0]
    assert all(torch.equal(parts[2][name], value) for name, value in whole[2].items())
    verify(tmp_path / "default" / "checkpoints" / "step-00000007")


class KeepsSettings:
    """A logger that writes down what it is told a run has."""

    def __init__(self, folder, step, settings):
        (Path(folder) / "told.txt").write_text(" ".join(settings))

    def scalars(self, step, values): ...

    def histogram(self, step, name, counts): ...

    def close(self): ...


def read_by_others(folder):
    """What refuses the run of a program: (who, what it says), once the way on that it tells has been gone."""
    config = {**settings(folder, 1), "run": {"directory": str(folder), "loggers": [f"{__name__}:KeepsSettings"]}}
    trained = fit(folder, config=config)[2]
    run = folder / "default"
    found = []
    for who, read in {
        "eval": lambda: evaluate(run, overrides=[]),
        "sample": lambda: next(Source(run).continued("a")),
        "convert": lambda: Source(run).model_config,
        "train --resume": lambda: train(load_config(run / "config.toml"), resume=str(run)),
    }.items():
        with pytest.raises(ConfigError) as error:
            read()
        found.append((who, said := str(error.value)))
        if who != "train --resume":
            model = make_model()
            eval(said.partition("into the model that the program builds: ")[2], {"weft": weft, "model": model})
            assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    return found


@pytest.mark.slow
def test_a_run_of_a_program_records_no_model_and_text_and_commands_that_need_them_refuse_it(pool, tmp_path):
    for who, said in pool.run(1, read_by_others, tmp_path)[0]:
        assert said.startswith(f"{tmp_path / 'default'}: is a run of a program"), who
        assert (f"resume='{tmp_path / 'default'}'" in said) == (who == "train --resume") and "\n" not in said
    run = tmp_path / "default"
    others = ["train", "optimizer", "schedule", "sharding", "checkpoint", "run"]
    assert list(tomllib.loads((run / "config.toml").read_text())) == others
    assert (run / "told.txt").read_text().split() == others
    assert "pattern" not in (run / "report.html").read_text() and "[data]" not in (run / "report.html").read_text()
    pool.run(1, go_on, tmp_path, 2, str(run))


def over_a_text(folder):
    """What a program's trainer says of a run of a text model, where only the first rank can read its settings."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(runs, "_describes_task", lambda directory: None)
        with pytest.raises(ConfigError) as error:
            fit(folder, resume=str(folder))
    return str(error.value)


def test_a_program_cannot_resume_a_run_of_a_text(pool, tmp_path):
    (tmp_path / "config.toml").write_text("[model]\nhidden_size = 32\n")
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    for said in pool.run(2, over_a_text, tmp_path):
        assert "which a program cannot replace" in said and f"weft train --resume {tmp_path}" in said


@pytest.mark.long
def test_the_process_group_that_a_trainer_began_ends_with_the_interpreter(tmp_path):
    def program(end):
        return f"""
import atexit
import torch.distributed as dist
from tests.train.test_trainer import Trainer, batches, loss, make_model

atexit.register(lambda: print("there is one:", dist.is_initialized()))
steps = {{"steps": 1, "microbatch_size": 8, "global_batch_size": 8}}
config = {{"train": steps, "run": {{"directory": {str(tmp_path / end[0])!r}}}}}
trainer = Trainer(model=make_model, loss=loss, data=batches, config=config)
print("there is one:", dist.is_initialized())
{end}
"""

    path = tmp_path / "program.py"
    path.write_text(program("trainer.run()"))
    environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{WITHOUT_PICTURES}"}
    launched = subprocess.run([*TORCHRUN, str(path)], capture_output=True, text=True, check=False, env=environment)
    imports = "sys.modules['matplotlib'] = None\nimport tests.train.test_trainer"
    alone, failed = run_programs([program("trainer.run()"), program("1 / 0")], imports)
    for done in (launched, alone, failed):
        assert re.findall("there is one: .*", done.stdout) == ["there is one: True", "there is one: False"]
        assert done.returncode == (done is failed), done.stderr


@pytest.mark.long
def test_a_process_group_that_was_destroyed_elsewhere_is_not_destroyed_again():
    program = """
import atexit, gc, weakref
import torch.distributed as dist
from weft.mesh import forget_meshes
from weft.train.run.world import begin_alone

atexit.register(lambda: print("there is one:", dist.is_initialized()))
begin_alone()
begun = weakref.ref(dist.group.WORLD)
forget_meshes()
dist.destroy_process_group()
gc.collect()
print("there is one:", begun() is not None)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.findall("there is one: .*", done.stdout) == ["there is one: False", "there is one: True"], done.stderr


class Cube(nn.Module):
    """Filled by `reset_parameters`, as a model that is built on the meta device is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def refused_at_its_beginning(folder):
    with pytest.raises(ConfigError, match="nothing to train"):
        Trainer(model=nn.ReLU, loss=lambda model, batch: batch, data=batches, config=settings(folder, 3))


def test_a_run_of_a_program_that_is_refused_leaves_no_directory(pool, tmp_path):
    pool.run(1, refused_at_its_beginning, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def with_habits(folder):
    seen = []
    callbacks = {
        name: lambda trainer, numbers, name=name: seen.append(name) for name in ("start", "step", "save", "end")
    }
    trainer = Trainer(
        model=Cube,
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        data=batches,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        callbacks=callbacks,
        config=settings(folder, 3),
        say=lambda line: None,
    )
    trainer.run()
    units = sum(isinstance(module, weft.FSDPModule) for module in trainer.model.modules())
    return seen, units, type(trainer.optimizer).__name__


@pytest.mark.slow
def test_a_function_builds_the_model_blocks_are_units_and_moments_call(pool, tmp_path):
    for seen, units, optimizer in pool.run(2, with_habits, tmp_path):
        assert seen == ["start", "step", "step", "step", "save", "end"]
        assert units == 4, "three blocks and the rest"
        assert optimizer == "SGD"


def refusals(folder):
    arguments = {"model": make_model(), "loss": loss, "data": batches, "config": settings(folder)}
    found = []
    for change in (
        {"callbacks": {"epoch": print}},
        {"data": iter([])},
        {"shard": lambda model, **options: None},
        {"config": {**settings(folder), "model": {"hidden_size": 64}}},
        {"config": settings(folder, overlap=True)},
        {"config": settings(folder, microbatch_size=3)},
    ):
        with pytest.raises(ConfigError) as error:
            Trainer(**{**arguments, **change})
        found.append(str(error.value))
    return found


def test_what_cannot_work_is_one_line(pool, tmp_path):
    said = pool.run(1, refusals, tmp_path)[0]
    words = [
        "'epoch' is not an event",
        "data: is an iterator",
        "shard: must end",
        "[model]: has no effect",
        "overlap",
        "3",
    ]
    for line, word in zip(said, words):
        assert word in line and "\n" not in line


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))


def frozen():
    return make_model().requires_grad_(False)


def nothing(*arguments):
    """A function that forgot to return."""


WRONG = {
    "model: None cannot be called": {"model": None},
    "model: a float cannot be called": {"model": 3.0},
    "model: the class Deep is called without arguments: missing a required argument: 'depth'": {"model": Deep},
    "model: the function nothing returns None, not a torch.nn.Module": {"model": nothing},
    "model: the class int returns a int": {"model": int},
    "has no parameter that requires a gradient": {"model": frozen},
    "loss: None cannot be called": {"loss": None},
    "loss: a Tensor cannot be called": {"loss": torch.zeros(())},
    "loss: the function <lambda> is called with (model, batch): too many": {"loss": lambda model: 0},
    "loss: a CrossEntropyLoss compares outputs": {"loss": nn.CrossEntropyLoss()},
    "loss: the function mse_loss compares outputs": {"loss": mse_loss},
    "data: None is neither": {"data": None},
    "data: the function nothing returns None": {"data": nothing},
    "data: the class Deep is called with (rank, ranks)": {"data": Deep},
    "validation: the function nothing returns None": {"validation": nothing},
    "validation: is an iterator": {"validation": iter([])},
    "validation: a list yields no microbatch": {"validation": []},
    "shard: a bool cannot be called": {"shard": True},
    "optimizer: a SGD cannot be called": {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)},
    "optimizer: the function nothing returns None": {"optimizer": nothing},
    "optimizer: the function <lambda> returns a list": {"optimizer": lambda model: list(model.parameters())},
    "callbacks: 'step': None cannot be called": {"callbacks": {"step": None}},
    "say: a bool cannot be called": {"say": False},
    "resume: None; pass True": {"resume": None},
    "config: None; pass the path": {"config": None},
    "[train]": {"config": {"train": 3}},
}


def refusals_of_arguments(folder):
    arguments = {"model": make_model, "loss": loss, "data": batches, "config": settings(folder)}
    found = []
    for change in WRONG.values():
        with pytest.raises(ConfigError) as error:
            Trainer(**{**arguments, **change})
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_an_argument_of_another_kind_is_one_line_with_the_argument_what_it_is_and_the_fix(pool, tmp_path):
    for words, line in zip(WRONG, pool.run(1, refusals_of_arguments, tmp_path)[0], strict=True):
        assert words in line and "\n" not in line and (";" in line), line


def went_on(folder):
    make(folder).run()
    return make(folder, steps=2, resume=folder / "default").run_place.directory == folder / "default"


@pytest.mark.slow
def test_the_run_to_resume_may_be_a_path(pool, tmp_path):
    assert pool.run(1, went_on, tmp_path)[0]


def stopped_and_started_again(folder):
    """What a script says that is stopped, then the same one again, and one that goes on as its configuration says."""
    found = []
    plain = settings(folder, 5)
    resuming = {**plain, "run": {**plain["run"], "resume": True}}
    for config in (plain, plain, resuming):
        said, stop = [], StopAt(2)
        trainer = Trainer(model=make_model(), loss=loss, data=batches, config=config, say=said.append)
        trainer.stop, stop.trainer = stop, trainer
        trainer.run()
        found.append(said)
    with pytest.raises(ConfigError) as error:
        train(from_tables({"run": {**resuming["run"], "name": "none"}}))
    return [*found, str(error.value)]


@pytest.mark.slow
def test_a_script_prints_where_its_run_is_and_how_to_resume_it_and_obeys_run_resume(pool, tmp_path):
    first, again, resumed, refusal = pool.run(1, stopped_and_started_again, tmp_path)[0]
    run = tmp_path / "default"
    go_on = f"resume={str(run)!r}"
    assert f"a new run in {run}" in first
    assert f"stopped at step 2 of 5, which is saved; resume with: {go_on}" in first
    assert f"a new run in {run}-2; {run} is unchanged; it resumes from step 2 with: {go_on}" in again
    assert f"resuming {run}-2 from step 2" in resumed
    assert "no run 'none' in" in refusal


def losses_that_are_none(folder):
    said = []
    for number, wrong in enumerate(
        (
            lambda model, batch: 1.0,
            lambda model, batch: None,
            lambda model, batch: model(batch[0]).square(),
            lambda model, batch: loss(model, batch)[0].detach(),
            lambda model, batch: (*loss(model, batch), 3),
        )
    ):
        with pytest.raises(ConfigError) as error:
            make(folder / str(number), loss=wrong).run()
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_what_is_no_loss_is_one_line(pool, tmp_path):
    said = pool.run(1, losses_that_are_none, tmp_path)[0]
    for line, word in zip(
        said,
        ("a float", "a NoneType", "a tensor [8, 2]", "does not depend on any parameter of the model", "a tuple"),
        strict=True,
    ):
        assert line.startswith("loss: returns ") and word in line and "\n" not in line


def test_data_that_yields_nothing_is_an_error():
    with pytest.raises(ConfigError, match="data: yields no microbatch"):
        Stream([], 1).next_step()


def test_data_that_can_be_iterated_only_once_raises_at_its_end():
    with pytest.raises(ConfigError, match="data: a generator ended after 3 microbatches of this rank") as error:
        stream = Stream((number for number in range(3)), 2)
        assert stream.next_step() == [0, 1]
        stream.next_step()
    assert "pass data that starts again" in str(error.value)


def test_shorter_data_is_not_mistaken_for_a_damaged_checkpoint():
    stream = Stream([0] * 9, 7)
    stream.next_step()
    with pytest.raises(ConfigError, match="is 7 microbatches into a pass, but a pass over this data has 5"):
        Stream([0] * 5, 7).load_state_dict(stream.state_dict())


def test_another_microbatch_size_is_refused_by_the_position_in_own_data():
    stream = Stream([0] * 9, 2, microbatch_size=4)
    stream.next_step()
    with pytest.raises(ConfigError, match=r"train.microbatch_size = 2 \(it was 4\): .* leave the setting as it was"):
        Stream([0] * 18, 4, microbatch_size=2).load_state_dict(stream.state_dict())


def test_a_position_in_own_data_that_another_number_of_ranks_cannot_have_is_refused():
    def stream(ranks, data=(0,) * 12):
        return Stream(data, 3, ranks=ranks)

    two = stream(2)
    two.next_step()
    three = stream(3)
    three.load_from_other_ranks(two.state_dict(), 0, 3)
    assert three.taken == 2
    with pytest.raises(ConfigError, match="is 6 microbatches into a pass, which 4 ranks cannot share evenly"):
        stream(4).load_from_other_ranks(two.state_dict(), 0, 4)

    class Stateful(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    saved = stream(2, Stateful([0]))
    with pytest.raises(
        ConfigError, match="data with its own state_dict has one position for each rank; resume on the same number"
    ):
        stream(1, Stateful([0])).load_from_other_ranks(saved.state_dict(), 0, 1)


def test_data_that_failed_on_its_way_begins_anew():
    class Failing(list):
        def __iter__(self):
            yield 0
            raise OSError("the disk is gone")

    stream = Stream(Failing(), 1)
    with pytest.raises(OSError, match="the disk is gone"):
        stream.load_state_dict({**stream.state_dict(), "taken": 2, "own": [None, stream._generators.state()]})
    stream.source = [1, 2]
    stream.load_state_dict({"epoch": 0, "taken": 0, "microbatch_size": 1, "own": [None, None]})
    assert stream.next_step() == [1]


def shuffled(**options):
    return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2, **{"shuffle": True, **options})


def with_own_generators():
    rows = torch.arange(10.0)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
    return shuffled(shuffle=None, sampler=sampler, generator=torch.Generator().manual_seed(6))


def with_workers_that_persist():
    return shuffled(num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("loader", [shuffled, with_own_generators, with_workers_that_persist])
def test_a_shuffling_loader_resumes_in_the_middle_of_a_later_pass(loader):
    torch.manual_seed(3)
    stream = Stream(loader(), 6)
    for _ in range(2):  # two passes of five microbatches, and two of the third
        stream.next_step()
    state, generators = stream.state_dict(), torch.get_rng_state()
    again = Stream(loader(), 6)
    again.load_state_dict(state)
    found = []
    for each in (stream, again):
        torch.set_rng_state(generators)
        found.append([microbatch[0].tolist() for _ in range(2) for microbatch in each.next_step()])
    assert found[0] == found[1]


def test_a_validation_set_that_yields_nothing_is_refused_the_first_time_and_later():
    once = iter([1, 2])
    found = _Validation(once)
    assert list(found) == [1, 2]
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"validation: .* yields no microbatch; pass an iterable that starts again"
        ):
            list(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    left: torch.Tensor
    name: str


class Words(dict):
    """A dictionary whose items are attributes."""

    __getattr__ = dict.__getitem__


def test_batches_of_other_libraries_move_to_the_device_and_are_counted():
    rows = torch.ones(3, 2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    whole = [BatchEncoding({"x": rows}), UserDict(x=rows), Pair(rows, "a"), packed, {"x": (rows, None, "text")}]
    encoding, mapping, pair, moved, plain = move(whole, torch.device("meta"))
    assert encoding["x"].is_meta and mapping["x"].is_meta and pair.left.is_meta and plain["x"][0].is_meta
    assert isinstance(encoding, BatchEncoding) and isinstance(mapping, UserDict) and pair.name == "a"
    assert moved.data.is_meta and not moved.batch_sizes.is_meta, "torch reads these sizes on the host"
    assert not any(each.is_meta for each in (whole[0]["x"], whole[1]["x"], whole[2].left)), "they are left alone"
    words = Words(kind=nn.Linear)
    assert move(words, torch.device("meta")) == words
    assert [_samples(each, 1) for each in whole[:3]] == [3, 3, 3] and _samples(None, 7) == 7


def test_every_pass_through_the_data_has_a_number():
    class Source(list):
        def set_epoch(self, number):
            self[:] = [number, number]

    stream = Stream(Source([0, 0]), 3)
    assert stream.next_step() + stream.next_step() == [0, 0, 1, 1, 2, 2]
    again = Stream(Source([0, 0]), 3)
    again.load_state_dict(stream.state_dict())
    assert again.next_step() == stream.next_step() == [3, 3, 4]


@pytest.mark.parametrize("batches", [False, True])
def test_a_sampler_of_a_loader_hears_the_number_of_the_pass(batches):
    rows = torch.arange(8.0)
    sampler = DistributedSampler(rows, 1, 0)
    chosen = {"batch_sampler": BatchSampler(sampler, 2, drop_last=True)} if batches else {"sampler": sampler}
    stream = Stream(DataLoader(rows, **chosen), 8 // (1 + batches))
    passes = [torch.cat(stream.next_step()).tolist() for _ in range(3)]
    for number, found in enumerate(passes):
        sampler.set_epoch(number)
        assert found == [float(row) for row in sampler]


def test_reading_up_to_a_position_draws_no_random_number_of_the_run():
    def stream():
        return Stream(DataLoader(TensorDataset(torch.arange(4.0)), shuffle=True), 1)

    first, again = stream(), stream()
    first.next_step()
    state = first.state_dict()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.next_step()[0][0], again.next_step()[0][0])


def test_loaders_with_an_epoch_and_a_state_hear_of_the_epoch_first():
    heard = []

    class Loader(list):
        def set_epoch(self, number):
            heard.append(("epoch", number))

        def state_dict(self):
            return {"at": 1}

        def load_state_dict(self, state):
            heard.append(("state", state["at"]))

    Stream(Loader([1]), 1).load_state_dict({"epoch": 2, "taken": 1, "microbatch_size": 1, "own": [{"at": 1}, None]})
    assert heard == [("epoch", 2), ("state", 1)]


def make(folder, steps=1, *, model=None, **options):
    torch.manual_seed(3)
    options = {"loss": loss, "data": batches, "config": settings(folder, steps), **options}
    return Trainer(model=model or make_model(), say=lambda line: None, **options)


def names_that_differ(folder, where):
    def own(model, batch):
        return loss(model, batch)[0], {"b" if model.training is (where == "step") and dist.get_rank() else "a": 1.0}

    trainer = make(folder, loss=own, validation=batches)
    with pytest.raises(ConfigError) as error:
        trainer.run()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "validation"])
def test_own_numbers_have_the_same_names_on_every_rank(pool, tmp_path, where):
    for said in pool.run(2, names_that_differ, tmp_path, where):
        assert "(a on rank 0, b on rank 1)" in said


def in_another_order(folder):
    def own(model, batch):
        numbers = [("one", 1), ("two", torch.tensor(2)), ("rank", float(dist.get_rank()))]
        return loss(model, batch)[0], dict(numbers[:: -1 if dist.get_rank() else 1])

    make(folder, loss=own, validation=batches).run()
    return metrics(folder / "default"), metrics(folder / "default", "validation")


@pytest.mark.slow
def test_own_numbers_are_plain_ones_or_scalars_in_any_order(pool, tmp_path):
    for (line,) in pool.run(2, in_another_order, tmp_path)[0]:
        assert (line["one"], line["two"], line["rank"]) == (1, 2, 0.5)


def own_numbers_that_are_refused(folder):
    found = []
    for numbers in ({"loss": 1.0}, {"step": 1.0}, {"ema_x": 1.0}, {"x": torch.ones(2)}, {"x": "much"}):
        with pytest.raises(ConfigError) as error:
            trainer = make(folder, loss=lambda model, batch: (loss(model, batch)[0], numbers))  # noqa: B023
            trainer.run()
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_own_numbers_that_cannot_be_logged_are_refused(pool, tmp_path):
    words = [
        "'loss' for a number",
        "'step' for a number",
        "'ema_x' for a number",
        "'x' is a tensor [2]",
        "'x' is a str",
    ]
    for line, word in zip(pool.run(1, own_numbers_that_are_refused, tmp_path)[0], words, strict=True):
        assert word in line


def loss_with_a_router_beside_it(folder):
    trainer = make(folder)
    trainer.experts.take_losses = lambda zero: zero + 100
    trainer.run()
    return metrics(folder / "default")


@pytest.mark.slow
def test_a_custom_loss_is_not_adjusted(pool, tmp_path):
    (line,) = pool.run(1, loss_with_a_router_beside_it, tmp_path)[0]
    assert line["loss"] > 0


def modes_after_validation(folder):
    model = make_model()
    trainer = make(folder, model=model, validation=batches)
    trainer.model[1].eval()  # frozen, as batch norms are
    trainer.run()
    return trainer.model.training, trainer.model[0].training, trainer.model[1].training


@pytest.mark.slow
def test_a_validation_leaves_every_module_as_it_was(pool, tmp_path):
    assert pool.run(1, modes_after_validation, tmp_path)[0] == (True, True, False)


def random_states_of_steps(folder, every):
    own = torch.Generator().manual_seed(5)
    held_out = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), 4, shuffle=True, generator=own)
    states = []
    note = {"step": lambda trainer, numbers: states.append((torch.get_rng_state(), own.get_state()))}
    make(folder, config=settings(folder, 3, validate_every=every), validation=held_out, callbacks=note).run()
    return states


def test_a_loader_may_make_its_generator_while_the_random_state_is_kept():
    loader = SimpleNamespace(generator=None)
    with Generators(loader).unchanged():
        loader.generator = torch.Generator().manual_seed(3)
        drawn = torch.rand(1)
    assert loader.generator.initial_seed() == 3 and torch.equal(drawn, torch.rand(1))


@pytest.mark.slow
def test_a_validation_leaves_every_random_generator_as_it_was(pool, tmp_path):
    often, never = (pool.run(1, random_states_of_steps, tmp_path, every)[0] for every in (1, 0))
    for states in zip(often, never, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(*states))


def norms_with_a_part_in_the_optimizer(folder):
    part = {"optimizer": lambda model: torch.optim.SGD(model[-1].parameters(), lr=0.1)}
    make(folder / "whole", 4, **part).run()
    make(folder / "parts", 2, **part).run()
    make(folder / "parts", 4, resume=True, **part).run()
    return [[line["gradient_norm"] for line in metrics(folder / each / "default")] for each in ("whole", "parts")]


@pytest.mark.slow
def test_gradients_of_what_no_optimizer_updates_do_not_add_up(pool, tmp_path):
    whole, parts = pool.run(1, norms_with_a_part_in_the_optimizer, tmp_path)[0]
    assert whole == parts


def momentum_that_changes(folder):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def change(trainer, numbers):
        trainer.optimizer.param_groups[0]["momentum"] = 0.5

    make(folder, optimizer=sgd, callbacks={"step": change}).run()
    again = make(folder, 2, optimizer=sgd, resume=True)
    return again.optimizer.param_groups[0]["momentum"]


@pytest.mark.slow
def test_options_of_a_custom_optimizer_come_from_the_checkpoint(pool, tmp_path):
    assert pool.run(1, momentum_that_changes, tmp_path)[0] == 0.5


def rate_told(folder):
    """What a resumed run with its own optimizer says of its learning rate, and its settings."""
    for steps, resume in ((2, False), (4, True)):
        said = []
        config = {**settings(folder, steps), "schedule": {"shape": "linear", "warmup_steps": 0}}
        sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
        options = {"optimizer": sgd, "config": config, "resume": resume, "say": said.append}
        trainer = Trainer(model=make_model(), loss=loss, data=batches, **options)
        if not resume:
            trainer.run()
    return said, trainer.config.schedule


@pytest.mark.slow
def test_the_rate_of_a_custom_optimizer_is_told_as_a_multiple_of_its_own(pool, tmp_path):
    said, schedule = pool.run(1, rate_told, tmp_path)[0]
    old, new = (schedule.factor(2, steps) for steps in (2, 4))
    assert f"learning rate of step 3: {new:.3g} times the optimizer's own ({old:.3g} with the old settings)" in said


class Adapts(torch.optim.SGD):
    """Counts its steps in its groups, and grows by them."""

    def __init__(self, params, lr=1e-3, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["steps"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            group["lr"] *= group["steps"]
        super().step()


def adapting(folder):
    optimizer = {"name": f"{__name__}:Adapts", "options": {"momentum": 0.5}}
    config = {**settings(folder, 6, validate_every=0), "optimizer": optimizer}
    whole = fit(folder / "whole", config={**config, "run": {"directory": str(folder / "whole")}})
    fit(folder, config={**config, "train": {**config["train"], "steps": 3}})
    options = {"momentum": 0.25}
    again = make(folder, config={**config, "optimizer": {**optimizer, "options": options}}, resume=True)
    held = [(group["steps"], group["momentum"]) for group in again.optimizer.param_groups]
    again.saves.close()
    return whole, fit(folder, config=config, resume=True), held


@pytest.mark.slow
def test_what_an_optimizer_counts_in_its_groups_resumes_and_its_arguments_are_those_of_the_configuration(
    pool, tmp_path
):
    whole, resumed, held = pool.run(1, adapting, tmp_path)[0]
    assert resumed[0] == whole[0] and held == [(3, 0.25)] * len(held)
    assert all(torch.equal(resumed[2][name], value) for name, value in whole[2].items())


def foreign_optimizer(folder):
    with pytest.raises(ConfigError) as error:
        make(folder, optimizer=lambda model: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    return str(error.value)


def test_an_optimizer_that_cannot_be_saved_is_refused_before_the_first_step(pool, tmp_path):
    assert "optimizer: cannot be in a checkpoint" in pool.run(1, foreign_optimizer, tmp_path)[0]


def with_features(folder):
    features = {
        "train": {"activation_checkpointing": True, "recompute_every": 2, "compile": "eager"},
        "optimizer": {"flat": True},
        "sharding": {"dp_replicate": dist.get_world_size()},
    }
    plain = settings(folder)
    config = {**plain, **features, "train": {**plain["train"], **features["train"]}}
    return fit(folder, config=config)


@pytest.mark.slow
def test_features_of_a_configuration_work_with_a_custom_model(pool, tmp_path):
    losses, _, weights = reference()
    lines, _, trained = pool.run(2, with_features, tmp_path)[0]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert trained.keys() == weights.keys()


def done_twice(folder):
    make(folder).run()
    again = make(folder, resume=True)
    held = again.saves.checkpoints._lock is not None
    return held, again.run(), again.saves.checkpoints._lock is None


@pytest.mark.slow
def test_a_run_with_nothing_to_do_lets_others_write(pool, tmp_path):
    assert pool.run(1, done_twice, tmp_path)[0] == (True, True, True)


def signals_around_a_run(folder):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    trainer = make(folder)
    within = [signal.getsignal(number) for number in numbers]
    make(folder)  # one that never runs
    trainer.run()
    return before == [signal.getsignal(number) for number in numbers], before == within


@pytest.mark.slow
def test_signals_do_before_and_after_a_run_what_the_program_says(pool, tmp_path):
    assert pool.run(1, signals_around_a_run, tmp_path)[0] == (True, True)


def stopped_and_run_again(folder):
    def stop(trainer, numbers):
        if trainer.position.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    whole, parts = make(folder / "whole", 4), make(folder / "parts", 4, callbacks={"step": stop})
    done = [parts.run(), whole.run(), parts.run()]  # the signal is meant for the run that runs
    assert parts.watchdog._peers is None
    return done, *([line["loss"] for line in metrics(folder / each / "default")] for each in ("whole", "parts"))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_when_it_runs_again(pool, tmp_path):
    done, whole, parts = pool.run(1, stopped_and_run_again, tmp_path)[0]
    assert done == [False, True, True] and whole == parts and len(parts) == 4


class Callable:
    def __call__(self, rank, ranks):
        return batches(rank, ranks)


def more_refusals(folder):
    found = []
    optimizer = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}
    for options in (
        {"validation": lambda rank, ranks: iter(batches(rank, ranks))},
        {"data": 3},
        {"config": settings(folder, validation_batches=2)},
        {"config": settings(folder, stop_after=2)},
        {"config": settings(folder, sample="def ")},
        {"config": {**settings(folder), "checkpoint": {"keep_best": True}}},
        {"config": {**settings(folder), "optimizer": {"lr": 0.1}}, **optimizer},
        {"config": {**settings(folder), "run": {"directory": str(folder), "weights": "there"}}},
    ):
        with pytest.raises(ConfigError) as error:
            make(folder, **options)
        found.append(str(error.value))
    model = make_model()
    make(folder, data=Callable(), model=model).run()
    with pytest.raises(ConfigError) as error:
        make(folder, model=model)
    return [*found, str(error.value)]


@pytest.mark.slow
def test_data_and_options_without_effect_are_refused(pool, tmp_path):
    words = ["first validation would use up", "neither an iterable", "validation_batches"]
    words += [
        "train.stop_after = 2",
        'train.sample = "def "',
        "checkpoint.keep_best = true",
        "[optimizer]",
        "run.weights",
        "model: is already sharded, perhaps by an earlier trainer; build it anew",
    ]
    for line, word in zip(pool.run(1, more_refusals, tmp_path)[0], words, strict=True):
        assert word in line
