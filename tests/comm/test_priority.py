"""What yields begins behind the exchange that is expected, or when it is waited for."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from tests.pool import distributed
from weft.comm import backends, priority
from weft.comm.builtin import BuiltIn
from weft.comm.collectives import all_gather
from weft.comm.lanes import Lane

CPU = torch.device("cpu")


@distributed(2)
def test_a_gather_that_is_held_back_begins_when_it_is_waited_for_or_let_go():
    begun = []

    def gather(name, lane):
        def run(*args, **kwargs):
            begun.append(name)
            return all_gather(*args, **kwargs)

        full = torch.empty(2)
        return full, lane.run(run, full, torch.tensor([dist.get_rank() + 1.0]), dist.group.WORLD)

    lane, urgent = Lane("gather", CPU), Lane("exchange", CPU)
    for ends in ("wait", "let go"):
        begun.clear()
        priority.expect()
        held = [gather(f"held {number}", lane) for number in range(2)]
        first = gather("exchange", urgent)
        assert begun == ["exchange"], "it does not yield"
        if ends == "let go":
            priority.let_go()
        for full, ticket in (first, *reversed(held)):
            ticket.wait()
            assert full.tolist() == [1.0, 2.0]
        assert begun == ["exchange", "held 0", "held 1"], "in the order of their issue"
        priority.let_go()
        _, ticket = gather("later", lane)
        assert begun[-1] == "later", "nothing is expected any more"
        ticket.wait()
    priority.expect()
    _, ticket = gather("given up", lane)
    ticket.abandon(timedelta(seconds=3))
    assert begun[-1] == "given up", "the other ranks wait for it"
    priority.let_go()


@distributed(2)
def test_without_tags_no_gather_is_held_back():
    begun = []

    def run(*args, **kwargs):
        begun.append("gather")
        return all_gather(*args, **kwargs)

    full = torch.empty(2)
    with mock.patch.object(backends, "INSTEAD", BuiltIn()):
        priority.expect()
        ticket = Lane("gather", CPU).run(run, full, torch.tensor([dist.get_rank() + 1.0]), dist.group.WORLD)
        started = list(begun)
        ticket.wait()
        priority.let_go()
    assert started == ["gather"], "other ranks may issue it before or after the exchange"
    assert full.tolist() == [1.0, 2.0]
