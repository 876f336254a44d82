"""What is gathered is what the main weights say now, whoever wrote them, whenever, on whichever rank."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later
from tests.fsdp.seams.truth import (
    STRATEGIES,
    assert_gradients,
    assert_weights,
    backward,
    naming,
    nothing_renewed,
    sgd,
    step,
    tokens_loss,
)
from tests.pairs import all_pairs
from tests.pool import distributed
from weft.quantize import nvfp4, tensorwise

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
TENSORWISE = weft.MixedPrecisionPolicy(param_quantization=tensorwise())
RESIDENT = ["optim", "optim_grads"]
CLOSE = {"rtol": 1e-2, "atol": 1e-3}
"""Of gradients that bf16 weights give: what is stale differs by half of its value."""


def half(**options) -> nets.Net:
    """A net of bf16 weights over fp32 ones, with fp32 outputs."""
    net = nets.make()
    for block in net.blocks:
        weft.fully_shard(block, mp_policy=HALF, **options)
    return weft.fully_shard(net, mp_policy=replace(HALF, output_dtype=torch.float32), **options)


def fail_in_backward(net: nets.Net, batch: torch.Tensor) -> None:
    handle = net.blocks[1].register_forward_hook(fails_later)
    with pytest.raises(Oops):
        nets.loss_of(net, batch).backward()
    handle.remove()


def full_now(net: nets.Net) -> dict[str, torch.Tensor]:
    """The registered full parameters, as a module of this unit would read them."""
    for name, parameter in net.named_parameters():
        assert not isinstance(parameter, torch.distributed.tensor.DTensor), f"{name} is not unsharded"
    return {name: parameter.detach().float() for name, parameter in net.named_parameters()}


def in_compute_dtype(plain: nets.Net, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: p.detach().to(dtype).float() for name, p in plain.named_parameters()}


def by_step(net: nets.Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def by_copy(net: nets.Net, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.copy_(parameter * 2)


def by_foreach(net: nets.Net, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        torch._foreach_mul_(optimizer.param_groups[0]["params"], 2.0)


def by_load(net: nets.Net, optimizer: torch.optim.Optimizer) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})


WRITES: list[Callable[[nets.Net, torch.optim.Optimizer], None]] = [by_step, by_copy, by_foreach, by_load]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "strategy", "dtype", "steps"),
    [
        (by_step, "no_shard", torch.float32, 1),
        (by_step, "optim", torch.bfloat16, 3),
        (by_copy, "optim", torch.float32, 1),
        (by_copy, "optim_grads_params", torch.float32, 3),
        (by_foreach, "optim", torch.bfloat16, 1),
        (by_load, "optim_grads_params", torch.bfloat16, 1),
    ],
)
@distributed(2)
def test_unshard_after_a_write_that_followed_a_forward_without_backward(write, strategy, dtype, steps):
    plain = nets.make()
    sharded = half(strategy=strategy) if dtype == torch.bfloat16 else nets.shard(nets.make(), strategy=strategy)
    optimizers = sgd(plain, sharded)
    for batch in nets.data(steps, 4):
        backward(plain, sharded, tokens_loss, batch)
    for net, optimizer in zip((plain, sharded), optimizers):
        output = net(nets.data(1, 4, seed=7)[0])  # whose backward does not come
        write(net, optimizer)
        del output
    plain.load_state_dict(nets.whole(sharded.state_dict()))
    units = [*sharded.blocks, sharded]
    for unit in units:
        unit.unshard()
    torch.testing.assert_close(full_now(sharded), in_compute_dtype(plain, dtype), rtol=0, atol=0)
    for unit in units:
        unit.reshard()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_step_that_followed_a_forward_without_backward_is_a_step_of_the_weights(strategy):
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy=strategy)
    optimizers = sgd(plain, sharded)
    for batch in nets.data(3, 4):
        backward(plain, sharded, tokens_loss, batch)
        outputs = [net(batch) for net in (plain, sharded)]
        for net, optimizer in zip((plain, sharded), optimizers):
            by_step(net, optimizer)
            optimizer.zero_grad()
        del outputs
        now = nets.whole(sharded.state_dict())
        torch.testing.assert_close(now, dict(plain.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_load_state_dict_after_an_exception_in_backward(strategy):
    batches = nets.data(3, 4)
    plain, sharded = nets.make(), nets.shard(nets.make(), strategy=strategy)
    backward(plain, sharded, tokens_loss, batches[0])
    wanted = {name: 2 * value.detach().clone() for name, value in plain.state_dict().items()}
    kept = {name: 2 * value.detach().clone() for name, value in sharded.state_dict().items()}
    for net in (plain, sharded):
        fail_in_backward(net, batches[1])
    plain.load_state_dict(wanted)
    sharded.load_state_dict(kept)
    actual = nets.whole(sharded.state_dict())
    torch.testing.assert_close(actual, wanted)
    for net in (plain, sharded):
        for parameter in net.parameters():
            parameter.grad = None
    backward(plain, sharded, tokens_loss, batches[2])
    assert_gradients(sharded, plain)
    assert_weights(sharded, plain)


def microbatch(plain: nets.Net, sharded: nets.Net, batch: torch.Tensor) -> None:
    """One backward of both, where the plain one casts as `HALF` does."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    expected = nets.loss_as_cast(plain, batch, ranks=ranks)
    expected.backward()
    loss = nets.loss_of(sharded, batch.chunk(ranks)[rank])
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / ranks, expected.detach())
    loss.backward()


