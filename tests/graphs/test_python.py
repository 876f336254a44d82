"""The Python of a captured module: what a replay would not run, or would run as it was. Without ranks."""

import collections
import copy
import enum
import functools
import itertools
import math
import random
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from tests.graphs.test_keys import Always
from weft.graphs import attributes, walk
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
    return GraphedCall(owner, module, "forward", "scope", lambda it: [*it.modules()], lambda parameter: False), owner


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


def test_a_change_of_an_attribute_counts_once_however_many_shapes_the_inputs_have():
    module = Base()
    call, _owner = graphed(module)
    for module.factor in (1.0, 2.0, 3.0):
        for _ in range(3):
            for rows in (2, 3, 4):
                step(module, torch.ones(rows, 4, requires_grad=True))
            call.enable()
    assert (call.captures, call.replays) == (9, 15), call.eager


class Pair:
    """Has attributes in slots and in a dict, and is called."""

    __slots__ = ("__dict__", "left")
    kinds = {"a": [1.0]}

    def __init__(self):
        self.left, self.right = 1.0, 1.0

    def __call__(self, y):
        return y * self.left * self.right * self.kinds["a"][0]


class Settings:
    """Is never made."""

    scale = 1.0


class Hidden(nn.Module):
    """No child of a module, for it lies in a tuple."""

    def __init__(self, child=None):
        super().__init__()
        self.scale, self.child = 1.0, child

    def forward(self, y):
        return y * self.scale if self.child is None else self.child(y * self.scale)


class Row(tuple):
    """Unlike a plain tuple, has a `__dict__`."""


def unset():
    """A function whose closure has a variable without a value."""

    def multiplied(y):
        try:
            return y * factor
        except NameError:
            return y

    factor = 1.0
    del factor
    return multiplied


class Deep(Base):
    """Reads what lies in all kinds of places."""

    def __init__(self):
        super().__init__()
        self.pair, self.sign, self.kind = Pair(), 0.0, Settings
        self.hidden = (Hidden(Hidden()), {"a": [{"b": ({"scale": 1.0},)}]})
        self.table, self.times = {1: 1.0}, functools.partial(times, factors=[1.0])
        scale = [1.0]
        self.closed = lambda y: y * scale[0]
        self.scale = scale
        self.order = collections.OrderedDict(a=1.0, b=2.0)
        self.chosen, self.row, self.unset, self.named = {1.0}, Row([{"scale": 1.0}]), unset(), SimpleNamespace(old=1.0)
        self.function, self.bound = torch.sin, [1.0].index

    def forward(self, x):
        hidden, deep = self.hidden
        y = self.closed(self.times(hidden(self.pair(super().forward(x)))))
        y = y * self.kind.scale * deep["a"][0]["b"][0]["scale"] * self.table.get(1, 2.0)
        y = self.unset(self.function(y)) * next(iter(self.order.values())) + self.bound(1.0)
        y = y * max(self.chosen) * self.row[0]["scale"] * getattr(self.named, "new", 1.0)
        return y + math.copysign(1.0, self.sign) + (self.sign is False)


def times(y, factors):
    return y * factors[0]


DEEP = {
    "a slot": lambda module: setattr(module.pair, "left", 3.0),
    "a callable object": lambda module: setattr(module.pair, "right", 3.0),
    "what an object's class has": lambda module: module.pair.kinds.update(a=[3.0]),
    "a class": lambda module: setattr(module.kind, "scale", 3.0),
    "a module that is no child": lambda module: setattr(module.hidden[0], "scale", 3.0),
    "a module inside a module that is no child": lambda module: setattr(module.hidden[0].child, "scale", 3.0),
    "seven levels down": lambda module: module.hidden[1]["a"][0]["b"][0].update(scale=3.0),
    "a key": lambda module: (module.table.clear(), module.table.update({2: 1.0})),
    "an argument of a partial": lambda module: module.times.keywords["factors"].__setitem__(0, 3.0),
    "what a closure has": lambda module: module.closed.__closure__[0].cell_contents.__setitem__(0, 3.0),
    "another closure": lambda module: setattr(module.closed.__closure__[0], "cell_contents", [3.0]),
    "a variable that gets its value": lambda module: setattr(module.unset.__closure__[0], "cell_contents", 3.0),
    "an element of a set": lambda module: (module.chosen.clear(), module.chosen.add(3.0)),
    "what a tuple with attributes has": lambda module: module.row[0].update(scale=3.0),
    "the name of an attribute": lambda module: (delattr(module.named, "old"), setattr(module.named, "new", 3.0)),
    "a function of torch": lambda module: setattr(module, "function", torch.tanh),
    "a method of a list": lambda module: setattr(module, "bound", module.bound.__self__.count),
    "a sign": lambda module: setattr(module, "sign", -0.0),
    "a type": lambda module: setattr(module, "sign", False),
    "an order": lambda module: module.order.move_to_end("a"),
}


