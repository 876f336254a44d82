"""`weft check`: faults are named, and right configurations raise no alarm. All ranks are threads of this process."""

import os
import signal
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.pairs import pairwise
from tests.train.command import write_config
from weft.cli import main
from weft.comm.watch.hang_detector import HangDetector
from weft.errors import CollectiveMismatch
from weft.fsdp.gradients import direct
from weft.models.context import Slices
from weft.models.model import HybridModel
from weft.models.tensor_parallel import TensorRanks
from weft.moe import parts
from weft.moe.visits import goes_in_halves, in_halves
from weft.optim import norms
from weft.pipeline.transport import Transport
from weft.train.check import apart, check, run
from weft.train.check.threads.ranks import _NoHangs, run_ranks
from weft.train.config import load_config, parse_config
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.run.runs import Run

SIZES = (
    "train.global_batch_size=64",
    "train.microbatch_size=2",
    "data.sequence_length=256",
    "model.hidden_size=256",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=4",
    "model.num_experts=16",
)


def checked(ranks, pattern, *changes):
    config = parse_config("", [f"model.pattern={pattern}", *SIZES, *changes])
    config.validate(ranks)
    return check(config, ranks)


# --- ranks as threads -------------------------------------------------------------------------------------------------


def test_ranks_as_threads_run_the_collectives_of_torch():
    def work(rank):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        largest = torch.tensor([rank + 1.0])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        everyone = [None] * 3
        dist.all_gather_object(everyone, {"rank": rank})
        first = [rank]
        dist.broadcast_object_list(first, src=0)
        return total.item(), largest.item(), [each["rank"] for each in everyone], first

    assert run_ranks(3, work) == [(6.0, 3.0, [0, 1, 2], [0])] * 3
    assert not dist.is_initialized()


def test_ranks_as_threads_go_in_halves_each_by_itself():
    """One waits inside while another enters and leaves."""

    def work(rank):
        with in_halves(rank == 0):
            dist.barrier()
            inside = goes_in_halves()
            dist.barrier()
        return inside, goes_in_halves()

    assert run_ranks(2, work) == [(True, False), (False, False)]


def test_ctrl_c_ends_all_ranks():
    ended = []

    def work(rank):
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                dist.barrier()
        finally:
            ended.append(rank)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]


def test_a_rank_that_sends_nothing_is_named_at_once():
    def work(rank):
        if rank != 1:
            dist.all_reduce(torch.zeros(1))

    with pytest.raises(
        CollectiveMismatch, match=r"rank 0: waits for rank [12] in .*; rank 1: has ended; rank 2: waits"
    ):
        run_ranks(3, work)


def test_messages_of_different_sizes_and_failures_end_all_ranks():
    def send(rank):
        group = dist.group.WORLD
        if rank:
            group.recv([torch.zeros(3)], 0, 7).wait()
        else:
            group.send([torch.zeros(2)], 1, 7)

    with pytest.raises(CollectiveMismatch, match=r"gets \[2\] float32 where it expects \[3\] float32"):
        run_ranks(2, send)

    def fail(rank):
        if rank:
            raise KeyError("here")
        dist.barrier()

    with pytest.raises(KeyError, match="here"):
        run_ranks(2, fail)


# --- right configurations ---------------------------------------------------------------------------------------------

PACKED = "data.packing=whole"
RIGHT = [
    (2, "[*-][*E]KP", ("sharding.tp=2", PACKED)),
    (4, "[*E]M/[*E]", ("sharding.ep=2", "sharding.dp_replicate=2", "sharding.strategy=optim")),
    (4, "[K-][P-][*-]", ("sharding.pp=2", "sharding.cp=2", PACKED)),
    (2, "[*-]|[*-]/[*-]", ("sharding.pp=2", "model.tie_word_embeddings=true")),
    (4, "[*E][*E]", ("sharding.cp=2", "sharding.tp=2", "sharding.ep=2", "train.overlap=true", "train.halves=true")),
    (4, "[*-]P", ("sharding.cp=2", "sharding.tp=2", "model.context_attention=heads", PACKED)),
    (2, "MG", ("sharding.tp=2", "model.mamba_kernel=mamba_ssm", "model.delta_kernel=fla")),
    (4, "[*-]", ("sharding.cp=4", "model.context_attention=heads")),  # the copy has 4 heads, where 2 would do for tp
]


