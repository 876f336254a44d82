"""An exception leaves one state behind, and everything that a user can do next begins from it."""

import copy
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.comm.test_hang_detector import patience
from tests.fsdp import nets
from tests.fsdp.failing import FailsInBackward, Oops, fails_later, throw
from tests.fsdp.seams.truth import (
    STRATEGIES,
    assert_gradients,
    assert_weights,
    backward,
    naming,
    sgd,
    step,
    tokens_loss,
)
from tests.pool import distributed
from weft.comm import backends
from weft.comm.builtin import BuiltIn
from weft.comm.watch.hang_detector import start_hang_detector
from weft.errors import WeightsWritten
from weft.fsdp.module import unit_of
from weft.fsdp.unit import State
from weft.memory.pool import Pool, Transient
from weft.quantize import mx


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def in_backward(net: nets.Net, batch: torch.Tensor) -> None:
    handle = net.blocks[1].register_forward_hook(fails_later)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def inside_a_block_in_backward(net: nets.Net, batch: torch.Tensor) -> None:
    """The block's own backward has begun, and its weights are held."""
    handle = net.blocks[1].up.register_forward_hook(fails_later)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def in_forward(net: nets.Net, batch: torch.Tensor) -> None:
    handle = net.blocks[1].down.register_forward_pre_hook(throw)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def in_the_forward_of_a_second_microbatch(net: nets.Net, batch: torch.Tensor) -> None:
    if isinstance(net, weft.FSDPModule):
        net.set_is_last_backward(False)
    nets.loss_of(net, batch).backward()
    in_forward(net, batch)
    if isinstance(net, weft.FSDPModule):
        net.set_is_last_backward(True)
        net.reset_iter_state()  # what the first microbatch gave is not wanted: there is no other way to say so


def in_a_hook_of_the_forward(net: nets.Net, batch: torch.Tensor) -> None:
    handle = net.blocks[1].register_forward_hook(throw)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def in_a_hook_before_the_forward(net: nets.Net, batch: torch.Tensor) -> None:
    handle = net.blocks[2].register_forward_pre_hook(throw)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def in_a_hook_of_a_gradient(net: nets.Net, batch: torch.Tensor) -> None:
    output = net(batch[:, :-1])
    output.register_hook(throw)
    with pytest.raises(Oops):
        output.sum().backward()


def in_the_loss(net: nets.Net, batch: torch.Tensor) -> None:
    """Between forward and backward."""
    output = net(batch[:, :-1])
    with pytest.raises(Oops):
        throw(output)


FAILURES = [
    in_backward,
    inside_a_block_in_backward,
    in_forward,
    in_the_forward_of_a_second_microbatch,
    in_a_hook_of_the_forward,
    in_a_hook_before_the_forward,
    in_a_hook_of_a_gradient,
    in_the_loss,
]


