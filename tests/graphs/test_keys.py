"""Which calls one capture serves: those that an eager call would answer alike. Without ranks, beside eager calls."""

import copy

import pytest
import torch
from torch import nn

from tests.graphs.test_hooks import poisoned
from weft.graphs.call import GraphedCall
from weft.graphs.tape import TapeBackend


class Always:
    """An owner whose memory never moves."""

    in_schedule = False

    def __init__(self):
        self.backend = TapeBackend()

    def eager_because(self):
        return None

    def may_capture(self):
        return True


class Weighs(nn.Module):
    """Its result depends on all that can differ between two calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, other=None, factor=1.0):
        y = self.linear(x) * (factor if self.training else factor + 1)
        return y if other is None else y + 2 * other


class Two(Weighs):
    """Returns two tensors."""

    def forward(self, x):
        y = self.linear(x)
        return y * 2, y * 3


def pair(make):
    """A plain module, and a graphed copy with its call and the owner, which the call does not keep."""
    plain = make()
    module, owner = copy.deepcopy(plain), Always()
    call = GraphedCall(owner, module, "forward", "scope", lambda it: [*it.modules()], lambda parameter: False)
    return plain, module, call, owner


def results(module, arguments):
    """Of a forward and a backward: outputs, and gradients of inputs and weights."""
    arguments = [*arguments()]
    output = module(*arguments)
    output.square().sum().backward()
    tensors = [each for each in dict.fromkeys(arguments) if isinstance(each, torch.Tensor) and each.requires_grad]
    found = [output.detach(), *(each.grad for each in tensors), *(each.grad for each in module.parameters())]
    module.zero_grad()
    return found


def x(needs=True, seed=1):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_(needs)


def one_tensor_twice():
    tensor = x()
    return tensor, tensor


CALLS = {
    "number": [lambda: (x(), None, 2.0), lambda: (x(), None, 3.0)],
    "type of a number": [lambda: (x(), None, 1), lambda: (x(), None, True)],
    "one tensor twice": [one_tensor_twice, lambda: (x(), x(seed=2))],
    "needs no gradient": [lambda: (x(),), lambda: (x(needs=False),)],
    "strides": [lambda: (x(),), lambda: (x(needs=False).t().requires_grad_(),)],
    "None": [lambda: (x(),), lambda: (x(), x(seed=2))],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_calls_that_differ_have_captures_of_their_own_and_alike_ones_share_one(calls):
    plain, module, call, _owner = pair(Weighs)
    with poisoned():
        for _ in range(5):
            for arguments in calls:
                for found, expected in zip(results(module, arguments), results(plain, arguments), strict=True):
                    assert torch.equal(found, expected)
            call.enable()
    assert (call.captures, call.replays) == (2, 6), call.eager


def test_calls_with_more_signatures_than_are_captured_are_eager_and_counted():
    _, module, call, _owner = pair(Weighs)
    for _ in range(3):
        for factor in range(5):
            results(module, lambda factor=factor: (x(), None, factor))
        call.enable()
    assert (call.captures, call.replays) == (4, 4)
    assert call.eager["more than 4 different input signatures"] == 3


def test_training_is_part_of_what_differs_and_calls_under_autocast_stay_eager():
    plain, module, call, _owner = pair(Weighs)
    for _ in range(5):
        for training, cast in ((True, False), (False, False), (True, True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                found, expected = (results(each.train(training), lambda: (x(),)) for each in (module, plain))
            assert found[0].dtype == (torch.bfloat16 if cast else torch.float32)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        call.enable()
    assert (call.captures, call.replays) == (2, 6), call.eager
    assert call.eager["autocast is active around it"] == 5


def test_an_output_that_gets_no_gradient_adds_none_of_a_backward_before():
    plain, module, call, _owner = pair(Two)
    for step in range(5):
        for each in (plain, module):
            first, second = each(x(seed=step))
            (first.sum() if step == 4 else (first + second).sum()).backward()
        call.enable()
    assert call.replays == 3
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


def test_a_retained_graph_keeps_its_capture_until_it_is_gone():
    plain, module, call, _owner = pair(Weighs)
    for _ in range(3):
        results(module, lambda: (x(),))
        call.enable()
    retained = module(x())
    retained.square().sum().backward(retain_graph=True)
    module.zero_grad()
    results(module, lambda: (x(seed=2),))
    assert call.eager["its last forward waits for its backward"] == 1
    retained.square().sum().backward()
    plain(x()).square().sum().backward()
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)
    replays = call.replays
    results(module, lambda: (x(seed=2),))
    assert call.replays == replays + 1


def test_gradients_and_outputs_that_a_user_keeps_stay_as_they_are():
    _, module, call, _owner = pair(Weighs)
    for _ in range(3):
        results(module, lambda: (x(),))
        call.enable()
    kept = results(module, lambda: (x(),))
    before = [each.clone() for each in kept]
    results(module, lambda: (x(seed=5),))
    assert call.replays == 3
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