@pytest.mark.long
def test_right_configurations_raise_no_alarm():
    for ranks, pattern, changes in RIGHT:
        result = checked(ranks, pattern, *changes)
        assert not result.found, (pattern, changes, result.found)
        assert result.ranks == ranks and result.parameters > 10 and not result.unseen


TIED = "model.tie_word_embeddings=true"
ON_EIGHT = [
    ("[K-][*E]", ("sharding.tp=4", "sharding.strategy=optim_grads_params", TIED)),
    ("[PE]M/[*E]", ("sharding.tp=4", "sharding.dp_replicate=2", "sharding.strategy=optim", PACKED)),
    ("[*E]K[ME]", ("sharding.tp=2", "sharding.pp=2", "sharding.ep=2", "sharding.strategy=optim")),
    ("[GE][+-]", ("sharding.tp=4", "sharding.cp=2", "sharding.ep=2", PACKED)),
]
"""Four tensor-parallel ranks beside other axes, and stages with experts that are spread and cut."""


@pytest.mark.long
def test_tensor_parallel_ranks_beside_every_other_axis_on_eight_ranks_equal_one():
    for pattern, changes in ON_EIGHT:
        result = checked(8, pattern, *changes)
        assert result.ranks == 8 and not result.found and not result.unseen, (pattern, changes, result)


LAYOUTS = (
    (2, "[{0}-]{0}", ("sharding.tp=2", TIED)),
    (4, "[{0}E]{0}", ("sharding.tp=2", "sharding.ep=2")),
    (4, "[{0}-]{0}/[{0}-]", ("sharding.cp=2",)),
    (4, "[{0}E]{0}-", ("sharding.ep=2", "train.overlap=true")),
    (4, "[{0}-]{0}[{0}-]/[{0}-]", ("sharding.pp=2", TIED)),
)
"""Axes beside each other, ties and depths."""


@pytest.mark.long
def test_every_mixer_in_every_layout_raises_no_alarm():
    strategies = ("no_shard", "optim", "optim_grads_params")
    for layout, mixer, strategy, packed in pairwise(
        layout=LAYOUTS, mixer="*+MG", strategy=strategies, packed=((), (PACKED,))
    ):
        ranks, pattern, changes = layout
        changes = (*changes, f"sharding.strategy={strategy}", *packed)
        result = checked(ranks, pattern.format(mixer), *changes)
        assert not result.found, (pattern, mixer, changes, result.found)


@pytest.mark.long
def test_a_large_configuration_becomes_small_and_keeps_its_axes():
    changes = ("sharding.tp=2", "sharding.dp_replicate=4", "sharding.ep=8", "train.global_batch_size=128")
    result = checked(128, "[*-][*E]" * 8, *changes)
    assert not result.found
    assert result.axes == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 2}
    assert result.parameters < 40


# --- faults -----------------------------------------------------------------------------------------------------------


def without_sum_of(fits):
    """The sum over tensor-parallel ranks is left out for gradients that fit."""
    reduce_now = direct.reduce_now

    def reduced(wide, *args):
        return wide if fits(wide) else reduce_now(wide, *args)

    return mock.patch.object(direct, "reduce_now", reduced)


def found(ranks, pattern, *changes, patch):
    with patch:
        result = checked(ranks, pattern, *changes)
    return "\n".join(result.found)


@pytest.mark.slow
def test_a_norm_whose_gradient_is_not_summed():
    said = found(2, "[*-]", "sharding.tp=2", patch=without_sum_of(lambda gradient: gradient.dim() == 1))
    assert "gradient of decoder.layers.0.self_attention.norm.weight" in said
    assert "partial over tp, and not reduced" in said and "proj" not in said


@pytest.mark.slow
def test_a_router_whose_gradient_is_not_summed():
    said = found(
        2, "[*E]", "sharding.tp=2", patch=without_sum_of(lambda gradient: gradient.dim() == 2 and len(gradient) < 32)
    )
    assert said.startswith("gradient of decoder.layers.0.mlp.router.weight: partial over tp")


