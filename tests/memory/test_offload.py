"""Weights, gradients and optimizer state in CPU memory: the same numbers, by way of copies to and from the device."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later
from tests.fsdp.side_by_side import assert_same, batches, bottom_up, kinds, make, steps
from tests.pool import distributed
from weft.comm import streams
from weft.fsdp.construction.first_values import bring_buffers

pytestmark = pytest.mark.slow

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOAD = weft.CPUOffloadPolicy()


def memory(net) -> dict:
    return weft.memory_report(net)


@pytest.mark.long
@distributed(2, 4, long=4)
def test_an_offloaded_run_is_bit_equal_to_one_on_the_device():
    data = nets.data(2, 8)
    plain = {micro: nets.train(nets.make(), data, microbatches=micro) for micro in (1, 2)}
    if dist.get_world_size() == 2:
        cases = [{"strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads_params")]
        cases += [{"mp_policy": HALF}, {"mp_policy": HALF, "strategy": "optim_grads"}]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        cases = [{"reshard_after_forward": 2}, {"mesh": mesh}]
        cases += [{"mesh": mesh, "outer_strategy": "optim", "mp_policy": HALF}]
    for number, options in enumerate(cases):
        for micro, reference in list(plain.items())[:: 1 if number == 0 else -1][: 2 if number == 0 else 1]:
            runs = []
            for policy in (weft.OffloadPolicy(), OFFLOAD):
                net = nets.shard(nets.make(), offload_policy=policy, **options)
                on_microbatch = net.set_is_last_backward if options.get("strategy") == "optim" else lambda last: None
                runs.append(nets.train_here(net, data, microbatches=micro, on_microbatch=on_microbatch))
            # What is added to a gradient is summed over the ranks first, in CPU memory; on the device rank by rank.
            exact = {"rtol": 0, "atol": 0} if micro == 1 else {}
            torch.testing.assert_close(runs[1]["gradients"], runs[0]["gradients"], **exact)
            if "mp_policy" not in options:
                torch.testing.assert_close(runs[1]["gradients"], reference["gradients"])


@distributed(2)
def test_nothing_sharded_stays_on_the_device_and_nothing_is_allocated_once_planned():
    for policy in (weft.MixedPrecisionPolicy(), HALF):
        net, device = (
            nets.shard(nets.make(), mp_policy=policy, offload_policy=offload)
            for offload in (torch_fsdp.CPUOffloadPolicy(), torch_fsdp.OffloadPolicy())
        )
        for model in (net, device):
            nets.train_here(model, nets.data(3, 4))
        on_device = memory(device)
        assert on_device["offloaded"] == {"weights": 0, "gradients": 0}
        assert memory(net)["offloaded"] == on_device["persistent"]
        assert memory(net)["persistent"] == {"weights": 0, "gradients": 0}
        before = memory(net)["transient"]
        assert all(pool["live"] == 0 for pool in before.values())
        nets.train_here(net, nets.data(3, 4))
        assert memory(net)["transient"] == before


@distributed(2)
def test_accumulation_evaluation_and_flat_optimizers_work_alike():
    data = nets.data(2, 12)
    runs = []
    for policy in (weft.OffloadPolicy(), OFFLOAD):
        net = nets.shard(nets.make(), mp_policy=HALF, offload_policy=policy)
        run = nets.train_here(
            net,
            data,
            microbatches=3,
            on_microbatch=net.set_requires_gradient_sync,
            optimizer=lambda net: weft.optim.flat(torch.optim.AdamW, net, lr=1e-2, fused=True),
            clip=weft.optim.clip_grad_norm_,
        )
        with torch.no_grad():
            run["evaluation"] = nets.loss_of(net, data[0])
        net.blocks[0].unshard()
        run["by hand"] = net.blocks[0].up.weight.detach().clone()
        net.blocks[0].reshard()
        net.zero_grad()
        for _ in range(2):  # a second reduction of every unit before the first is published
            x = net.blocks[0](net.blocks[0](torch.ones(2, 13)))
        x.float().sum().backward()
        nets.loss_of(net, data[1]).backward()
        run["more gradients"] = nets.whole({name: p.grad for name, p in net.named_parameters()})
        runs.append(run)
    torch.testing.assert_close(runs[1], runs[0])


def offloaded(fsdp):
    """On a CPU mesh torch cannot pin."""
    net = bottom_up(fsdp, make(), offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False))
    seen = [kinds(net)]
    numbers = steps(
        net, seen=seen, clip=lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor()
    )
    net.loss(batches()[0]).backward()
    seen += [[p.device.type, p.grad.device.type, p.grad.to_local().device.type] for p in net.parameters()]
    return numbers, seen


@distributed(2)
def test_the_policy_means_what_it_means_to_torch():
    assert_same(offloaded)


@distributed(2)
def test_memory_of_the_host_is_pinned_as_the_policy_says():
    for pins in (True, False):
        with mock.patch.object(streams, "host_memory", wraps=streams.host_memory) as taken:
            net = nets.shard(nets.make(), offload_policy=weft.CPUOffloadPolicy(pin_memory=pins))
            for batch in nets.data(2, 4):  # the second is added
                nets.loss_of(net, batch).backward()
        units = len(net.blocks) + 1
        assert [call.kwargs["pinned"] for call in taken.call_args_list] == [pins] * 3 * units


@distributed(2)
def test_what_a_failed_backward_has_downloaded_takes_no_memory_and_is_in_no_later_gradient():
    plain, net = nets.make(), nets.shard(nets.make(), offload_policy=weft.CPUOffloadPolicy(pin_memory=False))
    rows = nets.data(1, 4)[0]
    nets.loss_of(net, rows).backward()
    handle = net.embedding.register_forward_hook(fails_later)
    with pytest.raises(Oops):
        nets.loss_of(net, rows).backward()  # its gradients would be added
    handle.remove()
    net.reset_iter_state()
    assert all(pool["live"] == 0 for pool in memory(net)["transient"].values())
    for each in (plain, net):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter).detach()
    weft.optim.clip_grad_norm_(net, 1e9)  # copies them to the main gradients
    for each in (plain, net):
        nets.loss_of(each, rows).backward()
    nets.assert_same(
        {name: parameter.grad for name, parameter in net.named_parameters()},
        {name: parameter.grad for name, parameter in plain.named_parameters()},
    )


@distributed(2)
def test_what_is_no_policy_is_named():
    with pytest.raises(TypeError, match=r"offload_policy='cpu': pass weft.OffloadPolicy\(\), weft.CPUOffloadPolicy"):
        weft.fully_shard(nn.Linear(2, 2), offload_policy="cpu")


def test_buffers_come_to_the_device_once():
    one, two = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    two.running_mean = one.running_mean
    bring_buffers([one, two], torch.device("meta"))
    assert all(buffer.is_meta for module in (one, two) for buffer in module.buffers())
    assert one.running_mean is two.running_mean and one.running_var is not two.running_var
