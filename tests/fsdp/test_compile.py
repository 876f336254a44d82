"""`torch.compile` of each block: one graph, no breaks, the numbers of the uncompiled run."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.fsdp import nets
from tests.pool import distributed


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before sharding", "after sharding", "as a wrapper"])
@distributed(2)
def test_each_block_compiles_once_without_breaks(when):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    batches = nets.data(4, 4)
    plain = nets.train_here(nets.shard(nets.make()), batches)
    net = nets.make()
    if when == "as a wrapper":
        for number, block in enumerate(net.blocks):
            net.blocks[number] = torch.compile(block, backend=graphs, fullgraph=True)
    if when == "before sharding":
        for block in net.blocks:
            block.compile(backend=graphs, fullgraph=True)
    nets.shard(net)
    if when == "after sharding":
        for block in net.blocks:
            block.compile(backend=graphs, fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    two = nets.train_here(net, batches[:2], optimizer=lambda _: optimizer)
    compiled = graphs.frame_count
    rest = nets.train_here(net, batches[2:], optimizer=lambda _: optimizer)
    assert 1 <= compiled <= len(net.blocks)
    assert graphs.frame_count == compiled, "recompiled after the second step"
    torch.testing.assert_close(two["losses"] + rest["losses"], plain["losses"])
    weights = {name.replace("_orig_mod.", ""): value for name, value in rest["weights"].items()}
    torch.testing.assert_close(weights, plain["weights"])