@pytest.mark.slow
def test_sinks_that_the_norm_for_clipping_leaves_out():
    clip = run.clip_gradients

    def without_sinks(model, largest):
        sinks = [each for name, each in model.named_parameters() if name.endswith("sinks")]
        kept = [each.grad.to_local().clone() for each in sinks]
        for each in sinks:
            each.grad.to_local().zero_()
        norm = clip(model, largest)
        for each, gradient in zip(sinks, kept):
            each.grad.to_local().copy_(gradient)
        return norm

    patch = mock.patch.object(run, "clip_gradients", without_sinks)
    said = found(2, "*-", "sharding.tp=2", "model.attention_sinks=true", patch=patch)
    assert "norm for clipping: decoder.layers.0.self_attention.sinks is left out" in said


@pytest.mark.slow
def test_a_sum_over_a_wrong_group():
    patch = mock.patch.object(direct, "group_of", lambda mesh, axis: dist.group.WORLD)
    said = found(4, "[*-]", "sharding.tp=2", patch=patch)
    assert "norm.weight" in said and "tp same" in said


@pytest.mark.slow
def test_the_scale_of_the_gradients_of_experts():
    patch = mock.patch("weft.models.sharding._for_experts", lambda options, meshes: dict(options))
    said = found(2, "[*E]", "sharding.ep=2", patch=patch)
    assert "experts" in said and "2 times that of one rank" in said and "router" not in said


def test_a_tied_weight_that_the_norm_counts_twice():
    def twice(model):
        return SimpleNamespace(group=model.cut.group, has_copies=False)

    said = found(
        2,
        "[*-][*-]",
        "sharding.pp=2",
        "model.tie_word_embeddings=true",
        patch=mock.patch.object(norms, "parts_of", twice),
    )
    assert "norm for clipping: embedding.weight is counted 2 times" in said


def test_layers_of_a_stage_under_wrong_names():
    hybrid = run.hybrid

    def renamed(*args):
        model = hybrid(*args)
        layers = model.decoder.layers._modules
        for number, name in enumerate(list(layers)):
            layers[str(number)] = layers.pop(name)
        return model

    said = found(2, "[*-]|[*-]", "sharding.pp=2", patch=mock.patch.object(run, "hybrid", renamed))
    assert "decoder.layers.1.self_attention.norm.weight" in said and "on no rank" in said


@pytest.mark.slow
def test_a_message_that_a_rank_does_not_send():
    gather = TensorRanks.gather

    def skipped(ranks, x):
        return torch.cat([x, x], dim=1) if ranks.rank == 1 else gather(ranks, x)

    said = found(2, "[*-]", "sharding.tp=2", patch=mock.patch.object(TensorRanks, "gather", skipped))
    assert "wait for messages that no rank sends" in said and "rank 0: waits for rank 1" in said


@pytest.mark.slow
def test_positions_of_slices_that_begin_anew():
    def local(slices, device):
        return torch.arange(2 * slices.width).expand(slices.whole.batch, -1)

    said = found(2, "[*-]", "sharding.cp=2", patch=mock.patch.object(Slices, "position_ids", local))
    assert "loss of microbatch 0 on rank 0" in said


@pytest.mark.slow
def test_a_loss_that_each_context_rank_averages_by_itself():
    patch = mock.patch.object(Slices, "mean", lambda slices, loss, labels: loss)
    said = found(2, "[*-]", "sharding.cp=2", patch=patch)
    assert "loss of microbatch 0" in said and "different values along cp" in said


@pytest.mark.slow
def test_a_shared_embedding_whose_gradients_stages_do_not_exchange():
    patch = mock.patch.object(Transport, "swap", lambda transport, tensor: torch.zeros_like(tensor))
    said = found(2, "[*-][*-]", "sharding.pp=2", "model.tie_word_embeddings=true", patch=patch)
    assert said.startswith("gradient of embedding.weight: ") and "along pp" in said


