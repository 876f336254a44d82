"""A model in stages computes what it computes in one piece, bit for bit."""

import dataclasses
import re
import signal
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
import weft.debug
from tests.overlap.small import config, gradients, plain
from tests.pool import RankFailed, distributed
from tests.programs import run_programs
from weft.errors import CollectiveMismatch
from weft.models import HybridModel, shard
from weft.models.cut import layer_costs
from weft.models.stack import Layer
from weft.overlap import Crossing, evaluate, forward_backward
from weft.overlap.run import SharedEnds
from weft.pipeline import Action, Cut, Table, balanced

CFG = config("[*-]*[*-]-")


def data(count, cfg=CFG, rank=0):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(cfg.vocab_size, (2, 2, 6), generator=generator).unbind() for _ in range(count)]


def build(cfg, meshes=None, **how):
    torch.manual_seed(0)
    return HybridModel(cfg, meshes, **how)


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def in_stages(cfg, meshes, schedule, count, expected, rounds=1, switches=None, **how):
    """A model in stages under `schedule`: losses and gradients are the `expected` ones."""
    model = build(cfg, meshes, **how)
    losses, whole = expected
    for _ in range(rounds):
        trace = []
        found = forward_backward(model, data(count, cfg), schedule=schedule, trace=trace, **(switches or {}))
        same(found, losses)
        same(gradients(model, whole=True), {name: whole[name] for name, _ in model.named_parameters()})
    return model, trace


def one_piece(cfg, count):
    whole = build(cfg)
    return plain(whole, data(count, cfg)), gradients(whole, whole=True)


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_a_dense_model_in_stages_equals_the_one_in_one_piece():
    ranks = dist.get_world_size()
    meshes = weft.init_meshes("cpu", pp=ranks)
    expected = one_piece(CFG, 5)
    for schedule in ("gpipe", "1f1b", "combined"):
        # What crosses is told in the first round and known in the second.
        model, trace = in_stages(CFG, meshes, schedule, 5, expected, rounds=2)
        assert sum(step.slot == "send" for step in trace) == (10 if dist.get_rank() < ranks - 1 else 0)
    names = [None] * ranks
    dist.all_gather_object(names, [name for name, _ in model.named_parameters()])
    assert sorted(name for part in names for name in part) == sorted(expected[1])
    layers = model.decoder.layers  # an index counts those that are here, names are those of the whole
    assert [layers[at] for at in range(len(layers))] == list(layers) == layers[:]


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_two_chunks_on_a_rank_in_a_loop_and_in_a_v():
    """On 4 ranks there are more stages than layers."""
    ranks = dist.get_world_size()
    meshes = weft.init_meshes("cpu", pp=ranks)
    expected = one_piece(CFG, 2 * ranks + 1)
    for schedule, placement in (("interleaved", "loop"), ("combined", "loop"), ("dualpipev", "v"), ("zbv", "v")):
        how = {"chunks": 2, "placement": placement}
        _, trace = in_stages(CFG, meshes, schedule, 2 * ranks + 1, expected, **how)
        apart = [step for step in trace if step.slot.endswith(".weights")]
        assert bool(apart) == (placement == "v")
        if schedule == "zbv" and dist.get_rank() == 0:
            assert sum(step.slot == "head.weights" for step in apart) == 2 * ranks + 1
        if placement == "v" and dist.get_rank() == ranks - 1:  # the turn: both stages are here
            assert not any(step.slot in ("embed", "head") for step in trace)


def test_chunks_of_one_rank_need_no_process_group():
    cfg = dataclasses.replace(CFG, pattern="[*-]|*|[*-]|-")
    expected = one_piece(cfg, 3)
    in_stages(cfg, None, "interleaved", 3, expected, chunks=4)


