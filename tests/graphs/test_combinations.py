"""Graphs against eager calls, bit for bit: cases in which every two values of the settings meet."""

import contextlib
import functools

import pytest
import torch

import weft
from tests.graphs.test_hooks import assert_equal, poisoned
from tests.graphs.test_scopes import ALL, ATTENTION, ROUTER, train
from tests.overlap.small import config
from tests.pairs import pairwise
from tests.pool import distributed

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)
DRIVEN = (
    (1, None),
    (2, None),
    (1, {"overlap": False, "delay_wgrad": True}),
    (2, {"overlap": True, "delay_wgrad": True}),
    (2, {"overlap": True, "early_release": True}),
)
"""Ranks of experts, and the schedule; None: hooks."""
SCOPES = (ATTENTION, ROUTER, ("mamba",), ("mlp", "finish"), ALL)
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
RECOMPUTED = ("attend", "experts")


@functools.cache
def cases():
    """Those in which every two values meet."""
    return pairwise(
        scopes=SCOPES,
        driven=DRIVEN,
        strategy=STRATEGIES,
        policy=(None, HALF),
        tied=(False, True),
        microbatches=(1, 3),
        recompute=((), RECOMPUTED),
        on_meta=(False, True),
    )


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


def check(
    scopes, driven, strategy, policy=None, tied=False, microbatches=3, recompute=(), on_meta=False, *, steps, **meshes
):
    """Runs with each of the choices of `scopes` are bit-equal to one without, and each scope replays."""
    ep, schedule = driven
    more = {"shared_expert_intermediate_size": 8, "tie_word_embeddings": tied, "recompute": recompute}
    cfg = config("M[*E]G", moe_rows_per="expert", **more)
    how = {"schedule": schedule, "steps": steps, "microbatches": microbatches, "strategy": strategy}
    if policy is not None:
        how["mp_policy"] = policy
    with built_on_meta() if on_meta else contextlib.nullcontext():
        plain, _ = train(cfg, weft.init_meshes("cpu", ep=ep, **meshes), None, **how)
        for chosen in scopes:
            with poisoned():
                found, report = train(cfg, weft.init_meshes("cpu", ep=ep, **meshes), chosen, **how)
            assert_equal(found, plain)
            assert all(each["replays"] for each in report["scopes"].values()), (chosen, driven, strategy, report)


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
@distributed(2, timeout=400)
def test_every_two_settings_together_have_the_numbers_of_eager_calls(part):
    for scopes, *case in cases()[part::3]:
        check([scopes], *case, steps=4)


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
@distributed(4, timeout=400)
def test_replicated_shards_have_the_numbers_of_eager_calls(part):
    how = {"steps": 5, "dp_replicate": 2}
    if part:
        check([ALL], (2, {"overlap": True, "delay_wgrad": True}), "optim_grads_params", None, True, **how)
    else:
        check([ALL], (1, None), "optim_grads_params", HALF, **how)


@pytest.mark.long
@distributed(2, timeout=400)
def test_hooks_and_schedules_take_six_steps():
    """How long a capture is in use, and whether weights stay. test_hooks.py has more."""
    for driven in (DRIVEN[1], DRIVEN[3]):
        check([ALL], driven, "optim_grads_params", microbatches=3, steps=6)
    check([ALL], DRIVEN[0], "optim_grads_params", microbatches=1, steps=4)
