"""What ranks that share rows or layers keep between forward and backward."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests.models.test_context import batch, build
from tests.models.test_documents import config
from tests.pool import distributed
from weft.models import context_part
from weft.models.gathering import Gathering


class Made(TorchDispatchMode):
    """The memory of all tensors that are made inside."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if type(each) is torch.Tensor:
                storage = each.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self):
        """Bytes that are in use now."""
        return sum(nbytes for storage, nbytes in self.storages.values() if not storage.expired())


def kept(cfg, meshes=None):
    """Bytes that lie between forward and backward, of a row without documents."""
    model, given = build(cfg, meshes, dtype=torch.float32), batch(None, 128)
    if meshes is not None and meshes.cp is not None:
        given = context_part(given, meshes)
    with Made() as made:
        loss = model(**given)
    found = made.alive()
    loss.backward()
    return found


SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "mamba_num_heads": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "kda_num_heads": 4,
    "kda_head_dim": 8,
}


@pytest.mark.slow
@distributed(4)
def test_four_ranks_keep_little_more_than_a_quarter_of_what_one_keeps():
    for axes, most, patterns in (
        ({"tp": 4}, 0.35, ("[*-]", "+", "M", "G")),
        ({"tp": 4, "etp": 1, "ep": 4}, 0.35, ("[*E]",)),
        ({"cp": 4}, 0.30, ("M", "G")),
    ):
        meshes = weft.init_meshes("cpu", **axes)
        for pattern in patterns:
            cfg = dataclasses.replace(config(pattern), **SIZES)
            mine = kept(cfg, meshes)
            if dist.get_rank() == 0:
                share = mine / kept(cfg)
                assert share <= most, (axes, pattern, share)


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