def test_a_model_lists_the_layers_of_each_of_its_chunks():
    for how in ({}, {"chunks": 2}, {"chunks": 2, "placement": "v"}):
        model = build(CFG, **how)
        assert len(model.chunks) == how.get("chunks", 1)
        assert [id(layer) for chunk in model.chunks for layer in chunk] == [*map(id, model.staged_layers)]
        assert all(model.chunks)


def test_a_table_in_a_file_is_run_as_written(tmp_path):
    cfg = dataclasses.replace(CFG, pattern="[*-]|[*E]")
    entries = "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"
    (tmp_path / "mine.txt").write_text(f"table mine: chunks 2, microbatches 2, placement loop\nrank 0: {entries}\n")
    _, trace = in_stages(cfg, None, str(tmp_path / "mine.txt"), 2, one_piece(cfg, 2), chunks=2)
    visits = [f"{step.direction[0].upper()}{step.microbatch}.{step.chunk}" for step in trace]
    assert list(dict.fromkeys(visits)) == entries.split()


@pytest.mark.slow
@distributed(2)
def test_empty_segments_pass_on_what_they_get():
    meshes = weft.init_meshes("cpu", pp=2)
    for pattern in ("|[*-]*", "[*-]|", "[*-]||*-|"):
        cfg = dataclasses.replace(CFG, pattern=pattern)
        in_stages(cfg, meshes, "interleaved", 3, one_piece(cfg, 3))


@pytest.mark.slow
@distributed(2)
def test_tied_weights_on_two_ranks_and_prediction_depths():
    """The last rank has a copy of the embedding; both have the whole gradient, in whatever call it was made."""
    meshes = weft.init_meshes("cpu", pp=2)
    tied = dataclasses.replace(CFG, pattern="[*-]*[*-]/*-", tie_word_embeddings=True)
    for cfg, how in ((tied, {}), (tied, {"chunks": 2, "placement": "v"})):
        losses, whole = one_piece(cfg, 4)
        model = build(cfg, meshes, **how)
        schedule = "dualpipev" if how else "1f1b"
        found = [
            loss
            for half in (data(4, cfg), data(4, cfg))
            for loss in forward_backward(model, half, schedule=schedule, loss_scale=0.5)
        ]
        same(found, losses * 2)
        copies = dist.get_rank() == 1 and not how
        assert (model.embedding is not None) == (dist.get_rank() == 0 or copies)
        assert (model.mtp is not None) == (model.decoder.final_layernorm is not None)
        mine = gradients(model, whole=True)
        torch.testing.assert_close(mine, {name: whole[name] for name in mine})
        both = [None, None]
        dist.all_gather_object(both, mine.get("embedding.weight"))
        if copies:
            same(*both)
    untied = dataclasses.replace(tied, tie_word_embeddings=False)
    model, alone = build(untied, meshes).eval(), build(untied).eval()  # without depths only one end uses the embedding
    same(forward_backward(model, data(2, untied), schedule="1f1b"), plain(alone, data(2, untied)))
    mine, whole = gradients(model, whole=True), gradients(alone, whole=True)
    same(mine["embedding.weight"], whole["embedding.weight"])


