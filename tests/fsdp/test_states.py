"""The three state machines of the engine: each does what its table says, and refuses everything else.

In a pretended world: what is computed there is noise, what happens to units is not.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later, throw
from tests.pool import distributed
from weft.errors import WeightsWritten
from weft.fsdp import hooks
from weft.fsdp import unit as weights
from weft.fsdp.driver import UNTIL_BACKWARD, USER, Hold
from weft.fsdp.gradients import group as gradients
from weft.fsdp.gradients.group import GroupGradients, Where
from weft.fsdp.parameter import SHARDED
from weft.fsdp.runtime import passes
from weft.fsdp.runtime.passes import Pass, Passes
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.runtime.runtime import Runtime
from weft.fsdp.unit import State, Unit
from weft.layout.trace import Event, Trace
from weft.memory.pool import Pool
from weft.quantize import mx


@pytest.fixture
def net(world) -> nets.Net:
    world(0, 2)
    return nets.shard(nets.make())


TOKENS = nets.data(1, 2)[0]


def backward(net: nn.Module, last: bool = True, sync: bool = True) -> None:
    net.set_is_last_backward(last)
    net.set_requires_gradient_sync(sync)
    nets.loss_of(net, TOKENS).backward()


def evaluate(net: nn.Module) -> None:
    with torch.no_grad():
        net(TOKENS)


def write(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)


def runtime_of(net: nn.Module) -> Runtime:
    return net._weft_driver.engine


@contextmanager
def hooked(module: nn.Module, hook: Callable, behind: bool = False) -> Iterator[None]:
    register = module.register_forward_hook if behind else module.register_forward_pre_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def visits(units: list[Unit]) -> Trace:
    """What a schedule that uses these units in turn says before it begins."""
    return Trace("schedule", tuple(Event(what, unit.number) for unit in units for what in ("use", "done")))


def illegal(transitions: dict[tuple[Any, str], Any], states: Any, more: tuple[str, ...] = ()) -> list[Any]:
    """Every pair of a state and an event that the table does not have."""
    events = dict.fromkeys([event for _, event in transitions])
    pairs = [(state, event) for state in states for event in (*events, *more) if (state, event) not in transitions]
    return [pytest.param(*pair, id=f"{pair[0].value}, {pair[1]}") for pair in pairs]


def legal(causes: dict[tuple[Any, str], Callable]) -> list[Any]:
    return [pytest.param(*pair, cause, id=f"{pair[0].value}, {pair[1]}") for pair, cause in causes.items()]


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def walked(monkeypatch) -> list[tuple[str, Any, str, Any]]:
    """The transitions of all units and gradients: whose, from, event, to."""
    found = []

    asked: list[Any] = []

    class Table(dict):
        """A table of transitions that notes which event was looked up last."""

        def get(self, key: tuple[Any, str]) -> Any:
            asked.append(key)
            return super().get(key)

    def watch(machine: Any, cls: type, attribute: str, whose: Callable[[Any], str]) -> None:
        def change(self: Any, state: Any) -> None:
            if attribute in vars(self) and asked and asked[-1][0] is vars(self)[attribute]:
                found.append((whose(self), *asked.pop(), state))
            vars(self)[attribute] = state

        monkeypatch.setattr(machine, "TRANSITIONS", Table(machine.TRANSITIONS))
        monkeypatch.setattr(cls, attribute, property(lambda self: vars(self)[attribute], change), raising=False)

    watch(weights, Unit, "state", str)
    watch(gradients, GroupGradients, "where", lambda each: str(each._plan.unit()))
    return found


MIDDLE = "blocks.1 (Block)"


def the_user_unshards(net: nets.Net) -> None:
    net.blocks[1].unshard(async_op=True)


def the_user_waits(net: nets.Net) -> None:
    net.blocks[1].unshard(async_op=True).wait()


def a_forward_beside_the_user(net: nets.Net) -> None:
    net.blocks[1].unshard()
    evaluate(net)


def the_user_lets_go(net: nets.Net) -> None:
    net.blocks[1].unshard()
    net.blocks[1].reshard()


def a_write_while_the_user_holds(net: nets.Net) -> None:
    net.blocks[1].unshard()
    with torch.no_grad():
        for group in net.blocks[1]._weft_unit.groups:
            for parameter in map(SHARDED, group.parameters):
                parameter.mul_(0.5)
    evaluate(net)


def there_is_no_memory(net: nets.Net) -> None:
    def take(pool: Pool, transient: Any) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Pool, "take", take)
        net.blocks[1].unshard()


WEIGHTS = {
    (State.AT_REST, "gather"): the_user_unshards,
    (State.ON_THE_WAY, "fail"): there_is_no_memory,
    (State.ON_THE_WAY, "arrive"): the_user_waits,
    (State.HERE, "hold"): the_user_waits,
    (State.HELD, "hold"): a_forward_beside_the_user,
    (State.HELD, "let go"): a_forward_beside_the_user,
    (State.HELD, "let go last"): the_user_lets_go,
    (State.HELD, "renew"): a_write_while_the_user_holds,
    (State.HERE, "free"): the_user_lets_go,
}


def test_each_transition_of_weights_has_a_cause_here():
    assert WEIGHTS.keys() == weights.TRANSITIONS.keys()


@pytest.mark.parametrize("state, event, cause", legal(WEIGHTS))
def test_a_unit_goes_where_the_table_says(state, event, cause, net, walked):
    cause(net)
    mine = [transition[1:] for transition in walked if transition[0] == MIDDLE]
    assert (state, event, weights.TRANSITIONS[state, event]) in mine
    for (_, _, before), (after, _, _) in pairwise(mine):
        assert before is after
    unit = net.blocks[1]._weft_unit
    assert mine[-1][2] is unit.state and unit.resident is (unit.state is not State.AT_REST)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_training_walks_only_what_the_table_has(strategy, world, walked):
    world(0, 2)
    net = nets.shard(nets.make("non-reentrant"), strategy=strategy)
    for last in (False, True, True):
        backward(net, last)
        evaluate(net)
    assert {transition[1:] for transition in walked if isinstance(transition[1], State)} == {
        (*pair, to) for pair, to in weights.TRANSITIONS.items() if pair[1] not in ("renew", "fail")
    }


DRIVER = Hold("a driver of this test")


def bring(net: nets.Net, state: State) -> Unit:
    """The unit of a block in that state."""
    block = net.blocks[1]
    unit, runtime = block._weft_unit, runtime_of(net)
    if state is State.ON_THE_WAY:
        block.unshard(async_op=True)
    elif state is State.HERE:  # until somebody frees it
        runtime.unshard(unit)
        unit.acquire(DRIVER)
        unit.release(DRIVER)
    elif state is State.HELD:
        block.unshard()
        unit.acquire(DRIVER)
    assert unit.state is state
    return unit


@pytest.mark.parametrize("state, event", illegal(weights.TRANSITIONS, State))
def test_everything_else_is_an_error_that_names_unit_state_and_holders(state, event, net):
    unit = bring(net, state)
    with pytest.raises(RuntimeError) as refused:
        unit.state = weights.TRANSITIONS.get((unit.state, event)) or unit._refuse(event)
    message = str(refused.value)
    assert "blocks.1 (Block)" in message and f"'{event}'" in message and state.value in message
    for holder in unit.holders:
        assert holder.name in message
    assert unit.state is state


@pytest.mark.parametrize("state", State)
def test_gathering_and_freeing_ask_for_nothing_that_is_not_to_be_done(state, net):
    """Who foresees a unit asks for it, who foresees no use lets it go: both in any state."""
    unit = bring(net, state)
    holders = list(unit.holders)
    unit.prefetch()
    assert unit.state is (State.ON_THE_WAY if state is State.AT_REST else state)
    unit.free()
    assert unit.state is (State.HELD if state is State.HELD else State.AT_REST)
    assert list(unit.holders) == holders


@pytest.mark.parametrize("state", [State.AT_REST, State.ON_THE_WAY, State.HERE])
def test_weights_that_nobody_holds_are_not_renewed(state, net):
    unit = bring(net, state)
    with pytest.raises(RuntimeError, match=rf"blocks\.1 \(Block\): 'renew' while its weights are {state.value}"):
        unit.renew()


@pytest.mark.parametrize("state", State)
def test_who_does_not_hold_cannot_let_go(state, net):
    unit = bring(net, state)
    holders = list(unit.holders)
    with pytest.raises(RuntimeError, match=r"blocks\.1 \(Block\): a stranger releases weights that it does not hold"):
        unit.release(Hold("a stranger"))
    assert unit.state is state and list(unit.holders) == holders


def test_the_same_holder_cannot_hold_twice(net):
    unit = bring(net, State.HELD)
    with pytest.raises(RuntimeError, match=r"blocks\.1 \(Block\): a driver of this test holds its weights already"):
        unit.acquire(DRIVER)
    assert list(unit.holders) == [USER, DRIVER]
    unit.release(DRIVER)
    unit.acquire(DRIVER)
    assert unit.state is State.HELD


def test_who_has_the_same_name_is_another_holder(net):
    unit = bring(net, State.HELD)
    twin = Hold(DRIVER.name)
    unit.acquire(twin)
    unit.release(DRIVER)
    assert list(unit.holders) == [USER, twin]


def test_a_wait_for_an_unshard_whose_weights_a_pass_has_freed_gathers_them_again(net):
    handle = net.blocks[1].unshard(async_op=True)
    evaluate(net)
    assert net.blocks[1]._weft_unit.state is State.AT_REST
    handle.wait()
    assert list(net.blocks[1]._weft_unit.holders) == [USER]


class Lost:
    """A message that never arrives."""

    def wait(self) -> None:
        raise Oops


def test_an_unshard_whose_message_is_lost_holds_nothing_and_takes_no_memory(world):
    world(0, 2)
    owner, user = nn.Linear(32, 32), nn.Linear(32, 32)
    user.weight = owner.weight
    model = nn.Sequential(owner, user)
    policy = weft.MixedPrecisionPolicy(param_quantization=mx())
    for module in (owner, user, model):
        weft.fully_shard(module, mp_policy=policy)
    for module in (user, owner):
        handle = module.unshard(async_op=True)
        module._weft_unit.tickets.append(Lost())
        with pytest.raises(Oops):
            handle.wait()
        assert not any(each._weft_unit.holders for each in model)
        owner.reshard()
        user.reshard()
        assert not any(each["live"] for each in weft.memory_report(model)["transient"].values())


def test_an_unshard_of_a_unit_whose_parameter_was_replaced_holds_nothing(net):
    block = net.blocks[1]
    block.up.weight = nn.Parameter(torch.zeros(29, 13))
    with pytest.raises(RuntimeError, match=r"'up\.weight' of a sharded module was replaced"):
        block.unshard()
    assert not block._weft_unit.holders
    block.unshard()
    assert list(block._weft_unit.holders) == [USER]


def test_weights_that_came_from_shards_kept_after_forward_are_stale_after_a_write(world):
    world(0, 4)
    net = nets.shard(nets.make(), reshard_after_forward=2)
    net.set_reshard_after_backward(False)
    backward(net)
    units = [block._weft_unit for block in net.blocks]
    assert not any(unit.is_stale for unit in units)
    write(net)
    assert all(unit.holders and unit.is_stale for unit in units)


# --- holders ----------------------------------------------------------------------------------------------------------


def passes_by(net: nets.Net) -> None:
    for last in (False, True, True):
        backward(net, last)
        evaluate(net)


def is_abandoned(net: nets.Net) -> None:
    fails_in_backward(net)
    fails_in_forward(net)
    net.reset_iter_state()


def is_scheduled(net: nets.Net) -> None:
    """A driver that visits units itself, as a schedule does."""
    runtime, units = runtime_of(net), [block._weft_unit for block in net.blocks]
    for _ in range(2):
        with runtime.scheduled(visits(units)):
            for unit in units:
                runtime.use(unit, DRIVER)
            for unit in units:
                runtime.done(unit, DRIVER)


def is_crowded(net: nets.Net) -> None:
    """The pool has a plan in which not all blocks are here at once."""
    passes_by(net)
    loss = nets.loss_of(net, TOKENS)
    for block in (net.blocks[0], net.blocks[2]):
        block.unshard()
    loss.backward()
    for block in (net.blocks[0], net.blocks[2]):
        block.reshard()


@pytest.mark.parametrize("allocator", ["trace", "caching"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("happens", [passes_by, is_abandoned, is_scheduled, is_crowded])
def test_a_users_hold_is_never_evicted(happens, known, allocator, world):
    """`known`: the pool has a plan before."""
    world(0, 2)
    net = nets.make()
    net.spare = block = nets.Block(13, 29)  # no pass runs it: one of its own would end the hold, as with torch
    weft.fully_shard(block)
    nets.shard(net, runtime=weft.RuntimeOptions(allocator=allocator))
    if known:
        passes_by(net)
    block.unshard()
    held = list(block.parameters())
    values = [parameter.detach().clone() for parameter in held]
    happens(net)
    unit = block._weft_unit
    assert unit.state is State.HELD and list(unit.holders) == [USER]
    for parameter, now, value in zip(held, block.parameters(), values):
        assert now is parameter and torch.equal(now, value), "the memory went to somebody else"
    block.reshard()
    at_rest(net)


def at_rest(net: nets.Net) -> None:
    """Nobody holds anything."""
    for module in (*net.blocks, net):
        assert not module._weft_unit.holders
        assert module._weft_unit.state is State.AT_REST
        for group in module._weft_unit.groups:
            assert group.gradients.where is Where.NOWHERE
    assert runtime_of(net).passes.current is Pass.IDLE
    assert [each["live"] for each in weft.memory_report(net)["transient"].values()] == [0, 0]


LEAK = Hold("a driver that forgets")


def leaks(module: nn.Module, args: Any) -> None:
    module._weft_unit.acquire(LEAK)


def leak_in_a_schedule(net: nets.Net) -> None:
    with runtime_of(net).scheduled(visits([net.blocks[1]._weft_unit])):
        runtime_of(net).use(net.blocks[1]._weft_unit, LEAK)


def leak_in_an_evaluation_by_a_schedule(net: nets.Net) -> None:
    with runtime_of(net).scheduled(visits([net.blocks[1]._weft_unit]), backward=False):
        runtime_of(net).use(net.blocks[1]._weft_unit, LEAK)


def leak_in_a_forward(net: nets.Net) -> None:
    with hooked(net.blocks[1], leaks):
        nets.loss_of(net, TOKENS)


def leak_in_an_evaluation(net: nets.Net) -> None:
    with hooked(net.blocks[1], leaks):
        evaluate(net)


def leak_in_a_backward(net: nets.Net) -> None:
    def later(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: leaks(module, args))

    with hooked(net.blocks[1], later, behind=True):
        nets.loss_of(net, TOKENS).backward()


LEAKS = [
    leak_in_a_forward,
    leak_in_an_evaluation,
    leak_in_a_backward,
    leak_in_a_schedule,
    leak_in_an_evaluation_by_a_schedule,
]


@pytest.mark.parametrize("cause", LEAKS)
def test_a_leaked_hold_is_found_at_the_end_of_the_pass_with_its_name(cause, net):
    with pytest.raises(RuntimeError, match=r"blocks\.1 \(Block\): .* still held by a driver that forgets"):
        cause(net)
    evaluate(net)
    at_rest(net)
    backward(net)
    at_rest(net)


class TriesAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.child(x)
        except Oops:
            return self.child(x)


def test_a_call_whose_inputs_cannot_be_prepared_leaves_nothing_to_the_next_call(world, monkeypatch):
    """As those that memory ran out for, or that cannot be made again with other tensors."""
    world(0, 2)
    model, x = TriesAgain(), torch.ones(2, 4, requires_grad=True)
    weft.fully_shard(model.child, reshard_after_forward=False)
    weft.fully_shard(model)
    unit, driver, marked = model.child._weft_unit, model.child._weft_driver, hooks._marked

    def fails_once(*args: Any) -> Any:
        if args[0].unit is not unit:
            return marked(*args)
        monkeypatch.setattr(hooks, "_marked", marked)
        raise Oops

    monkeypatch.setattr(hooks, "_marked", fails_once)
    model(x).sum().backward()
    assert not unit.holders and not unit.calls
    monkeypatch.setattr(hooks, "_marked", fails_once)
    with torch.autograd.profiler.profile(), pytest.raises(Oops):
        model.child(x)
    assert driver._stretch._range is None
    with torch.no_grad():
        model(x)
    assert not unit.holders and not unit.calls and unit.state is State.AT_REST


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


def test_weights_stay_where_they_are_while_a_second_backward_goes_through_a_forward(world):
    world(0, 2)
    model = weft.fully_shard(TwoOutputs())
    unit = model._weft_unit
    for first in (0, 1):
        outputs, fixed = model(torch.ones(2, 4)), []
        outputs[first].sum().backward()
        assert not unit.calls
        outputs[1 - first].register_hook(lambda gradient, fixed=fixed: fixed.append(unit.gathered[0].is_fixed()))
        outputs[1 - first].sum().backward()
        assert fixed == [True] and not unit.calls


# --- gradients --------------------------------------------------------------------------------------------------------


def one_axis(strategy: str = "optim_grads_params") -> nets.Net:
    return nets.shard(nets.make(), strategy=strategy)


def two_axes() -> nets.Net:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    return nets.shard(nets.make(), mesh=mesh, outer_strategy="optim")


def a_backward() -> nets.Net:
    net = one_axis()
    backward(net)
    return net


def a_backward_without_sync() -> nets.Net:
    net = one_axis()
    backward(net, sync=False)
    return net


def two_backwards_without_sync() -> nets.Net:
    net = a_backward_without_sync()
    backward(net, sync=False)
    return net


def a_backward_that_the_outer_axis_waits_for() -> nets.Net:
    net = two_axes()
    backward(net, last=False)
    return net


def two_backwards_that_the_outer_axis_waits_for() -> nets.Net:
    net = a_backward_that_the_outer_axis_waits_for()
    backward(net, last=False)
    return net


def a_block_that_is_called_twice() -> nets.Net:
    net = one_axis()
    net.blocks.insert(1, net.blocks[1])
    backward(net)
    return net


GRADIENTS = {
    (Where.NOWHERE, "pack"): a_backward_without_sync,
    (Where.PACKED, "pack"): two_backwards_without_sync,
    (Where.SUMMED, "pack"): two_backwards_that_the_outer_axis_waits_for,
    (Where.REDUCED, "pack"): a_block_that_is_called_twice,
    (Where.PACKED, "reduce"): a_backward,
    (Where.ON_THE_WAY, "arrive"): a_backward,
    (Where.ON_THE_WAY, "wait"): a_backward_that_the_outer_axis_waits_for,
    (Where.REDUCED, "publish"): a_backward,
}


def test_each_transition_of_gradients_has_a_cause_here():
    assert GRADIENTS.keys() == gradients.TRANSITIONS.keys()


@pytest.mark.parametrize("state, event, cause", legal(GRADIENTS))
def test_gradients_go_where_the_table_says(state, event, cause, world, walked):
    world(0, 4)
    net = cause()
    mine = [transition[1:] for transition in walked if transition[0] == MIDDLE and isinstance(transition[1], Where)]
    assert (state, event, gradients.TRANSITIONS[state, event]) in mine
    for (_, _, before), (after, _, _) in pairwise(mine):
        assert before is after
    assert all(group.gradients.where is mine[-1][2] for group in net.blocks[1]._weft_unit.groups)


def gradients_in(state: Where) -> GroupGradients:
    """Those of a block, in that state."""
    net = two_axes()
    group = net.blocks[1]._weft_unit.groups[0]
    if state is Where.SUMMED:
        backward(net, last=False)
    elif state is not Where.NOWHERE:
        backward(net, sync=False)
        if state is not Where.PACKED:
            group.gradients.reduce(runtime_of(net).channels, 1.0, channel=0, finishes=True).wait()
        if state is Where.REDUCED:
            group.gradients.reduced()
    assert group.gradients.where is state
    group.gradients.net = net  # alive
    return group.gradients


@pytest.mark.parametrize("state, event", illegal(gradients.TRANSITIONS, Where))
def test_everything_else_is_an_error_that_names_unit_and_state_of_gradients(state, event, world):
    world(0, 4)
    found = gradients_in(state)
    with pytest.raises(RuntimeError) as refused:
        found.where = gradients.TRANSITIONS.get((found.where, event)) or found._refuse(event)
    message = str(refused.value)
    assert "blocks.1 (Block)" in message and f"'{event}'" in message and state.value in message
    assert found.where is state


@pytest.mark.parametrize("state", Where)
def test_gradients_are_forgotten_from_anywhere(state, world):
    world(0, 4)
    found = gradients_in(state)
    found.discard()
    assert found.where is Where.NOWHERE
    found.net.set_requires_gradient_sync(True)
    found.net.set_is_last_backward(True)
    runtime_of(found.net).reset()
    assert weft.memory_report(found.net)["transient"]["partial gradients"]["live"] == 0
    backward(found.net)
    at_rest(found.net)


# --- passes -----------------------------------------------------------------------------------------------------------


def in_state(state: Pass) -> Passes:
    found = Passes("a model")
    if state is Pass.FAILED:
        found.fail()
    elif state is not Pass.IDLE:
        found.begin(state)
    assert found.current is state
    return found


def cause(found: Passes, event: str) -> None:
    if event.startswith("begin "):
        found.begin(Pass(event.removeprefix("begin ")))
    else:
        getattr(found, event)()


@pytest.mark.parametrize(
    "state, event", [pytest.param(*pair, id=f"{pair[0].value}, {pair[1]}") for pair in passes.TRANSITIONS]
)
def test_a_pass_goes_where_the_table_says(state, event):
    found = in_state(state)
    cause(found, event)
    assert found.current is passes.TRANSITIONS[state, event]


@pytest.mark.parametrize("around", [Pass.IDLE, Pass.FORWARD, Pass.EVALUATION])
def test_the_end_of_a_backward_leads_to_what_was_around_it(around):
    found = in_state(around)
    found.begin(Pass.BACKWARD)
    found.end()
    assert found.current is around


@pytest.mark.parametrize("state", Pass)
def test_every_pass_can_fail_and_what_was_around_it_has_failed_with_it(state):
    found = in_state(state)
    found.fail()
    assert found.current is Pass.FAILED
    found.recover()
    assert found.current is Pass.IDLE


@pytest.mark.parametrize(
    "state, event",
    [each for each in illegal(passes.TRANSITIONS, Pass) if each.values != (Pass.BACKWARD, "end")],
)
def test_everything_else_is_an_error_that_names_model_and_pass(state, event):
    found = in_state(state)
    with pytest.raises(RuntimeError) as refused:
        cause(found, event)
    assert "a model" in str(refused.value) and event in str(refused.value) and state.value in str(refused.value)
    assert found.current is state


@pytest.mark.parametrize("around", [Pass.FORWARD, Pass.EVALUATION])
def test_the_passes_of_a_model_are_what_its_calls_are(around, net):
    """Seen from inside of each: a forward or evaluation, a gradient taken in it, a backward, a schedule."""
    seen: list[Pass] = []
    look = lambda *_: seen.append(runtime_of(net).passes.current)  # noqa: E731

    def differentiate(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        with torch.enable_grad():
            x = torch.ones(2, 13, requires_grad=True)
            twice = 2 * x
            twice.register_hook(look)
            torch.autograd.grad(net.blocks[2](twice).sum(), x)

    def look_later(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(look)

    with (
        hooked(net.blocks[0], look),
        hooked(net.blocks[1], differentiate, behind=True),
        hooked(net.norm, look),
        hooked(net.embedding, look_later, behind=True),
    ):
        if around is Pass.EVALUATION:
            evaluate(net)
        else:
            loss = nets.loss_of(net, TOKENS)
    assert seen == [around, Pass.BACKWARD, around]
    look()
    if around is Pass.FORWARD:
        loss.backward()
        look()
        assert seen[3:] == [Pass.IDLE, Pass.BACKWARD, Pass.IDLE]
    with runtime_of(net).scheduled(visits([])):
        look()
    look()
    assert seen[-2:] == [Pass.SCHEDULE, Pass.IDLE]
    at_rest(net)


def test_the_trace_of_a_scheduled_evaluation_is_what_it_has_done(net):
    runtime, units = runtime_of(net), [block._weft_unit for block in net.blocks]
    with runtime.scheduled(visits(units), backward=False):
        for unit in units[:2]:
            runtime.use(unit, DRIVER)
            runtime.done(unit, DRIVER)
    assert runtime.gathers.traces["schedule"].uses == (1, 2)
    at_rest(net)


def test_a_schedule_inside_a_forward_or_a_backward_is_refused(net):
    def schedule(*args: Any) -> None:
        with runtime_of(net).scheduled(visits([])):
            pass

    x = torch.ones(1, requires_grad=True)
    (other := 2 * x).register_hook(schedule)
    with hooked(net.blocks[1], schedule):
        for call in (lambda: evaluate(net), lambda: nets.loss_of(net, TOKENS), other.backward):
            with pytest.raises(RuntimeError, match=r"cannot run inside a forward or backward .*: call it outside"):
                call()
    at_rest(net)
    backward(net)
    at_rest(net)


def test_a_forward_that_goes_on_after_a_backward_inside_it_has_failed_is_refused(net):
    def differentiate(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        x = torch.ones(2, 13, requires_grad=True)
        (y := net.blocks[2](x)).register_hook(throw)
        with pytest.raises(Oops):
            torch.autograd.grad(y.sum(), x)

    said = pytest.raises(RuntimeError, match="a backward inside a forward failed, and the forward continued")
    with hooked(net.blocks[0], differentiate, behind=True), said:
        nets.loss_of(net, TOKENS)
    backward(net)
    at_rest(net)


def test_a_backward_that_runs_no_hook_of_the_model_is_one_of_its_passes_and_fails_like_one(net):
    kept: list[torch.Tensor] = []
    backward(net)
    traces = runtime_of(net).gathers.traces
    with hooked(net.blocks[1].down, lambda module, args: kept.append(module.weight.sum())):
        for written in (False, True):
            net(TOKENS)
            before = traces["forward"]
            full = net._weft_unit.groups[0].parameters[0].full
            if written:
                with torch.no_grad():
                    full.mul_(2)
                with pytest.raises(WeightsWritten):
                    kept.pop().backward()
            else:
                kept.pop().backward()
                assert traces["forward"] == before
            assert runtime_of(net).passes.current is Pass.IDLE
    backward(net)
    at_rest(net)


@distributed(2)
def test_what_is_reduced_without_a_backward_after_one_that_failed_begins_at_rest():
    """As torch's pipelining asks for it. What the failed backward has not reduced is no longer due."""
    net = nets.shard(nets.make())
    backward(net)
    fails_in_backward(net)
    with patch.object(Reductions, "reduce_group", side_effect=AssertionError("nothing waits for its reduction")):
        weft.fully_shard.state(net)._root_post_backward_final_callback()
    at_rest(net)
    backward(net)
    at_rest(net)


