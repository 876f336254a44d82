"""Ranks that issue different collectives learn it before an optimizer can use the result."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.agreement import Agreement
from weft.errors import CollectiveMismatch

NAMES = ("", "blocks.0", "blocks.1")


def reach(agreement: Agreement, *flags: list[bool], arrived=()) -> tuple[list[list[bool]], bool]:
    return agreement.compare(flags, arrived, NAMES, [dist.group.WORLD])


@distributed(2, 4)
def test_a_flag_is_true_where_it_is_true_on_any_rank():
    generator = torch.Generator().manual_seed(0)
    flags = torch.rand(dist.get_world_size(), 200, generator=generator) < 0.3
    mine, anywhere = flags[dist.get_rank()].tolist(), flags.any(0).tolist()
    agreement = Agreement(True, channel=0)
    agreement.note(1, "all-gather", 8)
    assert reach(agreement, mine[:3], [], mine[3:]) == ([anywhere[:3], [], anywhere[3:]], True)


@pytest.mark.parametrize("difference", ["unit", "operation", "bytes", "order", "number"])
@distributed(2, 4)
def test_every_rank_learns_which_unit_differed_first(difference):
    last = dist.get_rank() == dist.get_world_size() - 1
    agreement = Agreement(True, channel=0)
    agreement.note(0, "all-gather", 64)
    log = [(1, "all-gather", 128), (2, "reduction", 128)]
    if last:
        log = {
            "unit": [(2, "all-gather", 128), log[1]],
            "operation": [(1, "reduction", 128), log[1]],
            "bytes": [(1, "all-gather", 256), log[1]],
            "order": log[::-1],
            "number": [],
        }[difference]
    for entry in log:
        agreement.note(*entry)
    with pytest.raises(CollectiveMismatch, match=r"position 1 .*rank 0: all-gather of blocks\.0 \(128 bytes\)"):
        reach(agreement, [True])
    agreement.note(0, "all-gather", 64)
    assert reach(agreement, [True]) == ([[True]], True), "the next step starts anew"


@distributed(2)
def test_what_ranks_issued_in_a_pass_that_failed_is_not_compared():
    agreement = Agreement(True, channel=0)
    for unit in range(dist.get_rank()):  # how far each came
        agreement.note(unit, "all-gather", 64)
    agreement.forget()
    agreement.note(1, "all-gather", 64)
    assert reach(agreement, [True]) == ([[True]], True)


@distributed(2)
def test_nothing_is_compared_without_the_check():
    agreement = Agreement(False, channel=0)
    agreement.note(dist.get_rank(), "all-gather", 64)
    assert reach(agreement, [dist.get_rank() == 1]) == ([[True]], True)


@distributed(2, 4)
def test_ranks_hear_whether_all_units_ended_in_the_same_order():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    agreement = Agreement(True, channel=0)
    assert reach(agreement, arrived=[2, 1, 0]) == ([], True)
    assert reach(agreement, arrived=[2, 0, 1] if rank == last else [2, 1, 0]) == ([], False)


@distributed(2)
def test_ranks_with_different_units_raise_before_the_first_pass():
    net = nets.shard(nets.make(hidden=29 + dist.get_rank()))
    said = r"rank 0: blocks\.0 \(Block, [\d,]+ elements of 5 parameters\); rank 1: .*build the same model on every rank"
    with pytest.raises(CollectiveMismatch, match=said):
        net(nets.data(1, 4)[0])


@distributed(2)
def test_ranks_whose_groups_have_other_parameters_of_the_same_sizes_raise_before_the_first_pass():
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    net[1 + dist.get_rank()].weight.requires_grad_(False)
    weft.fully_shard(net)
    said = r"rank 0: 2\.weight \[4, 4\] of the root; rank 1: 1\.weight .*freeze the same parameters before fully_shard"
    with pytest.raises(CollectiveMismatch, match=said):
        net(torch.ones(2, 4))


@distributed(2)
def test_ranks_with_different_numbers_of_parameters_raise_before_the_first_pass():
    class Split(torch.nn.Module):
        """12 elements, in one parameter or in several."""

        def __init__(self, parts: int) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.randn(12 // parts) for _ in range(parts))

        def forward(self, x):
            return x * torch.cat([*self.parts]).sum()

    net = weft.fully_shard(Split(2 + dist.get_rank()))
    with pytest.raises(CollectiveMismatch, match=r"12 elements of 2 parameters\); rank 1: .* of 3 parameters"):
        net(torch.ones(2))


@distributed(4)
def test_ranks_on_two_axes_all_raise_for_different_units_whichever_group_notices_first():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    units = ["first", "second", "third" if dist.get_rank() else "another third"]
    with pytest.raises(CollectiveMismatch, match=r"have different units.*build the same model on every rank"):
        Agreement(True, channel=0).same_structure(units, [mesh.get_group(axis) for axis in (0, 1)])


@distributed(2)
def test_equal_steps_agree_and_compare_the_units_once():
    net = nets.shard(nets.make(), runtime=weft.RuntimeOptions(check_collectives=True))
    compare = Agreement.same_structure
    with mock.patch.object(Agreement, "same_structure", autospec=True, side_effect=compare) as compared:
        for seed in range(3):
            nets.loss_of(net, nets.data(1, 4, seed + dist.get_rank())[0]).backward()
    assert compared.call_count == 1
    assert all(parameter.grad is not None for parameter in net.parameters())