@pytest.mark.parametrize("change", DEEP.values(), ids=DEEP)
def test_what_changes_deep_inside_leads_to_a_new_capture(change):
    def make():
        Settings.scale, Pair.kinds = 1.0, {"a": [1.0]}
        return Deep()

    _, call = run(make, at_five(change))
    assert (call.captures, call.replays) == (2, 5), call.eager


class Kept:
    """A descriptor."""

    def __init__(self, value):
        self.value = value

    def __get__(self, owner, kind=None):
        return self.value


class Kind(enum.Enum):
    ONE = {"scale": 1.0}


HELD = {}
"""What `holds` made last: its module refers to none of it by an attribute."""


def holds():
    """A module that reads what its methods, descriptors, members of enums, references and keys hold."""
    inside = {name: [1.0] for name in ("method", "default", "property", "cached", "before", "counted")}
    kept = Kept(1.0)
    HELD.update(inside, kept=kept, referred=Settings())
    Kind.ONE.value.update(scale=1.0)

    class Holds(Base):
        descriptor = kept

        def __init__(self):
            super().__init__()
            self.codes, self.kind, self.keys = [lambda y: y * 1.0], Kind.ONE, {Settings(): 1}
            self.reference, self.number = weakref.ref(HELD["referred"]), numpy.float32(1.0)
            self.factory = collections.defaultdict(lambda: 1.0)
            self.cached = functools.lru_cache(lambda: inside["cached"][0])

        @property
        def held(self):
            return inside["property"][0]

        def times(self, y, by=inside["default"], *, also={"scale": 1.0}):  # noqa: B006  # it is the case
            return y * by[0] * also["scale"] * inside["method"][0] * self.held * self.descriptor

        def forward(self, x):
            y = self.codes[0](self.times(super().forward(x))) * self.kind.value["scale"] * next(iter(self.keys)).scale
            y = y * self.reference().scale * float(self.number) * self.factory.default_factory() * self.cached()
            return y

    module = Holds()
    before = module.forward
    module.forward = lambda x: before(x) * inside["before"][0]
    return module


HOLDERS = {
    "what a method's closure has": lambda module: HELD["method"].__setitem__(0, 3.0),
    "what a property's closure has": lambda module: HELD["property"].__setitem__(0, 3.0),
    "what a default has": lambda module: HELD["default"].__setitem__(0, 3.0),
    "what a default of a keyword has": lambda module: type(module).times.__kwdefaults__["also"].update(scale=3.0),
    "other defaults": lambda module: setattr(type(module).times, "__defaults__", ([3.0],)),
    "what a descriptor has": lambda module: setattr(HELD["kept"], "value", 3.0),
    "the closure of a forward that was patched before": lambda module: HELD["before"].__setitem__(0, 3.0),
    "the code of a function": lambda module: module.codes.__setitem__(0, lambda y: y * 3.0),
    "the value of an enum's member": lambda module: Kind.ONE.value.update(scale=3.0),
    "what is weakly referred to": lambda module: setattr(HELD["referred"], "scale", 3.0),
    "what a key has": lambda module: setattr(next(iter(module.keys)), "scale", 3.0),
    "what a default dict makes": lambda module: setattr(module.factory, "default_factory", lambda: 3.0),
    "what a cached function has": lambda module: (HELD["cached"].__setitem__(0, 3.0), module.cached.cache_clear()),
    "a number of NumPy": lambda module: setattr(module, "number", numpy.float32(3.0)),
    "a method of the class": lambda module: setattr(type(module), "times", lambda self, y: y * 3.0),
}