def write_everywhere(plain: nets.Net, sharded: nets.Net, write: Callable[[torch.Tensor], None]) -> None:
    with torch.no_grad():
        for net in (plain, sharded):
            for parameter in net.parameters():
                write(parameter)


BETWEEN = {
    "copy_": lambda net: [p.copy_(p * 1.5) for p in net.parameters()],
    "foreach": lambda net: torch._foreach_mul_(list(net.parameters()), 1.5),
    "of the local part": lambda net: [
        (p.to_local() if isinstance(p, torch.distributed.tensor.DTensor) else p).mul_(1.5) for p in net.parameters()
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "flagged", "way"),
    [("optim", True, "copy_"), ("optim", True, "foreach"), ("optim_grads", False, "of the local part")],
)
@distributed(2)
@nothing_renewed()
def test_weights_that_are_written_between_microbatches(strategy, flagged, way):
    plain, sharded = nets.make(), half(strategy=strategy)
    for number, batch in enumerate(nets.data(3, 4)):
        with naming("microbatch", number):
            if flagged:
                sharded.set_is_last_backward(number == 2)
            else:
                sharded.set_requires_gradient_sync(number == 2)
            microbatch(plain, sharded, batch)
            for net in (plain, sharded):
                with torch.no_grad():
                    BETWEEN[way](net)
    assert_gradients(sharded, plain, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RESIDENT)
