import gc
import os
import random
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import weft
from tests.pool import distributed
from weft.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CheckpointMismatch,
    ModelState,
    OptimizerState,
    RandomState,
    locking,
    verify,
)
from weft.checkpoint.manifest import File


def make(width=7, sharded=True):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3), nn.BatchNorm1d(3))
    if sharded:
        model[3] = nn.LayerNorm(3)  # what batch normalisation counts would differ between ranks
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def everything(model, optimizer):
    """Weights, buffers and optimizer state, unsharded."""
    names = dict(model.named_parameters())
    weights = {name: full(value) for name, value in model.state_dict().items()}
    moments = {
        f"{name}/{key}": full(value)
        for name, parameter in names.items()
        for key, value in optimizer.state[parameter].items()
    }
    return weights | moments


def state_of(model, optimizer):
    return {
        "model": ModelState(model),
        "optimizer": OptimizerState(model, optimizer),
        "random": RandomState(),
    }


@pytest.mark.slow
@distributed(1, 2, 4, long=4)
def test_a_save_brings_everything_back_in_another_model(tmp_path):
    model, optimizer = make()
    torch.manual_seed(dist.get_rank())
    step(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(model, optimizer))
        saved = everything(model, optimizer)
        expected = torch.rand(3), numpy.random.rand(3).tolist(), random.random()
        step(model, optimizer)
        assert manager.latest() in (None, 1)
        manager.wait()
        other, other_optimizer = make()
        assert manager.load(state_of(other, other_optimizer)) == 1
        got = torch.rand(3), numpy.random.rand(3).tolist(), random.random()
    loaded = everything(other, other_optimizer)
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key
    assert torch.equal(got[0], expected[0])
    assert got[1:] == expected[1:]


