"""Frozen parameters beside trainable ones, frozen units, and changes of mind, as one process has them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.test_behaviour import LowRank, assert_at_rest, assert_same_state, everything, mine, sgd
from tests.pool import distributed

PLACES = [{"strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")]


def adapted(recompute: str | None = None) -> nets.Net:
    """Low-rank corrections of a frozen base in the outer blocks, a frozen block between them."""
    net = nets.make(recompute).requires_grad_(False)
    for block in (net.blocks[0], net.blocks[2]):
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    net.gain.requires_grad_(True)  # reentrant checkpointing needs an input with a gradient
    return net


def change_of_mind(net: nets.Net, step: int) -> None:
    """Step 1 unfreezes bases that were sharded frozen, one of them in part; step 3 freezes what has trained."""
    if step == 1:
        net.blocks[1].requires_grad_(True)
        net.blocks[2].up.base.weight.requires_grad_(True)
    if step == 3:
        net.blocks[0].requires_grad_(False)
        net.blocks[2].up.base.weight.requires_grad_(False)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [None, pytest.param("reentrant", marks=pytest.mark.long), "non-reentrant"])
@distributed(2)
def test_adapters_frozen_units_and_later_changes_equal_one_process(recompute):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    two_axes = {"mesh": mesh, "outer_strategy": "optim", "strategy": "optim_grads_params"}
    for options in [*(PLACES if recompute is None else PLACES[1::2]), two_axes]:
        plain, net = adapted(recompute).double(), nets.shard(adapted(recompute).double(), **options)
        optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, net)}
        for step, batch in enumerate(nets.data(5, 8)):
            for model, part in ((plain, everything), (net, mine)):
                optimizers[model].zero_grad()
                change_of_mind(model, step)
                for last, half in enumerate(batch.chunk(2)):
                    if model is net:
                        net.set_is_last_backward(bool(last))
                    nets.loss_of(model, part(half)).backward()
            assert_same_state(net, plain)
            assert_at_rest(net)
            for optimizer in optimizers.values():
                optimizer.step()


@pytest.mark.slow
@distributed(2)
def test_adapters_in_fp32_on_a_frozen_base_in_bf16_equal_one_process_that_casts_at_the_same_places():
    def make() -> nets.Net:
        net = adapted()
        for parameter in net.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        return net

    plain, net = make(), make()
    frozen = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in net.blocks:
        weft.fully_shard(block, mp_policy=policy)
    weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    assert all(p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) for p in net.parameters())
    optimizers = [sgd(model.parameters()) for model in (plain, net)]
    for batch in nets.data(3, 8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nets.loss_as_cast(plain, batch, ranks=dist.get_world_size()).backward()
        nets.loss_of(net, mine(batch)).backward()
        # Weights that differ in fp32's last bit may round to neighbours in bf16, 2 ** -8 of their value apart.
        assert_same_state(net, plain, rtol=3e-3, atol=3e-3)
        for optimizer in optimizers:
            optimizer.step()
    for name, value in frozen.items():
        torch.testing.assert_close(nets.full(net.state_dict()[name]), value, rtol=0, atol=0)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_a_parameter_frozen_in_the_middle_of_an_accumulation_keeps_what_it_has(strategy, checked):
    runtime = weft.RuntimeOptions(check_collectives=checked)
    plain, net = nets.make(), nets.shard(nets.make(), strategy=strategy, runtime=runtime)
    for model, part in ((plain, everything), (net, mine)):
        batches = [part(batch) for batch in nets.data(3, 8)]
        if model is net:
            net.set_requires_gradient_sync(False)
        nets.loss_of(model, batches[0]).backward()
        model.blocks[1].requires_grad_(False)
        if model is net:
            net.set_requires_gradient_sync(True)
        nets.loss_of(model, batches[1]).backward()
    assert_same_state(net, plain)
    for model, part in ((plain, everything), (net, mine)):  # and it does not come back later
        model.zero_grad()
        model.blocks[1].requires_grad_(True)
        nets.loss_of(model, part(nets.data(3, 8)[2])).backward()
    assert_same_state(net, plain)
    assert_at_rest(net)
