"""A backward comes in by whatever tensor it likes, and what an exception left behind is nobody's loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import STRATEGIES, assert_gradients, assert_weights, backward, sgd, step
from tests.pool import distributed


class Net(nn.Module):
    """A body that may be a unit, and a head; `way` is how its values leave."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Flatten(1))
        self.head = nn.Linear(8, 1)
        self.way = way
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, into: list | None = None) -> torch.Tensor | None:
        hidden = self.body(self.first(x)[:, None])
        if self.way == "a view of a unit, written to":
            hidden += x
        score = self.head(F.gelu(hidden))
        self.kept = self.first(x) if self.way == "an inner tensor" else score.square().mean()
        if self.way == "a list of the caller":
            assert into is not None
            into.append(score)
            return None
        if self.way == "a detached loss beside what is kept":
            return self.kept.detach()
        return score.squeeze(-1)


def loss_of(net: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
    into: list[torch.Tensor] = []
    score = net(rows, into)
    if into:
        return into[0].square().mean()
    if net.way in ("an inner tensor", "a detached loss beside what is kept"):
        return net.kept.square().mean()
    score -= rows[:, 0]  # in place: `score` is a view
    return score.square().mean()


WAYS = [
    "a view, written to",
    "a view of a unit, written to",
    "an inner tensor",
    "a list of the caller",
    "a detached loss beside what is kept",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nested", "strategy"),
    [
        (False, "optim"),
        (False, "optim_grads_params"),
        (True, "no_shard"),
        (True, "optim_grads"),
        (True, "optim_grads_params"),
    ],
)
@distributed(2)
def test_a_backward_is_noticed_whichever_tensor_it_starts_from(nested, strategy):
    for way in WAYS:
        plain, sharded = Net(way), Net(way)
        if nested:
            weft.fully_shard(sharded.body, strategy=strategy)
        weft.fully_shard(sharded, strategy=strategy)
        optimizers = sgd(plain, sharded)
        for seed in range(2):
            backward(plain, sharded, loss_of, torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            assert_gradients(sharded, plain)
            step(optimizers)
        assert_weights(sharded, plain)


@pytest.mark.parametrize(
    ("strategy", "kind"), list(zip(STRATEGIES, ["evaluation", "evaluation", "training", "training"]))
)
@distributed(2)
def test_a_forward_that_fails_takes_nothing_from_the_microbatches_before_it(strategy, kind):
    plain, sharded = Net("a view, written to"), Net("a view, written to")
    weft.fully_shard(sharded.body, strategy=strategy)
    weft.fully_shard(sharded, strategy=strategy)
    rows = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    sharded.set_is_last_backward(False)
    backward(plain, sharded, loss_of, rows[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.set_grad_enabled(kind == "training"):
        sharded(torch.ones(2, 9))
    sharded.set_is_last_backward(True)
    backward(plain, sharded, loss_of, rows[1])
    assert_gradients(sharded, plain)


@distributed(2)
def test_a_block_that_was_replaced_is_foreseen_no_more():
    plain, sharded = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for block in sharded:
        weft.fully_shard(block)
    weft.fully_shard(sharded)
    for number in range(3):
        if number == 1:
            plain[1] = nn.Identity()
            sharded[1] = nn.Identity()
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        backward(plain, sharded, lambda net, part, rank: net(part).square().mean(), rows)
        assert_gradients(sharded, plain)
        plain.zero_grad()
        sharded.zero_grad()


@distributed(2)
def test_norms_are_of_what_is_in_the_model_now():
    """A block that was replaced keeps its gradients, and one that came later has some."""
    net = nn.Sequential(*(weft.fully_shard(nn.Linear(8, 8)) for _ in range(3)))
    weft.fully_shard(net)(torch.ones(2, 8)).sum().backward()
    before = weft.memory_report(net)["persistent"]["weights"]
    kept, net[1] = net[1], weft.fully_shard(nn.Linear(8, 8, bias=False))
    own = weft.memory_report(net[1])["persistent"]["weights"]
    assert weft.memory_report(net)["persistent"]["weights"] == before + own  # those of the old one are there, too
    net(torch.ones(2, 8)).sum().backward()
    assert kept.weight.grad is not None and net[1].weight.grad is not None
    expected = torch.stack([p.grad.full_tensor().norm() for p in net.parameters()]).norm()
    torch.testing.assert_close(nets.full(weft.optim.grad_norm(net)), expected)


@distributed(2)
def test_what_is_added_after_sharding_is_refused_unless_it_is_sharded_or_ignored():
    def late(ignored: bool = False) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        gate = nn.Parameter(torch.ones(1))
        weft.fully_shard(net, ignored_params=[gate] if ignored else None)
        net.register_parameter("gate", gate)
        return net

    with pytest.raises(RuntimeError, match=r"'gate' was added to the root .* after fully_shard and is in no unit"):
        late()(torch.ones(1, 8))
    late(ignored=True)(torch.ones(1, 8))
    frozen = late()
    frozen.gate.requires_grad_(False)
    frozen(torch.ones(1, 8))
    replaced = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weft.fully_shard(replaced)
    replaced[1] = weft.fully_shard(nn.Linear(8, 3))
    replaced(torch.ones(1, 8)).sum().backward()


@distributed(2)
def test_a_unit_that_modifies_its_input_in_place_gets_an_error_with_the_fix():
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    weft.fully_shard(net[1])
    weft.fully_shard(net)
    with pytest.raises(RuntimeError, match=r"1 \(Sequential\) modifies its input in place.* ReLU\(inplace=False\)"):
        net(torch.ones(2, 8))


@distributed(2)
def test_weights_that_are_gone_are_named_in_half_precision_too():
    net = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2)))
    for block in net:
        weft.fully_shard(block, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16))
    weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16))
    kept: list[torch.Tensor] = []
    net[0][1].register_forward_hook(lambda module, args, output: kept.append(output))
    net(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"backward reads '0.weight' or .* of 0 \(Sequential\)"):
        kept[0].float().sum().backward()


@distributed(2)
def test_new_random_tensors_are_drawn_as_one_process_draws_them():
    net = weft.fully_shard(nn.Linear(7, 3))
    torch.manual_seed(3)
    drawn = [torch.randn_like(net.weight), torch.rand_like(net.weight), torch.randn(4)]
    torch.manual_seed(3)
    expected = [torch.randn(3, 7), torch.rand(3, 7), torch.randn(4)]
    actual = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in drawn]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