@pytest.mark.long
@distributed(4)
def test_tied_weights_and_a_prediction_depth_on_four_ranks():
    meshes = weft.init_meshes("cpu", pp=4)
    cfg = dataclasses.replace(CFG, pattern="[*-]*[*-]-/*-", tie_word_embeddings=True)
    losses, whole = one_piece(cfg, 8)
    for schedule, how in (("1f1b", {}), ("interleaved", {"chunks": 2}), ("zbv", {"chunks": 2, "placement": "v"})):
        model = build(cfg, meshes, **how)
        same(forward_backward(model, data(8, cfg), schedule=schedule), losses)
        mine = gradients(model, whole=True)
        torch.testing.assert_close(mine, {name: whole[name] for name in mine})
        assert (model.embedding is not None) == (dist.get_rank() in ((0,) if "placement" in how else (0, 3)))


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "combined", "dualpipev", "zbv"])
def test_every_schedule_delays_releases_early_and_recomputes(schedule):
    """Bit for bit, with experts that are all here."""
    how = {"placement": "v"} if schedule in ("dualpipev", "zbv") else {}
    meshes = weft.init_meshes("cpu", pp=2)
    cfg = dataclasses.replace(CFG, pattern="[*E]*[*-][*E]")
    expected = one_piece(cfg, 5)
    chunks = 1 if schedule == "1f1b" else 2
    both = ("attend", "experts")
    one, other = ((True, False, both), (False, True, ())), ((False, True, both), (True, True, ()))
    for delays, releases, recompute in one if schedule in ("gpipe", "interleaved", "zbv") else other:
        cfg = dataclasses.replace(cfg, recompute=recompute)
        switches = {"delay_wgrad": delays, "early_release": releases}
        _, trace = in_stages(cfg, meshes, schedule, 5, expected, switches=switches, chunks=chunks, **how)
        apart = {step.microbatch for step in trace if step.slot.endswith(".weights")}
        assert schedule in ("dualpipev", "zbv") or apart == (set(range(5)) if delays else set())


@pytest.mark.long
@distributed(2, 4, long=4)
def test_streams_wait_for_what_comes_and_memory_for_what_leaves():
    """What a device would run beside: the order is right, however fast each stream is."""
    expected = one_piece(CFG, 4)
    for schedule, how in (("1f1b", {}), ("combined", {"chunks": 2}), ("zbv", {"chunks": 2, "placement": "v"})):
        with weft.debug.check_streams():
            meshes = weft.init_meshes("cpu", pp=2)
            model = weft.models.shard(build(CFG, meshes, **how), meshes, strategy="optim_grads_params")
            for _ in range(2):
                losses = forward_backward(model, data(4), schedule=schedule)
                same(losses, expected[0])
                found = gradients(model, whole=True)
                torch.testing.assert_close(found, {name: expected[1][name] for name in found})


