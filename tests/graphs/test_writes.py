"""Captured modules that write gradients of weights themselves, against eager calls, bit for bit."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp.test_direct_gradient import WIDTH, Writing, by_helper, make, nothing, rows
from tests.graphs.test_hooks import assert_equal, local, poisoned, tape
from tests.pool import distributed
from weft.graphs import writes
from weft.graphs.capture import CaptureRefused
from weft.graphs.places import range_of
from weft.graphs.tape import TapeBackend


def run(graphs, strategy, policy, microbatches, steps=6):
    """Losses, gradients and weights, and the report."""
    net = make()
    weft.fully_shard(net.direct, strategy=strategy, mp_policy=policy)
    weft.fully_shard(net, strategy=strategy, mp_policy=policy, runtime=weft.RuntimeOptions(graphs=graphs))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for step in rows(steps, microbatches):
        for number, x in enumerate(step):
            net.set_is_last_backward(number == microbatches - 1)
            loss = net(x[dist.get_rank()])
            loss.backward()
            seen.append(loss.detach())
        seen += [local(each.grad) for each in net.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(each) for each in net.parameters()], graphs and weft.graph_report(net)


def compare(**how):
    plain, _ = run(None, **how)
    with poisoned():
        found, report = run(tape("direct"), **how)
    assert_equal(found, plain)
    assert report["replays"] >= 2 * how["microbatches"], report
    return report


WIDE, HALF = weft.MixedPrecisionPolicy(), weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.slow
@distributed(2)
def test_both_conventions_are_replayed_in_the_first_microbatch_and_in_later_ones():
    report = compare(strategy="optim", policy=WIDE, microbatches=3)
    assert not any("backward" in each for each in report["eager"]), report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "policy", "microbatches"),
    [("optim", HALF, 3), ("optim_grads", WIDE, 3), ("optim_grads", HALF, 1), ("optim_grads_params", WIDE, 1)],
)
@distributed(2)
def test_every_strategy_replays_written_gradients(strategy, policy, microbatches):
    compare(strategy=strategy, policy=policy, microbatches=microbatches)


@pytest.mark.slow
@distributed(2)
def test_a_backward_into_too_many_buffers_is_eager_and_right():
    most, writes.MOST = writes.MOST, 1
    try:
        report = compare(strategy="optim", policy=WIDE, microbatches=3)
    finally:
        writes.MOST = most
    assert report["eager"]["a backward writes to more than 1 sets of buffers"] > 0, report


def test_the_bytes_of_recordings_include_the_trial():
    weight = nn.Parameter(torch.ones(WIDTH))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(WIDTH), False

    def backward():
        weight.main_grad.add_(weight.detach() * 2)
        weight.grad_added_to_main_grad = True

    def capture(function, may_write):
        return TapeBackend().capture(function, [range_of(weight), *may_write])

    recordings = writes.Recordings(capture, backward, [weight], contextlib.nullcontext, [].append)
    of_trial = recordings.nbytes
    assert of_trial == weight.nbytes
    recordings.run(poisoned=False)
    assert recordings.nbytes == 2 * of_trial


def test_a_backward_that_asks_for_other_gradients_than_its_trial_is_refused():
    weights = [nn.Parameter(torch.ones(WIDTH)) for _ in range(2)]
    asked = list(weights)

    def backward():
        for each in asked:
            weft.fsdp.weight_gradient(each)[0].fill_(1)

    def capture(function, may_write):
        return TapeBackend().capture(function, [*map(range_of, weights), *may_write])

    recordings = writes.Recordings(capture, backward, weights, contextlib.nullcontext, [].append)
    for others in (weights[::-1], weights[:1], [*weights, weights[0]]):
        asked[:] = others
        with pytest.raises(CaptureRefused, match="needs other weight gradients than before"):
            recordings.run(poisoned=False)


class Asks(nn.Module):
    """Asks where to write the gradient of `weight` too early."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        weft.fsdp.weight_gradient(self.weight)[0].zero_()
        return Writing.apply(x, self.weight, by_helper, nothing)


@distributed(2)
def test_gradients_that_are_asked_for_in_forward_are_refused():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Asks())
    weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=tape("1")))
    for _ in range(4):
        net(torch.ones(2, WIDTH)).sum().backward()
        net.zero_grad()
    assert "a forward in it asks for gradients of weights" in str(weft.graph_report(net)["eager"])
