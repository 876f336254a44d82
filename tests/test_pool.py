"""The test pool itself: every other multi-process test stands on it."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankFailed, distributed


@distributed(2, 4)
def test_each_rank_runs_the_body_in_one_process_group():
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    assert total == sum(range(dist.get_world_size()))


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()


def sleep_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(60)


FAILURES = [
    (fail_on_rank_1, 120, "broken on purpose"),
    (die_on_rank_1, 120, "the process died"),
    (sleep_on_rank_1, 3, "in sleep_on_rank_1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("body, timeout, message", FAILURES)
def test_a_failing_rank_fails_the_job_and_the_pool_serves_the_next(pool, body, timeout, message):
    with pytest.raises(RankFailed, match=message):
        pool.run(2, body, timeout=timeout)
    assert pool.run(2, dist.get_rank) == [0, 1]
