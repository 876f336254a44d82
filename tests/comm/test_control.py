"""What hosts agree on."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm.control import agree


def test_pretended_ranks_agree_with_the_only_real_one():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        assert agree([3, -4], [5], [dist.group.WORLD], "test") == ([3, -4], [5])
    finally:
        dist.destroy_process_group()
