"""The plan of a schedule, in one piece and over stages, says to the byte what it takes."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import weft
from tests.overlap import test_schedule
from tests.overlap.test_stages import CFG, build, data
from tests.pool import distributed
from weft.fsdp import plan_of
from weft.models import shard
from weft.overlap import evaluate, forward_backward
from weft.overlap.order import BACKWARD, COMPUTE, FORWARD, Step
from weft.overlap.units import ModelUnits


def check(model, **options):
    for _ in range(3):
        forward_backward(model, data(4), **options)
    plan = plan_of(model)
    reported = {role: counts["peak"] for role, counts in weft.memory_report(model)["transient"].items()}
    assert plan.peak_bytes == reported and reported["gathered weights"]
    assert {step.kind for step in plan.steps} == {"schedule"} and plan.off_plan == {}


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("delay_wgrad", [False, True])
def test_the_peaks_of_a_schedule_with_experts_are_those_that_memory_reports(delay_wgrad):
    model = test_schedule.build(test_schedule.CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    check(model, delay_wgrad=delay_wgrad)


@pytest.mark.slow
@distributed(4)
@pytest.mark.parametrize("schedule", ["interleaved", "combined"])
def test_the_peaks_of_a_pipeline_are_those_that_memory_reports(schedule):
    meshes = weft.init_meshes("cpu", pp=dist.get_world_size() // 2)
    check(shard(build(CFG, meshes, chunks=2), meshes), schedule=schedule)


@pytest.mark.slow
@distributed(2)
def test_the_first_schedule_of_quantized_weights_takes_all_its_memory_from_the_plan():
    policy = weft.MixedPrecisionPolicy(param_quantization=weft.quantize.rowwise())
    model = shard(build(CFG), weft.init_meshes("cpu"), mp_policy=policy)
    forward_backward(model, data(2), overlap=False)
    weights = weft.memory_report(model)["transient"]["gathered weights"]
    assert (weights["plans"], weights["fallbacks"]) == (1, 0)


@pytest.mark.slow
@distributed(2)
def test_weights_keep_their_addresses_from_a_forward_to_its_backward_and_no_longer():
    fixed = []

    def before(units, around, graph, **options):
        acquire(units, around, graph, **options)
        if around.step.direction == FORWARD:
            fixed.extend(group.transient.is_fixed() for unit, _ in around.acquire for group in unit.groups)

    acquire = ModelUnits.before
    model = shard(build(CFG), weft.init_meshes("cpu"))
    with mock.patch.object(ModelUnits, "before", before):
        forward_backward(model, data(2), overlap=False)
        assert fixed and all(fixed)
        fixed.clear()
        evaluate(model, data(2))
        assert fixed and not any(fixed)


def test_the_last_reduction_of_the_head_comes_after_its_separate_weight_gradients():
    head: Any = "the units of the head"  # of a stage that does not embed
    units = ModelUnits((), (), (head,), weft.MixedPrecisionPolicy(), None)
    steps = [Step(BACKWARD, 0, None, slot, COMPUTE) for slot in ("head", "head.weights")]
    assert [each.reduce for each in units.program(steps)] == [[], [head]]