def test_gradients_that_are_divided_too_often():
    options_of = run.hybrid.__globals__["options_of"]

    def divided(*args):
        return {**options_of(*args), "gradient_divide_factor": 2}

    said = found(2, "[*-]", patch=mock.patch("weft.train.task.text.options_of", divided))
    assert "1 / 2 of that of one rank, the number of ranks of dp_shard" in said


@pytest.mark.slow
def test_replicas_that_do_not_reduce():
    hybrid = run.hybrid

    def apart(*args):
        model = hybrid(*args)
        model.set_requires_all_reduce(False)
        return model

    said = found(4, "[*-]", "sharding.dp_replicate=2", patch=mock.patch.object(run, "hybrid", apart))
    assert "gradient of" in said and "dp_replicate" in said


@pytest.mark.slow
def test_a_vocabulary_whose_parts_all_begin_at_zero():
    patch = mock.patch("weft.models.model.units_of", lambda units, ranks, rank: (0, -(-units // ranks)))
    assert "loss of microbatch 0" in found(2, "[*-]", "sharding.tp=2", patch=patch)


@pytest.mark.slow
def test_a_weight_of_another_rank_s_slice():
    spans_of = parts.spans_of
    patch = mock.patch.object(parts, "spans_of", lambda sections, ranks, rank: spans_of(sections, ranks, 0))
    said = found(2, "[*-]", "sharding.tp=2", patch=patch)
    assert "first weight differs from that of one rank" in said and "tp cut" in said


def test_a_weight_that_two_axes_divide_is_cut_on_both(world):
    world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    assert run._mark(DTensor.from_local(torch.ones(1, 2), mesh, strided, run_check=False)) == "dp_shard cut, tp cut"


def test_clipping_that_leaves_out_a_parameter():
    clip = run.clip_gradients

    def partly(model, largest):
        first = next(model.parameters()).grad.to_local()
        kept = first.clone()
        norm = clip(model, largest)
        first.copy_(kept)
        return norm

    said = found(2, "[*-]", patch=mock.patch.object(run, "clip_gradients", partly))
    assert said.startswith("embedding.weight: not scaled by clipping")


def test_what_one_rank_raises_is_a_finding():
    forward = HybridModel.forward

    def fails(model, *args, **kwargs):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("no such thing")
        return forward(model, *args, **kwargs)

    said = found(2, "[*-]", patch=mock.patch.object(HybridModel, "forward", fails))
    assert "ValueError: no such thing (on rank 1 of 2, in fails of" in said


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_what_it_found_and_ends_with_a_code(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text('[model]\npattern = "[*-]"\n[sharding]\ntp = 2\n')
    assert main(["check", str(path), "--ranks", "2"]) == 0
    assert "tp 2" in capsys.readouterr().out
    with without_sum_of(lambda gradient: gradient.dim() == 1):
        assert main(["check", str(path), "--ranks", "2"]) == 1
    assert "1. gradient of" in capsys.readouterr().out
    path.write_text('[model]\nfactory = "module:function"\n')
    assert main(["check", str(path)]) == 2
    assert "model.factory" in capsys.readouterr().err


# --- before a training ------------------------------------------------------------------------------------------------


def begins(path, directory, said):
    """What a trainer with `train.check` raises where the check says that."""
    with mock.patch.object(apart, "_said", lambda config, ranks: said if dist.get_rank() == 0 else "another"):
        try:
            Trainer(load_config(path, ["train.check=true"]), Run(directory, None))
        except ConfigError as error:
            return str(error)


@pytest.mark.slow
def test_a_run_with_a_fault_begins_on_no_rank(pool, tmp_path):
    said = pool.run(2, begins, write_config(tmp_path), tmp_path / "run", "1. gradient of x")
    assert said == ["train.check = true: 1. gradient of x"] * 2


@pytest.mark.long
def test_the_check_before_a_run_is_that_of_the_command(tmp_path):
    config = load_config(write_config(tmp_path), ["sharding.tp=2", "train.check=true"])
    assert apart._said(config, 2) == ""


def test_the_checks_stand_in_answers_whatever_the_detector_of_hangs_is_asked():
    asked = {name for name, method in vars(HangDetector).items() if callable(method) and not name.startswith("_")}
    assert asked and asked <= vars(_NoHangs).keys()
