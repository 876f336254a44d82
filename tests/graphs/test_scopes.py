"""Scopes of `weft.models`, under hooks and under a schedule, against eager runs, bit for bit."""

import pytest
import torch
import torch.distributed as dist

import weft
from tests.fsdp.nets import full
from tests.graphs.test_hooks import assert_equal, local, poisoned
from tests.overlap.small import build, config
from tests.pool import distributed

ATTENTION = ("attn",)
THREE = ("attn", "moe_router", "moe_preprocess")
ROUTER = ("moe_router",)


def train(cfg, meshes, scopes, *, schedule, steps, microbatches, poison=True, **options):
    """Losses, gradients of all steps and weights, and the report."""
    graphs = None if scopes is None else weft.Graphs(scopes, warmup=1, backend="tape")
    model = build(cfg, meshes, strategy="optim_grads_params", runtime=weft.RuntimeOptions(graphs=graphs), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    seen = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        batches = torch.randint(0, 37, (microbatches, 2, 2, 6), generator=generator)
        if schedule:
            seen += weft.overlap.forward_backward(model, [tuple(batch) for batch in batches], **schedule)
        else:
            for number, (tokens, labels) in enumerate(batches):
                model.set_is_last_backward(number + 1 == microbatches)
                loss = model(tokens, labels)
                loss.backward()
                seen.append(loss.detach())
        seen += [local(each.grad) for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(each) for each in model.parameters()], scopes and weft.graph_report(model)


def compare(cfg, scopes, *, schedule=None, steps=6, microbatches=2, ep=1, **options):
    meshes = weft.init_meshes("cpu", ep=ep)
    how = {"schedule": schedule, "steps": steps, "microbatches": microbatches, **options}
    plain, _ = train(cfg, meshes, None, **how)
    with poisoned():
        found, report = train(cfg, meshes, scopes, **how)
    assert_equal(found, plain)
    assert all(report["scopes"][scope]["replays"] for scope in scopes if scope in report["scopes"]), report
    return report


@distributed(2)
def test_the_scopes_of_the_seed_under_a_schedule():
    report = compare(config("[*-][*E]", moe_rows_per="expert"), THREE, schedule={"overlap": True}, ep=2)
    assert set(report["scopes"]) == set(THREE)