class Forwarding:
    """Has the members of another object through `__getattr__`, which `isinstance` does not see from Python 3.12 on."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.slow
@distributed(1)
def test_an_object_that_forwards_to_another_is_saved_and_loaded_as_that_one(tmp_path):
    model, other = (make(width)[0] for width in (7, 7))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": Forwarding(ModelState(model))}, asynchronous=False)
        assert manager.load({"model": Forwarding(ModelState(other))}) == 1
    for one, copy in zip(model.parameters(), other.parameters()):
        assert torch.equal(full(one), full(copy))


def save_on(directory, asynchronous=True):
    model, optimizer = make()
    torch.manual_seed(10 + dist.get_rank())
    step(model, optimizer)
    with CheckpointManager(directory) as manager:
        manager.save(1, state_of(model, optimizer), asynchronous=asynchronous)
    return {key: value.numpy() for key, value in everything(model, optimizer).items()}


def load_on(directory):
    model, optimizer = make()
    torch.manual_seed(0)
    CheckpointManager(directory).load(state_of(model, optimizer))
    draw = torch.rand(2).tolist()
    return {key: value.numpy() for key, value in everything(model, optimizer).items()}, draw


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3)])
def test_another_number_of_ranks_loads_the_same_values(pool, tmp_path, before, after):
    saved = pool.run(before, save_on, tmp_path)[0]
    answers = pool.run(after, load_on, tmp_path)
    loaded = answers[0][0]
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        numpy.testing.assert_array_equal(loaded[key], value, err_msg=key)
    draws = [tuple(draw) for _, draw in answers]
    assert len(set(draws)) == after, "each rank has random numbers of its own"
    assert [tuple(draw) for _, draw in pool.run(after, load_on, tmp_path)] == draws


def test_only_the_newest_are_kept_and_each_is_complete(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for number in range(1, 6):
        manager.save(number, {"numbers": {"value": torch.full((4,), number), "note": f"step {number}"}})
    manager.close()
    assert manager.steps() == [4, 5]
    for number in (4, 5):
        state = {"value": torch.zeros(4, dtype=torch.int64), "note": ""}
        manager.load({"numbers": state}, step=number)
        assert state["value"].tolist() == [number] * 4
        assert state["note"] == f"step {number}"
        assert verify(tmp_path / f"step-{number:08d}").step == number


def test_a_program_that_ends_without_closing_waits_for_its_last_checkpoint(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        threading.Thread, "start", lambda self, start=threading.Thread.start: started.append(self) or start(self)
    )
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"numbers": {"value": torch.ones(2)}})
    (thread,) = (each for each in started if each.name == "weft-checkpoint-1")
    assert not thread.daemon, "Python waits at its end for threads that are no daemons"


def test_a_program_that_ends_without_hearing_of_its_failed_save_prints_a_line(tmp_path, monkeypatch, capsys):
    at_exit = []
    of_python = SimpleNamespace(register=lambda call, *given: at_exit.append(partial(call, *given)))
    of_python.unregister = lambda call: at_exit.clear() if at_exit[0].func == call else None
    monkeypatch.setattr("weft.checkpoint.manager.atexit", of_python)
    monkeypatch.setattr("weft.checkpoint.manifest.File.measure", no_space)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"numbers": {"value": torch.ones(2)}})
    while manager.saving:
        time.sleep(0.001)
    (at_the_end,) = at_exit
    at_the_end()
    assert capsys.readouterr().err == "the checkpoint of step 1 is not saved: [Errno 28] No space left on device\n"
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.wait()
    assert not at_exit, "the error was raised"


def test_tensors_without_memory_are_refused_and_the_checkpoint_is_not_said_to_be_damaged(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"numbers": {"value": torch.ones(2)}})
        with pytest.raises(
            CheckpointMismatch, match=r"on the meta device, which have no memory: numbers.value; allocate"
        ):
            manager.load({"numbers": {"value": torch.ones(2, device="meta")}})
        with pytest.raises(RuntimeError, match="refers to a single memory location") as error:
            manager.load({"numbers": {"value": torch.ones(1).expand(2)}})
        assert not isinstance(error.value, CheckpointError) and not manager.passed_over


def test_what_is_protected_stays_beside_the_newest_and_counts_as_one_of_them(tmp_path):
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
            manager.protected = {best}
            manager.save(step, {"state": {"step": step}}, asynchronous=False)
            assert manager.steps() == sorted({best, step})


def test_the_background_save_writes_what_was_there_when_it_began(tmp_path):
    value = torch.arange(200_000)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"numbers": {"value": value}})
        value.zero_()
    loaded = {"value": torch.zeros(200_000, dtype=torch.int64)}
    manager.load({"numbers": loaded})
    assert torch.equal(loaded["value"], torch.arange(200_000))


def test_a_checkpoint_of_another_model_is_refused_with_all_keys_and_changes_nothing(tmp_path):
    saved, _ = make(sharded=False)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": ModelState(saved)})
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3, bias=False), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointMismatch) as error:
        manager.load({"model": ModelState(other)})
    said = str(error.value)
    assert "missing in the checkpoint: model.3.bias" not in said
    assert "unexpected in the checkpoint: model.2.bias, model.3.num_batches_tracked" in said
    assert "model.0.weight (float32 [7, 5], here float32 [9, 5])" in said
    assert "\n" not in said
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_weight_that_would_stay_unset_is_an_error(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": ModelState(nn.Linear(3, 3, bias=False))})
    with pytest.raises(CheckpointMismatch, match=r"missing in the checkpoint: model\.bias"):
        manager.load({"model": ModelState(nn.Linear(3, 3))})


def test_another_dtype_is_an_error(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": ModelState(nn.Linear(3, 3))})
    with pytest.raises(CheckpointMismatch, match=r"model\.bias \(float32 \[3\], here bfloat16 \[3\]\)"):
        manager.load({"model": ModelState(nn.Linear(3, 3, dtype=torch.bfloat16))})


class Nested(torch.optim.SGD):
    """Keeps a dictionary of tensors for each parameter."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            moments = self.state[parameter].setdefault("moments", {"first": torch.zeros_like(parameter)})
            moments["first"] += parameter.grad


def test_dictionaries_in_an_optimizer_s_state_come_back(tmp_path):
    found = []
    for number in (1, 2):
        model, _ = make(sharded=False)
        optimizer = Nested(model.parameters(), lr=0.1)
        with CheckpointManager(tmp_path) as manager:
            if number == 1:
                step(model, optimizer)
                manager.save(1, {"optimizer": OptimizerState(model, optimizer)}, asynchronous=False)
            else:
                manager.load({"optimizer": OptimizerState(model, optimizer)})
        found.append([optimizer.state[parameter]["moments"]["first"].clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found)) and found[0][0].any()


class Annealed(torch.optim.SGD):
    def step(self):
        self.state["annealed"]["steps"] = self.state["annealed"].get("steps", 0) + 1
        super().step()


def test_what_an_optimizer_keeps_beside_the_state_of_parameters_comes_back(tmp_path):
    model, _ = make(sharded=False)
    for number in (1, 2):
        optimizer = Annealed(model.parameters(), momentum=0.5)
        with CheckpointManager(tmp_path) as manager:
            if number == 1:
                step(model, optimizer)
                manager.save(1, {"optimizer": OptimizerState(model, optimizer)})
            else:
                manager.load({"optimizer": OptimizerState(model, optimizer)})
    assert optimizer.state["annealed"] == {"steps": 1} and len(optimizer.state) == 7


