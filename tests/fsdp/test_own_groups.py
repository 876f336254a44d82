"""Communicators of a user's own for gathers, and `no_sync`."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.lanes import Lane


def gathered_over(monkeypatch):
    """The process groups of gathers from now on."""
    groups, run = set(), Lane.run

    def note(lane, collective, *args, **options):
        if lane.name == "gather":
            groups.update(each for each in args if isinstance(each, dist.ProcessGroup))
        return run(lane, collective, *args, **options)

    monkeypatch.setattr(Lane, "run", note)
    return groups


@pytest.mark.slow
@distributed(2)
def test_gathers_run_on_the_process_group_that_was_given():
    mesh = init_device_mesh("cpu", (2,))
    own = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    other = dist.new_group([0, 1])
    losses, batch = [], nets.data(1, 4)[0][dist.get_rank() :: 2]
    for choice in (False, [own]):
        runtime = weft.RuntimeOptions(separate_all_gather_group=choice)
        with pytest.MonkeyPatch.context() as patches:
            groups = gathered_over(patches)
            net = nets.shard(nets.make(), mesh=mesh, runtime=runtime)
            losses.append(nets.loss_of(net, batch))
            losses[-1].backward()
        assert (groups == {own}) == bool(choice) and own not in groups - {own}
    assert torch.equal(*losses)
    with pytest.raises(ValueError, match=r"used another communicator for gathers over the ranks \[0, 1\]"):
        nets.shard(nets.make(), mesh=mesh, runtime=weft.RuntimeOptions(separate_all_gather_group=[other]))(batch)


@pytest.mark.slow
@distributed(2)
def test_a_rank_joins_gathers_over_a_communicator_that_was_chosen_after_the_first_pass():
    net, tokens = nets.shard(nets.make()), nets.data(1, 4)[0]
    nets.loss_of(net, tokens).backward()
    net.set_separate_reduce_scatter_group(True)
    if dist.get_rank():
        net.blocks = nn.ModuleList([net.blocks[0], net.blocks[2]])
    nets.loss_of(net, tokens).backward()


@distributed(2)
def test_a_process_group_that_serves_no_gather_is_refused():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    net = nets.shard(nets.make(), runtime=weft.RuntimeOptions(separate_all_gather_group=[alone]))
    with pytest.raises(ValueError, match=r"the process group has the ranks \[\d\], .* gathered over \[0, 1\]"):
        net(nets.data(1, 2)[0])


def test_what_is_no_process_group_is_refused():
    for wrong in ("yes", ["yes"], 1):
        with pytest.raises(TypeError, match=r"separate_all_gather_group=.*: choose True or False, or pass a list of"):
            weft.RuntimeOptions(separate_all_gather_group=wrong)
    listed, other = (weft.RuntimeOptions(separate_all_gather_group=groups) for groups in ([], ()))
    assert listed == other and hash(listed) == hash(other)


@distributed(2)
def test_under_no_sync_gradients_accumulate_and_the_next_backward_reduces_them():
    rank, batches = dist.get_rank(), nets.data(3, 4)
    plain = nets.make()
    for batch in batches:
        nets.loss_of(plain, batch).backward()
    net = nets.shard(nets.make(), strategy="optim_grads_params")
    with net.no_sync():
        for batch in batches[:2]:
            nets.loss_of(net, batch[rank::2]).backward()
        assert all(parameter.grad is None for parameter in net.parameters())
        with net.no_sync():  # nests
            pass
    nets.loss_of(net, batches[2][rank::2]).backward()
    for (name, found), expected in zip(net.named_parameters(), plain.parameters()):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
    with pytest.raises(ArithmeticError), net.blocks[0].no_sync():
        raise ArithmeticError
    assert net.blocks[0]._weft_unit.requires_gradient_sync and net._weft_unit.requires_gradient_sync


@pytest.mark.slow
@distributed(4)
def test_ranks_with_other_kinds_of_units_make_their_communicators_by_themselves():
    """Ranks 0 and 1 hold a stage whose units have one mesh, ranks 2 and 3 one whose units have two."""
    rank = dist.get_rank()
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"] for _ in range(2)]
    runtime, losses = weft.RuntimeOptions(separate_all_gather_group=True), []
    for options in ({}, {"runtime": runtime}):
        net = nets.make()
        for number, block in enumerate(net.blocks):
            weft.fully_shard(block, mesh=meshes[number % 2 if rank > 1 else 0], **options)
        weft.fully_shard(net, mesh=meshes[0], **options)
        losses.append(nets.loss_of(net, nets.data(1, 4)[0][rank % 2 :: 2]))
        losses[-1].backward()
    assert torch.equal(*losses)