@pytest.mark.slow
@distributed(2)
def test_an_evaluation_over_stages_gives_the_losses_and_leaves_gradients_alone():
    meshes = weft.init_meshes("cpu", pp=2)
    whole = build(CFG).eval()
    with torch.no_grad():
        expected = [whole(*pair) for pair in data(5)]
    for how in ({}, {"chunks": 2}, {"chunks": 2, "placement": "v"}):
        model = build(CFG, meshes, **how).eval()
        same(evaluate(model, data(5)), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        forward_backward(model, data(4), schedule="combined" if how.get("placement") != "v" else "zbv")
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        same(evaluate(model.eval(), data(5)), expected)
        same({name: parameter.grad for name, parameter in model.named_parameters()}, before)


@pytest.mark.slow
@distributed(2)
def test_ranks_that_were_called_with_different_things_say_so():
    model = build(CFG, weft.init_meshes("cpu", pp=2))
    rank = dist.get_rank()
    pairs = data(4)
    if rank:
        pairs = [(tokens[:, :-1], labels[:, :-1]) for tokens, labels in pairs]
    with pytest.raises(CollectiveMismatch, match=r"rank 0: schedule '1f1b'.*\[2, 6\].*rank 1: .*\[2, 5\]"):
        forward_backward(model, pairs, schedule="1f1b")
    with pytest.raises(CollectiveMismatch, match=r"'gpipe'.*'1f1b'"):
        forward_backward(model, data(4), schedule=("gpipe", "1f1b")[rank])
    with pytest.raises(CollectiveMismatch, match=r"rank 0: .* in training mode .*rank 1: .* in evaluation mode"):
        forward_backward(model.train(not rank), data(4), schedule="1f1b")
    model.train()
    # And after that as if nothing had been; another shape is told anew.
    forward_backward(model, data(4), schedule="1f1b")
    longer = [(tokens.repeat(1, 2), labels.repeat(1, 2)) for tokens, labels in data(3)]
    model.zero_grad()
    whole = build(CFG)
    same(forward_backward(model, [*data(1), *longer], schedule="1f1b"), plain(whole, [*data(1), *longer]))


def test_an_end_without_a_gradient_adds_zeros_and_without_any_there_stays_none():
    shared = nn.ParameterList(torch.zeros(2) for _ in range(3))
    cut = mock.Mock(shares_ends=True, is_first=True, has_copies=False)
    answers = iter([torch.tensor([1.0, 1.0, 0.0]), torch.full((2,), 3.0), torch.full((2,), 4.0)])  # flags, gradients
    transport = mock.Mock(swap=lambda part: next(answers))
    ends = SharedEnds(mock.Mock(shared_ends=[shared], tied_ends=()), cut, transport)
    shared[0].grad = torch.ones(2)
    ends.add_up()
    assert [each.grad if each.grad is None else each.grad.tolist() for each in shared] == [[4.0] * 2, [4.0] * 2, None]


@distributed(2)
def test_hooks_that_would_see_the_share_of_one_stage_are_refused():
    meshes = weft.init_meshes("cpu", pp=2)
    model = build(dataclasses.replace(CFG, tie_word_embeddings=True), meshes)
    for parameter in model.parameters():  # a step as soon as a gradient is there
        step = torch.optim.SGD([parameter], lr=0.1).step
        parameter.register_post_accumulate_grad_hook(lambda _, step=step: step() and None)
    with pytest.raises(ValueError, match="share a parameter that has a hook on its accumulated gradient"):
        forward_backward(model, data(1), schedule="1f1b")


@pytest.mark.parametrize("kind", ["one piece", "a V on one rank", "depths"])
@pytest.mark.parametrize("strategy", ["none", "no_shard"])
@distributed(1)
def test_hooks_on_what_both_ends_use_see_the_whole_gradient_or_are_refused(kind, strategy):
    cfg = dataclasses.replace(CFG, pattern="[*-][*-]/[*-]" if kind == "depths" else "[*-][*-]")
    cfg = dataclasses.replace(cfg, tie_word_embeddings=kind != "depths")
    meshes, how = weft.init_meshes("cpu"), {"chunks": 2, "placement": "v"} if kind == "a V on one rank" else {}
    model, seen = build(cfg, meshes, **how), []
    if strategy != "none":
        shard(model, meshes, strategy=strategy)
    model.embedding.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor().clone()))
    run = {"schedule": "zbv"} if how else {"overlap": False}
    if strategy == "none":
        with pytest.raises(ValueError, match="before and after its layers has a hook"):
            forward_backward(model, data(1, cfg), **run)
        return
    forward_backward(model, data(1, cfg), **run)
    whole = build(cfg)
    for tokens, labels in data(1, cfg):
        whole(tokens, labels).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], whole.embedding.weight.grad)


@distributed(2)
def test_an_average_of_a_model_in_stages_is_a_copy_that_runs():
    meshes = weft.init_meshes("cpu", pp=2)
    model = build(CFG, meshes)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    same(evaluate(average.module, data(2)), evaluate(model, data(2)))
    forward_backward(model, data(2))
    assert all(parameter.grad is None for parameter in average.parameters())


def fails_in_the_second_stage():
    model = build(CFG, weft.init_meshes("cpu", pp=2))
    fault = ArithmeticError("no such number") if dist.get_rank() else None
    with mock.patch.object(Layer, "attend", side_effect=fault) if fault else nullcontext():
        forward_backward(model, data(4), schedule="1f1b")


@pytest.mark.slow
def test_a_stage_that_fails_is_named_on_the_others(pool):
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(2, fails_in_the_second_stage)
    first, second = str(caught.value).split("--- rank 1")
    assert "raised ArithmeticError in the forward of microbatch 0, layer 0.attend (stage 1): no such number" in first
    assert "ArithmeticError: no such number" in second
    assert time.monotonic() - started < 30