def test_another_optimizer_is_an_error(tmp_path):
    model, optimizer = make(sharded=False)
    step(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": OptimizerState(model, optimizer)})
    for other in (torch.optim.SGD, torch.optim.Adam):  # Adam has the same options as AdamW
        said = f"saved with another optimizer: it was AdamW, here it is {other.__name__}. Build"
        with pytest.raises(CheckpointMismatch, match=said):
            manager.load({"optimizer": OptimizerState(model, other(model.parameters(), lr=0.1))})
    *most, last = model.parameters()
    other = torch.optim.AdamW([{"params": most}, {"params": [last]}])
    said = r"\(groups of \[6\] parameters, here \[5, 1\]: 3.bias is in group 0 there and group 1 here\): build"
    with pytest.raises(CheckpointMismatch, match=said):
        manager.load({"optimizer": OptimizerState(model, other)})
    model, optimizer = make(sharded=False)
    other = torch.optim.AdamW([{"params": [], "lr": 0.5}, {"params": list(model.parameters())}])
    manager.load({"optimizer": OptimizerState(model, other)})
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1], "a group without parameters is no difference"
    assert len(other.state) == 6


@pytest.mark.parametrize("saved_by_name", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(weft.optim.flat, torch.optim.SGD)])
@distributed(1)
def test_an_optimizer_that_got_its_parameters_by_name_is_no_other_optimizer(tmp_path, kind, saved_by_name):
    model = weft.fully_shard(make(sharded=False)[0])
    by_name = torch.optim.SGD(model.named_parameters(), lr=0.1)
    other = kind(model if isinstance(kind, partial) else model.parameters(), lr=0.2)
    saved, loaded = (by_name, other) if saved_by_name else (other, by_name)
    rate = saved.param_groups[0]["lr"]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(model, saved))
        manager.load(state_of(model, loaded))
    assert loaded.param_groups[0]["lr"] == rate
    assert "param_names" in by_name.param_groups[0] and "param_names" not in other.param_groups[0]


class Logged(torch.optim.AdamW):
    """As a user's own, or Fabric's class of an optimizer."""


class Extended(torch.optim.AdamW):
    """With an option that AdamW does not have."""

    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            group["more"] = 1.0


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's class around an optimizer of any class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def test_optimizers_that_extend_or_wrap_those_of_torch_are_compared_by_their_options(tmp_path):
    model, optimizer = make(sharded=False)
    step(model, optimizer)
    with CheckpointManager(tmp_path / "adamw") as manager:
        manager.save(1, {"optimizer": OptimizerState(model, optimizer)})
        manager.load({"optimizer": OptimizerState(model, logged := Logged(model.parameters()))})
        assert len(logged.state) == 6
        with pytest.raises(CheckpointMismatch, match="another optimizer: its options are"):
            manager.load({"optimizer": OptimizerState(model, Extended(model.parameters()))})
    with CheckpointManager(tmp_path / "wrapped") as manager:
        manager.save(1, {"optimizer": OptimizerState(model, Wrapped(optimizer))})
        manager.load({"optimizer": OptimizerState(model, torch.optim.AdamW(model.parameters()))})
        for other in (torch.optim.SGD(model.parameters()), Wrapped(torch.optim.SGD(model.parameters()))):
            with pytest.raises(CheckpointMismatch, match="another optimizer: its options are"):
                manager.load({"optimizer": OptimizerState(model, other)})


