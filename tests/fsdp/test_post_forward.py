"""An integer `reshard_after_forward`: between forward and backward the weights stay cut over fewer ranks."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import nothing_renewed
from tests.fsdp.side_by_side import assert_same, batches, bottom_up, kinds, make, steps, whole
from tests.pool import distributed
from weft.comm import collectives
from weft.fsdp.payload import PostForwardShard

pytestmark = pytest.mark.slow


def gathered_bytes(net) -> int:
    """Of weights that are here now, by storage accounting."""
    return weft.memory_report(net)["transient"]["gathered weights"]["live"]


@pytest.mark.long
@distributed(4)
def test_training_equals_one_process_and_allocates_nothing_once_planned():
    batches = nets.data(3, 8)
    for recompute in (None, "non-reentrant"):
        plain = nets.train(nets.make().double(), batches, microbatches=2)
        net = nets.shard(nets.make(recompute).double(), reshard_after_forward=2)
        run = nets.train_here(net, batches, microbatches=2)
        torch.testing.assert_close(run["gradients"], plain["gradients"])
        torch.testing.assert_close(run["weights"], plain["weights"])
        before = weft.memory_report(net)["transient"]
        nets.train_here(net, batches, microbatches=2)
        after = weft.memory_report(net)["transient"]
        assert after == before, (after, before)


@distributed(4)
def test_half_of_each_unit_stays_and_backward_asks_the_neighbour_alone():
    gathers = []

    def all_gather(full, source, group, tag):
        if full.is_floating_point():  # the ranks' agreement at the end of a backward is a gather of integers
            gathers.append((group.size(), source.numel() / full.numel()))
        return real(full, source, group, tag)

    real = collectives.all_gather
    net = nets.shard(nets.make(), reshard_after_forward=2)
    tokens = nets.data(1, 4)[0]
    nets.loss_of(net, tokens).backward()
    units = [module._weft_unit for module in (net, *net.blocks)]
    with mock.patch.object(collectives, "all_gather", all_gather):
        for _ in range(2):
            gathers.clear()
            loss = nets.loss_of(net, tokens)
            # The root's backward is first, so what it needs has not gone.
            last = [unit for unit in units if unit.resident]
            halves = sum(unit.gathered_bytes for unit in units if unit not in last) // 2
            assert gathered_bytes(net) == halves + sum(unit.gathered_bytes for unit in last)
            assert len(last) == 1 and set(gathers) == {(4, 0.25)}
            assert all(type(p) is weft.fsdp.UnevenDTensor for p in net.parameters() if not last[0].holders)
            gathers.clear()
            loss.backward()
            assert len(gathers) == 3 and {size for size, _ in gathers} == {2}
            assert gathered_bytes(net) == 0
    with mock.patch.object(PostForwardShard, "keep", autospec=True) as keep:
        nets.loss_of(net, tokens).backward()
    assert keep.call_count == 3, "a backward keeps nothing"


@distributed(4)
@nothing_renewed()
def test_what_stays_is_dropped_when_the_weights_may_have_changed():
    net = nets.shard(nets.make(), reshard_after_forward=2)
    tokens = nets.data(1, 4)[0]
    nets.loss_of(net, tokens)  # nobody calls backward
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    changed = nets.shard(nets.make())
    changed.load_state_dict({name: nets.full(p) for name, p in net.named_parameters(remove_duplicate=False)})
    block = net.blocks[0]
    block.unshard()
    assert torch.equal(block.up.weight, nets.full(changed.blocks[0].up.weight))
    block.reshard()
    torch.testing.assert_close(nets.loss_of(net, tokens), nets.loss_of(changed, tokens), rtol=0, atol=0)
    for unit in (net, *net.blocks):
        unit.reshard()
    assert gathered_bytes(net) == 0
    nets.loss_of(net, tokens)
    net.reset_iter_state()
    assert gathered_bytes(net) == 0
    for parameter in (net.embedding.weight, net.gain, *net.blocks[0].parameters()):
        parameter.requires_grad_(False)
    nets.loss_of(net, tokens).backward()
    assert gathered_bytes(net) == 0, "of a block without a backward too"
    slab = weft.memory_report(net)["transient"]["gathered weights"]["slab"]
    nets.loss_of(net, tokens)
    net.set_reshard_after_forward(True)
    nets.loss_of(net, tokens).backward()
    assert 0 < weft.memory_report(net)["transient"]["gathered weights"]["slab"] < slab, "shards have no place any more"


@distributed(4)
def test_numbers_of_ranks_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"reshard_after_forward=3: it must divide .* axis, 4; choose one of 1, 2, 4"):
        weft.fully_shard(nets.make(), reshard_after_forward=3)
    with pytest.raises(ValueError, match="reshard_after_forward=0: it must divide"):
        weft.fully_shard(nets.make(), reshard_after_forward=0)
    with pytest.raises(ValueError, match="reshard_after_forward='2': choose True, False, None or a number"):
        weft.fully_shard(nets.make(), reshard_after_forward="2")
    with pytest.raises(ValueError, match="reshard_after_forward=2 where each rank keeps all weights"):
        weft.fully_shard(nets.make(), reshard_after_forward=2, strategy="optim")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    with pytest.raises(ValueError, match="it must divide the number of ranks of the shard axis, 2"):
        weft.fully_shard(nets.make(), reshard_after_forward=4, mesh=mesh)


def resharded_to(fsdp, size):
    net, seen = bottom_up(fsdp, make(), reshard_after_forward=size), []
    numbers = steps(net, seen=seen)
    loss = net.loss(batches()[0])
    seen.append(kinds(net))
    for module in (net, *net.blocks):
        module.reshard()
    loss.backward()
    numbers.append(whole(net))
    net.set_reshard_after_forward(False)
    return [numbers, steps(net, seen=seen)], seen


@pytest.mark.long
@distributed(4)
def test_a_number_of_ranks_means_what_it_means_to_torch():
    assert_same(resharded_to, 2)
    for size, same in ((1, False), (4, True)):  # all of the weights stay, or none, as a bool says it
        unit = weft.fully_shard(nets.Block(4, 4), reshard_after_forward=size)._weft_unit
        assert unit.reshard_after_forward is same and all(group.post_forward is None for group in unit.groups)
