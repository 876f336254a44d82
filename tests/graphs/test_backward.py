"""Backwards of replays beside eager ones, bit for bit: what gets gradients, in which layout, and in which order they
are added; and what autograd refuses between a forward and its backward. Without ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from tests.graphs.test_hooks import poisoned
from tests.graphs.test_keys import Always
from weft.graphs import backward
from weft.graphs.call import GraphedCall

WIDTH = 37
"""Wide enough that another order of additions shows."""


class Net(nn.Module):
    """`outside` is used before, after and beside of the captured `part`."""

    def __init__(self, part):
        super().__init__()
        self.part, self.outside = part, nn.Linear(WIDTH, WIDTH)


def rows(step, *shape):
    return torch.randn(*(shape or (19, WIDTH)), generator=torch.Generator().manual_seed(step))


def compare(make, step_of, steps=8, owned=False):
    """Both runs are bit-equal, also in which gradients are None; -> the call. `owned`: gradients of
    weights are used up before the next forward."""
    torch.manual_seed(0)
    plain = make()
    net, owner = copy.deepcopy(plain), Always()
    call = GraphedCall(owner, net.part, "forward", "part", lambda it: [*it.modules()], lambda parameter: owned)
    with poisoned():
        for step in range(steps):
            (found, refused), (expected, words) = (outcome(step_of, each, step) for each in (net, plain))
            assert refused == words, (step, call.eager)
            assert len(found) == len(expected)
            for number, (one, other) in enumerate(zip(found, expected)):
                same = one is None if other is None else one is not None and torch.equal(one, other)
                assert same, (step, number, call.eager)
                assert one is None or one.stride() == other.stride(), (step, number)
            call.enable()
    assert call.captures == 1
    return call


def outcome(step_of, net, step):
    """What a step returns, and all gradients and buffers; and whether autograd refused it."""
    try:
        seen, refused = step_of(net, step), False
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        seen, refused = [], True
    seen = [each.detach().clone() for each in seen] + [None if it.grad is None else it.grad for it in net.parameters()]
    seen += [each.clone() for each in net.buffers()]
    net.zero_grad()
    return seen, refused


class Auxiliary(nn.Module):
    """Two outputs, with weights of their own; the second one has an infinite derivative at zero."""

    def __init__(self):
        super().__init__()
        self.main, self.aux = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.main(x), self.aux(x).relu().sum(0).sqrt()


def test_an_output_without_a_gradient_leaves_its_weights_without_one():
    def step_of(net, step):
        y, aux = net.part(net.outside(rows(step)))
        loss = aux.sum() if step % 4 == 3 else y.square().mean()
        (loss + aux.sum() if step % 2 == 0 else loss).backward()
        return y, aux

    call = compare(lambda: Net(Auxiliary()), step_of)
    assert call.replays == 6 and len(call.eager) == 2, call.eager


def test_gradients_that_arrive_in_other_layouts_are_those_of_eager_calls(monkeypatch):
    recorded = []
    record = backward.Backward.record

    def recording(self, samples):
        recorded.append(samples)
        return record(self, samples)

    monkeypatch.setattr(backward.Backward, "record", recording)

    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        loss = (y.sum(), (y.t() @ rows(step, 19, 7)).square().sum(), (rows(1, WIDTH, 19) * y.t()).square().sum())
        loss[step % 3].backward()
        return (y,)

    call = compare(lambda: Net(nn.Linear(WIDTH, WIDTH)), step_of)
    assert call.replays == 6 and len(call.eager) == 2, call.eager
    assert len(recorded) == 3  # each layout once


def test_more_forms_of_gradients_than_are_recorded_are_eager_and_right(monkeypatch):
    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        (y.sum() if step < 4 else y.square().sum()).backward()
        return (y,)

    monkeypatch.setattr(backward, "MOST", 1)
    call = compare(lambda: Net(nn.Linear(WIDTH, WIDTH)), step_of)
    assert call.replays == 6
    assert call.eager["the gradients of its outputs have more than 1 different layouts"] == 4, call.eager


class Added(nn.Module):
    """Weights whose gradients are views of the outputs' gradients, and the same one for two of them."""

    def __init__(self):
        super().__init__()
        self.linear, self.one, self.other = nn.Linear(WIDTH, WIDTH), *map(nn.Parameter, torch.randn(2, 19, WIDTH))

    def forward(self, x):
        return self.linear(x) + self.one + self.other, self.linear.weight.sum(0)