def test_without_exchanges_a_rank_agrees_with_itself_on_its_captured_parts(world):
    world(0, 2)
    net = nets.shard(nets.make(), runtime=weft.RuntimeOptions(check_collectives=False))
    table = runtime_of(net).graphs = Mock(failed=[False, True])
    backward(net)
    table.agree.assert_called_once_with([False, True])


def fails_in_forward(net: nets.Net) -> None:
    with hooked(net.blocks[1].down, throw), pytest.raises(Oops):
        nets.loss_of(net, TOKENS)


def fails_in_a_hook_before_forward(net: nets.Net) -> None:
    with hooked(net.blocks[1], throw), pytest.raises(Oops):
        nets.loss_of(net, TOKENS)


def fails_in_evaluation(net: nets.Net) -> None:
    with hooked(net.blocks[1].down, throw), pytest.raises(Oops):
        evaluate(net)


def fails_in_a_forward_that_needs_more_modules(net: nets.Net) -> None:
    with hooked(net, throw, behind=True), pytest.raises(Oops):
        nets.loss_of(net, TOKENS)


def fails_in_backward(net: nets.Net) -> None:
    with hooked(net.blocks[1], fails_later, behind=True), pytest.raises(Oops):
        nets.loss_of(net, TOKENS).backward()


def fails_inside_a_blocks_backward(net: nets.Net) -> None:
    with hooked(net.blocks[1].up, fails_later, behind=True), pytest.raises(Oops):
        nets.loss_of(net, TOKENS).backward()


