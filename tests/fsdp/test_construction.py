"""Modules built on the meta device get memory and values unit by unit, the same on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed


class Scaled(nn.Module):
    """A layer with a buffer that no checkpoint holds, filled with the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("scale", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.copy_(torch.arange(len(self.scale)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.scale


def built_on_meta(*layers) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(layer() for layer in layers))


@distributed(2)
def test_ranks_with_other_seeds_get_rank_0s_values_and_real_buffers():
    model = built_on_meta(lambda: Scaled(7), lambda: Scaled(7))
    torch.manual_seed(dist.get_rank())
    for layer in model:
        weft.fully_shard(layer)
    weft.fully_shard(model)
    torch.manual_seed(0)
    reference = nn.Sequential(Scaled(7), Scaled(7))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), value, rtol=0, atol=0)
    x = torch.randn(3, 7)
    torch.testing.assert_close(model(x), reference(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight


@distributed(2)
def test_tied_parameters_stay_tied():
    model = built_on_meta(Tied)
    weft.fully_shard(model)
    assert model[0].head.weight is model[0].embedding.weight
    assert len(list(model.parameters())) == 1


@distributed(2)
def test_never_more_than_one_unit_is_whole_in_memory():
    width, depth = 256, 8
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    unit = model[0].weight.nbytes
    most = 0

    def watch(*_: object) -> None:
        nonlocal most
        most = max(most, sum(p.nbytes for p in model.parameters() if not p.is_meta and type(p) is nn.Parameter))

    for layer in model:
        reset = layer.reset_parameters
        layer.reset_parameters = lambda reset=reset: (watch(), reset())
    for layer in model:
        weft.fully_shard(layer)
        watch()
    assert most == unit
    at_rest = weft.memory_report(weft.fully_shard(model))
    assert at_rest["transient"]["gathered weights"]["live"] == 0
    assert at_rest["persistent"]["weights"] == unit * depth // dist.get_world_size()


@distributed(2)
def test_a_module_that_cannot_fill_itself_is_named():
    with torch.device("meta"):
        block = nets.Block(4, 8)
        block.extra = nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match=r"Block owns tensors on the meta device and has no reset_parameters"):
        weft.fully_shard(block)
