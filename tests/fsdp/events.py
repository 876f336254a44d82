"""What a step does, in the order in which it does it: equal results show none of it, and no clock is asked.

gather 1              the all-gather of unit "1" is issued
await gather 1        the computation that follows sees what it brought
outer gather 1        the same over the outer axis of a 2-D mesh, before the gather that starts from it
forward 1             the forward of unit "1" computes
backward 1            its backward computes
reduce 1              the reduction of its gradients is issued, over the shard axis
outer reduce 1        behind that, over the outer axis
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.comm import collectives
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.module import units_under


class Events(list[str]):
    """The events, as above. `behind`: of what was issued behind a ticket, that ticket's label. `groups`: the process
    groups of the gathers and of the reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: dict[str, str] = {}
        self.groups: dict[str, set[Any]] = {"gather": set(), "reduce": set()}
        self._labels: dict[Ticket, str] = {}

    @contextmanager
    def recording(self, net: nn.Module) -> Iterator[None]:
        """While entered, communication of `net` is noted, of each ticket only the first wait."""
        names = {
            group.channel: unit.name.split(".")[-1] or "root" for unit in units_under(net) for group in unit.groups
        }
        assert len(names) == len(units_under(net)), "each unit has one group, with a channel of its own"
        run, wait = Lane.run, Ticket.wait

        def issue(lane: Lane, collective: Any, *args: Any, **options: Any) -> Ticket:
            ticket = run(lane, collective, *args, **options)
            kind = "gather" if collective is collectives.all_gather else "reduce"
            label = f"{'outer ' * (lane.name == 'outer')}{kind} {names[options['channel']]}"
            self.groups[kind].update(each for each in args if isinstance(each, dist.ProcessGroup))
            if options.get("after") is not None:
                self.behind[label] = self._labels[options["after"]]
            self._labels[ticket] = label
            self.append(label)
            return ticket

        def await_(ticket: Ticket) -> None:
            wait(ticket)
            if ticket in self._labels:
                self.append(f"await {self._labels.pop(ticket)}")

        with mock.patch.object(Lane, "run", issue), mock.patch.object(Ticket, "wait", await_):
            yield

    def take(self) -> "Order":
        """What happened since the last time."""
        taken = Order(self)
        self.clear()
        return taken


class Order(list[str]):
    """Events of one pass."""

    def goes(self, *labels: str) -> bool:
        """Whether each of `labels` happened once, in this order, whatever else between them."""
        assert all(self.count(label) == 1 for label in labels), f"not once each: {labels} in {self}"
        places = [self.index(label) for label in labels]
        return places == sorted(places)


class _Mark(torch.autograd.Function):
    """The identity, which notes when it is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: Events, name: str) -> torch.Tensor:
        ctx.events, ctx.name = events, name
        events.append(f"forward {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.events.append(f"backward {ctx.name}")
        return gradient, None, None


class Layer(nn.Module):
    """A product, noted."""

    def __init__(self, events: Events, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self._events, self._name = events, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Mark.apply(self.linear(x), self._events, self._name))


class Chain(nn.Module):
    """Layers "0", "1", ... between the root's "embed" and "head"; `recompute` as in `nets.Net`."""

    def __init__(self, depth: int = 4, recompute: str | None = None) -> None:
        super().__init__()
        self.events = Events()
        self.embed, self.head = Layer(self.events, "embed"), Layer(self.events, "head")
        self.layers = nn.ModuleList(Layer(self.events, str(number)) for number in range(depth))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


def chain(depth: int = 4, recompute: str | None = None, **options: Any) -> Chain:
    """One unit per layer, the root last."""
    torch.manual_seed(0)
    net = Chain(depth, recompute)
    for layer in net.layers:
        weft.fully_shard(layer, **options)
    return weft.fully_shard(net, **options)


def steps(net: Chain, count: int, microbatches: int = 1) -> list[list[tuple[Order, Order]]]:
    """Train for `count` steps: of each, forward and backward of each microbatch, the last one announced as that."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    with net.events.recording(net):
        for _ in range(count):
            passes = []
            for number in range(microbatches):
                net.set_is_last_backward(number == microbatches - 1)
                loss = net(torch.ones(2, 6)).square().sum()
                forward = net.events.take()
                loss.backward()
                passes.append((forward, net.events.take()))
            optimizer.step()
            optimizer.zero_grad()
            found.append(passes)
    return found


def count(passes: Sequence[tuple[Order, Order]], label: str) -> int:
    """How often something happened in a step."""
    return sum(each.count(label) for both in passes for each in both)
