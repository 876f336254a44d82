"""State dicts and checkpoints: torch's functions do with weft what they do with FSDP2."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
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
from weft.fsdp import patches

pytestmark = pytest.mark.slow


FLAT = {"flatten_optimizer_state_dict": True}
FULL = {"full_state_dict": True}
FROM_RANK_0 = {**FULL, "broadcast_from_rank0": True}
WAYS = {
    "sharded": ({}, {}),
    "sharded, on CPU": ({"cpu_offload": True}, {}),
    "sharded, flat names": (FLAT, {**FLAT, "strict": False}),
    "whole": (FULL, FULL),
    "whole, set from rank 0": (FULL, FROM_RANK_0),
    "whole on rank 0, set by way of the CPU": ({**FULL, "cpu_offload": True}, {**FROM_RANK_0, "cpu_offload": True}),
}


def got_and_set(fsdp, way):
    getting, setting = (StateDictOptions(**options) for options in WAYS[way])
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


PARTS_OF_OTHERS = ("sharded, on CPU", "whole, set from rank 0")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.long) if way in PARTS_OF_OTHERS else way for way in WAYS]
)
@distributed(2)
def test_state_dicts_are_got_and_set(way):
    assert_same(got_and_set, way)


def whole_on_rank_0(fsdp):
    """What is saved for others to read: everything, in the memory of one rank."""
    net, optimizer = trained_pair(fsdp)
    for parameter in net.blocks[0].parameters():
        parameter.requires_grad_(False)
    getting = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, **FLAT)
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


@pytest.mark.long
@distributed(2)
def test_whole_state_dicts_are_got_and_a_model_is_set_from_one():
    assert_same(whole_on_rank_0)
    assert_same(a_model_set_from_whole_tensors)


def as_checkpoint(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


@pytest.mark.long
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


def saved_by_each_rank(fsdp, folder):
    """`torch.save` of what a rank has, for the same ranks to load."""
    net, optimizer = trained_pair(fsdp)
    file = f"{folder}/{fsdp.__name__}-{dist.get_rank()}.pt"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    other, its_optimizer = trained_pair(fsdp, seed=1, count=1)
    states = [torch.load(file, weights_only=weights_only) for weights_only in (True, False)]
    numbers = [tensors(state) for state in states]
    other.load_state_dict(states[0]["model"])
    its_optimizer.load_state_dict(states[0]["optimizer"])
    a_step(other, its_optimizer, batches()[2])
    return [*numbers, whole(other)], [facts_of(state) for state in states]


@distributed(2)
def test_torch_save_writes_sharded_tensors_and_empty_parts(tmp_path):
    assert_same(saved_by_each_rank, str(tmp_path))
    net = trained_pair(weft)[0]
    assert any(not p.to_local().numel() for p in net.parameters())
    parameter = net.blocks[0].up.bias
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert isinstance(loaded, torch.nn.Parameter) and type(loaded) is type(parameter)
    assert torch.equal(loaded, parameter)


@distributed(2)
def test_parameters_without_dimensions_are_set_from_whole_tensors():
    for options in (FULL, FROM_RANK_0):
        nets_and_optimizers = []
        for seed in (0, 1):
            net = nets.shard(nets.make(seed=seed))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            nets.loss_of(net, nets.data(1, 4, seed)[0]).backward()
            optimizer.step()
            nets_and_optimizers.append((net, optimizer))
        states = get_state_dict(*nets_and_optimizers[0], options=StateDictOptions(**FULL))
        other, its_optimizer = nets_and_optimizers[1]
        set_state_dict(
            other,
            its_optimizer,
            model_state_dict=states[0],
            optim_state_dict=states[1],
            options=StateDictOptions(**options),
        )
        assert isinstance(its_optimizer.state[other.gain]["exp_avg"], weft.fsdp.UnevenDTensor)
        torch.testing.assert_close(tensors(get_state_dict(other, its_optimizer)), tensors(states), rtol=0, atol=0)


@distributed(2)
def test_a_weight_that_rank_0_does_not_have_is_missing_on_every_rank():
    net = nets.shard(nets.make())
    state = get_model_state_dict(net, options=StateDictOptions(**FULL))
    del state["gain"]
    with pytest.raises(RuntimeError, match=r"Missing key.*gain"):
        set_model_state_dict(net, state, options=StateDictOptions(**FROM_RANK_0))


@distributed(2)
def test_training_does_not_write_to_the_whole_tensors_that_it_was_set_from():
    net, optimizer = trained_pair(weft)
    options = StateDictOptions(**FULL)
    states = get_state_dict(net, optimizer, options=options)

    def cut() -> dict[str, torch.Tensor]:  # what is not, the counts of steps, is torch's to copy
        return {path: tensor for path, tensor in tensors(states).items() if "'step'" not in path}

    before = cut()
    set_state_dict(net, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    a_step(net, optimizer, batches()[2])
    torch.testing.assert_close(cut(), before, rtol=0, atol=0)


def test_torch_s_functions_are_those_that_weft_wraps():
    """A new torch that changed them must not go unnoticed."""
    patches.apply()
    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        assert hasattr(getattr(torch.distributed.checkpoint.state_dict, name), "__wrapped__"), name


def saved_on_four_ranks(folder):
    """By either, to load on other numbers of ranks; returns the whole tensors."""
    expected = {}
    for saves in (weft, torch_fsdp):
        net, optimizer = trained_pair(saves)
        dcp.save(as_checkpoint(net, optimizer), checkpoint_id=f"{folder}/{saves.__name__}")
        a_step(net, optimizer, mine(nets.data(4, 8)[3]))
        expected[saves.__name__] = whole(net)["weights"]
    return expected


def loaded_on_two_ranks(folder, expected):
    for saves, loads in ((weft, torch_fsdp), (torch_fsdp, weft), (weft, weft)):
        net, optimizer = trained_pair(loads, seed=1, count=1)
        state = as_checkpoint(net, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{saves.__name__}")
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        a_step(net, optimizer, mine(nets.data(4, 8)[3]))
        torch.testing.assert_close(whole(net)["weights"], expected[saves.__name__])


@pytest.mark.long
def test_training_goes_on_after_loading_on_another_number_of_ranks(pool, tmp_path):
    expected = pool.run(4, saved_on_four_ranks, str(tmp_path))[0]
    pool.run(2, loaded_on_two_ranks, str(tmp_path), expected)