def fails_at_the_beginning_of_a_backward(net: nets.Net) -> None:
    loss, unit = nets.loss_of(net, TOKENS), net.blocks[1]._weft_unit
    unit.sync_versions = throw  # as for gathered weights that were written to
    with pytest.raises(Oops):
        loss.backward()
    del unit.sync_versions


def fails_in_a_recomputation(net: nets.Net) -> None:
    x = torch.ones(2, 13, requires_grad=True)
    y = checkpoint(lambda x: net.blocks[1](net.blocks[0](x)), x, use_reentrant=False)
    with hooked(net.blocks[0].up, throw), pytest.raises(Oops):
        y.sum().backward()


def fails_in_a_hook_of_a_gradient(net: nets.Net) -> None:
    loss = nets.loss_of(net, TOKENS)
    parameter = net.blocks[1]._weft_unit.groups[0].parameters[0].full
    handle = parameter.register_hook(throw)
    with pytest.raises(Oops):
        loss.backward()
    handle.remove()


def fails_in_a_hook_of_a_published_gradient(net: nets.Net) -> None:
    parameter = net.blocks[1]._weft_unit.groups[0].parameters[0].sharded
    handle = parameter.register_post_accumulate_grad_hook(throw)
    with pytest.raises(Oops):
        backward(net)
    handle.remove()


