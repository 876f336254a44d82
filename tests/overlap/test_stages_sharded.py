"""Stages that are sharded, with experts on several ranks: the same step as in one process."""

import dataclasses
from collections import Counter
from itertools import groupby
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import weft
from tests.overlap.small import gradients
from tests.overlap.test_stages import CFG, build, data
from tests.pool import distributed
from weft.errors import ConversionError
from weft.fsdp.gradients.group import GroupGradients
from weft.fsdp.module import units_under
from weft.models import hf, shard
from weft.overlap import evaluate, forward_backward

MIXED = dataclasses.replace(CFG, pattern="[*E]*[*-][*E]", aux_loss_coef=0.1)


def of_the_whole(cfg, parts, count):
    """Mean losses and gradients of a plain model over what `parts` data-parallel ranks have."""
    whole = build(cfg)
    losses = []
    for part in range(parts):
        losses.append([])
        for tokens, labels in data(count, cfg, part):
            loss = whole(tokens, labels)
            (loss / parts).backward()
            losses[-1].append(loss.detach())
    return losses, gradients(whole, whole=True)


def in_stages(cfg, meshes, strategy, schedule, count, expected, switches=None, **how):
    model = shard(build(cfg, meshes, **how), meshes, strategy=strategy)
    trace = []
    mine = data(count, cfg, meshes.dp_rank)
    losses = forward_backward(model, mine, schedule=schedule, trace=trace, **(switches or {}))
    torch.testing.assert_close(losses, expected[0][meshes.dp_rank])
    found = gradients(model, whole=True)
    torch.testing.assert_close(found, {name: expected[1][name] for name in found})
    return model, trace


@pytest.mark.parametrize("how", [{}, {"chunks": 2, "placement": "v"}])
@distributed(4)
def test_values_that_are_not_finite_are_named_with_their_stage_on_every_rank_of_all_stages(how):
    cfg = dataclasses.replace(CFG, pattern="[*-]|[*-]" if not how else "[*-]|[*-]|[*-]|[*-]")
    meshes = weft.init_meshes("cpu", pp=2)
    model = shard(build(cfg, meshes, **how), meshes)
    assert weft.find_nonfinite(model) == []
    stages = {name: 0 if "layers.0" in name or name.startswith("embedding") else 1 for name in all_names(model)}
    if how:
        stages = {name: next((n for n in range(4) if f"layers.{n}." in name), 3) for name in stages}
        stages |= {name: 0 for name in stages if name.startswith("embedding")}
    for parameter in model.parameters():
        parameter.to_local().detach().fill_(torch.inf)
    found = weft.find_nonfinite(model)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * dist.get_world_size()
    assert {record.name: record.stage for record in found} == stages
    assert {record.rank for record in found} == set(range(4))
    assert f"of stage {found[0].stage} on rank 0: " in str(found[0])


