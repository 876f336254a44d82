"""Modules that write their weight gradients themselves get the gradients that autograd would have made."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp import weight_gradient
from weft.fsdp.driver import Hold
from weft.fsdp.gradients.direct import whole
from weft.fsdp.module import runtime_of
from weft.layout.trace import Event, Trace

WIDTH = 13


class Writing(torch.autograd.Function):
    """`x @ weight.t()`; the weight's gradient is `write`'s business, which gets the inputs of its product."""

    @staticmethod
    def forward(ctx, x, weight, write, returned):
        ctx.save_for_backward(x)
        ctx.weight, ctx.write, ctx.returned = weight, write, returned
        return x @ weight.to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.write(ctx.weight, dy, x)
        return dy @ ctx.weight.to(dy.dtype), ctx.returned(ctx.weight), None, None


def by_helper(weight: nn.Parameter, dy: torch.Tensor, x: torch.Tensor) -> None:
    buffer, accumulate = weight_gradient(weight)
    if accumulate:
        buffer.addmm_(dy.t().to(buffer.dtype), x.to(buffer.dtype))
    else:
        torch.mm(dy.t().to(buffer.dtype), x.to(buffer.dtype), out=buffer)


def by_megatron_s_convention(weight: nn.Parameter, dy: torch.Tensor, x: torch.Tensor) -> None:
    if not hasattr(weight, "main_grad"):  # the plain model: nobody gives it one
        return by_helper(weight, dy, x)
    weight.main_grad.addmm_(dy.t().to(weight.main_grad.dtype), x.to(weight.main_grad.dtype))
    weight.grad_added_to_main_grad = True


def nothing(weight: nn.Parameter) -> None:
    return None


def dummy(weight: nn.Parameter) -> torch.Tensor | None:
    return torch.full_like(weight, torch.nan) if hasattr(weight, "main_grad") else None


def zeros(weight: nn.Parameter) -> torch.Tensor | None:
    return torch.zeros_like(weight) if hasattr(weight, "main_grad") else None


class Direct(nn.Module):
    """Weights whose gradients come from autograd, from their modules, and from both. Rows `[n, WIDTH]` to a scalar."""

    def __init__(self, write: Callable) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.twice, self.both, self.rare, self.convention, self.zeroed = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(5)
        )
        self.convention.grad_added_to_main_grad = self.zeroed.grad_added_to_main_grad = False
        self.zeroed.zero_out_wgrad = True  # its module returns zeros, so autograd's gradient is that of the other use
        self.write = write

    def forward(self, x: torch.Tensor, use_rare: bool) -> torch.Tensor:
        x = self.norm(x)
        for _ in range(2):
            x = F.gelu(Writing.apply(x, self.twice, self.write, nothing))
        x = x + Writing.apply(F.linear(x, self.both.to(x.dtype)), self.both, self.write, nothing)
        for _ in range(2):
            x = F.gelu(Writing.apply(x, self.convention, by_megatron_s_convention, dummy))
        x = x + Writing.apply(F.linear(x, self.zeroed.to(x.dtype)), self.zeroed, by_megatron_s_convention, zeros)
        if use_rare:
            x = Writing.apply(x, self.rare, self.write, nothing)
        return x.float().square().mean()


class Net(nn.Module):
    """Uses `rare` where the first element of the rows is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.direct = Direct(by_helper)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.direct(self.first(x), bool(x[0, 0] > 0))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(steps: int, microbatches: int) -> torch.Tensor:
    """`[steps, microbatches, ranks, 6, WIDTH]`, of which one rank's first element is positive in each microbatch."""
    ranks = dist.get_world_size()
    x = torch.randn(steps, microbatches, ranks, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    uses = torch.arange(microbatches)[:, None] % ranks == torch.arange(ranks)
    x[..., 0, 0] = torch.where(uses, 1.0, -1.0)
    return x


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: nets.full(p.grad).float() for name, p in model.named_parameters()}


