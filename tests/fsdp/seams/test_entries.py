"""Ways into backward besides a unit's output: the weights are there for each, or the unit is named.

Weights that are gone must not be read: not from memory that another unit has by now, not from none.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights, backward, naming, right_or_refused, sgd, step
from tests.pairs import all_pairs
from tests.pool import distributed
from weft.errors import WeightsGone

WIDTH = 13


class Routed(nn.Module):
    """A block with a side branch of two layers, whose scores stay on the module: no output depends on its last one."""

    def __init__(self, detached: bool, when: str) -> None:
        super().__init__()
        self.detached, self.when = detached, when
        self.up, self.down = nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)
        self.router, self.judge = nn.Linear(WIDTH, 17), nn.Linear(17, 5)
        self.scores: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "before":
            self.score(x)
        output = x + self.down(F.gelu(self.up(x)))
        if self.when == "after":
            self.score(x)
        return output

    def score(self, x: torch.Tensor) -> None:
        hidden = F.gelu(self.router(x.detach() if self.detached else x))
        self.scores = self.judge(hidden)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def shard(net: Stack, **options) -> Stack:
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return weft.fully_shard(net, **options)


def inputs(steps: int) -> torch.Tensor:
    """`[steps, rows, WIDTH]`"""
    return torch.randn(steps, 8, WIDTH, generator=torch.Generator().manual_seed(3))


def assert_trains(plain: nn.Module, sharded: nn.Module, loss, steps: int = 3) -> None:
    optimizers = sgd(plain, sharded)
    for number, batch in enumerate(inputs(steps)):
        with naming("step", number):
            backward(plain, sharded, loss, batch)
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


def routed(detached: bool = False, when: str = "after") -> Stack:
    torch.manual_seed(0)
    return Stack(*(Routed(detached, when) for _ in range(3)))


@pytest.mark.slow
@all_pairs(when=["before", "after"], detached=[False, True], allocator=["caching", "trace"])
@distributed(2)
def test_an_auxiliary_loss_on_scores_that_stay_on_a_module_computed_before_or_after_its_output(
    when, detached, allocator
):
    def loss(net: Stack, rows: torch.Tensor, rank: int) -> torch.Tensor:
        value = net(rows).square().mean()
        return value + sum(block.scores.square().mean() for block in net.blocks)

    sharded = shard(routed(detached, when), runtime=weft.RuntimeOptions(allocator=allocator))
    right_or_refused(lambda: assert_trains(routed(detached, when), sharded, loss), r"blocks\.\d")


@pytest.mark.slow
@pytest.mark.parametrize("known", [0, 2])
@distributed(2)
def test_an_auxiliary_loss_alone_on_scores_that_stay_on_a_module(known):
    """`known`: steps before, with the loss of the output. From then on other weights lie where these were."""

    def output_loss(net: Stack, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return net(rows).square().mean()

    def loss(net: Stack, rows: torch.Tensor, rank: int) -> torch.Tensor:
        net(rows)
        return sum(net.blocks[number].scores.square().mean() for number in (0, 1))

    plain, sharded = routed(), shard(routed())
    if known:
        assert_trains(plain, sharded, output_loss, known)
    right_or_refused(lambda: assert_trains(plain, sharded, loss), r"blocks\.\d")


@distributed(2)
def test_an_auxiliary_loss_in_a_backward_of_its_own_after_that_of_the_output():
    def work(net, part: torch.Tensor, share: float) -> None:
        value = net(part).square().mean()
        auxiliary = sum(block.scores.square().mean() for block in net.blocks)
        (value * share).backward(retain_graph=True)
        (auxiliary * share).backward()

    right_or_refused(lambda: assert_works(work), r"blocks\.\d")


def assert_works(work: Callable[[nn.Module, torch.Tensor, float], None]) -> None:
    """`work(net, part, share)` on this rank's part, and on all of them in the plain net, leaves the same gradients."""
    plain, sharded = routed(), shard(routed())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for batch in inputs(2):
        for net, parts in ((plain, batch.chunk(ranks)), (sharded, [batch.chunk(ranks)[rank]])):
            for part in parts:
                work(net, part, 1 / len(parts))
        assert_gradients(sharded, plain)
        for net in (plain, sharded):
            net.zero_grad()


class Features(nn.Module):
    """Three frozen stages of two layers each, whose inner layers are looked at by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 29), nn.GELU(), nn.Linear(29, 23), nn.GELU(), nn.Linear(23, WIDTH))
            for _ in range(3)
        )
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x

    def watch(self) -> None:
        for stage in self.stages:
            stage[2].register_forward_hook(lambda module, args, output: self.seen.append(output))


class Perceptual(nn.Module):
    """A generator judged by the features of a frozen net."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 29), nn.GELU(), nn.Linear(29, WIDTH))
        self.judge = Features().requires_grad_(False)