def trains(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    step(optimizers)


def evaluates(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    rows = nets.data(1, 4, seed=5)[0]
    with torch.no_grad():
        torch.testing.assert_close(sharded(rows), plain(rows))


def unshards(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    units = [*sharded.blocks, sharded]
    for unit in units:
        unit.unshard()
    now = dict(sharded.named_parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in now.values())
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    torch.testing.assert_close({name: parameter.detach() for name, parameter in now.items()}, expected)
    for unit in units:
        unit.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())


def loads(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    for net in (plain, sharded):
        net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})
    reads(plain, sharded, optimizers)


def reads(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    state = sharded.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    torch.testing.assert_close({name: nets.full(value) for name, value in state.items()}, dict(plain.state_dict()))


def steps_alone(plain: nets.Net, sharded: nets.Net, optimizers: list) -> None:
    """On gradients that the user sets, without any pass."""
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 0.5).detach()
    step(optimizers)
    reads(plain, sharded, optimizers)


THEN: list[Callable[[nets.Net, nets.Net, list], None]] = [trains, evaluates, unshards, loads, reads, steps_alone]


GOING_ON = [
    (fails, THEN[number % len(THEN)], STRATEGIES[-1 - number % 3], (0, 2)[number // 2 % 2])
    for number, fails in enumerate(FAILURES)
]
"""What fails and what comes then meet in one state, which test_states.py compares for each strategy that holds memory:
some of their pairs are enough."""


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "then", "strategy", "known"), GOING_ON)
@distributed(2, timeout=40)
def test_going_on_after_an_exception(fails, then, strategy, known):
    """With `known` steps before it."""
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy=strategy)
    optimizers = sgd(plain, sharded)
    batches = nets.data(known + 3, 4)
    for batch in batches[:known]:
        backward(plain, sharded, tokens_loss, batch)
        step(optimizers)
    fails(plain, batches[known])
    fails(sharded, mine(batches[known]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    if then is not trains:
        then(plain, sharded, optimizers)
    for batch in batches[known + 1 :]:
        backward(plain, sharded, tokens_loss, batch)
        assert_gradients(sharded, plain)
        step(optimizers)
    assert_weights(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "bucket_bytes"),
    [
        ("optim", 1 << 20),
        ("optim_grads", 0),
        ("optim_grads_params", 0),
        ("optim_grads_params", 1 << 20),
    ],
)
@distributed(2)
def test_a_failed_backward_drops_the_gradients_of_earlier_microbatches(strategy, bucket_bytes):
    """All of them, whatever of it had run: none is of some microbatches here and of others there. Seen at once."""
    for number, place in enumerate(("head", "blocks.2", "blocks.2.up", "blocks.0", "embedding")):
        waits = bool((number + bool(bucket_bytes)) % 2)
        with naming("fails in", place, "waits for its reduction", waits):
            plain = nets.make()
            sharded = nets.shard(nets.make(), strategy=strategy, runtime=weft.RuntimeOptions(bucket_bytes=bucket_bytes))
            first, second, third = nets.data(3, 4)
            sharded.set_is_last_backward(not waits)
            nets.loss_of(sharded, mine(first)).backward()
            sharded.set_is_last_backward(True)
            handle = sharded.get_submodule(place).register_forward_hook(fails_later)
            with pytest.raises(Oops):
                nets.loss_of(sharded, mine(second)).backward()
            handle.remove()
            for name, parameter in sharded.named_parameters():
                assert isinstance(parameter, DTensor) and parameter.grad is None, name
            backward(plain, sharded, tokens_loss, third)
            assert_gradients(sharded, plain)


@pytest.mark.slow
@distributed(2)
def test_a_backward_that_fails_in_the_loss_keeps_the_gradients_of_earlier_microbatches():
    """It has not reached the model: what a plain one keeps is kept, until the calls that the pages name."""
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy="optim_grads_params")
    first, second, third = nets.data(3, 4)
    backward(plain, sharded, tokens_loss, first)
    loss = nets.loss_of(sharded, mine(second))
    loss.register_hook(throw)
    with pytest.raises(Oops):
        loss.backward()
    assert_gradients(sharded, plain)
    for model in (plain, sharded):
        model.zero_grad()
    sharded.reset_iter_state()
    backward(plain, sharded, tokens_loss, third)
    assert_gradients(sharded, plain)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_hook_that_fails_when_gradients_are_handed_out_takes_them_all(strategy):
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy=strategy)
    first, second, third = nets.data(3, 4)
    nets.loss_of(sharded, mine(first)).backward()
    handle = sharded.blocks[1].up.weight.register_post_accumulate_grad_hook(throw)
    with pytest.raises(Oops):
        nets.loss_of(sharded, mine(second)).backward()
    handle.remove()
    assert all(parameter.grad is None for parameter in sharded.parameters())
    backward(plain, sharded, tokens_loss, third)
    assert_gradients(sharded, plain)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_backward_that_fails_before_it_comes_to_a_model_takes_nothing_from_it(strategy):
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy=strategy)
    first, second, third = nets.data(3, 4)
    sharded.set_is_last_backward(False)
    backward(plain, sharded, tokens_loss, first)
    with pytest.raises(Oops):
        FailsInBackward.apply(nets.loss_of(sharded, mine(second))).backward()
    sharded.set_is_last_backward(True)
    backward(plain, sharded, tokens_loss, third)
    assert_gradients(sharded, plain)


class Pair(nn.Module):
    """Two layers in one unit, of which `both` says whether the second runs too."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.left(x) + self.right(x) if both else self.left(x)


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair = nn.Linear(5, 5), Pair()

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.pair(self.first(x), both).sum()


@distributed(2)
def test_a_backward_of_an_earlier_forward_runs_after_one_that_failed_and_has_nothing_of_it():
    net = Choice()
    for each in (net.first, net.pair, net):
        weft.fully_shard(each)
    kept = net(torch.ones(2, 5), False)
    net.first.register_forward_hook(fails_later)
    with pytest.raises(Oops):
        net(torch.ones(2, 5), True).backward()
    kept.backward()
    given = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert given == {"first.weight", "first.bias", "pair.left.weight", "pair.left.bias"}
    torch.testing.assert_close(nets.full(net.pair.left.bias.grad), torch.full((5,), 2.0))


@distributed(2)
def test_of_nested_forwards_that_fail_the_innermost_is_told_to_other_ranks():
    net = nets.shard(nets.make())
    in_forward(net, nets.data(1, 4)[0])
    assert start_hang_detector()._last_words().startswith("raised Oops in the forward of blocks.1")


class Tries(nn.Module):
    """Goes on without its child if that cannot do it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.child, self.last = nn.Linear(13, 13), nets.Block(13, 29), nets.Block(13, 29)
        self.unable = False
        self.late = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            x = self.child(x)
        except Oops:
            time.sleep(self.late)
        return self.last(x)


