"""Tensor-parallel ranks gather the inputs of blocks again in backward."""

import dataclasses
from unittest import mock

import torch

import weft
from tests.models.test_context import batch, build
from tests.models.test_documents import config
from tests.pool import distributed
from weft.models.gathering import Gathering


@distributed(2)
def test_what_is_gathered_again_in_backward_starts_beside_the_inner_part_and_a_second_backward_finds_it():
    """In the order of events: the input is sent again, the last projection has its gradient, then the input is used."""
    model, given = build(config("*"), weft.init_meshes("cpu", tp=2)), batch(None)
    block, events = model.decoder.layers[0].self_attention, []
    send, receive = Gathering.send, Gathering.receive

    def noted(name, function):
        def called(work, *args):
            events.append(name)
            return function(work, *args)

        return called

    loss = model(**given)
    for name in ("o_proj", "q_proj"):
        weight = getattr(block, name).weight
        weight.register_hook(lambda _, name=name: events.append(name))
    with mock.patch.multiple(Gathering, send=noted("send", send), receive=noted("receive", receive)):
        loss.backward(retain_graph=True)
    first = {name: each.grad.to_local().clone() for name, each in model.named_parameters()}
    gradient, again, used = ["send", "receive"], ["send", "o_proj"], ["receive", "q_proj"]
    assert events[2:8] == gradient + again + used, events
    loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad.to_local(), 2 * first[name])
    checked = build(dataclasses.replace(config("*"), recompute=("attend",)), weft.init_meshes("cpu", tp=2))
    checked(**given).backward()
    for name, each in checked.named_parameters():
        torch.testing.assert_close(each.grad.to_local(), first[name])