def test_what_does_not_fit_is_refused():
    model = build(CFG, chunks=2)
    for schedule, message in (
        ("1f1b", "chunks = 2; it has 1"),
        ("dualpipev", "places stages as 'v', but the model as 'loop'"),
        (weft.pipeline.table("gpipe", ranks=1, chunks=2, microbatches=3), "for 3 microbatches, but there are 4"),
        (weft.pipeline.table("gpipe", ranks=2, chunks=2, microbatches=4), "for 2 ranks, but there are 1"),
        (Table("mine", (((Action("F", 0, 0),),),), 2, 4), "is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            forward_backward(model, data(4), schedule=schedule)
    with pytest.raises(ValueError, match="microbatches = 1; on 1 rank it needs 2 or more"):
        forward_backward(build(CFG, chunks=2, placement="v"), data(1), schedule="dualpipev")
    with pytest.raises(TypeError, match="pass a name or a Table"):
        forward_backward(model, data(4), schedule=3)
    with pytest.raises(ValueError, match="table : cannot be read"):
        forward_backward(model, data(4), schedule="")
    with pytest.raises(TypeError, match="microbatch 0 is a tuple of Tensor, NoneType, not a pair of tensors"):
        forward_backward(model, [(data(1)[0][0], None)])
    with pytest.raises(ValueError, match="5 segments"):
        build(dataclasses.replace(CFG, pattern="*|*|*|*|*"), chunks=2)
    with pytest.raises(ValueError, match="chunks=0: each rank has at least 1 stage"):
        build(CFG, chunks=0)
    with pytest.raises(ValueError, match=r"placement='w': choose"):
        build(CFG, chunks=2, placement="w")
    with pytest.raises(ValueError, match="3 segments on pp=2 ranks: each rank needs the same number"):
        weft.pipeline.Cut((range(1),) * 3, ranks=2)
    with pytest.raises(
        ValueError, match="placement='v' with 3 chunks on a rank: its stages run to the last rank and back"
    ):
        weft.pipeline.Cut((range(1),) * 3, placement="v")


def test_parameters_around_the_layers_belong_to_the_first_stage_or_from_the_last_layer_on_to_the_last():
    segments = (range(1), range(1, 2))
    for cut, layers, expected in (
        (Cut(segments), 2, [0, 0, 1, 1]),
        (Cut(segments, 2, 0), 1, [0, 0, 0]),
        (Cut(segments, 2, 1), 1, [1, 1, 1]),
    ):
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers + 2)))
        model.staged_layers = [*model][1:-1]
        assert [*cut.stages_of(model).values()] == expected


def test_a_layer_costs_what_a_token_uses_and_depths_belong_to_the_last_segment():
    cfg = config("[*E]")
    layer = HybridModel(cfg).decoder.layers[0]
    whole, experts = (sum(each.numel() for each in part.parameters()) for part in (layer, layer.mlp.experts))
    assert layer_costs(cfg, cfg.parsed.layers) == [whole - experts / 2]  # a token visits two of four
    for pattern, expected in (("[*-]" * 8, [4, 4]), ("[*-]" * 8 + "/[*-]", [5, 3])):
        assert [len(chunk) for chunk in HybridModel(config(pattern), chunks=2).chunks] == expected


@pytest.mark.parametrize(
    "costs, last, expected", [([1, 1, 1, 1], 0, [2, 2]), ([1, 1, 1, 1], 2, [3, 1]), ([1], 0, [0, 1])]
)
def test_layers_are_cut_where_the_dearest_segment_is_cheapest(costs, last, expected):
    assert [len(segment) for segment in balanced(costs, 2, last=last)] == expected
    assert [number for segment in balanced(costs, 2, last=last) for number in segment] == list(range(len(costs)))


class OwnLayer(nn.Linear):
    stages, dispatcher = ("attend",), None

    def attend(self, hidden):
        return Crossing(hidden + super().forward(hidden).tanh())

    def experts(self, rows, handle):
        raise NotImplementedError

    finish = experts

    def expert_modules(self):
        return []