def test_gradients_of_weights_that_are_views_of_others_outlast_the_backward():
    def step_of(net, step):
        y, total = net.part(net.outside(rows(step)))
        (y.square().sum() + total.sum()).backward()
        return (y,)

    call = compare(lambda: Net(Added()), step_of, owned=True)
    assert call.replays == 6, call.eager


class Turned(nn.Module):
    """Changes the layout and the memory of tensors that it made."""

    def __init__(self):
        super().__init__()
        self.linear, self.cell = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        y = self.linear(x).t_().squeeze_()
        factor = x.detach().clone()
        factor.data = factor.data.t() * 2
        return self.cell((y * factor).t()[None])[0][0]


@pytest.mark.slow
def test_tensors_that_a_forward_gives_another_layout_are_replayed_with_it():
    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        y.square().mean().backward()
        return (y,)

    call = compare(lambda: Net(Turned()), step_of)
    assert call.replays == 6, call.eager


class Tied(nn.Module):
    """Uses its weight and its input several times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(torch.tanh(self.linear(x)) + x) * x
        return y + x, x


@pytest.mark.parametrize("tied", [False, True])
def test_uses_inside_are_added_to_those_outside_in_the_order_of_an_eager_backward(tied):
    def make():
        net = Net(Tied())
        if tied:
            net.outside.weight = net.part.linear.weight
        return net

    def step_of(net, step):
        x = net.outside(rows(step))
        before = torch.sin(x) * x
        y, same = net.part(x)
        y = net.outside(y) + torch.cos(x) * x + same * 3 + before + same.exp()
        y.square().mean().backward()
        return (y,)

    assert compare(make, step_of).replays == 6


class Frozen(nn.Module):
    """Its backward reads `factor` and `frozen`, and not its bias."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("factor", torch.ones(WIDTH))
        self.register_buffer("late", None)

    def forward(self, x):
        y = self.linear(x) * self.frozen * self.factor
        return y if self.late is None else y * self.late


class Decays(Frozen):
    """Writes to the buffer that its backward reads."""

    def forward(self, x):
        self.factor.mul_(0.9)
        return super().forward(x)


WRITES = {
    "a buffer": (Frozen, lambda part: part.factor.mul_(3), True),
    "a frozen parameter": (Frozen, lambda part: part.frozen.data_ptr() and part.frozen.mul_(3), True),
    "a weight": (Frozen, lambda part: part.linear.weight.mul_(3), True),
    "what no backward reads": (Frozen, lambda part: part.linear.bias.mul_(3), False),
    "a further forward": (Decays, lambda part: part(rows(0)), True),
}


@pytest.mark.parametrize(("make", "write", "refused"), WRITES.values(), ids=WRITES)
def test_writes_between_forward_and_backward_are_refused_as_by_an_eager_backward(make, write, refused):
    seen = []

    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        if step == 5:
            with torch.no_grad():
                write(net.part)
        try:
            y.square().mean().backward()
        except RuntimeError:
            seen.append(step)
            raise
        return (y,)

    assert compare(lambda: Net(make()), step_of).replays >= 5
    assert seen == ([5, 5] if refused else [])


