"""CPU offload with a device: pinned memory on one side, streams and events on the other, the same numbers."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.gpu.cards import DEVICE, no_wait_of_the_host, on_one_card

pytestmark = pytest.mark.gpu

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def trained(offload_policy, mp_policy) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A net after steps of two microbatches, and its last gradients."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))  # by default, ranks over gloo compute on the CPU
    net = nets.shard(nets.make(), mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in nets.data(4, 4 * ranks).to(DEVICE):
        optimizer.zero_grad()
        for part in batch.chunk(2):
            nets.loss_of(net, part.chunk(ranks)[rank]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net, {name: nets.full(p.grad).cpu() for name, p in net.named_parameters()}


def body(ranks: int) -> None:
    for policy in (weft.MixedPrecisionPolicy(), HALF):
        _, expected = trained(weft.OffloadPolicy(), policy)
        net, gradients = trained(weft.CPUOffloadPolicy(), policy)
        tolerance = {"rtol": 3e-3, "atol": 3e-3} if policy is HALF else {}  # of bf16 sums in another order
        torch.testing.assert_close(gradients, expected, **tolerance)
        for parameter in net.parameters():
            for tensor in (parameter, parameter.grad):
                assert tensor.to_local().device.type == "cpu"
                assert DEVICE == "cpu" or not tensor.to_local().numel() or tensor.to_local().is_pinned()
        report = weft.memory_report(net)
        assert report["persistent"]["gradients"] == 0 < report["offloaded"]["gradients"]
        tokens = nets.data(1, 4)[0].to(DEVICE)
        block = net.blocks[0]
        # Uploads and gathers make only streams wait. Over gloo, what is on the card goes through memory of the host.
        with no_wait_of_the_host() if ranks == 1 else nullcontext():
            loss = nets.loss_of(net, tokens)
        loss.backward()
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        partly = nets.make()
        weft.fully_shard(partly.blocks[0], mesh=mesh, offload_policy=weft.CPUOffloadPolicy())
        weft.fully_shard(partly, mesh=mesh)
        whole = nets.shard(nets.make(), mesh=mesh)
        for model in (partly, whole):
            nets.loss_of(model, tokens).backward()
        norms = [weft.optim.clip_grad_norm_(model, 0.1) for model in (partly, whole)]
        torch.testing.assert_close(norms[0].to(DEVICE), norms[1].to(DEVICE))
        torch.testing.assert_close(nets.full(partly.gain.grad), nets.full(whole.gain.grad))
        block.unshard()
        assert block.up.weight.device.type == DEVICE
        block.reshard()


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_offloaded_training_equals_that_on_the_device(tmp_path, ranks, backend):
    on_one_card(body, ranks, backend, tmp_path, ranks)