def tries(fails: bool) -> Tries:
    torch.manual_seed(0)
    net = Tries()
    if fails:
        net.child.down.register_forward_pre_hook(throw)
    return net


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2, timeout=60)
def test_a_parent_that_catches_its_childs_exception_while_another_rank_is_slow(strategy):
    plain, sharded = tries(True), tries(True)
    for unit in (sharded.child, sharded.last, sharded):
        weft.fully_shard(unit, strategy=strategy)
    optimizers = sgd(plain, sharded)
    data = torch.randn(3, 4, 13, generator=torch.Generator().manual_seed(3))
    for number, batch in enumerate(data):
        with naming("step", number):
            sharded.late = 4.0 if dist.get_rank() == 1 and number == 1 else 0.0
            backward(plain, sharded, lambda net, rows, rank: net(rows).square().mean(), batch)
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2, timeout=60)
def test_a_parent_that_catches_the_exception_of_its_child_on_one_rank(strategy):
    """The others ran the child: it has their gradients alone."""
    models, sharded = [tries(False), tries(True)], tries(dist.get_rank() == 1)
    for unit in (sharded.child, sharded.last, sharded):
        weft.fully_shard(unit, strategy=strategy)
    optimizers = sgd(*models, sharded)
    data = torch.randn(3, 4, 13, generator=torch.Generator().manual_seed(3))
    for number, batch in enumerate(data):
        with naming("step", number):
            sharded.late = 0.9 if dist.get_rank() == 1 and number == 1 else 0.0
            for plain, rows in zip(models, batch.chunk(2)):
                (plain(rows).square().mean() / 2).backward()
            with patience(CERTAIN_S=0.3):
                sharded(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
            for one, other in zip(models[0].parameters(), models[1].parameters()):
                found = [each.grad for each in (one, other) if each.grad is not None]
                one.grad, other.grad = (sum(found).clone() for _ in range(2))
            assert_gradients(sharded, models[0])
            step(optimizers)
    assert_weights(sharded, models[0])


def another_world(store: Path, ranks: int) -> None:
    dist.barrier()  # all ranks have come to the world that ends
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if rank > 1 or number != 1:
                rows = layer(rows)
        return rows


@pytest.mark.slow
@distributed(4, timeout=60)
def test_ranks_with_different_pasts_hear_each_other(tmp_path):
    """Two of four were in a world of their own before; then they skip a unit, and must take part in its gathers."""
    rank, batch = dist.get_rank(), torch.randn(8, 8)
    if rank < 2:
        another_world(tmp_path / "of two", 2)
        net = nets.shard(nets.make())
        nets.loss_of(net, nets.data(1, 4)[0]).backward()
    another_world(tmp_path / "of all", 4)
    torch.manual_seed(0)
    plain, sharded = Skipping(), Skipping()
    sharded.load_state_dict(plain.state_dict())
    for layer in sharded.layers:
        weft.fully_shard(layer)
    weft.fully_shard(sharded, runtime=weft.RuntimeOptions(bucket_bytes=0))
    sharded(batch.chunk(4)[rank], rank).square().mean().backward()
    (sum(plain(rows, each).square().mean() for each, rows in enumerate(batch.chunk(4))) / 4).backward()
    assert_gradients(sharded, plain)
    assert rank > 1 or start_hang_detector().joins > 0


@pytest.mark.slow
@distributed(2, timeout=60)
def test_an_old_model_after_the_process_group_was_made_anew(tmp_path):
    net, batch = nets.shard(nets.make()), nets.data(1, 4)[0]
    nets.loss_of(net, batch).backward()
    another_world(tmp_path / "another", 2)
    said = r"(?i)process group.*(destroy|gone|anew|another|new)"
    with pytest.raises(RuntimeError, match=said):
        nets.loss_of(net, batch)
    with pytest.raises(RuntimeError, match=said):
        net.unshard()
    with pytest.raises(RuntimeError, match=said):
        net.blocks[0].unshard()
    try:  # the new world has the same ranks under the same names: right, if it is not refused
        whole = net.embedding.weight.full_tensor()
    except RuntimeError as error:
        assert re.search(said, str(error))
    else:
        torch.testing.assert_close(whole.detach(), nets.make().embedding.weight.detach())
    del net
    gc.collect()
    fresh = nets.shard(nets.make())
    plain = nets.make()
    backward(plain, fresh, tokens_loss, batch)
    assert_gradients(fresh, plain)


class _Both(nn.Module):
    """Two layers that are one unit, of which some calls use only the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, *, spoils: bool = False) -> torch.Tensor:
        rows = self.first(rows)
        if spoils:
            with torch.no_grad():
                self.first.weight.add_(1)
            return rows
        return self.second(rows)


@distributed(2)
def test_a_forward_whose_end_fails_is_followed_by_others_like_any_that_fails():
    model = _Both()
    weft.fully_shard([model.first, model.second])
    weft.fully_shard(model)
    rows = torch.ones(2, 4)
    with pytest.raises(WeightsWritten):
        model(rows, spoils=True)
    model(rows).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@contextmanager
def no_memory_once(failing: Transient | None, caught: bool = False) -> Iterator[None]:
    """Inside, the pool has no memory for `failing` when it is first asked for. `caught`: the code inside catches this
    error."""
    take, failures = Pool.take, []

    def fails_once(pool: Pool, transient: Transient) -> torch.Tensor:
        if not failures and transient is failing:
            failures.append(transient)
            raise MemoryError
        return take(pool, transient)

    Pool.take = fails_once
    try:
        with nullcontext() if caught else pytest.raises(MemoryError):
            yield
        assert failures or failing is None
    finally:
        Pool.take = take


@distributed(2)
def test_held_weights_whose_renewal_found_no_memory_are_gathered_by_the_next_pass():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for module in (*model, model):
        weft.fully_shard(module)
    sharded, rows = [*model.parameters()], torch.ones(2, 4)
    for module in model:
        module.unshard()
    with torch.no_grad():
        for mine, each in zip(sharded, plain.parameters()):
            mine.mul_(2)
            each.mul_(2)
        with no_memory_once(unit_of(model[0]).groups[0].transient):
            model(rows)
        torch.testing.assert_close(model(rows), plain(rows))


class Lost:
    """A message that ends with an error, however often one waits for it."""

    def __init__(self, ticket):
        self.ticket = ticket

    def wait(self):
        self.ticket.wait()
        raise Oops


@distributed(2)
def test_weights_whose_message_failed_on_the_way_are_gathered_again():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, rows = copy.deepcopy(plain), torch.ones(2, 4)
    for module in (*model, model):
        weft.fully_shard(module)
    model(rows).sum().backward()
    model.zero_grad()
    unit = unit_of(model[1])
    unit.prefetch()
    unit.tickets = [Lost(ticket) for ticket in unit.tickets]
    with pytest.raises(Oops):
        model(rows)
    assert unit.state is State.AT_REST and not unit.tickets
    for net in (plain, model):
        net(rows).sum().backward()
    for mine, each in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(mine.grad), each.grad)


@distributed(2)
def test_a_shared_message_for_which_there_is_no_memory_takes_none():
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model, rows = copy.deepcopy(plain), torch.ones(2, 4)
    for module in model:
        weft.fully_shard(module)
    weft.fully_shard(model, runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
    with torch.no_grad():
        model(rows)  # its order is known from now on
        with no_memory_once(unit_of(model[1]).groups[0].transient):
            model(rows)
        model.reset_iter_state()
        assert [each["live"] for each in weft.memory_report(model)["transient"].values()] == [0, 0]
        torch.testing.assert_close(model(rows), plain(rows))


@distributed(2)
def test_weights_whose_gather_found_no_memory_are_gathered_when_they_are_unsharded_again():
    """Of a unit with two groups, the second fails; and of a unit that shares a weight of another one."""
    owner, user = nn.Linear(4, 4), nn.Linear(4, 4)
    user.weight = owner.weight
    owner.bias.requires_grad_(False)
    before = {module: [each.detach().clone() for each in module.parameters()] for module in (owner, user)}
    model = nn.Sequential(owner, user)
    for module in (owner, user, model):
        weft.fully_shard(module)
    with torch.no_grad():
        model(torch.ones(1, 4))  # the memory comes from now on

    for module in (owner, user):
        with no_memory_once(unit_of(module).groups[-1].transient):
            module.unshard()
        assert not any(unit_of(each).holders for each in model)
        module.unshard()
        assert all(map(torch.equal, module.parameters(), before[module]))
        module.reshard()


class TriesAgain(nn.Sequential):
    """Calls each module once more if there was no memory. `unshards`: unshards it before, in the same way."""

    unshards = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            for call in (module.unshard,) if self.unshards else ():
                try:
                    call()
                except MemoryError:
                    call()
            try:
                x = module(x)
            except MemoryError:
                x = module(x)
        return x


@distributed(2)
def test_a_gather_that_found_no_memory_on_one_rank_is_no_other_collective_when_it_is_started_again():
    plain = TriesAgain(nn.Linear(4, 4), nn.Linear(4, 4))
    model, rows = copy.deepcopy(plain), torch.ones(2, 4)
    for module in (*model, model):
        weft.fully_shard(module)
    model.unshards = True
    with no_memory_once(unit_of(model[0]).groups[0].transient if dist.get_rank() else None, caught=True):
        loss = model(rows).sum()
    for each in (loss, plain(rows).sum()):
        each.backward()
    for mine, each in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(mine.grad), each.grad)


@distributed(2, timeout=20)
def test_a_shared_message_that_found_no_memory_is_shared_when_it_is_started_again():
    plain = TriesAgain(*[nn.Linear(4, 4) for _ in range(3)])
    model, rows = copy.deepcopy(plain), torch.ones(2, 4)
    with mock.patch.object(backends, "INSTEAD", BuiltIn()), torch.no_grad():  # without tags, no other message fits
        for module in model:
            weft.fully_shard(module)
        weft.fully_shard(model, runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
        with no_memory_once(unit_of(model[1]).groups[0].transient if dist.get_rank() else None, caught=True):
            torch.testing.assert_close(model(rows), plain(rows))


@distributed(2)
def test_units_of_a_shared_message_are_on_their_way_before_they_take_memory():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for module in model:
        weft.fully_shard(module)
    weft.fully_shard(model, runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
    units = {unit_of(module).groups[0].transient: unit_of(module) for module in model}
    states, take = [], Pool.take

    def observed(pool: Pool, transient: Transient) -> torch.Tensor:
        states.append(units[transient].state)
        return take(pool, transient)

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(Pool, "take", observed)
        model(torch.ones(2, 4))
    assert states == [State.ON_THE_WAY] * 3
    assert not any(unit.resident for unit in units.values())


@distributed(2)
def test_held_weights_whose_other_copy_found_no_memory_are_not_read_before_they_are_gathered_again():
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_quantization=mx(32, compute="scaled"))
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    for module in (*model, model):
        weft.fully_shard(module, mp_policy=policy)

    def gradient_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        output.float().sum().backward()
        return rows.grad

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.linspace(-1, 1, 512).view(2, 256).requires_grad_()
        return model(rows), rows

    expected = gradient_of(*forward())
    failing, following = forward(), forward()
    model[0].unshard()
    with no_memory_once(unit_of(model[0]).groups[0].payload.staging):
        gradient_of(*failing)
    assert unit_of(model[0]).holders
    assert torch.equal(gradient_of(*following), expected)
    assert torch.equal(gradient_of(*forward()), expected)


class Fails(nn.Sequential):
    """Leaves out its last module, or fails in the backward before the last two."""

    def forward(self, x: torch.Tensor, *, leaves_out: bool = False, fails: bool = False) -> torch.Tensor:
        for number, module in enumerate(self):
            if number < len(self) - leaves_out:
                x = module(x)
            if fails and number == len(self) - 3:
                x = FailsInBackward.apply(x)
        return x


@distributed(2, timeout=20)
def test_a_rank_whose_backward_failed_gathers_for_one_that_is_not_there_yet():
    """Rank 1 gathers the last module again for its backward, which rank 0 has kept: it expected this backward."""
    plain = Fails(*[nn.Linear(4, 4) for _ in range(4)])
    model, rows = copy.deepcopy(plain), torch.ones(2, 4)
    for module in (*model, model):
        weft.fully_shard(module)
    for leaves_out in (False, dist.get_rank() == 1):
        model(rows, leaves_out=leaves_out).sum().backward()
    with pytest.raises(Oops):
        model(rows, fails=True).sum().backward()
    for net in (plain, model):
        net(rows).sum().backward()
    for mine, each in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(mine.grad), each.grad)