def fails_in_a_backward_inside_of_a_forward(net: nets.Net) -> None:
    def differentiate(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        x = torch.ones(2, 13, requires_grad=True)
        y = net.blocks[2](x)
        y.register_hook(throw)
        torch.autograd.grad(y.sum(), x)

    with hooked(net.blocks[1], differentiate, behind=True), pytest.raises(Oops):
        nets.loss_of(net, TOKENS)


def fails_in_a_schedule(net: nets.Net) -> None:
    runtime, unit = runtime_of(net), net.blocks[1]._weft_unit
    with pytest.raises(Oops), runtime.scheduled(visits([unit])):
        runtime.use(unit, DRIVER)
        raise Oops


FAILURES = [
    fails_in_forward,
    fails_in_a_hook_before_forward,
    fails_in_evaluation,
    fails_in_a_forward_that_needs_more_modules,
    fails_in_backward,
    fails_inside_a_blocks_backward,
    fails_at_the_beginning_of_a_backward,
    fails_in_a_recomputation,
    fails_in_a_hook_of_a_gradient,
    fails_in_a_hook_of_a_published_gradient,
    fails_in_a_backward_inside_of_a_forward,
    fails_in_a_schedule,
]


def begins_forward(net: nets.Net) -> None:
    nets.loss_of(net, TOKENS)


def begins_evaluation(net: nets.Net) -> None:
    evaluate(net)


def begins_schedule(net: nets.Net) -> None:
    is_scheduled(net)


def begins_by_unsharding(net: nets.Net) -> None:
    net.blocks[1].unshard()
    assert list(net.blocks[1]._weft_unit.holders) == [USER]
    net.blocks[1].reshard()


def begins_by_resharding(net: nets.Net) -> None:
    net.reshard()


def begins_by_reading(net: nets.Net) -> None:
    net.state_dict()


def begins_by_loading(net: nets.Net) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})