def all_names(model):
    """Of the parameters of all stages."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [name for name, _ in model.named_parameters()])
    return sorted({name for names in everyone for name in names})


@pytest.mark.slow
@distributed(4)
def test_stages_without_parameters_clip_and_step_with_the_others():
    cfg = dataclasses.replace(CFG, pattern="[*-]|||[*-]")
    whole = build(cfg)
    steps = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for tokens, labels in data(3, cfg):
        whole(tokens, labels).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    steps.step()
    meshes = weft.init_meshes("cpu", pp=4)
    model = shard(build(cfg, meshes), meshes)
    optimizer = weft.optim.flat(torch.optim.AdamW, model, lr=1e-2, no_decay=lambda name, parameter: False)
    forward_backward(model, data(3, cfg), schedule="1f1b")
    norms = weft.parameter_norms(model)
    assert bool(norms) == (dist.get_rank() in (0, 3))
    assert weft.find_nonfinite(model) == []
    torch.testing.assert_close(weft.optim.clip_grad_norm_(model, 0.1), norm)
    optimizer.step()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name])
    assert len(optimizer.param_groups) == 2  # on all ranks, as checkpoints want them


@pytest.mark.long
@distributed(4)
def test_zero_1_to_3_and_hsdp_in_stages():
    meshes = weft.init_meshes("cpu", pp=2)
    expected = of_the_whole(CFG, 2, 4)
    for strategy, schedule, how in (
        ("optim", "1f1b", {}),
        ("optim_grads", "interleaved", {"chunks": 2}),
        ("optim_grads_params", "combined", {"chunks": 2}),
        ("optim_grads_params", "dualpipev", {"chunks": 2, "placement": "v"}),
        ("optim_grads", "zbv", {"chunks": 2, "placement": "v"}),
        ("optim", "zbv", {"chunks": 2, "placement": "v"}),
    ):
        reduced = Counter()

        def counted(gradients, *args, reduced=reduced, reduce=GroupGradients.reduce, **kwargs):
            reduced[gradients] += 1
            return reduce(gradients, *args, **kwargs)

        with mock.patch.object(GroupGradients, "reduce", counted):
            model, _ = in_stages(CFG, meshes, strategy, schedule, 4, expected, **how)
        mine = [group.gradients for unit in units_under(model) for group in unit.trainable_groups]
        assert reduced == dict.fromkeys(mine, 1 if strategy == "optim" else 4)
        gathered = [unit for unit in units_under(model) if any(group.transient for group in unit.groups)]
        assert not any(unit.resident for unit in gathered)
    replicated = weft.init_meshes("cpu", pp=2, dp_replicate=2)
    in_stages(CFG, replicated, "optim_grads_params", "1f1b", 4, expected)


@pytest.mark.long
@distributed(4)
def test_experts_on_two_ranks_in_two_stages():
    """pp 2 x ep 2: the exchange of a pair's one side runs under the other's computation."""
    meshes = weft.init_meshes("cpu", pp=2, ep=2)
    cfg = dataclasses.replace(MIXED, aux_loss_coef=0.0)
    expected = of_the_whole(cfg, 2, 4)
    for schedule, switches, how in (
        ("combined", {"delay_wgrad": True, "early_release": True}, {"chunks": 2}),
        ("dualpipev", {}, {"chunks": 2, "placement": "v"}),
    ):
        cfg = dataclasses.replace(cfg, recompute=("attend", "experts") if switches else ())
        _, trace = in_stages(cfg, meshes, "optim_grads_params", schedule, 4, expected, switches, **how)
        runs = [key for key, _ in groupby(trace, key=lambda step: (step.direction, step.microbatch, step.chunk))]
        inside = [one for one, other in zip(runs, runs[2:]) if one == other and one[0] == "backward"]
        assert inside, "no forward ran inside of a backward"


DEPTHS = dataclasses.replace(MIXED, pattern="[*E]*[*-]/[*E]/[*E]", recompute=("experts",))


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("schedule, how", [("1f1b", {}), ("zbv", {"chunks": 2, "placement": "v"})])
def test_prediction_depths_follow_the_last_stage(schedule, how):
    meshes = weft.init_meshes("cpu", pp=2)
    expected = of_the_whole(DEPTHS, 1, 4)
    model, trace = in_stages(DEPTHS, meshes, "optim_grads_params", schedule, 4, expected, {"delay_wgrad": True}, **how)
    entered = [step for step in trace if step.slot == "enter"]
    assert len(entered) == (4 * 2 * 2 if len(model.depths) else 0)  # microbatches, depths, directions
    assert len(model.depths) == (2 if model.cut.is_last else 0)


@pytest.mark.long
@distributed(4)
@pytest.mark.parametrize("pp", [1, 2])
def test_prediction_depths_with_experts_on_two_ranks(pp):
    """pp 2 x ep 2, and ep 2 x two ranks that have the same experts; the depths are with the last stage."""
    meshes = weft.init_meshes("cpu", pp=pp, ep=2)
    cfg = dataclasses.replace(MIXED, aux_loss_coef=0.0, pattern="[*E]*[*-][*E]/[*E][*E]")
    expected = of_the_whole(cfg, meshes.dp_size, 4)
    ways = (("interleaved", "loop"), ("dualpipev", "v")) if pp == 1 else (("combined", "loop"), ("zbv", "v"))
    for schedule, placement in ways:
        in_stages(cfg, meshes, "optim_grads", schedule, 4, expected, chunks=2, placement=placement)


@pytest.mark.slow
@distributed(2)
def test_the_losses_of_routers_reach_the_last_stage():
    meshes = weft.init_meshes("cpu", pp=2)
    expected = of_the_whole(MIXED, 1, 4)
    assert expected[0][0] != of_the_whole(dataclasses.replace(MIXED, aux_loss_coef=0.0), 1, 4)[0][0]
    in_stages(MIXED, meshes, "optim_grads", "1f1b", 4, expected)
    in_stages(MIXED, meshes, "optim_grads", "zbv", 4, expected, chunks=2, placement="v")


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("tied", [False, True])
def test_clipped_steps_equal_those_of_one_process(tied):
    """A copy counts once in the norm, and stays equal to what it is a copy of."""
    meshes = weft.init_meshes("cpu", pp=2)
    cfg = dataclasses.replace(CFG, tie_word_embeddings=tied)
    model = shard(build(cfg, meshes), meshes)
    norms = clipped_steps(cfg, meshes, model, "1f1b")
    both = [None, None]
    dist.all_gather_object(both, norms)
    assert both[0] == both[1] and min(norms) > 0.5


def clipped_steps(cfg, meshes, model, schedule, **switches):
    """Three steps of clipped AdamW leave the weights and the optimizer's state of one process; the norms."""
    whole, norms, parts = build(cfg), [], meshes.dp_size
    one, other = torch.optim.AdamW(whole.parameters(), lr=0.01), weft.optim.flat(torch.optim.AdamW, model, lr=0.01)
    for step in range(3):
        shares = [data(4, cfg, parts * step + part) for part in range(parts)]
        for tokens, labels in (pair for share in shares for pair in share):
            (whole(tokens, labels) / parts).backward()
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        forward_backward(model, shares[meshes.dp_rank], schedule=schedule, **switches)
        norms.append(weft.optim.clip_grad_norm_(model, 0.5))
        torch.testing.assert_close(norms[-1], expected)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    state = other.state_dict()["state"]
    for name, parameter in model.named_parameters():
        original = whole.get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), original.detach())
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name][moment].full_tensor(), one.state[original][moment])
    return norms


