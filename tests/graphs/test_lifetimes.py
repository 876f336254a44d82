"""What comes between captures, replays and their backwards: writes, other modes, other buffers, models that go. Without
ranks."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import weft
from tests.graphs.test_backward import WIDTH, Decays, rows
from tests.graphs.test_hooks import poisoned
from tests.graphs.test_keys import Always
from weft.fsdp import weight_gradient
from weft.graphs.call import GraphedCall
from weft.graphs.places import range_of
from weft.graphs.table import GraphTable
from weft.graphs.tape import TapeBackend
from weft.graphs.writes import Targets, Writes
from weft.overlap.wgrad import DelayedWeights


def part_of(make):
    """A graphed module, with three calls made."""
    torch.manual_seed(0)
    part, owner = make(), Always()
    call = GraphedCall(owner, part, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
    for step in range(3):
        y = part(rows(step).requires_grad_())
        y.sum().backward()
        call.enable()
        part.zero_grad()
    return part, call, owner


def test_a_replay_that_writes_to_a_buffer_is_seen_by_eager_backwards_that_read_it():
    part, call, _owner = part_of(Decays)
    eager = part(rows(0, 7, WIDTH))  # of other inputs
    part(rows(1).requires_grad_())
    assert call.replays == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        eager.sum().backward()


class Doubles(nn.Module):
    """Autograd saves nothing for its backward."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * 2 + self.bias


def test_a_second_backward_that_nothing_retained_is_refused():
    part, call, _owner = part_of(Doubles)
    y = part(rows(0).requires_grad_())
    assert call.replays == 2
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    later = part(rows(1).requires_grad_())
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    later.sum().backward()


def test_calls_under_delayed_weights_have_a_capture_of_their_own():
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH)
    part, owner = copy.deepcopy(plain), Always()
    call = GraphedCall(owner, part, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
    for step in range(8):
        delays = DelayedWeights()
        with delays if step % 2 else contextlib.nullcontext():
            y = part(rows(step))
            y.square().sum().backward()
        assert (part.weight.grad is None) == bool(step % 2)
        delays.run()
        call.enable()
        plain(rows(step)).square().sum().backward()
        assert torch.equal(part.weight.grad, plain.weight.grad)
        plain.zero_grad()
        part.zero_grad()
    assert (call.captures, call.replays) == (2, 4), call.eager


class Asking(torch.autograd.Function):
    """Writes the gradient of its weight itself; if its module is not steady, three times."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x)
        ctx.weight, ctx.module = weight, module
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        counts.append(1)
        if len(counts) < 4 or ctx.module.steady:
            buffer, accumulate = weight_gradient(ctx.weight)
            buffer.copy_((dy * ctx.saved_tensors[0]).sum(0) + (buffer if accumulate else 0))
        return dy * ctx.weight, None, None


counts: list[int] = []


class Asks(nn.Module):
    def __init__(self, steady):
        super().__init__()
        self.weight, self.steady = nn.Parameter(torch.ones(WIDTH)), steady

    def forward(self, x):
        return Asking.apply(x, self.weight, self)


def test_a_backward_that_asks_for_other_gradients_than_before_is_refused():
    assert part_of(lambda: Asks(True))[1].replays == 1
    counts.clear()
    with pytest.raises(RuntimeError, match="needs other weight gradients"):
        part_of(lambda: Asks(False))


def test_buffers_of_other_strides_and_dtypes_at_one_address_have_recordings_of_their_own():
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad_added_to_main_grad = False
    writes, memory, keys = Writes([parameter]), torch.zeros(4, 4), set()
    writes.added = [parameter]
    for parameter.main_grad in (memory, memory.t(), memory.view(torch.int32)):
        keys.add(Targets(writes).key)
    assert len(keys) == 3
    with pytest.raises(RuntimeError, match="needs other weight gradients"):
        Targets(writes).answer(parameter)


def test_memory_that_moved_is_no_address_of_a_tape():
    given = torch.ones(4)
    doubled, tape = TapeBackend().capture(lambda: given * 2, [range_of(given)])
    given.fill_(3)
    tape.replay()
    assert torch.equal(doubled, torch.full((4,), 6.0))
    kept = given.untyped_storage()
    kept.resize_(0)
    kept.resize_(1 << 16)
    with pytest.raises(RuntimeError, match="has moved since its capture"):
        tape.replay()


def test_transforms_and_recomputations_are_reasons_to_be_eager():
    net, seen = nn.Sequential(nn.Linear(4, 4)), []
    settings = weft.Graphs(modules=["0"], backend="tape")
    table = GraphTable(settings, net, None, torch.device("cpu"))
    assert table.eager_because() is None

    def note(gradient):
        with torch.enable_grad():
            seen.append(table.eager_because())

    torch.func.vmap(lambda x: note(x) or x)(torch.ones(2))
    y = net(torch.ones(2, 4))
    y.register_hook(note)
    y.sum().backward()
    assert seen == ["torch.func transforms it", "a recomputation"]
    table.drop()


@pytest.mark.slow
def test_one_of_two_graphed_models_can_be_dropped_while_the_other_is_used():
    owners, nets = Always(), []
    for seed in range(2):
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        net = copy.deepcopy(plain)
        call = GraphedCall(owners, net, "forward", "part", lambda it: [*it.modules()], lambda parameter: False)
        nets.append((plain, net, call))

    def both(step, pairs):
        x = rows(step)
        for way in (0, 1):
            y = x
            for pair in pairs:
                y = pair[way](y)
            y.square().mean().backward()
        for plain, net, call in pairs:
            call.enable()
            for one, other in zip(plain.parameters(), net.parameters()):
                assert torch.equal(one.grad, other.grad)
            plain.zero_grad()
            net.zero_grad()

    with poisoned():
        for step in range(5):
            both(step, nets)
        gone = weakref.ref(nets[0][1][0].weight)
        nets[0][2].drop()
        del nets[0]
        gc.collect()
        assert gone() is None
        for step in range(3):
            both(step, nets)
    assert nets[0][2].replays == 4  # its input got no gradient any more
