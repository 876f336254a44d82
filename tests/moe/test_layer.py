"""The layer, on one process and spread over several, against its definition."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.moe.reference import enlarge, plain
from tests.pool import distributed
from weft.moe import AllToAll, MoE, load_statistics

# Whole vectors of the processor in every row: what is left over at a tensor's end is computed with other roundings.
HIDDEN, INNER, EXPERTS, K, SEQ = 32, 32, 8, 3, 7

LAYERS = {
    "plain": {},
    "sigmoid, groups, shared": {
        "score": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "scaling_factor": 2.5,
        "expert_bias": True,
        "shared_intermediate_size": 8,
    },
    "losses": {"aux_loss_coef": 0.3, "z_loss_coef": 0.2, "norm_topk_prob": False},
    "capacity": {"capacity_factor": 0.7, "aux_loss_coef": 0.3},
    "gated shared": {"shared_intermediate_size": 12, "shared_expert_gate": True},
}


def make(options, dispatcher=None):
    """A layer with the same weights wherever it is.

    Logits are exact in fp32, so that they do not depend on how many rows are multiplied at once.
    """
    torch.manual_seed(5)
    layer = MoE(HIDDEN, INNER, EXPERTS, K, dispatcher=dispatcher, **options)
    enlarge(layer)
    with torch.no_grad():
        layer.router.weight.copy_((layer.router.weight * 8).round() / 8)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.3, EXPERTS))
    return layer


def batch(sequences=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, (sequences, SEQ, HIDDEN), generator=generator) / 8


def backward(output, loss, scale=1.0):
    """Of an objective in which every element of the output weighs differently."""
    objective = (output * torch.linspace(0.5, 1.5, output[0].numel()).view_as(output[0])).square().sum() / output[
        0
    ].numel()
    (objective + (0 if loss is None else loss * scale)).backward()


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_layer_is_its_definition(options):
    layer = make(options)
    hidden = batch().requires_grad_()
    output, loss = layer(hidden)
    backward(output, loss)
    found = {name: weight.grad for name, weight in layer.named_parameters()} | {"hidden": hidden.grad}

    layer.zero_grad()
    same = batch().requires_grad_()
    expected, expected_loss, _ = plain(layer, same)
    backward(expected, expected_loss)
    assert_close(output, expected)
    assert_close(loss, expected_loss)
    for name, weight in [*layer.named_parameters(), ("hidden", same)]:
        assert_close(found[name], weight.grad, msg=lambda text, name=name: f"{name}: {text}")


@distributed(2, 4)
def test_experts_over_ranks_equal_one_process_with_all_of_them():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dispatcher = AllToAll(dist.group.WORLD, EXPERTS)
    for options in LAYERS.values():
        whole, layer = make(options), make(options, dispatcher)
        everything = batch().requires_grad_()
        expected, expected_loss = whole(everything)
        backward(expected, expected_loss, scale=ranks)

        mine = batch().chunk(ranks)[rank].requires_grad_()
        output, loss = layer(mine)
        backward(output, loss)

        if layer.shared_expert is None:  # it multiplies other numbers of rows at once
            assert torch.equal(output, expected.chunk(ranks)[rank])
        assert_close(output, expected.chunk(ranks)[rank])
        assert_close(mine.grad, everything.grad.chunk(ranks)[rank])
        if loss is not None:
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert_close(total / ranks, expected_loss)
        gradients = {name: weight.grad for name, weight in whole.named_parameters()}
        for name, weight in layer.named_parameters():
            if name.startswith("experts."):
                expected_gradient = gradients[name][dispatcher.experts.start : dispatcher.experts.stop]
                if layer.shared_expert is None:
                    assert torch.equal(weight.grad, expected_gradient)
                assert_close(weight.grad, expected_gradient)
            else:
                dist.all_reduce(weight.grad)
                assert_close(weight.grad, gradients[name])
        loads = load_statistics(layer, group=dist.group.WORLD)[""]
        assert torch.equal(loads, load_statistics(whole)[""])
        assert loads.sum() == everything.shape[0] * SEQ * K
