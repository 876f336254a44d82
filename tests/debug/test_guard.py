"""`weft.debug.guard_memory`: kept views of gathered weights are seen; and which writes are seen without it."""

import pytest
import torch
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.debug import guard
from weft.fsdp.autograd import WeightsWritten


class Keeps(nn.Module):
    """A layer that keeps a view of its weight, in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way
        self.kept = [torch.empty(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[0] = self.linear.weight.detach() if self.way == "detach" else self.linear.weight.data
        return self.linear(x)


def make(way: str = "detach", allocator: str = "trace") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Keeps(way), Keeps(way))
    for layer in model:
        weft.fully_shard(layer)
    return weft.fully_shard(model, runtime=weft.RuntimeOptions(allocator=allocator))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_a_guard_inside_another_leaves_it():
    with guard.guard_memory():
        with guard.guard_memory():
            pass
        assert guard.guards == 1
    assert guard.guards == 0


@pytest.mark.parametrize("allocator", ["trace", "caching"])
@distributed(2)
def test_a_stale_view_of_gathered_weights_reads_nan_and_the_numbers_do_not_change(allocator):
    free, guarded = make(allocator=allocator), make(allocator=allocator)
    for _ in range(3):
        step(free)
        with weft.debug.guard_memory():
            step(guarded)
        for layer in guarded:
            assert layer.kept[0].isnan().all()
    for one, other in zip(free.parameters(), guarded.parameters()):
        assert torch.equal(nets.full(one.grad), nets.full(other.grad))
    step(guarded)


@distributed(2)
def test_a_write_by_data_is_found_under_guard():
    model = make("data")
    with weft.debug.guard_memory():
        step(model)
        model[1].register_forward_hook(lambda module, args, output: module.kept[0].zero_())
        with pytest.raises(WeightsWritten, match=r"'linear.weight' of 1 .* was written to while it was gathered"):
            model(torch.ones(2, 4))
    model.reset_iter_state()


def test_a_write_by_data_after_an_earlier_use_is_found_under_guard(world):
    world(0, 2)
    layer = weft.fully_shard(Keeps("data"), reshard_after_forward=False)
    with weft.debug.guard_memory():
        output = layer(torch.ones(2, 4)).sum()
        layer.kept[0].zero_()
        with pytest.raises(
            WeightsWritten, match=r"'linear.weight' of the root .* was written to while it was gathered"
        ):
            output.backward()


@distributed(2)
def test_a_write_to_a_kept_view_after_the_weights_went_is_found_at_the_next_gather():
    model = make()
    step(model)
    step(model)  # now the places are those of a plan: what is kept is memory that others use
    model[0].kept[0].zero_()
    with pytest.raises(
        WeightsWritten, match=r"'linear.weight' of 0 .* was written to after its gathered weights were freed"
    ):
        step(model)
    reference = make()
    model.zero_grad()
    step(reference)
    step(model)
    for one, other in zip(model.parameters(), reference.parameters()):
        assert torch.equal(nets.full(one.grad), nets.full(other.grad))
