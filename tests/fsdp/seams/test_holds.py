"""Who holds a unit's weights keeps them: the user's `unshard()`, a root that gives its weight away, two parents."""

from collections.abc import Callable, Collection

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.fsdp.seams import truth
from tests.fsdp.seams.truth import (
    assert_gradients,
    assert_weights,
    backward,
    naming,
    right_or_refused,
    sgd,
    step,
    tokens_loss,
)
from tests.pairs import all_pairs
from tests.pool import distributed
from weft.fsdp.module import unit_of


def assert_unsharded(sharded: nn.Module, plain: nn.Module) -> None:
    """The registered parameters are whole and have the plain one's values."""
    for name, parameter in sharded.named_parameters():
        assert not isinstance(parameter, DTensor), f"{name} is sharded"
    actual = {name: parameter.detach().clone() for name, parameter in sharded.named_parameters()}
    torch.testing.assert_close(actual, {name: parameter.detach() for name, parameter in plain.named_parameters()})


def assert_resharded(sharded: nn.Module) -> None:
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "strategy", "backward_finds"),
    [
        (0, "optim_grads", "all resharded"),
        (3, "optim_grads", "all unsharded"),
        (3, "optim_grads_params", "some unsharded"),
    ],
)
@distributed(2)
def test_all_blocks_may_be_unsharded_between_forward_and_backward(known, strategy, backward_finds):
    """`known`: steps before, from which the pool has a plan."""
    plain, sharded = nets.make(depth=5), nets.shard(nets.make(depth=5), strategy=strategy)
    optimizers = sgd(plain, sharded)
    batches = nets.data(known + 3, 4)
    for batch in batches[:known]:
        backward(plain, sharded, tokens_loss, batch)
        step(optimizers)
    for number, batch in enumerate(batches[known:]):
        with naming("step", number):
            losses = [nets.loss_of(plain, batch), nets.loss_of(sharded, mine(batch))]
            for block in sharded.blocks:
                block.unshard()
            for block, truth in zip(sharded.blocks, plain.blocks):
                assert_unsharded(block, truth)
            if backward_finds != "all unsharded":
                for block in sharded.blocks[:: 1 if backward_finds == "all resharded" else 2]:
                    block.reshard()
                    assert_resharded(block)
            for loss in losses:
                loss.backward()
            for block in sharded.blocks:
                block.reshard()
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize("known", [0, 3])
@distributed(2)
def test_a_users_unshard_is_not_evicted_by_a_pass_of_others(known):
    """Blocks that the pass does not run stay as the user has them, in training and in evaluation."""

    class Some(nets.Net):
        path = range(5)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for number in self.path:
                x = self.blocks[number](x)
            return self.head(self.norm(x)) * self.gain

    def make() -> Some:
        torch.manual_seed(0)
        return Some(depth=5)

    plain, sharded = make(), nets.shard(make())
    optimizers = sgd(plain, sharded)
    batches = nets.data(known + 2, 4)
    for batch in batches[:known]:
        backward(plain, sharded, tokens_loss, batch)
        step(optimizers)
    plain.path = sharded.path = (2, 4)
    held = [0, 1, 3]
    for number in held:
        sharded.blocks[number].unshard()
    with torch.no_grad():
        torch.testing.assert_close(sharded(batches[known]), plain(batches[known]))
    for number in held:
        assert_unsharded(sharded.blocks[number], plain.blocks[number])
    losses = [nets.loss_of(plain, batches[known]), nets.loss_of(sharded, mine(batches[known]))]
    for number in held:
        assert_unsharded(sharded.blocks[number], plain.blocks[number])
    for loss in losses:
        loss.backward()
    for number in held:
        sharded.blocks[number].reshard()
        assert_resharded(sharded.blocks[number])
    assert_gradients(sharded, plain)
    step(optimizers)
    plain.path = sharded.path = range(5)
    backward(plain, sharded, tokens_loss, batches[known + 1])
    assert_gradients(sharded, plain)


@distributed(2)
def test_a_users_unshard_outlives_passes_of_another_block_alone():
    plain, sharded = nets.make(), nets.shard(nets.make())
    x = torch.randn(2, 13)
    for _ in range(3):
        sharded.blocks[0].unshard()
        with torch.no_grad():
            torch.testing.assert_close(sharded.blocks[2](x), plain.blocks[2](x))
        assert_unsharded(sharded.blocks[0], plain.blocks[0])
        sharded.blocks[0].reshard()
        assert_resharded(sharded.blocks[0])