@pytest.mark.long
@distributed(4)
@pytest.mark.parametrize("pp, schedule, strategy", [(2, "combined", "optim_grads_params"), (1, "dualpipev", "optim")])
def test_clipped_steps_of_experts_on_several_ranks_equal_those_of_one_process(pp, schedule, strategy):
    """pp 2 x ep 2, and two stages on each rank with ep 2 x two ranks that have the same experts."""
    meshes = weft.init_meshes("cpu", pp=pp, ep=2)
    cfg = dataclasses.replace(MIXED, aux_loss_coef=0.0, pattern="[*E]*[*-][*E]/[*E]", tie_word_embeddings=True)
    how = {"chunks": 2, "placement": "v" if schedule == "dualpipev" else "loop"}
    model = shard(build(cfg, meshes, **how), meshes, strategy=strategy)
    clipped_steps(cfg, meshes, model, schedule, delay_wgrad=schedule == "combined")


def trained(model, optimizer, schedule):
    forward_backward(model.train(), data(4, model.cfg), schedule=schedule)
    optimizer.step()
    optimizer.zero_grad()
    return evaluate(model.eval(), data(3, model.cfg))


def goes_on_elsewhere(folder, cfg, begins, others):
    """A model saved in the stages that `begins` says goes on in `others`: (configuration, meshes, schedule, how).

    The optimizer's settings are saved by parameter, too: a list of parameters is another one in each stage.
    """
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    (meshes, schedule, how), losses = begins, []
    model = shard(build(cfg, meshes, **how), meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses.append(trained(model, optimizer, schedule))
    weights, state = get_state_dict(model, optimizer, options=by_name)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    losses.append(trained(model, optimizer, schedule))
    for other_cfg, meshes, schedule, how in others:
        torch.manual_seed(7)  # other weights to begin with
        other = shard(weft.models.HybridModel(other_cfg, meshes, **how), meshes)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.01)
        weights, state = get_state_dict(other, theirs, options=by_name)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(
            other, theirs, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=by_name
        )
        torch.testing.assert_close(evaluate(other.eval(), data(3, cfg)), losses[0])
        moments = [state["exp_avg"].full_tensor().abs().sum() for state in theirs.state.values()]
        assert len(moments) == len(list(other.parameters())) and all(moments)
        torch.testing.assert_close(trained(other, theirs, schedule), losses[1])


@pytest.mark.long
@distributed(2)
def test_a_checkpoint_of_stages_loads_in_one_piece_and_in_other_stages(tmp_path):
    pieces = weft.init_meshes("cpu", pp=2)
    one_rank = CFG, weft.init_meshes("cpu"), "combined", {"chunks": 2}
    v = CFG, pieces, "zbv", {"chunks": 2, "placement": "v"}
    goes_on_elsewhere(tmp_path, CFG, (pieces, "1f1b", {}), [one_rank, v])


@pytest.mark.long
@distributed(4)
def test_a_checkpoint_resumes_with_other_numbers_of_pipeline_and_expert_ranks(tmp_path):
    cfg = dataclasses.replace(MIXED, aux_loss_coef=0.0)
    both, deep, wide = (weft.init_meshes("cpu", pp=pp, ep=ep) for pp, ep in ((2, 2), (4, 1), (1, 4)))
    cut = dataclasses.replace(cfg, pattern="[*E]|*|[*-]|[*E]")
    others = [(cfg, deep, "1f1b", {}), (cut, deep, "1f1b", {}), (cut, both, "interleaved", {})]
    others.append((cfg, wide, "combined", {"chunks": 2}))
    goes_on_elsewhere(tmp_path, cfg, (both, "dualpipev", {"chunks": 2, "placement": "v"}), others)


@distributed(2)
def test_a_hugging_face_directory_is_read_by_stages_and_written_in_one_piece_only(tmp_path):
    cfg = dataclasses.replace(CFG, pattern="[*-]" * 3)
    whole = build(cfg)
    hf.save(whole, tmp_path / "whole")
    dist.barrier()
    meshes = weft.init_meshes("cpu", pp=2)
    torch.manual_seed(1)
    model = shard(weft.models.HybridModel(cfg, meshes), meshes)
    hf.load(model, tmp_path / "whole")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight.full_tensor(), whole.get_parameter(name).detach(), rtol=0, atol=0)
    with pytest.raises(ConversionError, match=r"split over pp=2 ranks.*load it with pp=1"):
        hf.save(model, tmp_path / "stages")
