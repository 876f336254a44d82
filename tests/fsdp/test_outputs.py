"""What a unit may return: backward finds the tensors, wherever they are, or the unit says what it cannot return."""

import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp.trees import map_tensors, tensors_in


class Pair(NamedTuple):
    x: torch.Tensor
    other: Any = None


@dataclass
class Plain:
    x: torch.Tensor
    other: Any = None
    derived: Any = field(init=False, default="made")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    other: Any = None


class Slots:
    __slots__ = ("__weakref__", "other", "x")

    def __init__(self, x: torch.Tensor, other: Any = None) -> None:
        self.x, self.other = x, other


class Endless:
    """An object that leads back to itself, and to a module."""

    def __init__(self, x: torch.Tensor, other: Any = None) -> None:
        self.held = SimpleNamespace(back=self, module=nn.Linear(2, 2), x=x)
        self.other = other

    @property
    def x(self) -> torch.Tensor:
        return self.held.x


class Record(dict):
    """A dict that torch's pytree does not know."""


class Row(list):
    """Likewise a list."""


REBUILT = [Pair, Plain, Frozen]
LOOKED_INTO = [Slots, Endless, lambda x, other=None: SimpleNamespace(x=x, other=other)]
CONTAINERS = {
    "tuple": lambda x: (3, x, None),
    "dict of lists": lambda x: {"a": [x, "b"]},
    "OrderedDict": lambda x: OrderedDict(x=x),
    "deque": lambda x: deque([x]),
    "set": lambda x: {x},
    "Record": lambda x: Record(x=x),
    "Row": lambda x: Row([x]),
    **{getattr(kind, "__name__", str(kind)): kind for kind in (*REBUILT, *LOOKED_INTO)},
    "nested": lambda x: Plain(Pair(Frozen({"x": x}))),
}


def test_tensors_are_found_and_changed_wherever_they_are():
    x = torch.ones(2)
    for name, make in CONTAINERS.items():
        assert [tensor is x for tensor in tensors_in(make(x), hidden=True)] == [True], name
    for name in ("tuple", "dict of lists", "OrderedDict", "deque", "Pair", "Plain", "Frozen", "nested"):
        value = CONTAINERS[name](x)
        changed = map_tensors(torch.neg, value, in_dataclasses=True)
        assert type(changed) is type(value)
        assert [tensor.tolist() for tensor in tensors_in(changed, hidden=True)] == [[-1, -1]], name
        assert [tensor.tolist() for tensor in tensors_in(value, hidden=True)] == [[1, 1]], name
        assert map_tensors(lambda tensor: tensor, value, in_dataclasses=True) is value, name
    unchanged = [1]
    assert map_tensors(torch.neg, {"x": x, "list": unchanged})["list"] is unchanged


