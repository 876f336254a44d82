"""The Python of a captured module: what a replay would not run, or would run as it was. Without ranks."""

import copy
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from tests.graphs.test_keys import Always
from weft.graphs.call import GraphedCall


class Base(nn.Module):
    """Has all that a user may change between two calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.act = nn.Linear(4, 4), nn.GELU()
        self.factor, self.seen = 1.0, []
        self.cfg, self.options = SimpleNamespace(scale=1.0), {"scale": 1.0}
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.act(self.linear(x)) * self.factor * self.cfg.scale * self.options["scale"]
        return y * 2 if self.act.training else y


def graphed(module):
    owner = Always()
    return GraphedCall(owner, module, "forward", "scope", [*module.modules()], lambda parameter: False), owner


def step(module, x):
    """Output, gradients and buffers."""
    y = module(x)
    y.square().sum().backward()
    found = [y.detach(), *(torch.zeros(0) if each.grad is None else each.grad for each in (x, *module.parameters()))]
    module.zero_grad()
    return found + [each.clone() for each in module.buffers()]


def run(make, between=lambda module, number: None, call_of=step, steps=8):
    """Both are bit-equal; -> the graphed module and its call."""
    expected = []
    for graphs in (False, True):
        random.seed(0)
        numpy.random.seed(0)
        module = make()
        call, owner = graphed(module) if graphs else (None, None)
        for number in range(steps):
            between(module, number)
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).requires_grad_()
            found = call_of(module, x)
            if not graphs:
                expected.append(found)
                continue
            call.enable()
            for one, other in zip(found, expected[number], strict=True):
                assert torch.equal(one, other), (number, call.eager)
    del owner
    return module, call


def at_five(change):
    return lambda module, number: change(module) if number == 5 else None


def patch(module):
    before = module.linear.forward
    module.linear.forward = lambda x: before(x) * 3


CHANGES = {
    "a number": lambda module: setattr(module, "factor", 2.0),
    "a child": lambda module: setattr(module, "act", nn.ReLU()),
    "the mode of a child": lambda module: module.act.eval(),
    "a configuration": lambda module: setattr(module.cfg, "scale", 3.0),
    "a dict": lambda module: module.options.update(scale=3.0),
    "a patched forward": patch,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attributes_that_change_between_calls_lead_to_a_new_capture(change):
    _, call = run(Base, at_five(change))
    assert (call.captures, call.replays) == (2, 5), call.eager


def test_attributes_that_change_with_each_call_end_the_captures_by_name():
    _, call = run(Base, lambda module, number: setattr(module, "factor", 1.0 + number), steps=10)
    assert call.captures == 5 and call.replays == 0
    assert any("differ from call to call (Base.factor)" in each for each in call.eager), call.eager


def test_a_hook_on_a_module_inside_ends_the_replays():
    doubled = lambda module, args, output: output * 2  # noqa: E731
    _, call = run(Base, at_five(lambda module: module.linear.register_forward_hook(doubled)))
    assert (call.captures, call.replays) == (1, 3)
    assert "a module inside of it has hooks, which a replay would not run" in call.eager


def test_a_module_that_freezes_every_other_step_is_captured_once_for_each():
    toggle = lambda module, number: module.linear.bias.requires_grad_(number % 2 == 0)  # noqa: E731
    _, call = run(Base, toggle)
    assert (call.captures, call.replays) == (2, 4), call.eager


class Appends(Base):
    def forward(self, x):
        self.seen.append(len(self.seen))
        return super().forward(x)


class Counts(Base):
    def forward(self, x):
        self.factor += 1
        return super().forward(x)


class CountsInItsClass(Base):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class Replaces(Base):
    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return super().forward(x) + self.mean


class Drops(Base):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else x * 1


class DropsByNumPy(Base):
    def forward(self, x):
        return super().forward(x) if numpy.random.rand() < 0.5 else x * 1


class Hooks(Base):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda gradient: self.seen.append(1))
        return y


SIDE_EFFECTS = [
    (Appends, "sets attributes of its modules, which a replay would not (Appends.seen)"),
    (Counts, "sets attributes of its modules, which a replay would not (Counts.factor)"),
    (CountsInItsClass, "sets attributes of its modules, which a replay would not (CountsInItsClass.calls)"),
    (Replaces, "sets attributes of its modules, which a replay would not (Replaces.mean)"),
    (Drops, "random numbers of Python or NumPy"),
    (DropsByNumPy, "random numbers of Python or NumPy"),
    (Hooks, "a hook on a gradient in it would not run"),
]


@pytest.mark.parametrize(("make", "reason"), SIDE_EFFECTS, ids=[make.__name__ for make, _ in SIDE_EFFECTS])
def test_a_forward_with_side_effects_stays_eager_and_has_each_once(make, reason):
    module, call = run(make)
    assert call.replays == 0 and any(reason in each for each in call.eager), call.eager
    assert len(module.seen) == (8 if make in (Appends, Hooks) else 0)
    assert make is not CountsInItsClass or make.calls == 16  # of both modules


class Leaves(Base):
    """Leaves a loss in what it is given."""

    def forward(self, x, losses):
        y = super().forward(x)
        if isinstance(losses, dict):
            losses["z"] = y.mean()
        else:
            losses.append(y.mean())
        return y


@pytest.mark.parametrize("empty", [list, dict])
def test_a_list_or_dict_that_a_forward_fills_keeps_it_eager(empty):
    def call_of(module, x):
        losses = empty()
        y = module(x, losses)
        (y.sum() + sum(losses.values() if empty is dict else losses)).backward()
        found = [y.detach(), *(each.grad for each in module.parameters())]
        module.zero_grad()
        return found

    _, call = run(Leaves, call_of=call_of)
    assert "it changes a list or dict among its arguments, which a replay would not" in call.eager


def test_a_copy_of_a_module_computes_with_its_own_weights():
    module, call = run(Base)
    assert call.replays
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.linear.weight.zero_()
    x = torch.ones(2, 4)
    assert torch.equal(other(x), other.act(other.linear.bias.expand(2, 4)) * 2)
    assert not torch.equal(other(x), module(x))


class Signed(Base):
    def forward(self, x, number):
        return self.linear(x) * float(numpy.copysign(1.0, number))


def test_minus_zero_is_a_number_of_its_own_and_nan_is_one():
    module, numbers = Signed(), (0.0, -0.0, float("nan"))
    call, _owner = graphed(module)
    x = torch.ones(1, 4)
    for number in numbers * 4:
        y = module(x, number)
        assert torch.equal(y, module.linear(x) * float(numpy.copysign(1.0, number)))
        y.sum().backward()
        call.enable()
    assert (call.captures, call.replays) == (3, 6), call.eager


def test_a_sparse_input_stays_eager():
    class Sparse(Base):
        def forward(self, x):
            return torch.sparse.mm(x, self.linear.weight)

    def call_of(module, x):
        y = module(x.detach().to_sparse())
        y.sum().backward()
        found = [y.detach(), module.linear.weight.grad]
        module.zero_grad()
        return found

    _, call = run(Sparse, call_of=call_of)
    assert call.eager == {"an input has the layout torch.sparse_coo": 8}
