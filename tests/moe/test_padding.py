"""Experts with as many rows as their capacity allows, whatever the router chooses."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.moe.test_layer import EXPERTS, HIDDEN, INNER, SEQ, K, backward, batch, make
from tests.pool import distributed
from weft.moe import AllToAll, MoE

OPTIONS = {"capacity_factor": 0.7, "aux_loss_coef": 0.3, "shared_intermediate_size": 8, "experts_bias": True}
PADDED = {**OPTIONS, "pad_to_capacity": True}


def results(layer, hidden):
    hidden = hidden.clone().requires_grad_()
    output, loss = layer(hidden)
    backward(output, loss)
    return {"output": output, "hidden": hidden.grad, **{name: each.grad for name, each in layer.named_parameters()}}


@pytest.mark.parametrize("factor", [0.1, 0.7, 10.0])
def test_padding_changes_no_result_and_makes_the_rows_of_each_expert_equally_many(factor):
    plain, layer = (make({**options, "capacity_factor": factor}) for options in (OPTIONS, PADDED))
    handle = layer.send(batch()).handle
    size = 4 * layer.router.capacity(SEQ)
    assert handle.offsets.tolist() == [size * (expert + 1) for expert in range(EXPERTS)]
    layer.reset_parameters()
    assert_close(results(layer, batch()), results(plain, batch()))
    assert torch.equal(layer.load, plain.load)


@distributed(2)
def test_padded_rows_that_travel_give_what_one_process_gives():
    rank = dist.get_rank()
    whole, layer = make(PADDED), make(PADDED, AllToAll(dist.group.WORLD, EXPERTS, rows_per="expert"))
    plain = make(OPTIONS, AllToAll(dist.group.WORLD, EXPERTS, rows_per="expert"))
    hidden = batch().chunk(2)[rank]
    expected = whole(batch())[0].chunk(2)[rank]
    assert_close(results(layer, hidden)["output"], expected)
    results(plain, hidden)
    assigned, travelled = layer.exchanged.tolist()
    assert assigned == plain.exchanged[0], "padding is no assignment"
    assert travelled == EXPERTS // 2 * 2 * layer.router.capacity(SEQ)


def test_padding_wants_a_capacity_and_one_row_per_expert():
    with pytest.raises(ValueError, match="set capacity_factor"):
        MoE(HIDDEN, INNER, EXPERTS, K, pad_to_capacity=True)
    with pytest.raises(ValueError, match='use a dispatcher with rows_per="expert"'):
        MoE(HIDDEN, INNER, EXPERTS, K, dispatcher=mock.Mock(rows_per="rank"), capacity_factor=1.0, pad_to_capacity=True)