def begins_by_resetting(net: nets.Net) -> None:
    net.reset_iter_state()


ENTRIES = [
    begins_forward,
    begins_evaluation,
    begins_schedule,
    begins_by_unsharding,
    begins_by_resharding,
    begins_by_reading,
    begins_by_loading,
    begins_by_resetting,
]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("failure", FAILURES)
def test_every_entry_begins_from_the_one_state_that_an_exception_leaves(failure, entry, net):
    failure(net)
    passes = runtime_of(net).passes
    assert passes.current in (Pass.FAILED, Pass.IDLE)
    assert runtime_of(net)._failure is None, "it keeps the tensors of the frames of its traceback"
    at_fault = passes.current
    if (FAILURES.index(failure) + ENTRIES.index(entry)) % 2:
        failure(net)
        assert passes.current is at_fault
    entry(net)
    assert passes.current is Pass.IDLE
    for module in (*net.blocks, net):
        assert module._weft_unit.holders.keys() <= {UNTIL_BACKWARD}
        assert all(group.gradients.where is Where.NOWHERE for group in module._weft_unit.groups)
    evaluate(net)
    at_rest(net)
    backward(net)
    at_rest(net)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_backward_of_an_earlier_forward_begins_from_the_one_state_that_an_exception_leaves(failure, net):
    loss = nets.loss_of(net, TOKENS)
    failure(net)
    loss.backward()
    at_rest(net)
    backward(net)
    at_rest(net)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    "failure",
    [each for each in FAILURES if each is not fails_in_a_hook_of_a_gradient],  # whose graph torch itself keeps for ever
)
def test_the_memory_of_a_failed_pass_goes_with_its_graph(failure, strategy, world):
    world(0, 2)
    net = nets.shard(nets.make(), strategy=strategy)
    for _ in range(3):
        failure(net)
        net.reset_iter_state()
        at_rest(net)
    gc.collect()
    assert not any(len(module._weft_unit.calls) for module in (*net.blocks, net))
