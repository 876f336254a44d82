"""Modules that `weft.Graphs` refuses when the model is first called."""

import pytest
import torch
from torch import nn

import weft
from tests.fsdp.nets import Block
from tests.graphs.test_hooks import tape
from tests.pool import distributed


def hooked(block):
    block.up.register_forward_hook(lambda module, args, output: None)


def compiled(block):
    block.up.compile()


def sharded(block):
    weft.fully_shard(block.up)


CASES = [
    (tape("1"), hooked, "'1.up' inside of '1' has hooks"),
    (tape("1"), compiled, "'1.up' is compiled"),
    (tape("1"), sharded, "'1' contains '1.up', which is a unit of its own"),
    (tape("1", "1.up"), None, "'1.up' lies inside of another chosen module"),
    (tape("2"), None, "no module '2'"),
    (weft.Graphs(modules=lambda name, module: False, backend="tape"), None, "chose none of the"),
    (weft.Graphs(("attn",), backend="tape"), None, "no layers of scopes"),
    (weft.Graphs(modules=["1"], backend="cuda"), None, "graphs are of CUDA"),
]


@distributed(2)
def test_modules_that_no_graph_can_hold_are_refused_with_the_reason():
    for graphs, change, words in CASES:
        net = nn.Sequential(nn.Linear(8, 8), Block(8, 12))
        if change is not None:
            change(net[1])
        weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))
        with pytest.raises(ValueError, match=words):
            net(torch.ones(2, 8))