def perceptual() -> Perceptual:
    torch.manual_seed(0)
    return Perceptual()


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["trace", "caching"])
@pytest.mark.parametrize("output", ["with the output", "without the output"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_features_of_a_frozen_net_that_hooks_capture_and_a_later_loss_uses(strategy, output, allocator):
    def loss(net: Perceptual, rows: torch.Tensor, rank: int) -> torch.Tensor:
        net.judge.seen.clear()
        final = net.judge(net.generator(rows))
        value = sum(feature.square().mean() for feature in net.judge.seen)
        return value + final.square().mean() if output == "with the output" else value

    plain, sharded = perceptual(), perceptual()
    options = {"strategy": strategy, "runtime": weft.RuntimeOptions(allocator=allocator)}
    for stage in sharded.judge.stages:
        weft.fully_shard(stage, **options)
    for root in (sharded.judge, sharded.generator):
        weft.fully_shard(root, **options)
    plain.judge.watch()
    sharded.judge.watch()
    right_or_refused(lambda: assert_trains(plain, sharded, loss, steps=4), r"stages\.\d")


@distributed(2)
def test_features_of_a_frozen_net_that_is_one_unit():
    def loss(net: Perceptual, rows: torch.Tensor, rank: int) -> torch.Tensor:
        net.judge.seen.clear()
        net.judge(net.generator(rows))
        return sum(feature.square().mean() for feature in net.judge.seen)

    plain, sharded = perceptual(), perceptual()
    for root in (sharded.judge, sharded.generator):
        weft.fully_shard(root, reshard_after_forward=True)
    plain.judge.watch()
    sharded.judge.watch()
    right_or_refused(lambda: assert_trains(plain, sharded, loss, steps=4), r"Features|the root")


class Around(nn.Module):
    """A block that gives an inner tensor away by another way than its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, given: list | None = None) -> torch.Tensor:
        self.kept = self.up(x)
        if given is not None:
            given.append(self.kept)
        return x + self.down(F.gelu(self.kept))


class Returns(Stack):
    """Returns the second block's inner tensor too, which that block did not return: by `way`."""

    def __init__(self, way: str) -> None:
        super().__init__(*(Around() for _ in range(3)))
        self.way = way

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given: list[torch.Tensor] = []
        x = self.first(x)
        x = self.blocks[0](x)
        x = self.blocks[1](x, given)
        x = self.blocks[2](x)
        return self.last(x), given[0] if self.way == "in a list that the block fills" else self.blocks[1].kept


@pytest.mark.parametrize("way", ["in a list that the block fills", "as an attribute"])
@pytest.mark.parametrize("used", ["beside the output", "alone"])
@distributed(2)
def test_a_tensor_that_leaves_a_unit_around_its_output(used, way):
    def make() -> Returns:
        torch.manual_seed(0)
        return Returns(way)

    def loss(net: Returns, rows: torch.Tensor, rank: int) -> torch.Tensor:
        output, inner = net(rows)
        value = inner.square().mean()
        return value if used == "alone" else value + output.square().mean()

    sharded = shard(make())
    right_or_refused(lambda: assert_trains(make(), sharded, loss), r"blocks\.\d")


class Collects(Stack):
    """All blocks fill one list."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        given: list[torch.Tensor] = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, given)
        return self.last(x), given


@pytest.mark.slow
@distributed(2)
def test_a_list_that_block_after_block_fills_is_the_callers_though_it_holds_what_needs_gradients():
    def make() -> Collects:
        torch.manual_seed(0)
        return Collects(*(Around() for _ in range(3)))

    def loss(net: Collects, rows: torch.Tensor, rank: int) -> torch.Tensor:
        output, inner = net(rows)
        assert len(inner) == 3
        return output.square().mean() + sum(each.square().mean() for each in inner)

    sharded = shard(make())
    right_or_refused(lambda: assert_trains(make(), sharded, loss), r"blocks\.\d")


@distributed(2)
def test_a_loss_on_an_inner_tensor_of_an_earlier_microbatch():
    """The block ran again since: its weights came and went, and the tensor waits."""

    def work(net, part: torch.Tensor, share: float) -> None:
        (net(part).square().mean() * share).backward(retain_graph=True)
        early = net.blocks[0].scores
        with torch.no_grad():
            net(part)
        (early.square().mean() * share).backward()

    right_or_refused(lambda: assert_works(work), r"blocks\.\d")


@pytest.mark.slow
@distributed(2)
def test_a_feature_that_a_hook_captured_in_a_net_of_tokens():
    """Hidden states by hooks on the inner layers of trainable blocks, as distillation reads them."""
    seen: list[torch.Tensor] = []

    def make() -> nets.Net:
        net = nets.make()
        for block in net.blocks:
            block.up.register_forward_hook(lambda module, args, output: seen.append(output))
        return net

    def loss(net: nets.Net, rows: torch.Tensor, rank: int) -> torch.Tensor:
        seen.clear()
        return nets.loss_of(net, rows) + sum(feature.square().mean() for feature in seen)

    def train() -> None:
        plain, sharded = make(), nets.shard(make())
        optimizers = sgd(plain, sharded)
        for batch in nets.data(3, 4):
            backward(plain, sharded, loss, batch)
            assert_gradients(sharded, plain)
            step(optimizers)

    right_or_refused(train, r"blocks\.\d")


class Enough(Exception):
    """Ends a forward whose output is not needed."""


@distributed(2)
def test_the_kept_output_of_a_forward_that_an_exception_ends_has_a_backward_outside_of_what_it_left():
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    plain, net, rows = make(), make(), torch.ones(2, WIDTH)
    for block in net:
        weft.fully_shard(block)
    weft.fully_shard(net)
    kept: list[torch.Tensor] = []

    def stop(output: torch.Tensor) -> None:
        kept.append(output)
        raise Enough

    def backward_of_kept(handle) -> None:
        with pytest.raises(Enough):
            net(rows)
        handle.remove()
        kept.pop().sum().backward()

    backward_of_kept(net[2].register_forward_pre_hook(lambda module, args: stop(args[0])))
    plain[:2](rows).sum().backward()
    assert_gradients(net, plain)
    with pytest.raises(WeightsGone, match=r"of 1 \(Sequential\) .* ended with an exception.*in a pre-hook of the next"):
        backward_of_kept(net[1].register_forward_hook(lambda module, args, output: stop(output)))
    net[1][0].register_forward_hook(lambda module, args, output: kept.append(output))
    net(rows)
    with pytest.raises(WeightsGone, match="a tensor that forward did not return"):
        kept.pop().sum().backward()
