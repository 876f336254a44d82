"""What few settings touch: meta start, recomputation, pipelines with recurrences, experts cut over ranks."""

import contextlib
import dataclasses

import pytest
import torch

import weft
from tests.graphs.test_hooks import assert_equal, poisoned
from tests.graphs.test_scopes import ALL, ATTENTION, OVERLAPPED, ROUTER, THREE, train
from tests.overlap.small import config
from tests.pool import distributed


def compare(cfg, meshes, scopes, *, within=contextlib.nullcontext, **how):
    """Both runs are bit-equal; returns the report."""
    with within():
        plain, _ = train(cfg, meshes(), None, **how)
    with poisoned(), within():
        found, report = train(cfg, meshes(), scopes, **how)
    assert_equal(found, plain)
    return report["scopes"]


@contextlib.contextmanager
def built_on_meta():
    """Models are built on the meta device, and `fully_shard` fills them."""
    init = weft.models.HybridModel.__init__

    def on_meta(self, *args, **kwargs):
        with torch.device("meta"):
            init(self, *args, **kwargs)

    weft.models.HybridModel.__init__ = on_meta
    try:
        yield
    finally:
        weft.models.HybridModel.__init__ = init


@pytest.mark.slow
@distributed(2)
def test_a_model_that_starts_on_the_meta_device():
    cfg, how = config("[*E]", moe_rows_per="expert"), {"schedule": OVERLAPPED, "steps": 5, "microbatches": 2}
    scopes = compare(cfg, lambda: weft.init_meshes("cpu", ep=2), ALL, within=built_on_meta, **how)
    assert all(each["replays"] for each in scopes.values()), scopes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, OVERLAPPED])
@distributed(2)
def test_what_is_recomputed_is_eager_and_the_rest_replays(schedule):
    cfg = config("[*E]", moe_rows_per="expert", recompute=("attend",))
    how = {"schedule": schedule, "steps": 5, "microbatches": 2}
    scopes = compare(cfg, lambda: weft.init_meshes("cpu", ep=2), ALL, **how)
    assert scopes["attn"]["replays"] == 0 and any("checkpoint" in each for each in scopes["attn"]["eager"])
    assert all(each["replays"] for scope, each in scopes.items() if scope != "attn"), scopes


@pytest.mark.slow
@distributed(2)
def test_stages_of_a_pipeline_with_recurrences():
    how = {"schedule": {"schedule": "1f1b"}, "steps": 5, "microbatches": 3}
    scopes = compare(config("[*-]|M[G-]"), lambda: weft.init_meshes("cpu", pp=2), ALL, **how)
    assert all(each["replays"] for each in scopes.values()), scopes


@pytest.mark.long
@distributed(4)
def test_experts_over_two_ranks_and_each_of_them_cut_over_two():
    cfg = config("[*E]", moe_rows_per="expert", capacity_factor=1.0, pad_to_capacity=True)
    cfg = dataclasses.replace(cfg, num_key_value_heads=2)
    how = {"schedule": None, "steps": 20, "microbatches": 1}
    meshes = lambda: weft.init_meshes("cpu", tp=2, ep=2, etp=2)  # noqa: E731
    for chosen in (ATTENTION, THREE, ROUTER, (*THREE, "experts")):
        scopes = compare(cfg, meshes, chosen, **how)
        assert all(each["replays"] for each in scopes.values()), scopes
