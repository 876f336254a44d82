"""What people do with modules, sharded or not: the numbers are those of the plain module.

In double precision, so that rounding hides nothing.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later
from tests.pool import distributed


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def everything(batch: torch.Tensor) -> torch.Tensor:
    return batch


def state(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """Weights and gradients by name; a missing gradient stays missing."""
    return dict(net.state_dict()) | {f"{name}.grad": parameter.grad for name, parameter in net.named_parameters()}


def assert_same_state(sharded: nn.Module, plain: nn.Module, **tolerance) -> None:
    nets.assert_same(state(sharded), state(plain), **tolerance)


def assert_at_rest(net: nn.Module) -> None:
    report = weft.memory_report(net)["transient"]
    assert report["gathered weights"]["live"] == 0
    assert all(isinstance(p, DTensor) for p in net.parameters())


def compare(
    plain: nn.Module,
    sharded: nn.Module,
    work: Callable[[nn.Module, torch.Tensor, Callable, int], None],
    steps: int = 3,
    **tolerance,
) -> None:
    """Run `work(model, batch, part, step)`, which does forwards and backwards, with an optimizer step after each, on
    the plain model with all rows and on the sharded one with this rank's."""
    optimizers = [sgd(model.parameters()) for model in (plain, sharded)]
    for step, batch in enumerate(nets.data(steps, 8)):
        for model, optimizer, part in ((plain, optimizers[0], everything), (sharded, optimizers[1], mine)):
            optimizer.zero_grad()
            work(model, batch, part, step)
        assert_same_state(sharded, plain, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
        assert_at_rest(sharded)
    assert_same_state(sharded, plain, **tolerance)


def one_backward(model, batch, part, step):
    nets.loss_of(model, part(batch)).backward()


def pair(**options) -> tuple[nn.Module, nn.Module]:
    return nets.make().double(), nets.shard(nets.make().double(), **options)


# --- which parameters -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(2)
def test_frozen_parameters_stay_and_take_no_gradient_memory():
    models = []
    for _ in range(2):
        net = nets.make().double()
        for parameter in [*net.blocks[0].parameters(), net.blocks[1].up.weight]:
            parameter.requires_grad_(False)
        models.append(net)
    frozen = {name: p.detach().clone() for name, p in models[0].named_parameters() if not p.requires_grad}
    plain, sharded = models[0], nets.shard(models[1])
    compare(plain, sharded, one_backward)
    for name, value in frozen.items():
        torch.testing.assert_close(nets.full(sharded.state_dict()[name]), value, rtol=0, atol=0)
    alone = nets.make()
    for parameter in alone.parameters():
        parameter.requires_grad_(False)
    nets.shard(alone)
    assert not alone(nets.data(1, 4)[0]).requires_grad
    assert weft.memory_report(alone)["persistent"]["gradients"] == 0
    trainable = weft.memory_report(sharded)["persistent"]
    everything_trains = weft.memory_report(trained_once())["persistent"]
    assert trainable["gradients"] < everything_trains["gradients"]


def trained_once():
    net = nets.shard(nets.make().double())
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    return net


class LowRank(nn.Module):
    """A frozen linear layer and a trainable correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def low_rank() -> nets.Net:
    net = nets.make().double().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return net.double()


@pytest.mark.slow
@distributed(2)
def test_low_rank_corrections_of_a_frozen_base_train():
    plain, sharded = low_rank(), nets.shard(low_rank())
    compare(plain, sharded, one_backward)
    trainable = sum(p.numel() for p in plain.parameters() if p.requires_grad) * 8
    assert weft.memory_report(sharded)["persistent"]["gradients"] < trainable


class Tied(nn.Module):
    """Embedding in a unit of its own, head in the root, one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.block = nets.Block(13, 29)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def make(cls: type[nn.Module], *args) -> nn.Module:
    torch.manual_seed(0)
    return cls(*args).double()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_parameters_tied_across_units_stay_tied(strategy):
    plain, sharded = make(Tied), make(Tied)
    for module in (sharded.embedding, sharded.block, sharded):
        weft.fully_shard(module, strategy=strategy)
    assert sharded.head.weight is sharded.embedding.weight
    assert len(list(sharded.parameters())) == len(list(plain.parameters()))
    compare(plain, sharded, one_backward)
    assert sharded.head.weight is sharded.embedding.weight
    sharded.unshard()
    sharded.reshard()
    assert weft.memory_report(sharded)["transient"]["gathered weights"]["live"] == 0, "not the embedding's either"


class Nested(nn.Module):
    """A unit in a unit in a unit, each with parameters of its own on both sides of the inner one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(13, 13)
        self.inner = Nested(depth - 1) if depth else nets.Block(13, 29)
        self.after = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.inner(self.before(x))))


class OnVectors(nn.Module):
    """Feeds embedded tokens, which need no gradient, to a body and predicts."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("table", torch.randn(11, 13))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.table[tokens]) @ self.table.t()


def shard_nested(net: Nested) -> None:
    if isinstance(net.inner, Nested):
        shard_nested(net.inner)
    weft.fully_shard(net)


@pytest.mark.slow
@distributed(2, 4)
def test_units_nest_three_deep_and_inputs_need_no_gradient():
    plain, sharded = (make(lambda: OnVectors(Nested(3))) for _ in range(2))
    shard_nested(sharded.body)
    weft.fully_shard(sharded)
    compare(plain, sharded, one_backward)


@distributed(2)
def test_a_list_of_modules_is_one_unit():
    plain, sharded = nets.make().double(), nets.make().double()
    weft.fully_shard([*sharded.blocks[:2]])
    weft.fully_shard([sharded.blocks[2], sharded.norm])
    weft.fully_shard(sharded)
    compare(plain, sharded, one_backward)


class Branches(nn.Module):
    """Two branches of the same shape; `use` says which run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.left, self.right = nets.Block(13, 29), nets.Block(13, 29)
        self.head = nn.Linear(13, 11)
        self.spare = nn.Parameter(torch.ones(5))
        self.use = "both"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.use in ("both", "left"):
            x = self.left(x)
        if self.use in ("both", "right"):
            x = self.right(x)
        return self.head(x)


def branches(**options) -> tuple[Branches, Branches]:
    plain, sharded = make(Branches), make(Branches)
    for module in (sharded.left, sharded.right, sharded):
        weft.fully_shard(module, **options)
    return plain, sharded


@distributed(2)
def test_a_parameter_that_no_rank_uses_keeps_no_gradient_and_its_value():
    plain, sharded = branches()
    compare(plain, sharded, one_backward)
    assert sharded.spare.grad is None


@pytest.mark.slow
@distributed(2)
def test_a_block_that_all_ranks_skip_in_some_steps_is_left_alone_there():
    def work(model, batch, part, step):
        model.use = ("both", "left", "right", "both")[step]
        one_backward(model, batch, part, step)

    for strategy in ("optim", "optim_grads_params"):
        compare(*branches(strategy=strategy), work)


class Masked(nn.Module):
    """A root whose own parameters are used or not, rank by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.Block(13, 29)
        self.register_buffer("table", torch.randn(11, 13))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(13)) for _ in range(3))
        self.ranks = [0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = []
        for rank, rows in zip(self.ranks, tokens.chunk(len(self.ranks))):
            outputs.append(self.body(self.table[rows]) * self.gains[rank])
        return torch.cat(outputs) @ self.table.t()


@distributed(2)
def test_a_parameter_used_on_one_rank_has_the_gradient_of_the_whole_batch():
    plain, sharded = make(Masked), make(Masked)
    weft.fully_shard(sharded.body)
    weft.fully_shard(sharded)
    plain.ranks, sharded.ranks = list(range(dist.get_world_size())), [dist.get_rank()]
    compare(plain, sharded, one_backward)


@distributed(2)
def test_parameter_attributes_and_ignored_parameters_survive():
    net = nets.make()
    net.blocks[0].up.weight.tensor_model_parallel = True
    ignored = net.gain
    nets.shard(net, ignored_params=[ignored])
    assert net.blocks[0].up.weight.tensor_model_parallel is True
    assert net.gain is ignored


# --- which passes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_several_forwards_before_one_backward(strategy):
    def work(model, batch, part, step):
        losses = [nets.loss_of(model, part(half)) for half in batch.chunk(2)]
        sum(losses).backward()

    compare(*pair(strategy=strategy), work)


@pytest.mark.slow
@distributed(2)
def test_several_forwards_then_their_backwards_in_any_order():
    def work(model, batch, part, step):
        losses = [nets.loss_of(model, part(half)) for half in batch.chunk(2)]
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward()

    compare(*pair(), work)


class Twice(nn.Module):
    """One block, used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.block, self.other = nets.Block(13, 29), nets.Block(13, 29)
        self.head = nn.Linear(13, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.other(self.block(self.embedding(tokens)))))


@pytest.mark.slow
@distributed(2)
def test_a_block_may_run_twice_in_one_forward():
    for strategy in ("optim", "optim_grads_params"):
        plain, sharded = make(Twice), make(Twice)
        for module in (sharded.block, sharded.other, sharded):
            weft.fully_shard(module, strategy=strategy)
        compare(plain, sharded, one_backward)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_gradients_accumulate_with_and_without_synchronisation(strategy):
    def by_sync(model, batch, part, step):
        for number, micro in enumerate(batch.chunk(4)):
            if isinstance(model, weft.FSDPModule):
                model.set_requires_gradient_sync(number == 3)
            nets.loss_of(model, part(micro)).backward()

    def by_last(model, batch, part, step):
        for number, micro in enumerate(batch.chunk(4)):
            if isinstance(model, weft.FSDPModule):
                model.set_is_last_backward(number == 3)
            nets.loss_of(model, part(micro)).backward()

    def by_itself(model, batch, part, step):
        for micro in batch.chunk(2):
            nets.loss_of(model, part(micro)).backward()

    for work in (by_sync, by_last, by_itself):
        compare(*pair(strategy=strategy), work, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["trace", "caching"])
@distributed(2)
def test_validation_during_training_changes_nothing(allocator):
    def work(model, batch, part, step):
        if step % 2:
            model.eval()
            with torch.no_grad():
                expected = None if isinstance(model, weft.FSDPModule) else model(part(batch))
                output = model(part(batch))
            assert expected is None or torch.equal(output, expected)
            assert not output.requires_grad
            model.train()
        one_backward(model, batch, part, step)
        if step == 2:
            with torch.no_grad():
                model(part(batch)[:1])

    options = weft.RuntimeOptions(allocator=allocator)
    compare(*pair(runtime=options), work, steps=6)


@pytest.mark.slow
@distributed(2)
def test_evaluation_between_forward_and_backward_changes_nothing():
    def work(model, batch, part, step):
        loss = nets.loss_of(model, part(batch))
        with torch.no_grad():
            model(part(batch))
        loss.backward()

    compare(*pair(), work)


@distributed(2)
def test_validation_equals_the_plain_model():
    plain, sharded = pair()
    tokens = nets.data(1, 4)[0]
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens), plain(tokens))
    assert_at_rest(sharded)
    with torch.inference_mode():
        torch.testing.assert_close(sharded(tokens), plain(tokens))
    torch.testing.assert_close(sharded(tokens), plain(tokens))


@pytest.mark.slow
@distributed(2)
def test_a_retained_graph_runs_backward_twice():
    def work(model, batch, part, step):
        loss = nets.loss_of(model, part(batch))
        loss.backward(retain_graph=True)
        loss.backward()

    compare(*pair(), work)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.one(x)), torch.tanh(self.other(x))


@pytest.mark.parametrize("allocator", ["trace", "caching"])
@distributed(2)
def test_a_backward_through_the_rest_of_a_graph_finds_weights_where_they_were_or_says_that_they_moved(allocator):
    """The first backward ends the call, and a forward in between takes the place that has been planned since."""
    plain, x = TwoHeads(), torch.ones(2, 5)
    sharded = weft.fully_shard(TwoHeads(), reshard_after_forward=True, runtime=weft.RuntimeOptions(allocator=allocator))
    for net in (plain, sharded):
        one, other = net(x)
        one.sum().backward()
        net(x)[0].sum().backward()
        if net is sharded and allocator == "trace":
            with pytest.raises(RuntimeError, match=r"weights have moved since.*allocator='caching'"):
                other.sum().backward()
            return
        other.sum().backward()
    assert_same_state(sharded, plain)


@distributed(2)
def test_gradients_of_inputs_are_right():
    torch.manual_seed(0)
    plain = nn.Sequential(nets.Block(13, 29), nets.Block(13, 29))
    sharded = copy.deepcopy(plain)
    for block in sharded:
        weft.fully_shard(block)
    weft.fully_shard(sharded)
    x = torch.randn(4, 13)
    for _ in range(2):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        ys = [model(each).square().sum() for model, each in zip((plain, sharded), xs)]
        torch.testing.assert_close(ys[1], ys[0])
        gradients = [torch.autograd.grad(y, each, retain_graph=True)[0] for y, each in zip(ys, xs)]
        torch.testing.assert_close(gradients[1], gradients[0])


# --- exceptions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_training_goes_on_after_an_exception_in_forward(strategy):
    plain, sharded = pair(strategy=strategy)

    def work(model, batch, part, step):
        if model is sharded and step in (1, 2):
            handle = model.blocks[1].down.register_forward_pre_hook(fail)
            with pytest.raises(Oops):
                model(part(batch))
            handle.remove()
        one_backward(model, batch, part, step)

    def fail(module, args):
        raise Oops

    compare(plain, sharded, work, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_training_goes_on_after_an_exception_in_backward_and_a_reset(strategy):
    plain, sharded = pair(strategy=strategy)

    def work(model, batch, part, step):
        if model is sharded and step in (1, 2):
            handle = model.blocks[1].register_forward_hook(fails_later)
            loss = nets.loss_of(model, part(batch))
            with pytest.raises(Oops):
                loss.backward()
            handle.remove()
            model.reset_iter_state()
            assert_at_rest(model)
            model.zero_grad()
        one_backward(model, batch, part, step)

    compare(plain, sharded, work, steps=4)


# --- torch's methods ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(2)
def test_unshard_registers_full_parameters_until_reshard():
    plain, sharded = pair()
    for async_op in (False, True):
        handle = sharded.blocks[0].unshard(async_op=async_op)
        if async_op:
            handle.wait()
        weight = sharded.blocks[0].up.weight
        assert not isinstance(weight, DTensor)
        torch.testing.assert_close(weight.detach(), plain.blocks[0].up.weight.detach(), rtol=0, atol=0)
        x = torch.randn(2, 13).double()
        torch.testing.assert_close(sharded.blocks[0].up(x), plain.blocks[0].up(x))
        sharded.blocks[0].reshard()
        assert_at_rest(sharded)

    def work(model, batch, part, step):
        if model is sharded:
            for block in model.blocks:
                block.unshard(async_op=True)
        one_backward(model, batch, part, step)

    compare(plain, sharded, work)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nets.Block(13, 29)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).sum()


@distributed(2)
def test_another_method_can_be_made_a_forward():
    plain, sharded = make(Encoder), make(Encoder)
    weft.fully_shard(sharded)
    weft.register_fsdp_forward_method(sharded, "encode")
    x = torch.randn(4, 13).double()
    for model, part in ((plain, everything), (sharded, mine)):
        model.encode(part(x)).square().mean().backward()
    assert_same_state(sharded, plain)
    assert_at_rest(sharded)
    for model, part in ((plain, everything), (sharded, mine)):
        (model(part(x)) / part(x).shape[0]).backward()
    assert_same_state(sharded, plain)
    with pytest.raises(ValueError, match="Encoder has no method 'decode'"):
        weft.register_fsdp_forward_method(sharded, "decode")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_registered_parameters_are_the_same_dtensors_before_and_after_a_step(strategy):
    sharded = nets.shard(nets.make(), strategy=strategy)
    before = list(sharded.parameters())
    tokens = nets.data(1, 4)[0]
    seen = []
    handle = sharded.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    loss = nets.loss_of(sharded, tokens)
    handle.remove()
    if strategy == "optim_grads_params":  # the root's may stay for its backward, those of the blocks may not
        assert all(isinstance(p, DTensor) for p in sharded.blocks.parameters())
    loss.backward()
    assert seen == [nn.Parameter] and all(a is b for a, b in zip(before, sharded.parameters()))
    assert_at_rest(sharded)
    assert all(isinstance(p.grad, DTensor) for p in sharded.parameters())


@pytest.mark.slow
@distributed(2)
def test_gradient_divide_factors_replace_or_follow_the_average():
    def scaled(factor):
        def work(model, batch, part, step):
            loss = nets.loss_of(model, part(batch))
            (loss if model is sharded else loss * factor).backward()

        return work

    for setter, factor in ((None, 1 / 3), (dist.get_world_size() * 4.0, 1 / 4)):
        plain, sharded = pair() if setter else pair(gradient_divide_factor=3.0)
        for unit in (*sharded.blocks, sharded) if setter else ():
            unit.set_gradient_divide_factor(setter)
        compare(plain, sharded, scaled(factor))


# --- options that change speed, never results -----------------------------------------------------------------------


def run(steps: int = 4, prepare=lambda net: None, **options) -> dict:
    net = nets.shard(nets.make(), **options)
    prepare(net)
    return nets.train(net, nets.data(steps, 8), rank=dist.get_rank(), ranks=dist.get_world_size(), microbatches=2)


def prefetch_by_hand(net: nets.Net) -> None:
    blocks = [*net.blocks]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    net.set_modules_to_forward_prefetch(blocks[:2])


@pytest.mark.long
@distributed(2)
def test_options_for_speed_give_bit_equal_results():
    short = partial(run, 3)
    reference = short()
    torch.testing.assert_close(short(prepare=prefetch_by_hand), reference, rtol=0, atol=0)
    for options in (
        {"allocator": "caching"},
        {"prefetch_bytes": 0},
        {"prefetch_bytes": 10**9},
        {"separate_all_gather_group": True},
        {"max_live_reduce_buffers": 1},
        {"max_live_reduce_buffers": 3},
        {"check_collectives": False},
    ):
        result = short(runtime=weft.RuntimeOptions(**options))
        torch.testing.assert_close(result, reference, rtol=0, atol=0, msg=lambda text, o=options: f"{o}: {text}")
    for choice in (True, False):
        torch.testing.assert_close(short(reshard_after_forward=choice), reference, rtol=0, atol=0)


@pytest.mark.slow
@distributed(2)
def test_a_planned_pool_allocates_nothing_in_later_steps():
    net = nets.shard(nets.make())
    optimizer = sgd(net.parameters())

    def step(batch):
        optimizer.zero_grad()
        nets.loss_of(net, mine(batch)).backward()
        optimizer.step()

    def counts():
        return [(role["allocations"], role["fallbacks"]) for role in weft.memory_report(net)["transient"].values()]

    batches = nets.data(14, 8)
    for batch in batches[:3]:
        step(batch)
    planned = counts()
    for batch in batches[3:13]:
        step(batch)
    assert counts() == planned
    report = weft.memory_report(net)["transient"]
    assert all(0 < role["peak"] <= role["slab"] for role in report.values())
