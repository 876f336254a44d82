"""What one does with parameters that were taken from a model before it was sharded."""

import copy

import pytest
import torch
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.errors import WeightsGone

HELD = r"'up.weight' of .*Block.* is a parameter from before fully_shard.*Build the optimizer after fully_shard"


@distributed(2)
def test_an_optimizer_that_was_built_before_sharding_raises_at_its_first_use():
    for used in (torch.optim.Optimizer.step, torch.optim.Optimizer.zero_grad):
        for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            model = nets.Block(4, 8)
            optimizer = torch.optim.AdamW([model.up.weight], **options)
            weft.fully_shard(model)
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(RuntimeError, match=HELD):
                getattr(optimizer, used.__name__)()


@distributed(2)
def test_a_write_to_a_parameter_from_before_sharding_is_refused_and_its_values_can_be_read():
    model = nets.Block(4, 8)
    held, values = model.up.weight, copy.deepcopy(model.up.weight.detach())
    weft.fully_shard(model)
    with torch.no_grad():
        for write in (
            lambda: held.mul_(2),
            lambda: nn.init.zeros_(held),
            lambda: torch._foreach_add_([held], 1.0),
            lambda: held.__setitem__(0, 1.0),
            lambda: setattr(held, "data", values * 2),
            lambda: torch.add(values, 1.0, out=held),
        ):
            with pytest.raises(RuntimeError, match=HELD):
                write()
    assert torch.equal(held.detach(), values) and held.shape == (8, 4) and held.requires_grad
    torch.testing.assert_close(nets.full(model.up.weight.detach()), values)


class Keeps(nn.Module):
    """Computes with the parameter objects that its layer had when it was built."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = [self.layer.weight, self.layer.bias]

    def forward(self, x):
        return nn.functional.linear(x, *self.kept)


@distributed(2)
def test_a_forward_that_computes_with_a_parameter_from_before_sharding_is_refused_in_backward():
    model = weft.fully_shard(Keeps())
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"'layer\.(weight|bias)' .*from before fully_shard.*Get the parameter from"):
        model(torch.ones(2, 4)).sum().backward()


@distributed(2)
def test_a_parameter_from_before_sharding_is_known_again_as_tied():
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = one.weight
    weft.fully_shard(one)
    weft.fully_shard(other)
    assert other.weight is one.weight


@distributed(2)
def test_a_parameter_of_a_model_that_has_gone_is_refused_by_name():
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    original = one.weight
    weft.fully_shard(one)
    sharded = one.weight
    del one
    for held in (original, sharded):
        other.weight = held
        with pytest.raises(ValueError, match=r"'weight' of Linear is already sharded, by a unit that no longer exists"):
            weft.fully_shard(other)


def test_a_gathered_parameter_of_a_model_that_has_gone_is_refused(world):
    world(0, 2)
    model = weft.fully_shard(nn.Linear(4, 4, bias=False))
    model.unshard()
    held = model.weight
    model.reshard()
    del model
    with pytest.raises(WeightsGone, match=r"^a parameter of a model that no longer exists is read after"):
        held + 1


@distributed(2)
def test_a_model_that_was_built_on_the_meta_device_is_no_exception():
    with torch.device("meta"):
        model = nets.Block(4, 8)
    optimizer = torch.optim.SGD([model.up.weight], lr=1.0)
    weft.fully_shard(model)
    with pytest.raises(RuntimeError, match=HELD):
        optimizer.zero_grad()