class Wraps(nn.Module):
    """A block whose output `wrap` hides."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.block = nets.Block(13, 29)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.block(x))


class Chain(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first, self.second = Wraps(wrap), Wraps(wrap)

    def forward(self, x: torch.Tensor) -> Any:
        for part in (self.first, self.second):
            (x,) = tensors_in(part(x), hidden=True)
        return self.second.wrap(x)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_hidden_outputs_train_like_one_process(strategy):
    from transformers.modeling_outputs import BaseModelOutput  # takes a while, in every worker

    torch.manual_seed(1)
    batches = torch.randn(2, 4, 13, dtype=torch.float64)
    for name, wrap in {**CONTAINERS, "of transformers": lambda x: BaseModelOutput(x)}.items():
        torch.manual_seed(0)
        plain = Chain(wrap).double()
        torch.manual_seed(0)
        net = Chain(wrap).double()
        for part in (net.first, net.second, net):
            weft.fully_shard(part, strategy=strategy)
        for batch in batches:
            for model, rows in ((plain, batch), (net, batch.chunk(2)[dist.get_rank()])):
                model.zero_grad()
                (output,) = tensors_in(model(rows), hidden=True)
                output.square().mean().backward()
            for p, expected in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(nets.full(p.grad), expected.grad, msg=lambda text, n=name: f"{n}: {text}")
        assert weft.memory_report(net)["transient"]["gathered weights"]["live"] == 0


@pytest.mark.slow
@distributed(2)
def test_output_dtype_reaches_into_containers_and_refuses_what_it_cannot_replace():
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    x = torch.ones(2, 13)
    for name, wrap in CONTAINERS.items():
        net = weft.fully_shard(Wraps(wrap), mp_policy=policy)
        if name in ("set", "Record", "Row", *(getattr(kind, "__name__", str(kind)) for kind in LOOKED_INTO)):
            with pytest.raises(TypeError, match=r"output_dtype=torch.float32: .*return a dataclass, or register"):
                net(x)
            continue
        output = net(x)
        (inside,) = tensors_in(output, hidden=True)
        assert type(output) is type(wrap(x)) and inside.dtype == torch.float32
        assert not isinstance(output, Plain) or output.derived == "made"


@distributed(2)
def test_what_computes_later_is_refused():
    def lazily(x):
        yield x

    async def awaited(x):
        return x

    for wrap, kind in ((lazily, "generator"), (lambda x: map(torch.neg, [x]), "map"), (awaited, "coroutine")):
        net = weft.fully_shard(Wraps(wrap))
        with pytest.raises(TypeError, match=f"forward of Wraps returned a {kind}.*return a list"):
            net(torch.ones(2, 13))
        net.wrap = lambda x: x
        net(torch.ones(2, 13)).sum().backward()


@distributed(2)
def test_a_tensor_that_leaves_other_than_as_an_output_is_an_error():
    class Leaks(Wraps):
        def forward(self, x):
            self.leaked = self.block(x)
            return self.leaked.detach()

    def loss_of(blocks):
        return blocks(torch.ones(2, 13)).sum() + blocks[1].leaked.square().sum()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, 13), Leaks(None), nn.Linear(13, 13))

    plain = make()
    loss_of(plain).backward()
    for strategy in ("optim", "optim_grads_params"):
        blocks = make()
        weft.fully_shard(blocks[1], reshard_after_forward=True, strategy=strategy)
        weft.fully_shard(blocks, strategy=strategy)
        loss = loss_of(blocks)
        if strategy == "optim_grads_params":
            with pytest.raises(RuntimeError, match=r"'block.down.weight' of 1 \(Leaks\) after its weights were freed"):
                loss.backward()
            continue
        loss.backward()  # the weights have stayed
        torch.testing.assert_close(
            nets.whole({name: p.grad for name, p in blocks.named_parameters()}),
            {name: p.grad for name, p in plain.named_parameters()},
        )


@distributed(2)
def test_arguments_that_a_unit_fills_are_the_caller_s():
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, seen, carrier):
            seen.append(x.dtype)
            carrier.other = carrier.x.dtype
            return self.linear(x)

    net = weft.fully_shard(Fills(), mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16))
    seen: list = []
    carrier = Plain(torch.ones(2))
    net(torch.ones(2, 3, requires_grad=True), seen, carrier)
    assert seen == [torch.bfloat16] and carrier.other == torch.float32


def test_lists_and_dicts_of_differentiable_inputs_are_the_caller_s_after_the_call(world):
    class Fills(nn.Linear):
        def forward(self, given):
            y = super().forward(given["rows"][0])
            given["rows"].append(y)
            given["output"] = y
            del given["unused"]
            return y

    world(0, 2)
    x = torch.ones(2, 4, requires_grad=True)
    given = {"rows": (rows := [x]), "unused": x}
    y = weft.fully_shard(Fills(4, 4))(given)
    assert [*given] == ["rows", "output"] and given["rows"] is rows and given["output"] is y
    assert len(rows) == 2 and rows[0] is x and rows[1] is y


@distributed(2)
def test_hidden_outputs_do_not_keep_a_graph_alive():
    net = weft.fully_shard(Wraps(Slots))
    output = net(torch.ones(2, 13))
    gone = weakref.ref(output)
    del output
    assert gone() is None
    assert not net._weft_unit.calls
