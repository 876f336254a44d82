"""Parameters that must not be cut, or only between blocks of rows."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm import collectives


def whole_matrices(parameter: nn.Parameter):
    return weft.TensorAtomic() if parameter.ndim == 2 else None


@pytest.mark.slow
@distributed(2, 4)
def test_an_atomic_tensor_lies_whole_on_one_rank_and_trains_alike():
    batches = nets.data(3, 4)
    plain = nets.train(nets.make(), batches)
    net = nets.shard(nets.make(), shard_placement_fn=whole_matrices)
    for parameter in net.parameters():
        if parameter.ndim == 2:
            assert parameter.to_local().numel() in (0, parameter.numel())
    torch.testing.assert_close(nets.train_here(net, batches)["weights"], plain["weights"])


def refuse(*_: object) -> None:
    raise AssertionError("communication in a step that needs none")


def muon_and_adamw(net: nn.Module):
    """Muon on the blocks' matrices, AdamW on the rest: one optimizer step for both."""
    matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and name.startswith("blocks")]
    others = [p for p in net.parameters() if not any(p is matrix for matrix in matrices)]
    muon, adamw = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)

    class Both:
        def zero_grad(self):
            muon.zero_grad()
            adamw.zero_grad()

        def step(self):
            with mock.patch.multiple(collectives, all_gather_uneven=refuse, reduce_now=refuse):
                muon.step()
            adamw.step()

    return Both()


def unclipped(net: nn.Module, most: float) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_muon_steps_on_atomic_parameters_without_communication():
    batches = nets.data(4, 4)
    plain = nets.train(nets.make(), batches, optimizer=muon_and_adamw, clip=unclipped)
    net = nets.shard(nets.make(), shard_placement_fn=whole_matrices)
    sharded = nets.train_here(net, batches, optimizer=muon_and_adamw, clip=unclipped)
    # Muon iterates in bf16, where the last bit of a gradient's sum is enough to round differently.
    torch.testing.assert_close(sharded["weights"], plain["weights"], rtol=2e-2, atol=2e-3)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@distributed(2, 4)
def test_a_block_of_rows_is_never_cut():
    module = Blocks()
    original = module.weight.detach().clone()
    weft.fully_shard(module, shard_placement_fn=lambda parameter: weft.BlockAtomic(3))
    rows = module.weight.to_local().shape[0]
    assert rows % 3 == 0
    total = torch.tensor(rows)
    dist.all_reduce(total)
    assert total == 12
    torch.testing.assert_close(module.weight.full_tensor(), original, rtol=0, atol=0)


@distributed(2)
def test_what_cannot_be_cut_so_is_named():
    with pytest.raises(ValueError, match=r"BlockAtomic\(rows=5\) for parameter 'weight' of shape \(12, 5\)"):
        weft.fully_shard(Blocks(), shard_placement_fn=lambda parameter: weft.BlockAtomic(5))
    with pytest.raises(
        ValueError, match=r"returned Shard\(dim=2\) .* shape \(12, 5\): choose a dimension from 0 to 1,"
    ):
        weft.fully_shard(Blocks(), shard_placement_fn=lambda parameter: Shard(2))
    with pytest.raises(ValueError, match=r"returned Replicate\(\) for parameter 'weight'"):
        weft.fully_shard(Blocks(), shard_placement_fn=lambda parameter: Replicate())
    scalar = nn.ParameterList([torch.tensor(1.0)])
    with pytest.raises(ValueError, match=r"BlockAtomic\(rows=1\) for parameter '0.0' of shape \(\)"):
        weft.fully_shard(nn.Sequential(scalar), shard_placement_fn=lambda parameter: weft.BlockAtomic(1))
    with pytest.raises(ValueError, match=r"BlockAtomic\(0\)"):
        weft.BlockAtomic(0)


@pytest.mark.slow
@distributed(4)
def test_muon_on_matrices_that_are_cut_needs_communication():
    net = nets.shard(nets.make())
    with pytest.raises(AssertionError, match="communication in a step that needs none"):
        nets.train_here(net, nets.data(1, 4), optimizer=muon_and_adamw, clip=unclipped)
