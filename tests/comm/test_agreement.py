"""What hosts agree on."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.comm.test_hang_detector import patience
from tests.pool import distributed
from weft.comm.agreement import agree
from weft.comm.backends import backend_of, transport_of
from weft.comm.groups import host_group
from weft.comm.watch.hang_detector import start_hang_detector
from weft.errors import CollectiveMismatch


def test_pretended_ranks_agree_with_the_only_real_one():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        assert agree([3, -4], [dist.group.WORLD], "test", channel=0) == [3, -4]
    finally:
        dist.destroy_process_group()


@distributed(2)
def test_a_group_of_torch_s_default_backends_sends_as_directly_as_one_of_gloo():
    cpu, group = torch.device("cpu"), dist.new_group(backend="cpu:gloo")
    assert backend_of(group, cpu) == "gloo" and backend_of(group, torch.device("cuda")) == ""
    assert transport_of(group, cpu).capabilities.tags and host_group(group) is group


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["moment", "model"])
@distributed(2)
def test_words_of_another_moment_or_model_are_never_taken_for_these(apart):
    start_hang_detector()
    rank, group = dist.get_rank(), dist.new_group([0, 1])  # which does not survive
    moment, channel = (f"moment {rank}", 0) if apart == "moment" else ("moment", rank)
    with patience(CERTAIN_S=0.3), pytest.raises(CollectiveMismatch, match="wait for different things"):
        agree([rank], [group], moment, channel=channel)