@distributed(2)
def test_a_users_unshard_outlives_a_pass_that_fails():
    plain, sharded = nets.make(), nets.shard(nets.make())
    batch = nets.data(1, 4)[0]
    sharded.blocks[2].unshard()

    def fail(*_) -> None:
        raise ZeroDivisionError

    handle = sharded.blocks[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        nets.loss_of(sharded, mine(batch))
    handle.remove()
    assert_unsharded(sharded.blocks[2], plain.blocks[2])
    for block in sharded.blocks[:2]:
        assert_resharded(block)
    backward(plain, sharded, tokens_loss, batch)
    assert_resharded(sharded.blocks[2])  # by the end of its own backward
    assert_gradients(sharded, plain)


@pytest.mark.slow
@distributed(2)
def test_reshard_without_a_hold_takes_nothing_from_a_backward():
    plain, sharded = nets.make(), nets.shard(nets.make())
    for batch in nets.data(3, 4):
        losses = [nets.loss_of(plain, batch), nets.loss_of(sharded, mine(batch))]
        for unit in (*sharded.blocks, sharded):
            unit.reshard()
        assert_resharded(sharded)
        for loss in losses:
            loss.backward()
        assert_gradients(sharded, plain)


class FusedHead(nn.Module):
    """Returns what a fused loss computes from: hidden states and the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(3))
        self.head = nn.Linear(13, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x, self.head.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "microbatches", "tie"), [("optim_grads", 2, False), ("optim_grads_params", 1, True)]
)
@distributed(2)
def test_a_root_that_returns_its_heads_weight_for_a_fused_loss(strategy, microbatches, tie):
    def make() -> FusedHead:
        torch.manual_seed(0)
        net = FusedHead()
        if tie:
            net.head.weight = net.embedding.weight
        return net

    def loss(net: FusedHead, rows: torch.Tensor, rank: int) -> torch.Tensor:
        hidden, weight = net(rows[:, :-1])
        return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), rows[:, 1:].flatten())

    plain, sharded = make(), make()
    for block in sharded.blocks:
        weft.fully_shard(block, strategy=strategy)
    weft.fully_shard(sharded, strategy=strategy)
    optimizers = sgd(plain, sharded)
    for number, batch in enumerate(nets.data(4, 4 * microbatches)):
        with naming("step", number):
            truth.microbatches(plain, sharded, loss, batch, microbatches)
            assert_gradients(sharded, plain)
            step(optimizers)
            with torch.no_grad():
                torch.testing.assert_close(sharded(batch)[1].clone(), plain(batch)[1])
    assert_weights(sharded, plain)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.own, self.child = nn.Linear(13, 13), child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.own(x))


class Family(nn.Module):
    """Two parents with one child; `path` says which run."""

    def __init__(self) -> None:
        super().__init__()
        child = nets.Block(13, 29)
        self.parents = nn.ModuleList(Parent(child) for _ in range(2))
        self.last = nn.Linear(13, 13)
        self.path: tuple[int, ...] = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            x = self.parents[number](x)
        return self.last(x)


PATHS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "both": lambda step: (0, 1),
    "the other way round": lambda step: (1, 0),
    "the second alone": lambda step: (1,),
    "in turn": lambda step: (step % 2,),
    "one twice": lambda step: (1, 0, 1),
}


@pytest.mark.slow
@all_pairs(strategy=["optim_grads", "optim_grads_params"], path=list(PATHS), child_is_a_unit=[False, True])
@distributed(2)
def test_a_module_in_two_units(strategy, path, child_is_a_unit):
    def make() -> Family:
        torch.manual_seed(0)
        return Family()

    plain, sharded = make(), make()
    if child_is_a_unit:
        weft.fully_shard(sharded.parents[0].child, strategy=strategy)
    for unit in (*sharded.parents, sharded):
        weft.fully_shard(unit, strategy=strategy)
    optimizers = sgd(plain, sharded)
    data = torch.randn(4, 4, 13, generator=torch.Generator().manual_seed(3))
    for number, batch in enumerate(data):
        with naming("step", number):
            plain.path = sharded.path = PATHS[path](number)
            backward(plain, sharded, lambda net, rows, rank: net(rows).square().mean(), batch)
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@distributed(2)
def test_a_parent_is_not_sharded_while_a_child_is_unsharded(strategy):
    plain, sharded = nets.make(), nets.make()
    for block in sharded.blocks:
        weft.fully_shard(block, strategy=strategy)
    sharded.blocks[1].unshard()
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)(blocks\.1|Block).*reshard"):
        weft.fully_shard(sharded, strategy=strategy)
    sharded.blocks[1].reshard()
    weft.fully_shard(sharded, strategy=strategy)
    for batch in nets.data(2, 4):
        backward(plain, sharded, tokens_loss, batch)
        assert_gradients(sharded, plain)


@pytest.mark.parametrize("when", ["between forward and backward", "in backward", "while gradients wait"])
@distributed(2)
def test_a_parent_is_not_sharded_while_a_child_has_a_backward_to_come_or_reduces(when):
    def shard_root() -> None:
        with pytest.raises((RuntimeError, ValueError), match=r"(?s)(\b0\b|Block).*(backward|reduc|gradient|forward)"):
            weft.fully_shard(sharded)

    torch.manual_seed(0)
    plain = nn.Sequential(nets.Block(13, 29), nn.Linear(13, 13))
    torch.manual_seed(0)
    sharded = nn.Sequential(nets.Block(13, 29), nn.Linear(13, 13))
    weft.fully_shard(sharded[0])
    data = torch.randn(2, 4, 13, generator=torch.Generator().manual_seed(3))
    if when == "while gradients wait":
        sharded[0].set_requires_gradient_sync(False)
    output = sharded[0](mine(data[0]).requires_grad_())
    if when == "between forward and backward":
        shard_root()
    elif when == "in backward":
        output.register_hook(lambda gradient: shard_root())
    output.square().mean().backward()
    if when == "while gradients wait":
        shard_root()
        sharded[0].set_requires_gradient_sync(True)
        sharded[0](mine(data[0])).mean().mul(0).backward()
    plain[0](data[0]).square().mean().backward()
    assert_gradients(sharded[0], plain[0])
    for net in (plain, sharded):
        for parameter in net.parameters():
            parameter.grad = None
    weft.fully_shard(sharded)
    backward(plain, sharded, lambda net, rows, rank: net(rows).square().mean(), data[1])
    assert_gradients(sharded, plain)


@distributed(2)
def test_a_weight_that_a_user_reads_under_his_own_unshard_takes_part_in_the_loss():
    """Such as a penalty on whole weights, between forward and backward."""

    def loss(net: nets.Net, rows: torch.Tensor, rank: int) -> torch.Tensor:
        value = nets.loss_of(net, rows)
        block = net.blocks[0]
        if isinstance(block, weft.FSDPModule):
            block.unshard()
        return value + block.up.weight.square().mean()

    def train() -> None:
        plain, sharded = nets.make(), nets.shard(nets.make())
        optimizers = sgd(plain, sharded)
        for batch in nets.data(3, 4):
            backward(plain, sharded, loss, batch)
            sharded.blocks[0].reshard()
            assert_gradients(sharded, plain)
            step(optimizers)

    right_or_refused(train, r"blocks\.0")


class InParts(nn.Module):
    """`first` and `second` form one unit. Each module that `recomputed` names has a separate checkpoint."""

    def __init__(self, recomputed: Collection[str], reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.recomputed, self.reentrant = recomputed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for name in ("first", "second"):
            layer = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if name in self.recomputed else layer(x)
            x = x.tanh()
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_unit_of_two_modules_may_recompute_one_of_them_or_each_by_itself(strategy):
    for recomputed in (["first"], ["second"], ["first", "second"]):
        for reentrant in (False, True):
            plain, sharded = InParts(recomputed, reentrant), InParts(recomputed, reentrant)
            weft.fully_shard([sharded.first, sharded.second], strategy=strategy)
            weft.fully_shard(sharded, strategy=strategy)
            optimizers = sgd(plain, sharded)
            for batch in torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)):
                backward(plain, sharded, lambda net, rows, rank: net(rows), batch)
                assert_gradients(sharded, plain)
                step(optimizers)
            assert_weights(sharded, plain)
            assert all(role["live"] == 0 for role in weft.memory_report(sharded)["transient"].values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_weights_that_stay_gathered_over_a_step_are_those_of_the_step(strategy):
    plain, sharded = nets.make(depth=5), nets.shard(nets.make(depth=5), strategy=strategy)
    sharded.set_reshard_after_forward(True)
    sharded.set_reshard_after_backward(False)
    for block in sharded.blocks:
        block.register_forward_pre_hook(refuse_weights_on_their_way)
    optimizers = sgd(plain, sharded)
    for number, batch in enumerate(nets.data(4, 4)):
        with naming("step", number):
            assert number == 0 or all(unit_of(block).holders for block in sharded.blocks), "nothing stays"
            backward(plain, sharded, tokens_loss, batch)
            assert_gradients(sharded, plain)
        step(optimizers)


def refuse_weights_on_their_way(block: nn.Module, inputs: tuple) -> None:
    assert all(group._refreshing is None for group in unit_of(block).groups), "an update is in flight"


@distributed(2)
def test_a_held_unit_that_shares_a_weight_has_the_values_of_a_step_when_the_other_is_unsharded():
    owner, user = nn.Linear(4, 4), nn.Linear(4, 4)
    user.weight = owner.weight
    model = nn.Sequential(owner, user)
    for module in (owner, user, model):
        weft.fully_shard(module, strategy="optim_grads")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    model(torch.ones(1, 4)).sum().backward()
    owner.unshard()
    optimizer.step()
    user.unshard()
    refuse_weights_on_their_way(owner, ())
    held = [each.detach().clone() for each in (owner.weight, owner.bias, user.weight, user.bias)]
    user.reshard()
    owner.reshard()
    new = [each.full_tensor().detach() for each in (owner.weight, owner.bias, user.weight, user.bias)]
    assert all(map(torch.equal, held, new))


@distributed(2)
def test_what_is_frozen_under_unshard_stays_so_when_backward_ends_the_hold():
    net = nets.shard(nets.make())
    loss = nets.loss_of(net, mine(nets.data(1, 4)[0]))
    net.blocks[1].unshard()
    net.blocks[1].requires_grad_(False)
    loss.backward()
    assert not unit_of(net.blocks[1]).holders
    assert not any(parameter.requires_grad for parameter in net.blocks[1].parameters())
