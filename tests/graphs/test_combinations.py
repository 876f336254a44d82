"""Graphs against eager calls, bit for bit: cases in which every two values of the settings meet."""

import pytest
import torch

import weft
from tests.graphs.test_hooks import assert_equal, poisoned
from tests.graphs.test_scopes import ALL, ATTENTION, ROUTER, THREE, train
from tests.overlap.small import config
from tests.pairs import pairwise
from tests.pool import distributed

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)
DRIVEN = (
    (1, None),
    (2, None),
    (1, {"overlap": False, "delay_wgrad": True}),
    (2, {"overlap": True}),
    (2, {"overlap": True, "delay_wgrad": True}),
    (2, {"overlap": True, "early_release": True}),
)
"""Ranks of experts, and the schedule; None: hooks."""
CASES = pairwise(
    scopes=(ATTENTION, THREE, ROUTER, ("mamba",), ("mlp",), ("finish",), ALL),
    driven=DRIVEN,
    strategy=("optim", "optim_grads", "optim_grads_params"),
    policy=(None, HALF),
    tied=(False, True),
    microbatches=(1, 3),
)


def check(scopes, driven, strategy, policy, tied, microbatches, *, steps, **meshes):
    """Both runs are bit-equal, and each scope replays."""
    ep, schedule = driven
    cfg = config("M[*E]G", moe_rows_per="expert", shared_expert_intermediate_size=8, tie_word_embeddings=tied)
    how = {"schedule": schedule, "steps": steps, "microbatches": microbatches, "strategy": strategy}
    if policy is not None:
        how["mp_policy"] = policy
    plain, _ = train(cfg, weft.init_meshes("cpu", ep=ep, **meshes), None, **how)
    with poisoned():
        found, report = train(cfg, weft.init_meshes("cpu", ep=ep, **meshes), scopes, **how)
    assert_equal(found, plain)
    assert all(each["replays"] for each in report["scopes"].values()), (scopes, driven, strategy, report)


@pytest.mark.long
@distributed(2)
def test_each_scope_has_the_numbers_of_eager_calls():
    for case in {case[0]: case for case in CASES}.values():
        check(*case, steps=5)


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
@distributed(2)
def test_every_two_settings_together_have_the_numbers_of_eager_calls(part):
    for case in CASES[part::3]:
        check(*case, steps=5)


@pytest.mark.long
@distributed(4)
def test_replicated_shards_have_the_numbers_of_eager_calls():
    for case in CASES[::9]:
        check(*case, steps=20 if case[0] == THREE else 5, dp_replicate=2)


@pytest.mark.long
@distributed(2, timeout=400)
def test_twenty_steps_of_the_scopes_of_the_seed_have_the_numbers_of_eager_calls():
    for scopes in (ATTENTION, THREE, ROUTER):
        for driven in DRIVEN:
            check(scopes, driven, "optim_grads_params", None, False, 3, steps=20)