def test_a_buffer_that_comes_later_is_read_from_then_on():
    def step_of(net, step):
        if step == 5:
            net.part.late = torch.full((WIDTH,), 2.0)
        y = net.part(net.outside(rows(step)))
        y.square().mean().backward()
        return (y,)

    torch.manual_seed(0)
    plain = Net(Frozen())
    net, owner = copy.deepcopy(plain), Always()
    call = GraphedCall(owner, net.part, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
    for step in range(9):
        assert torch.equal(step_of(net, step)[0], step_of(plain, step)[0])
        call.enable()
    assert (call.captures, call.replays) == (2, 5), call.eager


class Returns(nn.Module):
    """Its argument, its weight, one tensor twice, a number's worth of rows, and a view of its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        return y, y, x, self.linear.weight, y.sum(1, keepdim=True).expand(19, 5), x[:, :5]


def test_results_are_the_objects_and_have_the_layout_of_an_eager_call():
    def step_of(net, step):
        x = net.outside(rows(step))
        y, again, argument, weight, wide, view = net.part(x)
        assert again is y and argument is x and weight is net.part.linear.weight
        assert wide.stride() == (1, 0)
        if step == 5:
            view.mul_(2)
        loss = y.square().mean() + again.sin().sum() + (weight * argument[0]).sum() + (wide * rows(step, 19, 5)).sum()
        (loss + view.sum() + y.exp().mean()).backward()
        return (y, wide)

    torch.manual_seed(0)
    net, owner = Net(Returns()), Always()
    call = GraphedCall(owner, net.part, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
    for step in range(5):
        step_of(net, step)
        call.enable()
    assert call.replays == 3, call.eager
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_of(net, 5)  # an eager call writes to its argument
    compare(lambda: Net(Returns()), lambda net, step: step_of(net, step % 5))


class Recomputed(Auxiliary):
    """Counts what it computes, also again in a backward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        def counted(x):
            self.count.add_(1)
            return self.aux(x).sum(0) * 2

        return self.main(x), checkpoint(counted, x, use_reentrant=False)


def test_a_form_that_is_recorded_later_leaves_buffers_as_one_backward_does():
    def step_of(net, step):
        y, aux = net.part(net.outside(rows(step)))
        (y.sum() + aux.square().sum() if step in (3, 4) else y.sum()).backward()
        return y, aux

    assert compare(lambda: Net(Recomputed()), step_of).replays == 6


class Recurrent(nn.Module):
    """Its operator keeps more for a backward where gradients are computed."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x[None])[0][0]


def test_operators_that_depend_on_whether_gradients_are_computed_replay():
    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        y.square().mean().backward()
        return (y,)

    assert compare(lambda: Net(Recurrent()), step_of).replays == 6


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_chosen_weights_are_whole_in_the_pass_that_captures(way):
    """The caller's graph and that of the capture have nodes of their own: CUDA refuses nodes of another stream."""

    def step_of(net, step):
        weight = net.part.linear.weight
        node = get_gradient_edge(weight).node
        y, _ = net.part(net.outside(rows(step)) @ weight)
        assert get_gradient_edge(weight).node is node
        loss = (y @ weight).square().mean()
        if way == "grad":
            return (torch.autograd.grad(loss, weight)[0],)
        loss.backward(inputs=[weight])
        return ()

    compare(lambda: Net(Tied()), step_of)


class Elsewhere(nn.Module):
    """Has its weight twice: as a parameter, and in a list, as torch's recurrent layers have theirs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.flat = [self.linear.weight]

    def forward(self, x):
        return torch.tanh(self.linear(x)) @ self.flat[0]


def test_a_weight_that_a_module_also_has_in_a_list_gets_its_whole_gradient():
    def step_of(net, step):
        y = net.part(net.outside(rows(step)))
        y.square().mean().backward()
        return (y,)

    assert compare(lambda: Net(Elsewhere()), step_of).replays == 6


NODES = []


class Noting(Tied):
    """Notes the node that accumulates the gradients of its weight in a global variable, which no capture compares."""

    def forward(self, x):
        NODES.append(get_gradient_edge(self.linear.weight).node)
        return super().forward(x)


def test_a_capture_and_its_caller_share_no_node_that_accumulates_gradients():
    """Such a node belongs to the stream on which it was made, and CUDA refuses to capture a backward with others."""
    part, owner = Noting(), Always()
    call = GraphedCall(owner, part, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
    node = get_gradient_edge(part.linear.weight).node
    for step in range(2):
        NODES.clear()
        part(rows(step))[0].sum().backward()
    assert call.captures == 1
    eager, captured = NODES
    assert eager is node is not captured
    assert get_gradient_edge(part.linear.weight).node is node
