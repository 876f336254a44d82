"""Scopes of `weft.models`, under hooks and under a schedule, against eager runs, bit for bit."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import weft
from tests.graphs.test_hooks import assert_equal, local, poisoned
from tests.overlap.small import build, config
from tests.pool import distributed

ATTENTION = ("attn",)
THREE = ("attn", "moe_router", "moe_preprocess")
ROUTER = ("moe_router",)
ALL = tuple(scope for scope in weft.Graphs().scopes if scope != "experts")


def train(cfg, meshes, scopes, *, schedule, steps, microbatches, strategy="optim_grads_params", **options):
    """Losses, gradients of all steps and weights, and the report."""
    graphs = None if scopes is None else weft.Graphs(scopes, warmup=1, backend="tape")
    model = build(cfg, meshes, strategy=strategy, runtime=weft.RuntimeOptions(graphs=graphs), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    seen = []
    seed = 0 if meshes.pp is not None else dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
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


def compare(cfg, scopes, *, schedule=None, steps=4, microbatches=2, ep=1, dp_replicate=1, without=(), **options):
    meshes = weft.init_meshes("cpu", ep=ep, dp_replicate=dp_replicate)
    how = {"schedule": schedule, "steps": steps, "microbatches": microbatches, **options}
    plain, _ = train(cfg, meshes, None, **how)
    with poisoned():
        found, report = train(cfg, meshes, scopes, **how)
    assert_equal(found, plain)
    assert all(found["replays"] for scope, found in report["scopes"].items() if scope not in without), report
    return report


@pytest.mark.long
@distributed(2)
def test_each_kind_of_mixer_replays_under_the_name_of_what_it_mixes():
    sizes = {"kda_num_heads": 2, "kda_head_dim": 8, "kv_lora_rank": 8}
    cfg = config("[*]M[G]K[P-]", **sizes)
    report = compare(cfg, ALL, microbatches=1)
    assert {scope: each["captures"] for scope, each in report["scopes"].items()} == {
        "attn": 2,
        "mamba": 4,
        "mlp": 1,
        "finish": 1,
    }


TIED = config("[*-][*E]", moe_rows_per="rank", tie_word_embeddings=True)
OVERLAPPED = {"overlap": True}


@pytest.mark.long
@distributed(2)
def test_the_scopes_of_the_seed_with_two_microbatches_in_flight():
    report = compare(config("[*-][*E]", moe_rows_per="expert"), THREE, schedule=OVERLAPPED, ep=2, steps=7)
    assert report["scopes"]["attn"]["captures"] > 2  # of two layers
    assert set(report["scopes"]) == set(THREE)


@pytest.mark.long
@distributed(2)
def test_tied_weights_early_release_and_rows_per_rank():
    report = compare(TIED, ALL, schedule={"overlap": True, "early_release": True}, ep=2, without=THREE[2:])
    assert "one row per rank" in str(report["scopes"]["moe_preprocess"]["eager"])
    compare(TIED, ROUTER, ep=2, microbatches=1)


@pytest.mark.long
@distributed(2)
def test_delayed_weight_gradients_are_replayed_after_the_backward_that_queues_them():
    schedule = {"overlap": True, "delay_wgrad": True}
    report = compare(config("[*E]", moe_rows_per="expert"), ALL, schedule=schedule, ep=2, microbatches=3, steps=5)
    assert report["scopes"]["attn"]["replays"] > 6


@pytest.mark.slow
@distributed(2)
def test_a_pipeline_has_as_many_captures_as_microbatches_in_flight():
    cfg, meshes = config("[*-]|[*-]"), weft.init_meshes("cpu", pp=2)
    how = {"schedule": {"schedule": "1f1b"}, "steps": 6, "microbatches": 4}
    plain, _ = train(cfg, meshes, None, **how)
    with poisoned():
        found, report = train(cfg, meshes, ALL, **how)
    assert_equal(found, plain)
    in_flight = 2 - meshes.pp.get_local_rank()
    assert report["scopes"]["attn"]["captures"] == in_flight
    assert report["scopes"]["attn"]["replays"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "schedule"), [(1, None), (2, {**OVERLAPPED, "delay_wgrad": True})])
@distributed(2)
def test_experts_with_a_fixed_capacity_replay(ep, schedule):
    cfg = config("[*E]", moe_rows_per="expert", capacity_factor=1.0, pad_to_capacity=True)
    compare(cfg, weft.Graphs().scopes, schedule=schedule, ep=ep, microbatches=2, without=["mlp"])


REFUSED = [
    ({"moe_rows_per": "expert", "capacity_factor": 1.0}, "moe_preprocess", "with a capacity_factor the host reads"),
    ({"moe_rows_per": "rank"}, "moe_preprocess", "with one row per rank the host reads"),
    ({"moe_rows_per": "expert"}, "experts", "the number of rows of an expert changes"),
]


@pytest.mark.long
@distributed(2)
def test_scopes_whose_shapes_depend_on_values_are_refused_by_name():
    for more, scope, words in REFUSED:
        how = {"schedule": None, "steps": 4, "microbatches": 1}
        _, report = train(config("[*E]", **more), weft.init_meshes("cpu", ep=2), (*THREE, "experts"), **how)
        assert report["scopes"][scope]["captures"] == 0
        assert words in str(report["scopes"][scope]["eager"])
        assert report["scopes"]["attn"]["replays"] > 0


SUMS = [
    ({"ep": 2}, "with one row per rank the number of rows changes between calls"),
    ({"tp": 2}, "it contains a collective, because each expert is cut over tensor-parallel ranks"),
]


@distributed(2)
def test_a_sum_of_outputs_that_no_graph_can_hold_is_counted_as_eager():
    cfg = dataclasses.replace(config("[*E]", moe_rows_per="rank"), num_key_value_heads=2)
    for sizes, words in SUMS:
        how = {"schedule": None, "steps": 1, "microbatches": 1}
        _, report = train(cfg, weft.init_meshes("cpu", **sizes), ("finish",), **how)
        assert report["scopes"]["finish"]["eager"] == {words: 1}


@pytest.mark.long
@distributed(4)
def test_experts_over_two_ranks_and_copies_over_two():
    cfg = config("[*E]", moe_rows_per="expert")
    compare(cfg, ALL, schedule=OVERLAPPED, ep=2, dp_replicate=2)


@pytest.mark.long
@distributed(2)
def test_tensor_parallel_ranks_sum_gradients_of_the_router_behind_its_replay():
    """The losses of the router are of all positions, so that its scope ends before the ranks exchange means."""
    losses = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "router_bias": True, "qk_norm": "head"}
    cfg = config("[*-][*E]", moe_rows_per="expert", **losses)
    cfg = dataclasses.replace(cfg, num_key_value_heads=2)
    how = {"schedule": None, "steps": 5, "microbatches": 1}
    for scopes, etp in ((ROUTER, 1), (ALL, 2)):  # with etp=1 each rank routes its own positions
        meshes = weft.init_meshes("cpu", tp=2, etp=etp)
        plain, _ = train(cfg, meshes, None, **how)
        with poisoned():
            found, report = train(cfg, meshes, scopes, **how)
        assert_equal(found, plain)
        assert all(each["replays"] for each in report["scopes"].values()), report
