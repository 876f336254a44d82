"""Weights of a schedule are gathered no more often than its list of visits and the bytes ahead of it make necessary.

visits        A B | C D | A B | C D       two chunks, two microbatches
budget 2      gathered 8 times            what comes next is ahead, what went is needed later than that
budget 4      gathered 4 times            everything that comes fits
"""

from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

import weft
from tests.overlap.test_stages import CFG, build, data
from tests.pool import distributed
from weft.fsdp.gradients.group import GroupGradients
from weft.fsdp.module import runtime_of, units_under
from weft.fsdp.unit import State, Unit
from weft.layout.gathers import SCHEDULED_AHEAD
from weft.models import shard
from weft.overlap import forward_backward
from weft.overlap.units import ModelUnits

MICROBATCHES = 4


def ahead(visits, budget):
    """The units of the visits to come that are wanted here: as many as the budget holds, or the next two."""
    present, coming = visits[0], visits[1:]
    while coming and coming[0] is present:
        coming = coming[1:]
    if budget is None:
        return set(coming[:SCHEDULED_AHEAD])
    wanted = []
    for unit in dict.fromkeys(coming):
        if sum(each.gathered_bytes for each in (*wanted, unit)) > budget:
            break
        wanted.append(unit)
    return set(wanted)


def demanded(program, budget):
    """How often each unit is gathered at least, and the most bytes that are here, if those `ahead` are to be here."""
    visits = [unit for each in program for unit, _ in each.acquire]
    gathers, held, here, most, at = Counter(), Counter(), set(), 0, 0
    for each in program:
        for unit, _ in each.acquire:
            held[unit] += 1
            came = ({unit} | ahead(visits[at:], budget)) - here
            gathers.update(came)
            here |= came
            most = max(most, sum(each.gathered_bytes for each in here))
            at += 1
        for unit, _ in each.release:
            held[unit] -= 1
            if not held[unit] and unit not in ahead(visits[at - 1 :], budget) | set(visits[at : at + 1]):
                here.discard(unit)
    return gathers, most


def counted(model, schedule):
    """A call: how often each unit is gathered, its gradients reduced, and the most bytes that are here at a visit."""
    gathers, reduced, program, most = Counter(), Counter(), [], 0
    watched = units_under(model)
    gather, reduce, visit, plan = Unit._gather, GroupGradients.reduce, runtime_of(model).use, ModelUnits.program

    def gathered(unit, groups):
        gathers[unit] += 1
        gather(unit, groups)

    def reduces(gradients, *args, **kwargs):
        reduced[gradients] += 1
        return reduce(gradients, *args, **kwargs)

    def visited(*args):
        nonlocal most
        visit(*args)
        most = max(most, sum(unit.gathered_bytes for unit in watched if unit.resident))

    def planned(units, steps, *together):
        program.extend(plan(units, steps, *together))
        return program

    with (
        mock.patch.object(Unit, "_gather", gathered),
        mock.patch.object(GroupGradients, "reduce", reduces),
        mock.patch.object(runtime_of(model), "use", visited),
        mock.patch.object(ModelUnits, "program", planned),
    ):
        forward_backward(model, data(MICROBATCHES), schedule=schedule)
    return gathers, reduced, program, most


@pytest.mark.long
@distributed()
@pytest.mark.parametrize(
    "schedule, placement, ranks",
    [
        ("interleaved", "loop", 2),
        pytest.param("combined", "loop", 4, marks=pytest.mark.long),
        pytest.param("zbv", "v", 4, marks=pytest.mark.long),
    ],
)
def test_weights_are_gathered_as_often_as_the_visits_demand(schedule, placement):
    meshes = weft.init_meshes("cpu", pp=dist.get_world_size() // 2)
    sizes = [unit.gathered_bytes for unit in units_under(shard(build(CFG), weft.init_meshes("cpu")))]
    once = sum(sizes)
    for budget in (None, 0, once // 3, once) if dist.get_world_size() == 2 else (None, once // 3):
        model = build(CFG, meshes, chunks=2, placement=placement)
        model = shard(model, meshes, runtime=weft.RuntimeOptions(prefetch_bytes=budget))
        units = units_under(model)
        for _ in range(2):
            gathers, reduced, program, most = counted(model, schedule)
            assert (gathers, most) == demanded(program, budget), budget
            gradients = [group.gradients for unit in units for group in unit.trainable_groups]
            assert reduced == dict.fromkeys(gradients, MICROBATCHES)
            assert all(unit.state is State.AT_REST and not unit.holders and not unit.calls for unit in units)
            weights = runtime_of(model).channels.weights
            assert weights.fallbacks == 0 and weights.plans == 1 and weights.live == 0
        if budget == once:
            assert gathers == dict.fromkeys(units, 1)
