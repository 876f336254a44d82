"""What is sent over a border arrives in order, beside the computation, and its shape is told once."""

import time
import weakref
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import weft
import weft.debug
from tests.pool import distributed
from weft.comm.groups import group_of
from weft.pipeline import Cut
from weft.pipeline.transport import BACKWARD, FAREWELL, FORWARD, Channel, Transport


def transport(segments=2, **options):
    mesh, layers = weft.init_meshes("cpu", pp=2).pp, tuple(range(n, n + 1) for n in range(segments))
    cut = Cut(layers, 2, mesh.get_local_rank(), group=group_of(mesh, 0), **options)
    return Transport(cut, torch.device("cpu"))


@distributed(2)
def test_the_next_message_is_expected_while_one_is_worked_on():
    channel = transport().channel(0, FORWARD)
    told = mock.patch.object(Channel, "_tell", autospec=True, side_effect=Channel._tell)
    for step in range(2):
        sent = [[torch.full((2, 3), 4.0 * step + n), torch.ones(2, n % 2 + 1).t()] for n in range(4)]
        keys = ["even", "odd", "even", "odd"]
        if dist.get_rank():
            channel.foresee(keys)
            for number, message in enumerate(sent):
                assert len(channel._expected) == (number > 1 or step)  # known: its memory is there
                torch.testing.assert_close(channel.take(), message)
        else:
            with told as tell:
                for key, message in zip(keys, sent):
                    channel.send(key, message)
                assert tell.call_count == (0 if step else 2)
            channel.finish()


@distributed(2)
def test_borders_and_directions_do_not_hold_each_other_up():
    """Rank 0 has the stages 0 and 2: what it waits for first was sent last."""
    both = transport(4)
    first, second, back = both.channel(0, FORWARD), both.channel(2, FORWARD), both.channel(0, BACKWARD)
    if dist.get_rank():
        for channel in (second, first):
            channel.foresee([1])
        assert [each.item() for channel in (second, first) for each in channel.take()] == [2.0, 1.0]
        back.learn(1, first)
        back.send(1, [torch.tensor([3.0])])
        back.finish()
    else:
        first.send(1, [torch.tensor([1.0])])
        second.send(1, [torch.tensor([2.0])])
        back.learn(1, first)
        back.foresee([1])
        assert back.take()[0].item() == 3.0
        both.finish()


@distributed(2)
def test_the_memory_of_a_message_goes_when_it_has_arrived():
    """Not with the next message, nor at the end of a schedule."""
    channel = transport().channel(0, BACKWARD)
    channel.knows(1, (((3,), torch.float32),))
    if dist.get_rank():
        memory = numpy.ones(3, dtype=numpy.float32)
        sent = weakref.ref(memory)
        channel.send(1, [torch.from_numpy(memory)])
        del memory
        deadline = time.monotonic() + 20
        while sent() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sent() is None
    else:
        channel.foresee([1])
        channel.take()
    dist.barrier()
    channel.finish()


@distributed(2)
def test_another_shape_for_what_is_known_is_refused():
    channel = transport().channel(0, FORWARD)
    if dist.get_rank():
        channel.foresee([1])
        channel.take()
    else:
        channel.send(1, [torch.zeros(2, 3)])
        with pytest.raises(RuntimeError, match=r"stage 0 to stage 1 were \[2, 3\] float32 .* now \[2, 4\] bfloat16"):
            channel.send(1, [torch.zeros(2, 4, dtype=torch.bfloat16)])
        with pytest.raises(TypeError, match=r"\[2\] int64: tensors between stages must be of torch.float32"):
            channel.send(2, [torch.zeros(2, dtype=torch.int64)])
        with pytest.raises(TypeError, match="have at most 6 dimensions"):
            channel.send(3, [torch.zeros((1,) * 7)])
        channel.finish()


@distributed(2)
def test_what_leaves_on_a_stream_is_kept_until_the_stream_is_past_it():
    with weft.debug.check_streams():
        channel = transport().channel(0, FORWARD)
        if dist.get_rank():
            channel.foresee([1, 1])
            assert [channel.take()[0].sum().item() for _ in range(2)] == [0.0, 8.0]
        else:
            for number in range(2):
                channel.send(1, [torch.full((4,), 2.0 * number)])
            assert len(channel._sent) == 2
            channel.finish()


@distributed(2)
def test_what_the_ends_have_swapped_may_change_at_once():
    both, rank = transport(shares_ends=True), dist.get_rank()
    for shape in ((3,), (2, 2), (3,)):
        own = torch.full(shape, 1.0 + rank)
        assert torch.equal(both.swap(own), torch.full(shape, 2.0 - rank))
        assert not any(channel._sent for channel in both._channels.values()), "it has arrived"


def test_messages_that_are_given_up_are_waited_for_once_and_leave_no_memory(monkeypatch):
    channel = Channel(mock.Mock(), 0, 0, "messages", torch.device("cpu"))
    tickets = [mock.Mock(ended=False) for _ in range(2)]
    monkeypatch.setattr(channel._lane, "run", mock.Mock(side_effect=tickets))
    monkeypatch.setattr("weft.pipeline.transport.end_transfers", ended := mock.Mock())
    for key in (1, 2):
        channel.knows(key, (((3,), torch.float32),))
    channel.foresee([1, 2])
    channel.send(1, [torch.ones(3)])
    whole = Transport.__new__(Transport)
    whole._channels = {(0, FORWARD): channel, (0, BACKWARD): channel}
    whole.forget()
    assert all(ticket.abandon.call_args_list == [mock.call(FAREWELL)] for ticket in tickets)
    assert not (channel._coming or channel._expected or channel._sent or channel._told)
    ended.assert_called_once_with(channel.group)
