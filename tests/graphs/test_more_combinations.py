"""What few settings touch: recomputation, pipelines with recurrences, experts cut over ranks."""

import dataclasses

import pytest

import weft
from tests.graphs.test_hooks import assert_equal, poisoned
from tests.graphs.test_scopes import ALL, ATTENTION, OVERLAPPED, ROUTER, THREE, train
from tests.overlap.small import config
from tests.pool import distributed


def compare(cfg, meshes, scopes, **how):
    """Both runs are bit-equal; returns the report."""
    plain, _ = train(cfg, meshes(), None, **how)
    with poisoned():
        found, report = train(cfg, meshes(), scopes, **how)
    assert_equal(found, plain)
    return report["scopes"]


PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}
BOTH = ("attend", "experts")


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "schedule", "microbatches", "more"),
    [
        ("[*E]", OVERLAPPED, 2, PADDED),
        pytest.param("M[*-]G", None, 2, {}, marks=pytest.mark.slow),
        pytest.param("M[*-]G", {"overlap": False, "delay_wgrad": True}, 1, {}, marks=pytest.mark.long),
    ],
)
@distributed(2)
def test_what_is_recomputed_inside_of_a_scope_is_replayed_with_it(pattern, schedule, microbatches, more):
    cfg = config(pattern, moe_rows_per="expert", recompute=BOTH, **more)
    how = {"schedule": schedule, "steps": 4, "microbatches": microbatches}
    scopes = compare(cfg, lambda: weft.init_meshes("cpu", ep=2 if more else 1), weft.Graphs().scopes, **how)
    assert all(each["replays"] for each in scopes.values()), scopes


@pytest.mark.slow
@distributed(2)
def test_attention_in_a_window_reads_its_mask_from_a_replay():
    cfg = config("[*-]", sliding_window=3)  # the mask is of all layers: no argument, parameter or buffer
    scopes = compare(cfg, lambda: weft.init_meshes("cpu"), ("attn",), schedule=None, steps=4, microbatches=1)
    assert scopes["attn"]["replays"], scopes


@pytest.mark.long
@distributed(2)
def test_what_is_recomputed_from_a_gather_on_is_eager_by_name():
    cfg = dataclasses.replace(config("[*-]", recompute=BOTH), num_key_value_heads=2)
    scopes = compare(cfg, lambda: weft.init_meshes("cpu", tp=2), ALL, schedule=None, steps=5, microbatches=1)
    for scope in ("attn", "mlp"):
        assert scopes[scope]["replays"] == 0 and any("a checkpoint" in each for each in scopes[scope]["eager"]), scopes
    assert scopes["finish"]["replays"]


@pytest.mark.long
@pytest.mark.parametrize(("driven", "recompute"), [({}, ()), ({"delay_wgrad": True}, BOTH)])
@distributed(2)
def test_stages_of_a_pipeline_with_recurrences(driven, recompute):
    how = {"schedule": {"schedule": "1f1b", **driven}, "steps": 5, "microbatches": 3}
    cfg = config("[*-]|M[G-]", recompute=recompute)
    scopes = compare(cfg, lambda: weft.init_meshes("cpu", pp=2), ALL, **how)
    assert all(each["replays"] for each in scopes.values()), scopes


@pytest.mark.long
@distributed(4)
def test_experts_over_two_ranks_and_each_of_them_cut_over_two():
    cfg = config("[*E]", moe_rows_per="expert", capacity_factor=1.0, pad_to_capacity=True)
    cfg = dataclasses.replace(cfg, num_key_value_heads=2)
    how = {"schedule": None, "steps": 5, "microbatches": 1}
    meshes = lambda: weft.init_meshes("cpu", tp=2, ep=2, etp=2)  # noqa: E731
    plain, _ = train(cfg, meshes(), None, **how)
    for chosen in (ATTENTION, THREE, ROUTER, (*THREE, "experts")):
        with poisoned():
            found, report = train(cfg, meshes(), chosen, **how)
        assert_equal(found, plain)
        assert all(each["replays"] for each in report["scopes"].values()), report
