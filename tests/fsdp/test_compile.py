"""`torch.compile` of each block: one whole graph, no recompilation, the numbers of the uncompiled run."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import weft
from tests.fsdp import nets
from tests.pool import distributed

BF16 = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "compiled before sharding": ("before", {}),
    "wrapped": ("wrapper", {}),
    "bf16": ("after", {"mp_policy": BF16}),
    "weights stay until backward": ("after", {"reshard_after_forward": False}),
    "bf16, weights stay, wrapped": ("wrapper", {"mp_policy": BF16, "reshard_after_forward": False}),
    "weights always whole": ("before", {"strategy": "optim_grads"}),
    "compiled after sharding, unsharded by hand": ("after", {}),
}


def compiled(net: nets.Net, when: str, backend: Any, **options: Any) -> nets.Net:
    """Sharded, each block compiled as one graph: a break in one is an error."""
    if when == "wrapper":
        for number, block in enumerate(net.blocks):
            net.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    for moment in ("before", "after"):
        if when == moment:
            for block in net.blocks:
                block.compile(backend=backend, fullgraph=True)
        if moment == "before":
            nets.shard(net, **options)
    return net


def check(case: str) -> None:
    when, options = CASES[case]
    torch._dynamo.reset()
    counters.clear()
    batches = nets.data(4, 4)
    graphs = CompileCounterWithBackend("aot_eager")
    runs = []
    for net in (nets.shard(nets.make(), **options), compiled(nets.make(), when, graphs, **options)):

        def unshard(_last: bool, net: nets.Net = net) -> None:
            for block in net.blocks if "by hand" in case else ():
                block.unshard()

        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
        two = nets.train_here(net, batches[:2], optimizer=lambda _, own=optimizer: own, on_microbatch=unshard)
        seen = graphs.frame_count
        with torch._dynamo.config.patch(error_on_recompile=True):
            rest = nets.train_here(net, batches[2:], optimizer=lambda _, own=optimizer: own, on_microbatch=unshard)
        assert graphs.frame_count == seen, "recompiled after the second step"
        weights = {name.replace("_orig_mod.", ""): value for name, value in rest["weights"].items()}
        runs.append([two["losses"] + rest["losses"], two["norms"] + rest["norms"], weights])
    # A block is a norm, two products, an activation and an addition: all in one graph that equal blocks may share.
    assert 1 <= seen <= len(net.blocks) and graphs.op_count == 5 * seen
    assert not counters["graph_break"]
    torch.testing.assert_close(runs[1], runs[0])


@pytest.mark.long
@distributed(2, timeout=240)
def test_each_block_compiles_once_as_a_whole_and_trains_alike():
    for case in CASES:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(case) from error


@pytest.mark.slow
@distributed(2)
def test_a_break_inside_a_block_would_be_seen():
    class Broken(nets.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    net = nets.make()
    net.blocks[0] = Broken(13, 29)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        nets.loss_of(compiled(net, "after", "aot_eager"), nets.data(1, 4)[0])
