"""Gradients of gradients with respect to inputs are those of one process; those of parameters are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.pool import distributed


class Field(nn.Module):
    """A scalar field: `[rows, 5] -> [rows]`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(3))
        self.leave = nn.Linear(13, 1)
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.leave(x).squeeze(-1)


class Forces(Field):
    """Differentiates itself in its forward, as force fields do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


def pair(kind: type = Field, **options) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind().double())
    for block in models[1].blocks:
        weft.fully_shard(block, **options)
    return models[0], weft.fully_shard(models[1], **options)


def slope(model, x):
    """The field at `x`, and its slope there, which can be differentiated."""
    x = x.clone().requires_grad_()
    y = model(x)
    return x, y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def penalty(model, x):
    return (slope(model, x)[2].norm(dim=1) - 1).square().mean()


def penalty_alone(model, x):
    penalty(model, x).backward()


def penalty_and_loss(model, x):
    loss = model(x).square().mean()
    (penalty(model, x) + loss + model(x + 1).mean()).backward()


def penalty_before_another_backward(model, x):
    later = penalty(model, x)
    model(x).mean().backward()
    later.backward()


def second_derivatives(model, x):
    x, y, dy = slope(model, x)
    (ddy,) = torch.autograd.grad(dy.sum(), x, create_graph=True)
    (ddy.square().mean() + dy.mean() + y.mean()).backward()


def sometimes_a_penalty(model, x):
    """Begins when the memory plan is made."""
    model.steps = getattr(model, "steps", 0) + 1
    (penalty(model, x) if model.steps > 1 else model(x).mean()).backward()


WAYS = [
    penalty_alone,
    penalty_and_loss,
    penalty_before_another_backward,
    second_derivatives,
    sometimes_a_penalty,
]


def check(plain, sharded, way, steps=3):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 5, dtype=torch.float64, generator=generator)
        for model, rows in ((plain, x), (sharded, x.chunk(dist.get_world_size())[dist.get_rank()])):
            model.zero_grad()
            way(model, rows)
        for (name, p), expected in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (expected.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(nets.full(p.grad), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert weft.memory_report(sharded)["transient"]["gathered weights"]["live"] == 0


@pytest.mark.long
@pytest.mark.parametrize("strategy, recompute", [("optim", False), ("optim_grads_params", True)])
@distributed(2)
def test_penalties_on_slopes_equal_one_process(strategy, recompute):
    for way in WAYS:
        allocator = "caching" if way is sometimes_a_penalty else "trace"
        plain, sharded = pair(strategy=strategy, runtime=weft.RuntimeOptions(allocator=allocator))
        sharded.recompute = recompute
        check(plain, sharded, way, steps=2 if recompute else 3)


@pytest.mark.slow
@distributed(2)
def test_a_model_that_differentiates_itself_in_forward_equals_one_process():
    def forces(model, x):
        energy, force = model(x)
        (energy.square().mean() + (force - 1).square().mean()).backward()

    check(*pair(Forces), forces)


@pytest.mark.slow
@distributed(2)
def test_gradients_of_inputs_leave_parameters_alone_and_may_be_taken_again():
    def twice(model, x):
        x = x.clone().requires_grad_()
        y = model(x).square().mean()
        first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
        torch.testing.assert_close(first, second)
        assert all(p.grad is None for p in model.parameters())
        y.backward(retain_graph=True)
        y.backward()
        slopes.append(x.grad)

    for strategy in ("no_shard", "optim_grads_params"):
        slopes: list[torch.Tensor] = []
        plain, sharded = pair(strategy=strategy)
        check(plain, sharded, twice)
        for expected, mine in zip(slopes[::2], slopes[1::2]):
            rows = expected.chunk(dist.get_world_size())[dist.get_rank()]
            torch.testing.assert_close(mine, rows * dist.get_world_size())


@pytest.mark.slow
@distributed(2)
def test_what_cannot_be_differentiated_twice_says_so():
    plain, sharded = pair(runtime=weft.RuntimeOptions(allocator="caching"))  # penalties come after other backwards
    x = torch.randn(4, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"create_graph=True\) through .*Block.*with respect to inputs"):
        sharded(x).mean().backward(create_graph=True)
    sharded.reset_iter_state()

    with pytest.raises(RuntimeError, match=r"in no graph.*with respect to inputs"):
        torch.autograd.grad(sharded(x).mean(), list(sharded.parameters()))
    sharded.reset_iter_state()

    inside: list[torch.Tensor] = []
    handle = sharded.blocks[1].register_forward_hook(lambda module, args, output: inside.append(output))
    y = sharded(x)
    handle.remove()
    with pytest.raises(
        RuntimeError, match=r"a gradient was taken inside the root \(Field\).*inputs of sharded modules"
    ):
        torch.autograd.grad(y.sum(), inside.pop(), create_graph=True)
    check(plain, sharded, penalty_and_loss)


@pytest.mark.slow
@distributed(2)
def test_a_penalty_that_comes_after_the_memory_plan_says_what_to_do():
    _, sharded = pair()
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(2):
        sharded(x).mean().backward()
    with pytest.raises(RuntimeError, match="allocator='caching'"):
        penalty_alone(sharded, x)


class Ignores(nn.Linear):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_graph_of_a_gradient_may_leave_out_inputs_and_need_no_weights(world):
    """As that of a frozen linear layer does."""
    world(0, 2)
    model = weft.fully_shard(Ignores(4, 4).requires_grad_(False))
    x, other = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    (slope,) = torch.autograd.grad(model(x, other).sum(), x, create_graph=True)
    assert not slope.requires_grad and not model._weft_unit.computes
