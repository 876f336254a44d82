"""Sharded parameters read in unusual places: under `inference_mode`, by units of another precision, in a penalty."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients
from tests.fsdp.test_behaviour import everything, mine
from tests.pool import distributed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_state_dicts_and_detached_parameters_are_read_under_inference_mode(strategy):
    plain, net = nets.make(), nets.shard(nets.make(), strategy=strategy)
    batch = nets.data(1, 8)[0]
    for _ in range(2):
        with torch.inference_mode():
            states = [{name: nets.full(value) for name, value in each.state_dict().items()} for each in (net, plain)]
            detached = {name: nets.full(p.detach()) for name, p in net.named_parameters()}
            data = {name: nets.full(p.data) for name, p in net.named_parameters()}
            torch.testing.assert_close(net(mine(batch)), plain(mine(batch)))
        torch.testing.assert_close(*states)
        for found in (detached, data):
            torch.testing.assert_close(found, {name: p.detach() for name, p in plain.named_parameters()})
    with torch.inference_mode():
        kept = net.state_dict()
    net.load_state_dict({name: value * 2 for name, value in kept.items()})
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    for model, part in ((plain, everything), (net, mine)):
        nets.loss_of(model, part(batch)).backward()
    assert_gradients(net, plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


@distributed(2)
def test_weights_tied_across_units_of_different_precision_are_refused_by_name():
    half = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for first, second in ((half, None), (None, half)):
        net = Tied()
        weft.fully_shard(net.embedding, mp_policy=first)
        with pytest.raises(ValueError, match=r"'weight' of Linear is shared with 'weight' of Embedding.* mp_policy"):
            weft.fully_shard(net.head, mp_policy=second)
    net = Tied()
    weft.fully_shard(net.embedding, mp_policy=half)
    weft.fully_shard(net.head, mp_policy=half)


class Penalized(nn.Module):
    """Its loss has a penalty over all its parameters, those of its units too."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        penalties = [parameter.square().sum() for parameter in self.parameters()]
        if self.whole:
            penalties = [each.full_tensor() if isinstance(each, DTensor) else each for each in penalties]
        return (x * self.scale).mean() + sum(penalties)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_a_penalty_over_parameters_inside_a_forward_is_explained_and_right_as_a_plain_tensor(strategy):
    x = torch.arange(16.0).view(4, 4)
    for reshard in (None, False):
        for whole in (False, True):
            torch.manual_seed(0)
            plain = Penalized(whole)
            torch.manual_seed(0)
            net = Penalized(whole)
            for layer in net.layers:
                weft.fully_shard(layer, strategy=strategy, reshard_after_forward=reshard)
            weft.fully_shard(net, strategy=strategy)
            if not whole:
                with pytest.raises(RuntimeError, match=r"mixes plain tensors with sharded ones.*full_tensor\(\)"):
                    net(mine(x)).backward()
                continue
            for _ in range(2):
                for model, part in ((plain, everything), (net, mine)):
                    model.zero_grad()
                    model(part(x)).backward()
                assert_gradients(net, plain)
