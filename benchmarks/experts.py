"""Expert parallelism: the combined schedule, the same nodes one after another, and plain forward and backward.

    weft bench experts --ranks 2 -- --link 500mbit      # as root: a network of limited rate between the ranks
    weft bench experts --ranks 2                        # loopback: the exchange costs little, and so does hiding it

Four attention layers with eight experts each, two per token, spread over all ranks, everything sharded (ZeRO-3). A step
is forward and backward of all microbatches. The sides take turns within each round; a round's time is that of the
slowest rank, a side's figure the median over rounds. An exchange counts as hidden while this rank computes, and as
exposed while it waits for whatever communication.
"""

import argparse
import statistics
from collections.abc import Callable

import _harness
import torch
import torch.distributed as dist

import weft
from weft.comm.timeline import Timeline, busy, overlap
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward

ROWS, SEQUENCE, MICROBATCHES = 8, 256, 6
CONFIG = HybridConfig(
    pattern="[*E]" * 4,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
)