def in_the_dtypes_of(policy: weft.MixedPrecisionPolicy, plain: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The plain model on `x` with the same casts: its own weights stay wide, and so do the products for gradients."""
    if policy.param_dtype is None:
        return plain(x)
    narrow = {
        name: p.to(policy.param_dtype) for name, p in plain.named_parameters() if "norm" in name or "first" in name
    }
    return torch.func.functional_call(plain, narrow, (x.to(policy.param_dtype),))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_gradients_that_modules_write_equal_one_process(strategy):
    wide = weft.MixedPrecisionPolicy()
    half = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for policy in (wide, half):
        for microbatches in (1, 3):
            plain, sharded = make(), make()
            columns = (lambda parameter: Shard(parameter.ndim - 1)) if microbatches == 3 else None
            weft.fully_shard(sharded.direct, strategy=strategy, mp_policy=policy, shard_placement_fn=columns)
            weft.fully_shard(sharded, strategy=strategy, mp_policy=policy)
            for step in rows(3, microbatches):
                plain.zero_grad()
                sharded.zero_grad()
                for number, x in enumerate(step):
                    for part in x:
                        (in_the_dtypes_of(policy, plain, part) / len(x)).backward()
                    sharded.set_is_last_backward(number == microbatches - 1)
                    sharded(x[dist.get_rank()]).backward()
                expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
                # bf16: autograd's own gradients, of norm, bias and `both`, round each rank's sum once more.
                tolerance = {} if policy is wide else {"rtol": 2e-2, "atol": 2e-3}
                actual = gradients(sharded)
                torch.testing.assert_close(actual, expected, **tolerance)
                for name in ("direct.twice", "direct.convention"):  # written wide: no rounding in between
                    torch.testing.assert_close(actual[name], expected[name])
                assert not hasattr(sharded._weft_unit.groups[0].parameters[0].full, "main_grad")
            assert weft.memory_report(sharded)["transient"]["partial gradients"]["live"] == 0


@distributed(2)
def test_weight_gradients_may_come_after_backward_before_the_reduction():
    """As a schedule does that leaves weight gradients for later: it drives the unit itself."""
    queue: list[tuple] = []

    def later(weight, dy, x):
        queue.append((dy, x))

    torch.manual_seed(0)
    plain, sharded = Late(by_helper), Late(later)
    sharded.load_state_dict(plain.state_dict())
    weft.fully_shard(sharded)
    unit, runtime = sharded._weft_unit, runtime_of(sharded)
    hold = Hold("this test")
    x = torch.randn(2, 6, WIDTH)
    for _ in range(2):
        plain.zero_grad()
        sharded.zero_grad()
        (plain(x[0]) / 2).backward()
        (plain(x[1]) / 2).backward()
        events = Event("use", unit.number), Event("done", unit.number)
        with runtime.scheduled(Trace("schedule", events)):  # hooks stand back
            runtime.use(unit, hold)
            sharded(x[dist.get_rank()]).backward()
            runtime.done(unit, hold)
            with torch.no_grad():
                for dy, inputs in queue:
                    by_helper(sharded.weight, dy, inputs)
            queue.clear()
            runtime.ready(unit)
        torch.testing.assert_close(gradients(sharded), {name: p.grad for name, p in plain.named_parameters()})


class Late(nn.Module):
    def __init__(self, write: Callable) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(Writing.apply(x, self.weight, self.write, nothing) + self.bias)
        return x.square().mean()


class Declared(nn.Module):
    """Two weights of which modules write the gradients by Megatron's convention; only one of them is used."""

    def __init__(self, returned: Callable = dummy) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))
        for weight in (self.one, self.other):
            weight.grad_added_to_main_grad = False
        self.returned = returned

    def forward(self, x: torch.Tensor, used: str = "one") -> torch.Tensor:
        return Writing.apply(x, getattr(self, used), by_megatron_s_convention, self.returned).sum()


@distributed(2)
def test_a_weight_to_whose_main_grad_no_module_adds_has_no_gradient():
    net = weft.fully_shard(Declared())
    for used, unused in (("one", "other"), ("one", "other"), ("other", "one")):
        net.zero_grad()
        net(torch.ones(3, WIDTH), used).backward()
        torch.testing.assert_close(nets.full(net.get_parameter(used).grad), torch.full((WIDTH, WIDTH), 3.0))
        assert net.get_parameter(unused).grad is None


def test_a_frozen_weight_has_no_main_grad(world):
    world(0, 2)
    net, seen = weft.fully_shard(Declared()), []
    net.other.requires_grad_(False)
    output = net(torch.ones(3, WIDTH))
    fulls = [each.full for each in net._weft_unit.groups[0].parameters]
    output.register_hook(lambda gradient: seen.extend(hasattr(full, "main_grad") for full in fulls))
    output.backward()
    assert seen == [True, False] and net.other.grad is None


def test_a_gradient_in_main_grad_cannot_be_differentiated_and_none_need_not_be(world):
    world(0, 2)
    x = torch.ones(3, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients of parameters are reduced over the ranks and cannot be"):
        weft.fully_shard(Declared(nothing))(x).backward(create_graph=True)

    class Multiplies(Declared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.one).square().sum()

    net = weft.fully_shard(Multiplies())
    assert torch.autograd.grad(net(x), x, create_graph=True)[0].requires_grad


@distributed(2)
def test_whole_sums_the_gradient_over_the_ranks_and_leaves_the_given_one_as_it_was():
    """A sum hands the same tensor to both of its terms."""
    mesh, given = init_device_mesh("cpu", (2,)), torch.full((4,), 1.0 + dist.get_rank())
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
    other = torch.ones(4, requires_grad=True)
    (other * 1 + whole(parameter, mesh)).backward(given.clone())
    assert torch.equal(parameter.grad.to_local(), torch.full((4,), 3.0))
    assert torch.equal(other.grad, given)


class Twice(nn.Module):
    """Calls a unit twice, of whose weight the module writes the gradient by Megatron's convention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Convention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x)).square().mean()


class Convention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.weight.grad_added_to_main_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Writing.apply(x, self.weight, by_megatron_s_convention, dummy))


@distributed(2)
def test_a_weight_gets_a_new_main_grad_in_the_second_of_its_unit_s_backwards():
    plain, net = Twice(), Twice()
    weft.fully_shard(net.inner)
    weft.fully_shard(net)
    for x in torch.randn(2, 2, 6, WIDTH, generator=torch.Generator().manual_seed(1)):
        plain.zero_grad()
        net.zero_grad()
        for part in x:
            (plain(part) / 2).backward()
        net(x[dist.get_rank()]).backward()
        torch.testing.assert_close(nets.full(net.inner.weight.grad), plain.inner.weight.grad)
    offers = [event.what for event in runtime_of(net).gathers.traces["backward"].events].count("offer")
    assert offers == 2, "the plan knows when the buffers are taken"


@distributed(2)
def test_a_frozen_parameter_has_no_place_for_a_gradient():
    frozen = weft.fully_shard(nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(ValueError, match="frozen parameter: call it only if"):
        weight_gradient(frozen.weight)
