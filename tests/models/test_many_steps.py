"""Two clipped AdamW steps on meshes of up to eight ranks are those of one process. Ranks are threads of this one.

Two settings at a time decide what a layer exchanges: a mixer and where documents end, a mixer and what cuts its
weights, a mesh and what is shared over it. Where three meet, as the ranks of an axis with few heads and a window, the
sizes here make them meet in each case. So every two values of all settings meet, and not every combination.
"""

import math
from unittest import mock

import pytest
import torch

import weft
from tests.models.test_context import CLOSE, EXACT, ROWS, batch, build, cut, same, whole
from tests.models.test_documents import config
from tests.pairs import all_pairs
from weft.overlap import forward_backward
from weft.train.check.threads.ranks import run_ranks

pytestmark = pytest.mark.long

STEPS, MICROBATCHES = 2, 2
EPS = 1e-3
"""Of AdamW: with 1e-8 a gradient that is 0 but for rounding, as of a bias of keys, is a step of full length."""


def steps_of(model, optimizer, clip, run):
    """Losses and norms of all steps, the gradients of the first, and the weights in the end."""
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        losses += run(step)
        if not step:
            first = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        norms.append(whole(clip(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, first, {name: whole(each.detach()) for name, each in model.named_parameters()}


def alone(cfg, batches, dtype):
    model = build(cfg, dtype=dtype)

    def run(step):
        losses = [model(**each) for each in batches[step]]
        (sum(losses) / len(losses)).backward()
        return [loss.detach() for loss in losses]

    clip = lambda largest: torch.nn.utils.clip_grad_norm_(model.parameters(), largest)  # noqa: E731
    return steps_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS), clip, run)


def on_ranks(cfg, sizes, options, how, batches, dtype):
    """What each rank finds, with the losses of its own microbatches."""

    def work(rank):
        meshes = weft.init_meshes("cpu", **sizes)
        model = build(cfg, meshes, options, dtype)

        def run(step):
            mine = batches[step][meshes.dp_rank :: meshes.dp_size]
            mine = cut(mine, meshes) if meshes.cp is not None else mine
            return forward_backward(model, mine, loss_scale=1 / len(mine), **{"overlap": False, **how})

        clip = lambda largest: weft.optim.clip_grad_norm_(model, largest)  # noqa: E731
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
        return meshes.dp_rank, meshes.dp_size, steps_of(model, optimizer, clip, run)

    dense = math.prod(sizes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    of_experts = sizes.get("ep", 1) * sizes.get("etp", sizes.get("tp", 1))
    return run_ranks(sizes.get("pp", 1) * math.lcm(dense, of_experts), work)


def compare(cfg, sizes, options, how, rows, dtype, seq=32):
    batches = [[batch(rows, seq, STEPS * number + step) for number in range(MICROBATCHES)] for step in range(STEPS)]
    losses, *expected = alone(cfg, batches, dtype)
    close = EXACT if dtype is torch.float64 else CLOSE
    seen = set()
    for rank, size, (own, *found) in on_ranks(cfg, sizes, options, how, batches, dtype):
        same(own, [loss for at, loss in enumerate(losses) if at % MICROBATCHES % size == rank], **close)
        same(found, expected, **close)
        seen |= found[-1].keys()
    assert seen == expected[-1].keys()


CONTEXT = {
    "ZeRO-3": ({}, {}, {}),
    "HSDP": ({"dp_replicate": 2}, {}, {}),
    "experts under the schedule": ({"ep": 2}, {}, {"overlap": True}),
    "stages": ({"pp": 2}, {"strategy": "optim"}, {"schedule": "1f1b"}),
}
MIXERS = {
    "*": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "head"},
    "* exchanged": {"num_attention_heads": 4, "num_key_value_heads": 2, "context_attention": "heads"},
    "* in windows with sinks": {"num_attention_heads": 4, "sliding_window": 5, "attention_sinks": True},
    "+": {"q_lora_rank": 12},
    "M": {"chunk_size": 4},
    "G": {},
}


@all_pairs(
    mixer=[*MIXERS],
    rows=[*list(ROWS)[1:], "an odd length"],
    beside=[*CONTEXT],
    cp=[2, 4],
    dtype=[torch.float64, torch.float32],
)
@mock.patch("weft.models.layers.delta_net.CHUNK", 4)
def test_context_ranks_take_the_steps_of_one_process(mixer, rows, beside, cp, dtype):
    sizes, options, how = CONTEXT[beside]
    cfg = config(f"[{mixer[0]}E][{mixer[0]}-]", **MIXERS[mixer])
    seq = 27 if rows == "an odd length" else 32
    compare(cfg, {"cp": cp, **sizes}, options, how, ROWS.get(rows), dtype, seq)


SHARED = {
    "ZeRO-3": ({"dp_shard": 2}, {}, {}),
    "HSDP": ({"dp_replicate": 2}, {}, {}),
    "stages": ({"pp": 2}, {"strategy": "optim"}, {"schedule": "1f1b"}),
    "whole experts": ({"ep": 2, "etp": 1}, {}, {"overlap": True}),
    "cut experts": ({"ep": 2}, {}, {"overlap": True, "delay_wgrad": True}),
    "context ranks": ({"cp": 2}, {}, {}),
}
FEW = {"num_attention_heads": 4, "num_key_value_heads": 1, "mamba_n_groups": 1, "linear_num_key_heads": 1}
FEW |= {"linear_num_value_heads": 4, "kda_num_heads": 4, "kda_head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1}
FEW |= {"norm_topk_prob": False, "chunk_size": 4, "attention_bias": "all", "q_lora_rank": 12}
PATTERNS = {
    "* and M": ("[*E]M", {"qk_norm": "full", "attention_sinks": True, "sliding_window": 5}),
    "+ and G": ("[+E]G-", {"experts_bias": True}),
    "P and K": ("[PE]K", {"shared_expert_intermediate_size": 8, "shared_expert_gate": True}),
}
"""With one key head and one group, and two experts."""


@all_pairs(
    pattern=[*PATTERNS],
    beside=[*SHARED],
    tp=[2, 4],
    ties=[False, True],
    depths=["", "/[*-]/[*-]"],
    rows=["no documents", "a document over three slices"],
)
@mock.patch("weft.models.layers.delta_net.CHUNK", 4)
def test_tensor_parallel_ranks_take_the_steps_of_one_process(pattern, beside, tp, ties, depths, rows):
    sizes, options, how = SHARED[beside]
    symbols, more = PATTERNS[pattern]
    depths = depths.replace("*", "+") if "+" in symbols else depths
    cfg = config(symbols + depths, tie_word_embeddings=ties, **{**FEW, **more})
    compare(cfg, {"tp": tp, **sizes}, options, how, ROWS[rows], torch.float64)