@distributed(2)
def test_an_optimizer_that_steps_between_microbatches(strategy):
    """On gradients that the user keeps aside, as methods with an inner step do."""
    plain, sharded = nets.make(), half(strategy=strategy)
    optimizers = sgd(plain, sharded, lr=0.5)
    batches = nets.data(4, 4)
    microbatch(plain, sharded, batches[0])
    asides = [[p.grad.detach().clone() for p in net.parameters()] for net in (plain, sharded)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for number, batch in enumerate(batches[1:]):
        with naming("microbatch", number):
            sharded.set_requires_gradient_sync(number == 2)
            microbatch(plain, sharded, batch)
            if number < 2:
                for net, optimizer, aside in zip((plain, sharded), optimizers, asides):
                    now = [p.grad for p in net.parameters()]
                    for parameter, gradient in zip(net.parameters(), aside):
                        parameter.grad = gradient.clone()
                    optimizer.step()
                    for parameter, gradient in zip(net.parameters(), now):
                        parameter.grad = gradient
    assert_gradients(sharded, plain, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way"), [("optim", "copy_"), ("optim", "load_state_dict"), ("optim_grads", "foreach")]
)
@distributed(2)
def test_averaged_weights_that_are_swapped_in_for_an_evaluation_between_microbatches(strategy, way):
    def put(net: nets.Net, values: list[torch.Tensor]) -> None:
        parameters = list(net.parameters())
        if way == "foreach":
            torch._foreach_copy_(parameters, values)
        elif way == "copy_":
            for parameter, value in zip(parameters, values):
                parameter.copy_(value)
        else:
            names = [name for name, _ in net.named_parameters()]
            net.load_state_dict(dict(zip(names, values)) | {"head.weight": values[names.index("embedding.weight")]})

    def evaluated(net: nets.Net, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            averages = [p.detach() * 0.5 for p in net.parameters()]
            own = [p.detach().clone() for p in net.parameters()]
            put(net, averages)
            ranks = dist.get_world_size()
            if net is plain:
                loss = nets.loss_as_cast(net, rows, ranks=ranks)
            else:
                loss = torch.stack([nets.loss_of(net, part) for part in rows.chunk(ranks)]).mean()
            put(net, own)
        return loss

    plain, sharded = nets.make(), half(strategy=strategy)
    held_out = nets.data(1, 4, seed=5)[0]
    for number, batch in enumerate(nets.data(3, 4)):
        with naming("microbatch", number):
            sharded.set_is_last_backward(number == 2)
            microbatch(plain, sharded, batch)
            torch.testing.assert_close(evaluated(sharded, held_out), evaluated(plain, held_out))
    assert_gradients(sharded, plain, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@distributed(4)
def test_weights_that_are_written_between_microbatches_on_two_axes(outer):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    plain = nets.make()
    sharded = half(outer_strategy=outer, mesh=mesh)
    for number, batch in enumerate(nets.data(3, 8)):
        with naming("microbatch", number):
            sharded.set_is_last_backward(number == 2)
            microbatch(plain, sharded, batch)
            write_everywhere(plain, sharded, lambda parameter: parameter.mul_(1.5))
    assert_gradients(sharded, plain, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RESIDENT)
@distributed(2, timeout=40)
def test_an_optimizer_of_something_else_that_steps_on_one_rank_during_accumulation(strategy):
    plain, sharded = nets.make(), half(strategy=strategy)
    own = nn.Parameter(torch.ones(3))
    local = torch.optim.SGD([own], lr=0.1)
    for number, batch in enumerate(nets.data(3, 4)):
        sharded.set_is_last_backward(number == 2)
        microbatch(plain, sharded, batch)
        if dist.get_rank() == 0:
            local.zero_grad()
            own.square().sum().backward()
            local.step()
    assert_gradients(sharded, plain, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RESIDENT)
@distributed(2, timeout=40)
def test_a_write_on_one_rank_is_a_write_on_all(strategy):
    """To the part that lies there: the others gather what it has become."""
    plain, sharded = nets.make(), half(strategy=strategy)
    for number, batch in enumerate(nets.data(3, 4)):
        with naming("microbatch", number):
            sharded.set_is_last_backward(number == 2)
            microbatch(plain, sharded, batch)
            if dist.get_rank() == 0:
                with torch.no_grad():
                    for parameter in sharded.parameters():
                        parameter.to_local().mul_(1.5)
            with torch.no_grad():
                wholes = [nets.full(parameter) for parameter in sharded.parameters()]
                for parameter, whole in zip(plain.parameters(), wholes):
                    parameter.copy_(whole)
    assert_gradients(sharded, plain, **CLOSE)


@distributed(2)
def test_a_write_that_no_counter_sees_is_seen_after_the_next_backward():
    net, tokens = nets.shard(nets.make(), strategy="optim"), nets.data(1, 4)[0]
    before = nets.loss_of(net, tokens)
    net.norm.weight.to_local().data.mul_(2)  # torch gives `.data` of a plain tensor another counter
    before.backward()
    assert nets.loss_of(net, tokens) != before


class Follower(nn.Module):
    """A net and one that follows it: each forward writes the weights of the second, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.leader, self.follower = nets.make(), nets.make(seed=1)
        self.follower.requires_grad_(False)
        self.writes = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        led = self.leader(tokens)
        with torch.no_grad():
            before = self.follower(tokens)
            if self.writes:
                for mine, others in zip(self.follower.parameters(), self.leader.parameters()):
                    mine.lerp_(others, 0.5)
            after = self.follower(tokens)
        return (led - before).square().mean() + (led - after).square().mean()


@pytest.mark.slow
@all_pairs(strategy=STRATEGIES, bucket_bytes=[0, 1 << 20], reshard_after_forward=[None, False])
@distributed(2)
def test_weights_that_a_forward_writes_in_another_unit_are_those_of_its_next_use(
    strategy, bucket_bytes, reshard_after_forward
):
    options = {"strategy": strategy, "reshard_after_forward": reshard_after_forward}
    plain, sharded = Follower(), Follower()
    for net in (sharded.leader, sharded.follower):
        nets.shard(net, **options)
    weft.fully_shard(sharded, runtime=weft.RuntimeOptions(bucket_bytes=bucket_bytes), **options)
    optimizers = sgd(plain, sharded)
    for batch in nets.data(3, 4):
        plain(batch).backward()  # once, since each forward writes
        sharded(batch.chunk(2)[dist.get_rank()]).backward()
        assert_gradients(sharded, plain)
        step(optimizers)
        assert_weights(sharded, plain)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_weights_that_a_forward_writes_are_those_that_it_unshards(strategy):
    net, seen = nets.shard(nets.make(), strategy=strategy), []

    def write(module, args):
        for block in (net.blocks[0], net.blocks[2]):  # used before, and gathered ahead
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(2)
            block.unshard()
            seen.append({name: value.detach().clone() for name, value in block.named_parameters()})
            block.reshard()

    nets.loss_of(net, nets.data(1, 2)[0]).backward()
    before = [nets.whole(net.blocks[number].state_dict()) for number in (0, 2)]
    with torch.no_grad():
        nets.loss_of(net, nets.data(1, 2)[0])
        handle = net.blocks[1].register_forward_pre_hook(write)
        nets.loss_of(net, nets.data(1, 2)[0])
    handle.remove()
    for found, values in zip(seen, before, strict=True):
        for name, value in found.items():
            torch.testing.assert_close(value, 2 * values[name], rtol=0, atol=0)


@pytest.mark.slow
@distributed(2)
def test_weights_that_a_forward_writes_on_one_rank_alone_are_a_mismatch_before_the_optimizer():
    net = Follower()
    for each in (net.leader, net.follower):
        nets.shard(each)
    weft.fully_shard(net)
    batches = nets.data(2, 2)
    net(batches[0]).backward()
    net.writes = dist.get_rank() == 0  # the second use finds the weights of the first one, as the first pass has shown
    with pytest.raises(weft.errors.CollectiveMismatch, match="renewed all-gather"):
        net(batches[1]).backward()


class Between(nn.Sequential):
    """Writes one of a module's parameters between two uses in the same forward."""

    def forward(self, inputs: torch.Tensor, written: str) -> tuple[torch.Tensor, torch.Tensor]:
        (module,) = self
        before = module(inputs)
        with torch.no_grad():
            module.get_parameter(written).fill_(3.0)
        return before, module(inputs)


@distributed(2)
def test_a_write_in_a_forward_renews_whichever_group_of_a_unit_it_was_to():
    for written in ("weight", "bias"):
        torch.manual_seed(0)
        plain = Between(nn.Linear(4, 4))
        plain[0].bias.requires_grad_(False)
        sharded = copy.deepcopy(plain)
        weft.fully_shard(sharded[0], strategy="optim")
        weft.fully_shard(sharded, strategy="optim")
        assert len(sharded[0]._weft_unit.groups) == 2
        with torch.no_grad():
            torch.testing.assert_close(sharded(torch.ones(1, 4), written), plain(torch.ones(1, 4), written))


class Early(nn.Sequential):
    """Writes the weights of the last module before it uses them, and may leave it out or unshard it first."""

    factor: float | None = None
    unshards = False
    unsharded: torch.Tensor

    def forward(self, x: torch.Tensor, *, leaves_out: bool = False) -> torch.Tensor:
        *modules, last = self
        for number, module in enumerate(modules):
            x = module(x)
            if number == 0:
                if self.factor is not None:
                    with torch.no_grad():
                        last.weight.mul_(self.factor)
                if self.unshards and not leaves_out:
                    last.unshard()
                    self.unsharded = last.weight.detach().clone()
        return x if leaves_out else last(x)


def early(**options) -> Early:
    torch.manual_seed(0)
    model = Early(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    for module in (*model, model):
        weft.fully_shard(module, **options)
    return model


@pytest.mark.parametrize("recipe", [tensorwise(), nvfp4()], ids=str)
@distributed(2)
def test_weights_that_a_forward_writes_before_their_update_are_quantized_with_their_own_maximum(recipe):
    model = early(mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))
    rows = torch.randn(2, 32)
    before = model(rows)
    before.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)  # like an optimizer: all units must be updated
    model[-1].unshard()
    unsharded = model[-1].weight.detach().clone()
    model[-1].reshard()
    model.factor = 8.0
    torch.testing.assert_close(model(rows), 8 * before)
    model.unshards = True
    torch.testing.assert_close(model(rows), 64 * before)
    torch.testing.assert_close(model.unsharded, 64 * unsharded)


@distributed(2, timeout=20)
def test_weights_that_stay_gathered_are_renewed_as_a_pass_begins_and_not_by_the_ranks_that_use_them():
    model, rows, others = early(), torch.randn(2, 32), dist.get_rank() == 1
    model.set_reshard_after_backward(False)
    before = model(rows)
    before.sum().backward()
    with torch.no_grad():
        model[-1].weight.mul_(2)
    after = model(rows, leaves_out=others)
    if not others:
        torch.testing.assert_close(after, 2 * before)
    after.sum().backward()


@pytest.mark.parametrize("options", [{"strategy": "optim"}, {"mp_policy": TENSORWISE}], ids=["optim", "tensorwise"])
@distributed(2, timeout=20)
def test_a_unit_that_only_one_rank_unshards_in_a_forward_is_no_renewal_if_nothing_was_written(options):
    model, rows, others = early(**options), torch.randn(2, 32), dist.get_rank() == 1
    model(rows, leaves_out=True).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    model.unshards = True
    model(rows, leaves_out=others).sum().backward()
    assert model[-1].weight.grad is not None
