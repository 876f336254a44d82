"""Ranks with unequal numbers of microbatches, one of which then reads whole weights: an error and no hang."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.comm.test_hang_detector import patience
from tests.fsdp import nets
from tests.pool import distributed
from weft.errors import CollectiveMismatch

WORST_S = 30
"""Until every rank has been told."""


def shard(**options) -> nets.Net:
    """On a communicator of its own, which does not survive."""
    ranks = dist.new_group(list(range(dist.get_world_size())))
    return nets.shard(nets.make(), mesh=DeviceMesh.from_group(ranks, "cpu"), **options)


def full_tensors(net: nets.Net) -> None:
    for parameter in net.parameters():
        parameter.full_tensor()


def full_state(net: nets.Net) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


def norm(net: nets.Net) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def norms(net: nets.Net) -> None:
    weft.parameter_norms(net)


READS: dict[str, Callable[[nets.Net], None]] = {
    "full_tensor": full_tensors,
    "a full state dict": full_state,
    "clip_grad_norm_": norm,
    "parameter_norms": norms,
}


CASES = [
    ("optim", "a full state dict"),
    ("optim_grads_params", "full_tensor"),
    ("optim_grads", "clip_grad_norm_"),
    ("optim_grads", "parameter_norms"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "read"), CASES)
@distributed(2, timeout=WORST_S + 10)
def test_one_rank_runs_another_microbatch_while_the_others_read_whole_tensors(strategy, read):
    net = shard(strategy=strategy)
    for batch in nets.data(2, 4):
        nets.loss_of(net, batch).backward()
    begin = time.monotonic()
    extra = 1 if dist.get_rank() == 0 else 0
    with patience(CERTAIN_S=0.3), pytest.raises(CollectiveMismatch, match=r"rank 0: \S.*rank 1: \S"):
        for batch in nets.data(extra, 4):
            nets.loss_of(net, batch).backward()
        READS[read](net)
        READS[read](net)
    assert time.monotonic() - begin < WORST_S
    dist.barrier()


@pytest.mark.long
@distributed(2, timeout=WORST_S + 10)
def test_one_rank_reads_whole_tensors_that_the_other_never_asks_for():
    net = shard()
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with pytest.raises(CollectiveMismatch, match=r"rank 1 never began; rank 1: barrier"):
            full_tensors(net)
        assert time.monotonic() - begin < WORST_S
    dist.barrier()


@pytest.mark.slow
@distributed(2, timeout=WORST_S + 10)
def test_a_rank_that_evaluates_alone_gets_an_error_that_all_ranks_must():
    net = shard(strategy="optim")
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0: \S.*including evaluations and state dicts.*another rank's batch"
    ):
        for step, batch in enumerate(nets.data(3, 4)):
            nets.loss_of(net, batch).backward()
            if step == 1 and dist.get_rank() == 0:
                with torch.no_grad():
                    nets.loss_of(net, batch)
    dist.barrier()