@pytest.mark.parametrize("change", HOLDERS.values(), ids=HOLDERS)
def test_what_functions_and_references_hold_leads_to_a_new_capture(change):
    _, call = run(holds, at_five(change))
    assert (call.captures, call.replays) == (2, 5), call.eager


def test_a_class_that_gets_another_forward_is_captured_with_it():
    class Patched(Base):
        pass

    def change(module):
        type(module).forward = lambda self, x: self.linear(x) * 3

    def make():
        Patched.forward = Base.forward
        return Patched()

    _, call = run(make, at_five(change))
    assert (call.captures, call.replays) == (2, 5), call.eager


def test_a_capture_leaves_a_closure_as_it_was():
    def make():
        calls = 0

        class Counts(Base):
            def forward(self, x):
                nonlocal calls
                calls += 1
                return super().forward(x) * calls

        return Counts()

    _, call = run(make)
    assert call.captures == 0 and "it sets attributes" in call.refused, call.refused


@pytest.mark.parametrize("make", [Settings, collections.deque])
def test_a_weak_proxy_cannot_be_compared(make):
    there = make()
    _, call = run(Base, lambda module, number: setattr(module, "proxy", weakref.proxy(there)))
    assert call.captures == 0 and "ProxyType" in call.refused, call.refused


class Laid(Base):
    """Has a buffer whose layout may change where it lies."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))

    def forward(self, x):
        return super().forward(x) @ self.table * self.table.sum()


LAYOUTS = {
    "transposed": lambda module: setattr(module, "table", module.table.t()),
    "transposed in place": lambda module: module.table.t_(),
    "rows of zeros": lambda module: setattr(module, "table", module.table[:1].expand(4, 4)),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_a_buffer_that_gets_another_layout_at_its_address_leads_to_a_new_capture(change):
    _, call = run(Laid, at_five(change))
    assert (call.captures, call.replays) == (2, 5), call.eager


def test_a_forward_that_turns_a_buffer_is_eager():
    class Turns(Laid):
        def forward(self, x):
            self.table.t_()
            return super().forward(x)

    _, call = run(Turns)
    assert call.captures == 0
    assert "changes the shape of a tensor that the call did not create" in call.refused, call.refused


def test_equal_values_in_new_objects_need_no_capture():
    def renewed(module, number):
        module.factor, module.options = float("1.0"), {"scale": float("1.0")}
        module.cfg = SimpleNamespace(scale=float("1.0"))

    _, call = run(Base, renewed)
    assert (call.captures, call.replays) == (1, 6), call.eager
    module = Base()
    found = attributes.Attributes([module])
    renewed(module, 0)
    assert found.same() and found._walk.same()  # the next comparison is fast again


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return x * self.scale + self.offset


def test_a_child_that_comes_later_is_captured_with_its_weights_and_buffers():
    def written(module, number):
        if number == 4:
            module.act = Grown()
        if number == 6:
            with torch.no_grad():
                module.act.scale.mul_(2)
                module.act.offset.mul_(2)

    _, call = run(Base, written)
    assert call.captures == 2 and call.replays >= 4, call.eager


class Opaque(Base):
    """Reads what is no attribute."""

    def __init__(self, state):
        super().__init__()
        self.cfg = SimpleNamespace(scale=1.0, state=state)

    def forward(self, x):
        state = self.cfg.state
        return super().forward(x) * float(state[0] if isinstance(state, numpy.ndarray) else next(state, 1.0))


OPAQUE = {
    "ndarray": lambda: numpy.ones(2),
    "count": lambda: itertools.count(1),
    "generator": lambda: (i for i in (1, 2)),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_state_that_cannot_be_compared_keeps_a_module_eager(kind):
    def between(module, number):
        if number == 5 and kind == "ndarray":
            module.cfg.state[0] = 2

    _, call = run(lambda: Opaque(OPAQUE[kind]()), between)
    words = f"it may read state that cannot be compared: Opaque.cfg.state is a {kind}"
    assert call.replays == 0 and call.eager[words] > 0, call.eager


def test_more_state_than_can_be_compared_before_each_call_keeps_a_module_eager(monkeypatch):
    monkeypatch.setattr(walk, "MOST", 200)
    _, call = run(Base, lambda module, number: module.options.update({str(each): each for each in range(200)}))
    assert call.replays == 0 and "it may read more values than the 200 that are compared before each call" in call.eager


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mixtral", "GPT2"])
def test_blocks_of_hugging_face_can_be_compared(kind):
    import transformers

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(num_attention_heads=2, **sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    found = attributes.Attributes([*model.modules()])
    assert found.same() and found.difference() is None
    config.initializer_range /= 2
    assert not found.same() and "initializer_range" in found.difference()


def nested(depth):
    found = ()
    for _ in range(depth):
        found = (found,)
    return found


@pytest.mark.parametrize("much", [(1.0,) * 6000, nested(3000)], ids=["long", "deep"])
def test_what_tuples_have_is_counted_and_bounded(much):
    _, call = run(Base, lambda module, number: setattr(module, "much", (much, number)), steps=3)
    assert call.captures == 0 and call.refused.startswith("it may read"), call.refused


def test_attributes_that_change_with_each_call_end_the_captures_by_name():
    _, call = run(Base, lambda module, number: setattr(module, "factor", 1.0 + number), steps=10)
    assert call.captures == 5 and call.replays == 0
    assert any("change between calls (Base.factor)" in each for each in call.eager), call.eager


@pytest.mark.parametrize("where", [lambda module: module.linear, lambda module: module.hidden[0]])
def test_a_hook_on_a_module_inside_ends_the_replays(where):
    doubled = lambda module, args, output: output * 2  # noqa: E731
    _, call = run(Deep, at_five(lambda module: where(module).register_forward_hook(doubled)))
    assert (call.captures, call.replays) == (1, 3)
    assert "a module inside it has hooks, which a replay would not run" in call.eager


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
    (Drops, "random numbers from Python or NumPy"),
    (DropsByNumPy, "random numbers from Python or NumPy"),
    (Hooks, "a hook on one of its gradients would not run"),
]


@pytest.mark.parametrize(("make", "reason"), SIDE_EFFECTS, ids=[make.__name__ for make, _ in SIDE_EFFECTS])
def test_a_forward_with_side_effects_stays_eager_and_has_each_once(make, reason):
    module, call = run(make)
    assert call.replays == 0 and any(reason in each for each in call.eager), call.eager
    assert len(module.seen) == (8 if make in (Appends, Hooks) else 0)
    assert make is not CountsInItsClass or make.calls == 16  # of both modules


class Slotted:
    __slots__ = ("later",)


class Adds(Base):
    """Adds to everything that a capture restores."""

    def __init__(self):
        super().__init__()
        self.chosen, self.queue, self.slotted = {1}, collections.deque([1]), Slotted()

    def forward(self, x):
        self.chosen.add(2)
        self.queue.append(2)
        self.added = type(self).added_to_class = self.slotted.later = 1
        return super().forward(x)


def test_what_a_forward_adds_can_be_taken_away_again():
    module = Adds()
    found = attributes.Attributes([module])
    module(torch.ones(2, 4))
    assert not found.same()
    found.restore()
    assert found.same()
    assert (module.chosen, module.queue) == ({1}, collections.deque([1]))
    assert not any(map(hasattr, (module, Adds, module.slotted), ("added", "added_to_class", "later")))


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
    assert torch.equal(other(x), other.act(other.linear.bias.repeat(2, 1)) * 2)
    assert not torch.equal(other(x), module(x))


def test_a_dropped_call_leaves_the_forward_that_a_user_had_set():
    module = Base()
    patched = module.forward = lambda x: module.linear(x) * 2
    call, _owner = graphed(module)
    assert module.forward is call
    call.drop()
    assert module.forward is patched


class Signed(Base):
    def forward(self, x, number):
        return self.linear(x) * float(numpy.copysign(1.0, number))


@pytest.mark.parametrize("kind", [float, numpy.float64])
def test_minus_zero_is_a_number_of_its_own_and_nan_is_one(kind):
    module, numbers = Signed(), [*map(kind, (0.0, -0.0, float("nan")))]
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