class OwnModel(nn.Module):
    """Five layers, or those of some stages; all are made, so that each has the numbers of the whole."""

    def __init__(self, cut=None):
        super().__init__()
        torch.manual_seed(0)
        embedding, layers, head = nn.Embedding(11, 8), [OwnLayer(8, 8) for _ in range(5)], nn.Linear(8, 11)
        here = range(5) if cut is None else [number for segment in cut.mine for number in segment]
        self.layers = nn.ModuleDict({str(number): layers[number] for number in here})
        self.embedding = embedding if cut is None or cut.is_first else None
        self.head = head if cut is None or cut.is_last else None
        self.cut = cut

    @property
    def staged_layers(self):
        return list(self.layers.values())

    def embed(self, tokens):
        return self.embedding(tokens)

    def loss(self, hidden, tokens, labels, losses):
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@distributed(2)
def test_a_model_of_ones_own_says_how_it_is_cut():
    cfg = dataclasses.replace(CFG, vocab_size=11)
    whole = OwnModel()
    losses, expected = forward_backward(whole, data(3, cfg), overlap=False), gradients(whole, whole=True)
    mesh = weft.init_meshes("cpu", pp=2).pp
    segments = range(2), range(2, 5)
    model = OwnModel(Cut(segments, 2, mesh.get_local_rank(), group=mesh.get_group()))
    same(forward_backward(model, data(3, cfg), schedule="1f1b"), losses)
    same(gradients(model, whole=True), {name: expected[name] for name, _ in model.named_parameters()})
    model.layers.pop(next(iter(model.layers)))
    with pytest.raises(ValueError, match=r"OwnModel: its cut has \d layers? on rank \d of the pipeline"):
        forward_backward(model, data(3, cfg), schedule="1f1b")


KILLED = """
import os, signal, sys, torch, torch.distributed as dist, weft
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward
rank = {rank}
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=rank, world_size=2)
meshes = weft.init_meshes("cpu", pp=2)
model = HybridModel(HybridConfig(pattern="[*-][*-]", vocab_size=37, hidden_size=32), meshes)
model = weft.models.shard(model, meshes, strategy="optim_grads")
torch.manual_seed(0)  # the same on both
microbatches = [torch.randint(37, (2, 2, 16)).unbind() for _ in range(4)]
forward_backward(model, microbatches, schedule="1f1b")
if rank == 1:
    seen = []
    def die(*_):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    next(each for each in model.modules() if isinstance(each, torch.nn.Linear)).register_forward_hook(die)
forward_backward(model, microbatches, schedule="1f1b")
"""


@pytest.mark.long
def test_a_stage_that_is_killed_ends_the_others_with_its_rank(tmp_path):
    begin = time.monotonic()
    store = str(tmp_path / "store")
    first, second = run_programs(
        [KILLED.format(rank=rank, store=store) for rank in range(2)], "import weft.models, weft.overlap, weft.fsdp"
    )
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1 and time.monotonic() - begin < 60
    said = r"this rank \(0\) waited for \w+ from stage \d to stage \d, and the process of rank 1 exited"
    assert re.search(said, first.stderr), first.stderr


@distributed(2)
def test_layers_that_have_losses_in_training_alone_are_evaluated_in_stages_after_it():
    def attend(layer, *args, **kwargs):
        crossing = own(layer, *args, **kwargs)
        if layer.training:
            crossing.loss = crossing.rows.square().mean()
        return crossing

    own = Layer.attend
    model, whole = build(CFG, weft.init_meshes("cpu", pp=2)), build(CFG).eval()
    with mock.patch.object(Layer, "attend", attend):
        forward_backward(model, data(2))
        found = evaluate(model.eval(), data(2))
    with torch.no_grad():
        same(found, [whole(*pair) for pair in data(2)])
