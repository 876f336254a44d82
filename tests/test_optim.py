"""Optimizers over flat tensors give the numbers of the same optimizer over parameters."""

import pytest
import torch
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed


def small(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2


def per_parameter(optimizer, net, **options):
    """The optimizer as torch has it, with the same two groups."""
    decayed = [p for name, p in net.named_parameters() if not small(name, p)]
    plain = [p for name, p in net.named_parameters() if small(name, p)]
    return optimizer([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **options)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    "optimizer, options",
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
        (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}),
    ],
)
@distributed(2, 4)
def test_steps_are_those_of_one_process(strategy, optimizer, options):
    batches = nets.data(4, 4)
    plain = nets.train(nets.make(), batches, optimizer=lambda net: per_parameter(optimizer, net, **options))
    net = nets.shard(nets.make(), strategy=strategy)
    flat = nets.train_here(
        net,
        batches,
        optimizer=lambda net: weft.optim.flat(optimizer, net, no_decay=small, **options),
        clip=weft.optim.clip_grad_norm_,
    )
    torch.testing.assert_close(flat["weights"], plain["weights"])
    torch.testing.assert_close(flat["norms"], plain["norms"])


@distributed(2)
def test_it_runs_over_fewer_tensors_and_keeps_the_class():
    net = nets.shard(nets.make())
    optimizer = weft.optim.flat(torch.optim.AdamW, net, lr=1e-2)
    assert isinstance(optimizer, torch.optim.AdamW)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(tensors) == len(net.blocks) + 1 < len(list(net.parameters()))
    torch.optim.lr_scheduler.LinearLR(optimizer).step()


class Halves(nn.Module):
    """Two layers of which only the first is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@distributed(2)
def test_a_parameter_without_gradient_keeps_its_value_and_its_state():
    torch.manual_seed(0)
    model = weft.fully_shard(Halves())
    before = {name: nets.full(p) for name, p in model.named_parameters()}
    optimizer = weft.optim.flat(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(nets.full(parameter), before[name]) == name.startswith("unused")
    state = optimizer.state_dict()["state"]
    assert not state["unused.weight"]  # as the ordinary optimizer has none
    assert nets.full(state["used.weight"]["exp_avg"]).any()


@distributed(2, 4)
def test_state_loads_under_another_strategy_and_training_goes_on_alike():
    def build(strategy):
        net = nets.shard(nets.make(), strategy=strategy)
        return net, weft.optim.flat(torch.optim.AdamW, net, no_decay=small, lr=1e-2, weight_decay=0.1)

    batches = nets.data(6, 4)
    net, optimizer = build("optim_grads_params")
    nets.train_here(net, batches[:3], optimizer=lambda _: optimizer)
    other, resumed = build("optim")
    weights = {name: nets.full(value) for name, value in net.state_dict().items()}
    other.load_state_dict(weights)
    state = optimizer.state_dict()
    state["state"] = {
        name: {key: nets.full(value) for key, value in entries.items()} for name, entries in state["state"].items()
    }
    resumed.load_state_dict(state)
    first = nets.train_here(net, batches[3:], optimizer=lambda _: optimizer)
    second = nets.train_here(other, batches[3:], optimizer=lambda _: resumed)
    torch.testing.assert_close(first, second)


@pytest.mark.slow
@distributed(2)
def test_closures_make_the_gradients_and_assigned_gradients_are_clipped():
    torch.manual_seed(0)
    plain, model = Halves(), Halves()
    model.load_state_dict(plain.state_dict())
    weft.fully_shard(model)

    def step(net, optimizer, clip):
        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(2, 5)).square().sum()
            loss.backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 3
            clip(net)
            return loss

        return optimizer.step(closure).detach()

    one = torch.optim.SGD(plain.parameters(), lr=0.1)
    other = weft.optim.flat(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        expected = step(plain, one, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        torch.testing.assert_close(step(model, other, lambda net: weft.optim.clip_grad_norm_(net, 1.0)), expected)
    weights = {name: nets.full(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(weights, dict(plain.state_dict()))


@distributed(2)
def test_wrong_use_is_named():
    net = nets.shard(nets.make())
    with pytest.raises(ValueError, match="Muon is not element-wise"):
        weft.optim.flat(torch.optim.Muon, net)
    with pytest.raises(ValueError, match="Linear has no sharded module"):
        weft.optim.flat(torch.optim.AdamW, nn.Linear(2, 2))
    blocks_only = nets.make()
    weft.fully_shard(blocks_only.blocks[0])
    with pytest.raises(ValueError, match=r"embedding\.weight.*not sharded.*shard the root"):
        weft.optim.flat(torch.optim.AdamW, blocks_only)
    state = weft.optim.flat(torch.optim.AdamW, net).state_dict()
    del state["state"]["gain"]
    with pytest.raises(ValueError, match=r"missing \['gain'\]"):
        weft.optim.flat(torch.optim.AdamW, net).load_state_dict(state)
