"""State dicts and checkpoints: torch's functions do with weft what they do with FSDP2."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import weft
from tests.fsdp import nets
from tests.fsdp.side_by_side import (
    a_step,
    assert_same,
    batches,
    facts_of,
    kinds,
    make,
    mine,
    tensors,
    trained_pair,
    whole,
)
from tests.pool import distributed

pytestmark = pytest.mark.slow


WAYS = {
    "sharded": (StateDictOptions(), StateDictOptions()),
    "sharded, on CPU": (StateDictOptions(cpu_offload=True), StateDictOptions()),
}


def got_and_set(fsdp, way):
    getting, setting = WAYS[way]
    net, optimizer = trained_pair(fsdp)
    states = (
        get_model_state_dict(net, options=getting),
        get_optimizer_state_dict(net, optimizer, options=getting),
    )
    seen = [facts_of(state) for state in states]
    numbers = [tensors(state) for state in states]
    other, its_optimizer = trained_pair(fsdp, seed=1, count=1)
    set_model_state_dict(other, copy.deepcopy(states[0]), options=setting)
    set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(states[1]), options=setting)
    numbers.append(tensors(its_optimizer.state_dict()["state"]))
    for batch in batches()[1:]:
        a_step(other, its_optimizer, batch)
        numbers.append(whole(other))
    return numbers, [*seen, kinds(other)]


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_state_dicts_are_got_and_set(way):
    assert_same(got_and_set, way)


def whole_on_rank_0(fsdp):
    """What is saved for others to read: everything, in the memory of one rank."""
    net, optimizer = trained_pair(fsdp)
    getting = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = [get_model_state_dict(net, options=getting), get_optimizer_state_dict(net, optimizer, options=getting)]
    return [tensors(state) for state in states], [facts_of(state) for state in states]


def a_model_set_from_whole_tensors(fsdp):
    options = StateDictOptions(full_state_dict=True)
    net, _ = trained_pair(fsdp)
    state = get_model_state_dict(net, options=options)
    other, optimizer = trained_pair(fsdp, seed=1, count=1)
    report = set_model_state_dict(other, copy.deepcopy(state), options=options)
    numbers = [tensors(state), whole(other)]
    a_step(other, optimizer, batches()[2])
    return [*numbers, whole(other)], [facts_of(state), kinds(other), list(report.missing_keys)]


@distributed(2)
def test_whole_state_dicts_are_got_and_a_model_is_set_from_one():
    assert_same(whole_on_rank_0)
    assert_same(a_model_set_from_whole_tensors)


def as_checkpoint(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


@distributed(2)
def test_a_checkpoint_of_one_loads_with_the_other_and_on_one_process(tmp_path):
    for saves, loads in ((weft, torch_fsdp), (torch_fsdp, weft), (weft, weft)):
        folder = f"{tmp_path}/{saves.__name__}-{loads.__name__}"
        net, optimizer = trained_pair(saves)
        dcp.save(as_checkpoint(net, optimizer), checkpoint_id=folder)
        other, its_optimizer = trained_pair(loads, seed=1, count=1)
        state = as_checkpoint(other, its_optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        alone = make(1)
        its_own = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        state = as_checkpoint(alone, its_own)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(alone, its_own, model_state_dict=state["model"], optim_state_dict=state["optim"])
        expected = tensors(as_checkpoint(net, optimizer))
        torch.testing.assert_close(tensors(as_checkpoint(other, its_optimizer)), expected, rtol=0, atol=0)
        torch.testing.assert_close(tensors(as_checkpoint(alone, its_own)), expected, rtol=0, atol=0)
        batch = nets.data(4, 8)[3]
        a_step(net, optimizer, mine(batch))
        a_step(other, its_optimizer, mine(batch))
        a_step(alone, its_own, batch)
        torch.testing.assert_close(whole(other)["weights"], whole(net)["weights"])
        torch.testing.assert_close(whole(alone)["weights"], whole(net)["weights"])
