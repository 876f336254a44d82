"""Modules that `weft.Graphs` refuses when the model is first called."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.fsdp.nets import Block
from tests.graphs import test_hooks
from tests.graphs.test_hooks import tape
from tests.pool import distributed
from weft.errors import CollectiveMismatch


def hooked(block):
    block.up.register_forward_hook(lambda module, args, output: None)


def compiled(block):
    block.up._compiled_call_impl = block.up._call_impl  # as by `block.up.compile()`, which imports the compiler first


def sharded(block):
    weft.fully_shard(block.up)


CASES = [
    (tape("1"), hooked, "'1.up' inside '1' has hooks"),
    (tape("1"), compiled, "'1.up' is compiled"),
    (tape("1"), sharded, "'1' contains '1.up', which is a separate unit"),
    (tape(""), sharded, "'the root' contains '1.up'"),
    (tape("1", "1.up"), None, "'1.up' lies inside another chosen module"),
    (tape("1.up", "1"), None, "'1.up' lies inside another chosen module"),
    (tape("2"), None, "no module '2'"),
    (weft.Graphs(modules=lambda name, module: False, backend="tape"), None, "chose none of the"),
    (weft.Graphs(("attn",), backend="tape"), None, "no layers of scopes"),
    (weft.Graphs(modules=["1"], backend="cuda"), None, "graphs need CUDA"),
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


@distributed(2)
def test_inputs_and_weights_of_other_classes_are_refused_with_the_reason():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def run(make, plan, **options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), make())
        parallelize_module(net[1], mesh["tp"], plan)
        weft.fully_shard(net, mesh=mesh["dp"], runtime=weft.RuntimeOptions(graphs=tape("1")), **options)
        for _ in range(3):
            net(torch.ones(2, 8)).square().sum().backward()
            net.zero_grad()
        return weft.graph_report(net)

    with pytest.raises(ValueError, match=r"'1\.up' inside '1' has hooks"):
        run(lambda: Block(8, 12), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    report = run(lambda: nn.Linear(8, 8), ColwiseParallel(use_local_output=True))
    assert report["replays"] == 0 and any("a DTensor" in each for each in report["eager"]), report


@distributed(1)
def test_a_report_of_a_model_without_graphs_is_refused():
    net = weft.fully_shard(nn.Linear(8, 8))
    for function in (weft.graph_report, weft.drop_graphs):
        with pytest.raises(ValueError, match=r"FSDPLinear has no graphs: pass runtime=.*Graphs\(\)\) to fully_shard"):
            function(net)


@distributed(2)
def test_ranks_that_capture_different_numbers_of_modules_raise_before_the_first_pass():
    chosen = ["blocks.0", "blocks.1"][: 1 + dist.get_rank()]
    net = test_hooks.sharded(weft.Graphs(modules=chosen, warmup=1, backend="tape"))
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 1 parts of the model .*rank 1: 2 parts"):
        test_hooks.run(net, 1)
