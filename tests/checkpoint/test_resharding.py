import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets
from weft.checkpoint import CheckpointManager, ModelState, OptimizerState

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Odd(nn.Module):
    """Tensors that are hard to cut: fewer rows than ranks, no dimension, a prime number of elements."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one_row = nn.Parameter(torch.randn(1, 13))
        self.narrow = nn.Linear(13, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.narrow(x * self.one_row) * self.scale + self.frozen


def make(strategy):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 13), Odd())
    for module in (model[0], model[1], model):
        weft.fully_shard(module, strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(model):
    return {name: value.numpy() for name, value in nets.whole(model.state_dict()).items()}


def state_of(model, optimizer):
    return {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}


def save_on(directory, strategy):
    model, optimizer = make(strategy)
    train(model, optimizer, 2)
    model[1].seen.fill_(2)
    with CheckpointManager(directory) as manager:
        manager.save(2, state_of(model, optimizer))
    return plain(model)


def load_on(directory, strategy, again):
    """Load, and save what was loaded as it was loaded: `again` must then hold the same bytes."""
    model, optimizer = make(strategy)
    CheckpointManager(directory).load(state_of(model, optimizer))
    weights = plain(model)
    with CheckpointManager(again) as manager:
        manager.save(2, state_of(model, optimizer))
    return weights


def read_alone(directory):
    """Every tensor of a checkpoint, read by one process into plain tensors."""
    from tests.train.command import contents

    checkpoint = directory / "step-00000002"
    return {key: value for key, value in contents(checkpoint).items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def saved_by_two(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "first"
    return directory, pool.run(2, save_on, directory, "optim_grads_params")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "optim_grads_params"), (2, "no_shard"), (2, "optim"), (4, "optim_grads")],
)
def test_what_two_ranks_saved_loads_on_any_ranks_under_any_strategy(pool, tmp_path, saved_by_two, ranks, strategy):
    directory, saved = saved_by_two
    for loaded in pool.run(ranks, load_on, directory, strategy, tmp_path / "again"):
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            numpy.testing.assert_array_equal(loaded[name], value, err_msg=name)
    first, again = read_alone(directory), read_alone(tmp_path / "again")
    assert first.keys() == again.keys()
    moments = [key for key in first if key.startswith("optimizer.state.")]
    assert len(moments) == 6 * 3, "each trained parameter has two moments and a step"
    for key, value in first.items():
        assert torch.equal(again[key], value), key


def states_and_parts():
    """The names of parameters of which this rank saves a state of the optimizer, and those of which it has a part."""
    model, optimizer = make("optim_grads_params")
    train(model, optimizer, 1)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    here = {name for name, parameter in trained.items() if parameter.to_local().numel()}
    return set(OptimizerState(model, optimizer).state_dict()["state"]), here, set(trained)


def test_a_rank_saves_no_step_count_of_a_parameter_of_which_it_has_no_part(pool):
    both = pool.run(2, states_and_parts)
    assert all(states == here for states, here, _ in both)
    assert any(here < trained for _, here, trained in both)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_saves_what_a_single_process_loads(pool, tmp_path, strategy):
    saved = pool.run(4, save_on, tmp_path, strategy)[0]
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(7, 13), Odd())
    CheckpointManager(tmp_path).load({"model": ModelState(plain)})
    for name, value in plain.state_dict().items():
        numpy.testing.assert_array_equal(value.numpy(), saved[name], err_msg=name)


def go_on(directory, strategy):
    model, optimizer = make(strategy)
    CheckpointManager(directory).load(state_of(model, optimizer))
    before = plain(model)
    train(model, optimizer, 3)
    dist.barrier()
    return before, plain(model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_loaded_weights_are_the_ones_that_are_trained(pool, tmp_path, strategy):
    pool.run(2, save_on, tmp_path, "optim_grads_params")
    expected = pool.run(1, go_on, tmp_path, "no_shard")[0]
    for before, after in pool.run(4, go_on, tmp_path, strategy):
        for name, value in expected[1].items():
            numpy.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        changed = [name for name in after if not numpy.array_equal(before[name], after[name])]
        assert len(changed) == 6