def test_an_optimizer_whose_own_state_dict_a_load_can_fill_is_saved_as_it_is(tmp_path):
    class Counting(torch.optim.SGD):
        steps = torch.zeros(1)

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    model, _ = make(sharded=False)
    saved, loaded = Counting(model.parameters()), Counting(model.parameters())
    saved.steps, loaded.steps = torch.ones(1), torch.zeros(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": saved})
        manager.load({"optimizer": loaded})
    assert loaded.steps.item() == 1


@pytest.mark.parametrize("different", ["class", "groups"])
def test_another_optimizer_is_an_error_that_leaves_the_model_as_it_was(tmp_path, different):
    model, optimizer = make(sharded=False)
    step(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)})
    model, optimizer = make(sharded=False)
    first, *others = model.parameters()
    if different == "class":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    before = everything(model, optimizer)
    with pytest.raises(CheckpointMismatch, match="another optimizer" if different == "class" else "differently"):
        manager.load({"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)})
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def plain_optimizer(rows, dtype=torch.float32):
    model = nn.Linear(4, rows, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, OptimizerState(model, optimizer)


@pytest.mark.parametrize(
    ("rows", "dtype", "said"),
    [
        (8, torch.float32, r"weight \(float32 \[4, 4\], here float32 \[8, 4\]\)"),
        (4, torch.float64, r"weight \(float32 \[4, 4\], here float64 \[4, 4\]\)"),
    ],
)
def test_optimizer_state_of_another_shape_or_dtype_is_an_error(tmp_path, rows, dtype, said):
    model, optimizer, state = plain_optimizer(4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": state})
    _, optimizer, state = plain_optimizer(rows, dtype)
    with pytest.raises(CheckpointMismatch, match=said):
        manager.load({"optimizer": state})
    assert not optimizer.state


def test_a_checkpoint_without_the_class_and_the_shapes_of_the_optimizer_is_still_read(tmp_path):
    model, optimizer, state = plain_optimizer(4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = state.state_dict()
    for group in saved["groups"]:
        del group["shapes"], group["class"]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": saved})
    model, other, state = plain_optimizer(4)
    manager.load({"optimizer": state})
    moments = [[each["exp_avg"] for each in both.state.values()] for both in (optimizer, other)]
    assert moments[0][0].any() and all(map(torch.equal, *moments))
    with pytest.raises(CheckpointMismatch, match="saved with another optimizer: its options are"):
        manager.load({"optimizer": OptimizerState(model, torch.optim.SGD(model.parameters()))})


def test_options_that_only_one_of_save_and_load_has_are_no_other_optimizer(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)  # adds "param_names"
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # adds "initial_lr"
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": OptimizerState(model, optimizer)})
    other = torch.optim.AdamW(model.parameters())
    other.param_groups[0] |= {"newer": 1, "names": ["a program's own"]}
    manager.load({"optimizer": OptimizerState(model, other)})
    (options,) = other.param_groups
    assert [options[name] for name in ("initial_lr", "newer")] == [0.5, 1] and "param_names" not in options
    assert options["names"] == ["a program's own"], "a checkpoint has names of parameters there"


def test_optimizer_state_keeps_its_dtype(tmp_path):
    found = []
    for number in (1, 2):
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        optimizer = torch.optim.NAdam(model.parameters())  # its factor is in fp32
        with CheckpointManager(tmp_path) as manager:
            if number == 1:
                model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                for own in optimizer.state.values():
                    own["beside"] = {"factor": torch.tensor(0.3)}
                manager.save(1, {"optimizer": OptimizerState(model, optimizer)}, asynchronous=False)
            else:
                manager.load({"optimizer": OptimizerState(model, optimizer)})
        found.append(tree_leaves(list(optimizer.state.values())))
    for before, after in zip(*found, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@distributed(1)
def test_a_count_of_a_parameter_without_dimensions_stays_a_count(tmp_path, kind):
    """NAdam's `mu_product` and ASGD's `eta` have the shape of such a parameter. A flat tensor has one of each."""
    found = []
    for number in (1, 2):
        model = weft.fully_shard(Scaled())
        optimizer = weft.optim.flat(kind, model)
        state = {"optimizer": OptimizerState(model, optimizer)}
        with CheckpointManager(tmp_path) as manager:
            if number == 1:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                manager.save(1, state, asynchronous=False)
            else:
                manager.load(state)
        found.append([value for own in optimizer.state.values() for value in own.values()])
    assert [value.shape for value in found[0]] == [value.shape for value in found[1]]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_parameter_group_that_was_added_later_is_not_left_out(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([model.weight])
    state = OptimizerState(model, optimizer)
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, now \[1, 1\]\): build a new OptimizerState"):
        CheckpointManager(tmp_path).save(1, {"optimizer": state})


def test_a_load_that_a_new_parameter_group_prevents_leaves_the_state_that_is_saved_later(tmp_path):
    model, optimizer = make_plain()
    step(model, optimizer)
    state = {"optimizer": OptimizerState(model, optimizer)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(ValueError, match="build a new OptimizerState"):
            manager.load(state)
    optimizer.param_groups.pop()
    assert state["optimizer"].state_dict()["state"]["weight"]["exp_avg"].any()


@pytest.mark.parametrize("flat", [False, True])
@distributed(1)
def test_the_optimizer_of_an_unsharded_unit_is_saved_and_loaded(tmp_path, flat):
    found = []
    for number in (1, 2):
        model = weft.fully_shard(nn.Linear(2, 2))
        optimizer = weft.optim.flat(torch.optim.AdamW, model) if flat else torch.optim.AdamW(model.parameters())
        with CheckpointManager(tmp_path) as manager:
            if number == 1:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                model.unshard()
                manager.save(1, {"optimizer": OptimizerState(model, optimizer)}, asynchronous=False)
            else:
                model.unshard()
                manager.load({"optimizer": OptimizerState(model, optimizer)})
        if flat:
            weft.optim.flat(torch.optim.AdamW, model)
        model.reshard()
        found.append(OptimizerState(model, optimizer).state_dict()["state"]["weight"]["exp_avg"].full_tensor())
    assert torch.equal(*found) and found[0].any()


class Compiled(nn.Module):
    """Has the names of what `torch.compile` returns, whose import takes seconds."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_a_compiled_model_and_its_original_load_each_other(tmp_path):
    model, _ = make(sharded=False)
    model[0] = Compiled(model[0])
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": ModelState(model)})
    other, _ = make(sharded=False)
    for loads in (other, Compiled(other)):
        with torch.no_grad():
            other[0].weight.zero_()
        assert manager.load({"model": ModelState(loads)}) == 1
        assert torch.equal(other[0].weight, model[0]._orig_mod.weight) and other[0].weight.any()


def test_debris_is_ignored_and_removed_by_the_next_save(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"numbers": {"value": torch.ones(2)}}, asynchronous=False)
    half = tmp_path / "step-00000002.tmp-0123456789ab"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-00000000.trash-0123456789ab").mkdir()
    (tmp_path / "notes").mkdir()
    assert manager.latest() == 1
    manager.save(2, {"numbers": {"value": torch.ones(2)}}, asynchronous=False)
    manager.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", ".run", "notes", "step-00000001", "step-00000002"]


def test_a_manager_that_would_keep_nothing_and_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0: at least one checkpoint must be kept"):
        CheckpointManager(tmp_path, keep=0)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"two entries of the state have the key 'a\.b\.c'"):
            manager.save(1, {"a": {"b.c": 1, "b": {"c": 2}}})
        assert manager.steps() == []


def test_a_step_is_never_overwritten(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"numbers": {"value": torch.ones(2)}})
        with pytest.raises(CheckpointError, match="already exists"):
            manager.save(1, {"numbers": {"value": torch.zeros(2)}})
        loaded = {"value": torch.zeros(2)}
        manager.load({"numbers": loaded})
    assert loaded["value"].tolist() == [1, 1]


@pytest.mark.parametrize("step", [-1, 2.0, "3"])
def test_a_step_that_no_folder_can_be_named_after_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match=r"step = .*: must be an integer of at least 0"):
        CheckpointManager(tmp_path).save(step, {"numbers": {"value": 1}})
    assert not any(tmp_path.iterdir())


def test_steps_may_be_integers_of_other_libraries(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(torch.tensor(2), {"numbers": {"value": 1}}, asynchronous=False)
        manager.save(numpy.int64(3), {"numbers": {"value": 1}}, asynchronous=False)
        assert manager.load({"numbers": {"value": 0}}, numpy.int64(3)) == 3
        assert manager.load({"numbers": {"value": 0}}, torch.tensor(2)) == 2
        with pytest.raises(CheckpointError, match=r"no checkpoint of step '3' \(existing steps: \[2, 3\]\)"):
            manager.load({"numbers": {"value": 0}}, "3")
        assert manager.steps() == [2, 3]


def test_a_run_that_went_back_to_an_older_checkpoint_deletes_none_of_the_existing(tmp_path):
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (10, 20):
            manager.protected = {10}
            manager.save(step, {"numbers": {"value": step}}, asynchronous=False)
        manager.protected = set()
        manager.load({"numbers": {"value": 0}}, 10)
        for step in (11, 12):
            manager.save(step, {"numbers": {"value": step}}, asynchronous=False)
        assert manager.steps() == [10, 12, 20]


def test_a_checkpoint_that_was_moved_to_another_disk_is_unlinked_and_stays_there(tmp_path):
    moved = tmp_path / "disk" / "step-00000001"
    moved.parent.mkdir()
    with CheckpointManager(tmp_path / "run", keep=1) as manager:
        manager.save(1, {"numbers": {"value": 1}}, asynchronous=False)
        (manager.directory / moved.name).rename(moved)
        (manager.directory / moved.name).symlink_to(moved)
        assert manager.load({"numbers": {"value": 0}}) == 1
        manager.save(2, {"numbers": {"value": 2}}, asynchronous=False)
    assert sorted(path.name for path in manager.directory.iterdir()) == [".lock", ".run", "step-00000002"]
    verify(moved)


@pytest.mark.slow
def test_two_writers_of_one_directory_are_refused(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text("1234567890 on the host of an earlier run\n")
    monkeypatch.setattr("weft.checkpoint.manager._LOCK_TIMEOUT_S", 0.2)
    with CheckpointManager(tmp_path) as first:
        first.save(1, {"numbers": {"value": torch.ones(2)}})
        said = []
        second = CheckpointManager(tmp_path, progress=said.append)
        with pytest.raises(CheckpointError, match="in use by another trainer or checkpoint manager of this program"):
            second.save(2, {"numbers": {"value": torch.ones(2)}})
        assert said == []  # there is nothing to wait for
        monkeypatch.setattr(locking, "_held", weakref.WeakSet())  # as in another process
        (tmp_path / ".lock").write_text(f"{os.getpid()} on another host\n")
        with pytest.raises(CheckpointError, match="in use by another run"):
            second.save(2, {"numbers": {"value": torch.ones(2)}})
        owner = f"process {os.getpid()} on another host"
        assert said == [f"another run ({owner}) writes to {tmp_path}: waiting up to 0.2 s for it to end"]
    second.save(2, {"numbers": {"value": torch.ones(2)}}, asynchronous=False)
    assert second.steps() == [1, 2]
    with pytest.raises(CheckpointError, match="in use by another trainer"):  # a closed manager holds nothing
        first.save(3, {"numbers": {"value": torch.ones(2)}})
    second.close()
    first.save(3, {"numbers": {"value": torch.ones(2)}})
    first.close()


def test_a_forked_process_does_not_keep_the_lock(tmp_path, monkeypatch):
    """As the workers of a loader, which may live on after the run."""
    monkeypatch.setattr("weft.checkpoint.manager._LOCK_TIMEOUT_S", 0.2)
    manager = CheckpointManager(tmp_path)
    manager.claim()
    reads, writes = os.pipe()
    if not (worker := os.fork()):
        os.close(writes)
        os.read(reads, 1)  # until the end of the test
        os._exit(0)
    manager.close()
    with CheckpointManager(tmp_path) as other:
        other.claim()
    os.close(writes)
    os.waitpid(worker, 0)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nn.Linear(2, 2), r"'thing.value' is a Linear"),
        (bytearray(2), r"'thing.value' is a bytearray.* Convert it, or leave it out"),
        (torch.strided, r"'thing.value' is a layout"),
        (torch.contiguous_format, r"'thing.value' is a memory_format"),
        ([1, (2, bytearray(2))], r"'thing.value' contains a bytearray"),
        ([torch.eye(2).to_sparse()], r"'thing.value' contains a Tensor"),
        (torch.eye(2).to_sparse(), r"'thing.value' is a Tensor with torch.sparse_coo .*to_dense\(\)"),
        (torch.ones(2, device="meta"), r"'thing.value' is a Tensor .*on meta"),
        (torch.ones(2).as_subclass(Subclass), r"'thing.value' is a Subclass"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value, said):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match=said):
        manager.save(1, {"thing": {"value": value}})
    assert manager.steps() == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "the state 'thing' is of type int: pass a dictionary"),
        (torch.ones(2), "the state 'thing' is of type Tensor: pass a dictionary"),
        (torch.optim.SGD([torch.ones(2)]), r"'thing' is of type SGD: pass .*OptimizerState\(model, optimizer\)"),
    ],
    ids=["int", "Tensor", "SGD"],
)
def test_a_state_that_no_new_process_could_load_is_refused(tmp_path, value, said):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match=said):
            manager.save(1, {"thing": value})
        manager.save(1, {"thing": {"value": 5}}, asynchronous=False)
        with pytest.raises((TypeError, CheckpointMismatch), match=said if "SGD" not in said else "missing"):
            manager.load({"thing": value})


def test_plain_data_and_keys_that_a_load_would_refuse_are_not_saved(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=r"key 'thing.a\\nb' contains a character that cannot be printed"):
        manager.save(1, {"thing": {"a\nb": 1}})
    monkeypatch.setattr("weft.checkpoint.staging.LONGEST_PLAIN", 2000)
    with pytest.raises(ValueError, match=r"state 'thing.value' takes .* kB, and a load refuses .* 2.0 kB: make it"):
        manager.save(1, {"thing": {"value": [*range(2000)]}})
    manager.save(1, {"thing": {"value": 1}}, asynchronous=False)
    manager.close()
    assert manager.steps() == [1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_not_saved(tmp_path):
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"'thing.value' is a Tensor .*torch.qint8 .*dequantize\(\)"):
        CheckpointManager(tmp_path).save(1, {"thing": {"value": value}})


@pytest.mark.slow
@distributed(1)
def test_an_optimizer_that_keeps_sharded_tensors_in_lists_is_not_saved(tmp_path):
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss():
        optimizer.zero_grad()
        (result := model(torch.ones(4, 5)).square().sum()).backward()
        return result

    optimizer.step(loss)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match=r"'optimizer.state.0.weight.[a-z_]+' contains a DTensor"):
            manager.save(1, {"optimizer": OptimizerState(model, optimizer)})
        assert manager.steps() == []


def test_the_error_of_a_background_save_surfaces_and_older_checkpoints_stay(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"numbers": {"value": torch.ones(2)}}, asynchronous=False)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.checkpoint.manifest.File.measure", full_disk)
    manager.save(2, {"numbers": {"value": torch.ones(2)}})
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.save(3, {"numbers": {"value": torch.ones(2)}})
    monkeypatch.undo()
    assert manager.steps() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".run", "step-00000001"]
    manager.save(3, {"numbers": {"value": torch.ones(2)}})
    manager.close()
    assert manager.steps() == [1, 3]


def fail_on_rank_1(directory):
    manager = CheckpointManager(directory)
    manager.save(1, {"numbers": {"value": torch.ones(2)}}, asynchronous=False)
    if dist.get_rank() == 1:
        Path.open, kept = no_space, Path.open
    manager.save(2, {"numbers": {f"rank{dist.get_rank()}": torch.ones(2)}})
    try:
        manager.wait()
    except CheckpointError as error:
        return str(error), manager.steps()
    finally:
        if dist.get_rank() == 1:
            Path.open = kept
    return "", manager.steps()


def no_space(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_when_one_rank_cannot_write_every_rank_hears_of_it_and_nothing_is_committed(pool, tmp_path):
    for said, steps in pool.run(2, fail_on_rank_1, tmp_path):
        assert "No space left on device" in said
        assert steps == [1]


def fail_to_measure_on_rank_1(directory):
    manager = CheckpointManager(directory)
    if dist.get_rank() == 1:
        File.measure, kept = no_space, File.measure
    try:
        manager.save(1, {"numbers": {f"rank{dist.get_rank()}": torch.ones(2)}}, asynchronous=False)
    except OSError as error:
        return str(error), manager.steps()
    finally:
        if dist.get_rank() == 1:
            File.measure = kept


def test_a_rank_that_cannot_compute_its_checksums_is_reported_on_every_rank(pool, tmp_path):
    for said, steps in pool.run(2, fail_to_measure_on_rank_1, tmp_path, timeout=20):
        assert "No space left on device" in said
        assert steps == []


def fail_to_copy_on_rank_1(directory, asynchronous):
    manager = CheckpointManager(directory)
    value = nn.Linear(2, 2) if dist.get_rank() == 1 else torch.ones(2)
    try:
        manager.save(1, {"thing": {f"rank{dist.get_rank()}": value}}, asynchronous=asynchronous)
        manager.wait()
    except Exception as error:
        manager.save(2, {"thing": {"value": torch.ones(2)}})
        manager.close()
        return type(error), str(error), manager.steps()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_cannot_copy_its_state_is_reported_on_every_rank(pool, tmp_path, asynchronous):
    (other, said, steps), own = pool.run(2, fail_to_copy_on_rank_1, tmp_path, asynchronous, timeout=20)
    assert (other, steps) == (RuntimeError, [2])
    assert said.startswith("rank 1: TypeError: the state 'thing.rank1' is a Linear")
    assert own == (TypeError, said.removeprefix("rank 1: TypeError: "), [2])


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def groups_after_closing(directory):
    before = len(dist.distributed_c10d._world.pg_map)
    counts, steps, made = [], [], []
    weft.fully_shard(torch.nn.Linear(2, 2))(torch.ones(2))  # from here on, a hang detector watches collectives
    for number in (1, 2):
        with CheckpointManager(directory) as manager:
            manager.save(number, {"numbers": {"value": 1}})
            made += [weakref.ref(each.group) for each in (manager._ranks, manager._writers)]
            counts.append(len(dist.distributed_c10d._world.pg_map) - before)
        counts.append(len(dist.distributed_c10d._world.pg_map) - before)
        steps.append(manager.latest())
        manager.close()
    gc.collect()
    alive = [each for each in made if each() is not None]  # gloo's threads live as long as a group
    return counts, steps, len(dist.distributed_c10d._world.pg_map) - before, len(alive)


@pytest.mark.slow
def test_a_closed_manager_has_no_connections_and_makes_new_ones_if_it_is_used(pool, tmp_path):
    """A program may make a manager for each save."""
    assert pool.run(2, groups_after_closing, tmp_path, timeout=20) == [([2, 0, 2, 0], [1, 2], 0, 0)] * 2


def raise_on_one_rank(directory):
    manager = CheckpointManager(directory)
    said = []

    def committed():
        raise Unpicklable("one", "two")

    class Unready:
        def state_dict(self):
            return {"value": 1 if dist.get_rank() else {}[1]}

        def load_state_dict(self, state):
            pass

    for call in (
        lambda: manager.save(1, {"numbers": {"value": 1}}, asynchronous=False, committed=committed),
        lambda: manager.load({"numbers": Unready()}),
    ):
        try:
            call()
        except Exception as error:
            said.append((type(error), str(error)))
    manager.close()
    return said


def test_an_error_of_an_own_function_on_one_rank_is_raised_on_every_rank(pool, tmp_path):
    own, other = pool.run(2, raise_on_one_rank, tmp_path, timeout=20)
    assert [kind.__name__ for kind, _ in own] == ["Unpicklable", "KeyError"]
    assert other == [(RuntimeError, "rank 0: Unpicklable: one and two"), (RuntimeError, "rank 0: KeyError: 1")]


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("method", ["prepare_load", "check_load", "load_state_dict"])
def test_a_checkpoint_error_of_an_own_function_is_no_damage_either(tmp_path, method, step):
    """As that of another manager, from which an object loads the rest of its state."""

    def fail(_):
        raise CheckpointError("elsewhere holds no checkpoint")

    own = SimpleNamespace(state_dict=lambda: {"value": 0}, load_state_dict=lambda _: None)
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, {"numbers": own}, asynchronous=False)
        setattr(own, method, fail)
        with pytest.raises(CheckpointError, match=r"^elsewhere holds no checkpoint$"):
            manager.load({"numbers": own}, step)
        assert not manager.passed_over


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_damage_is_found(tmp_path, damage):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"numbers": {"value": torch.ones(200)}})
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"damaged: .*__0_0\.distcp"):
        verify(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"damaged: .*__0_0\.distcp"):
        manager.load({"numbers": {"value": torch.ones(200)}})


def test_without_a_checkpoint_loading_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointManager(tmp_path).load({"numbers": {"value": torch.ones(2)}})


def test_progress_says_when_a_save_begins_and_ends(tmp_path):
    said = []
    with CheckpointManager(tmp_path, progress=said.append) as manager:
        manager.save(7, {"numbers": {"value": torch.ones(2)}})
    assert said[0] == "saving step 7 …"
    assert said[1].startswith("saved step 7 in ")


def test_what_fails_after_the_commit_is_a_line(tmp_path):
    said = []

    def committed():
        raise OSError(28, "No space left on device")

    with CheckpointManager(tmp_path, keep=1, progress=said.append) as manager:
        for step in (1, 2):
            manager.save(step, {"numbers": {"value": step}}, asynchronous=False, committed=committed)
        assert manager.steps() == [2]
    assert said.count("[Errno 28] No space left on device") == 2


def test_each_rank_of_each_number_of_ranks_draws_its_own_numbers():
    saved = RandomState().state_dict()
    drawn = []
    for rank, ranks in ((0, 2), (1, 2), (0, 3), (0, 2)):
        RandomState().load_from_other_ranks(saved, rank, ranks)
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[-1]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn))
    RandomState().load_state_dict(saved)


def test_the_state_of_a_gpus_generator_is_loaded_before_the_program_uses_cuda(monkeypatch):
    python, numpys, torchs, _ = RandomState().state_dict()["generators"]
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("initialized"))  # torch applies an earlier seed here
    monkeypatch.setattr(torch.cuda, "set_rng_state", done.append)
    RandomState().load_state_dict({"generators": (python, numpys, torchs, "that of the GPU")})
    assert done == ["initialized", "that of the GPU"]


def test_a_load_that_fails_leaves_the_state_that_is_saved_later(tmp_path):
    model, optimizer = make_plain()
    step(model, optimizer)
    optimizer_state = OptimizerState(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": optimizer_state}, asynchronous=False)
        with pytest.raises(CheckpointMismatch):
            manager.load({"optimizer": optimizer_state, "model": {"another": torch.zeros(1)}})
    assert optimizer_state.state_dict()["state"]["weight"]["exp_avg"].any()


def make_plain():
    model = torch.nn.Linear(5, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
