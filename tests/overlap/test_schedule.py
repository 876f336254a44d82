"""The combined schedule computes what plain forward and backward compute, bit for bit."""

import dataclasses
import gc
import itertools
import math
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.overlap.small import build, config, gradients, plain
from tests.overlap.test_order import one_piece
from tests.pool import distributed
from weft.errors import CollectiveMismatch
from weft.fsdp import plan_of
from weft.fsdp.gradients.group import GroupGradients
from weft.fsdp.module import runtime_of, unit_of, units_under
from weft.models import HybridModel
from weft.models.layers.attention import Attention
from weft.models.prediction import PredictionDepth
from weft.moe import AllToAll, LocalDispatcher
from weft.overlap import Crossing, UndeclaredTensor, evaluate, forward_backward
from weft.overlap.order import Layer
from weft.overlap.units import ModelUnits

CFG = config("[*E]*[*E]", aux_loss_coef=0.1)
MODELS = {
    "odd": CFG,
    "even, dense layers between": dataclasses.replace(CFG, pattern="[*E][*-]*E-", z_loss_coef=0.01),
    "shared expert, recomputed": dataclasses.replace(
        CFG, shared_expert_intermediate_size=8, recompute=("attend", "experts"), tie_word_embeddings=True
    ),
}
SWITCHES = [
    dict(zip(("delay_wgrad", "early_release"), values)) for values in itertools.product([False, True], repeat=2)
]


def data(microbatches, vocabulary=CFG.vocab_size):
    """Microbatches of this rank, of different sizes."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = [(2, 2, 6 + 2 * (number % 2)) for number in range(microbatches)]
    return [torch.randint(vocabulary, shape, generator=generator).unbind() for shape in shapes]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def compare(cfg, meshes, ways, **options):
    """Each way of running, by its number of microbatches, equals the plain one in losses and gradients."""
    model = build(cfg, meshes, **options)
    for count, chosen in ways.items():
        microbatches = data(count)
        expected = plain(model, microbatches), gradients(model)
        for overlap, switches in chosen:
            losses = forward_backward(model, microbatches, overlap=overlap, **switches)
            same((losses, gradients(model)), expected)
            assert not any(unit.resident for unit in units_under(model) if any(g.transient for g in unit.groups))


PLAIN, DELAYED, EARLY, BOTH = ((True, SWITCHES[number]) for number in (0, 2, 1, 3))
APART, APART_DELAYED = ((False, SWITCHES[number]) for number in (0, 2))
ALL = {1: [APART, BOTH], 2: [PLAIN, EARLY], 3: [DELAYED, BOTH, APART_DELAYED], 5: [BOTH]}
SOME = {2: [BOTH, APART_DELAYED]}


@pytest.mark.long
@distributed()
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in MODELS), (4, "odd")])
def test_every_schedule_equals_plain_forward_and_backward(name):
    """Expert parallel over all ranks, each strategy, unsharded too; each model with two of them."""
    cfg, meshes = MODELS[name], weft.init_meshes("cpu", ep=dist.get_world_size())
    if dist.get_world_size() == 4:  # another exchange; what is done with its rows is the same
        compare(cfg, meshes, {3: [PLAIN, BOTH]}, strategy="optim_grads_params")
        return
    compare(cfg, meshes, ALL, strategy="optim_grads_params")
    other = dict(zip(MODELS, ({}, {"strategy": "optim_grads"}, {"strategy": "optim"})))[name]
    compare(cfg, meshes, SOME, **other)


@pytest.mark.long
@distributed(4)
@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_experts_on_some_ranks_and_copies_on_others(dp_replicate):
    """Expert parallel 2 of 4: the experts are sharded as well; HSDP; separate gather groups; bf16."""
    meshes = weft.init_meshes("cpu", ep=2, dp_replicate=dp_replicate)
    runtime = weft.RuntimeOptions(separate_all_gather_group=True)
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cfg = MODELS["even, dense layers between"]
    compare(cfg, meshes, {3: [PLAIN, BOTH]}, strategy="optim_grads_params", runtime=runtime)
    compare(cfg, meshes, SOME, strategy="optim_grads")
    compare(
        MODELS["shared expert, recomputed"], meshes, {2: [DELAYED]}, strategy="optim_grads_params", mp_policy=policy
    )


@pytest.mark.slow
@distributed(2)
def test_one_combined_run_equals_the_plain_one():
    meshes = weft.init_meshes("cpu", ep=2)
    model = build(CFG, meshes, strategy="optim_grads_params")
    microbatches = data(2)
    expected = plain(model, microbatches), gradients(model)
    same((forward_backward(model, microbatches), gradients(model)), expected)


@pytest.mark.slow
@distributed(2)
def test_a_scaled_loss_scales_gradients_and_validation_may_come_between():
    model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    microbatches = data(4)
    losses, whole = forward_backward(model, microbatches), gradients(model)
    with torch.no_grad():
        model(*microbatches[0])
    scaled = forward_backward(model, microbatches, loss_scale=0.25)
    same(scaled, losses)
    same(gradients(model), {name: gradient / 4 for name, gradient in whole.items()})
    plain(model, microbatches)
    same(gradients(model), whole)


@pytest.mark.long
@distributed(2)
def test_a_factor_for_each_microbatch_gives_the_mean_over_all_tokens():
    """The loss of one process on all microbatches of all ranks as one batch, whichever labels are ignored."""
    cfg = dataclasses.replace(CFG, aux_loss_coef=0.0)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(
        cfg.vocab_size, (2, 6, 2, 7), generator=generator
    )  # [microbatches of all ranks, ...]
    labels[torch.rand(labels.shape, generator=generator) < torch.arange(1, 7)[:, None, None] / 8] = -100
    labels[4] = -100  # a microbatch without any
    whole = build(cfg, None)
    expected = whole(tokens.flatten(0, 1), labels.flatten(0, 1))
    expected.backward()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [(tokens[number], labels[number]) for number in range(rank, 6, ranks)]
    counts = [int((each != -100).sum()) for _, each in mine]
    total = torch.tensor(sum(counts))
    dist.all_reduce(total)
    factors = [count * ranks / int(total) for count in counts]
    model = build(cfg, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    for switches in ({"overlap": False}, {}, {"delay_wgrad": True}):
        losses = forward_backward(model, mine, loss_scale=factors, **switches)
        loss = sum(loss * count for loss, count in zip(losses, counts) if count)
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / total, expected.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, msg=name)
        model.zero_grad()


@pytest.mark.slow
@distributed(2)
def test_gradients_add_to_those_that_are_there_and_the_user_says_when_they_end():
    model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim")
    microbatches = data(4)
    expected = forward_backward(model, microbatches), gradients(model)
    model.set_is_last_backward(False)
    losses = forward_backward(model, microbatches[:2])
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_is_last_backward(True)
    losses += forward_backward(model, microbatches[2:])
    same((losses, gradients(model)), expected)


@pytest.mark.long
@distributed(2)
def test_the_trace_is_the_order_and_units_are_held_and_reduced_as_planned():
    deep = dataclasses.replace(CFG, pattern="[*E]*" * 2)
    model = build(deep, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    stages = [Layer(number, layer.stages) for number, layer in enumerate(model.staged_layers)]
    for switches in SWITCHES:
        trace, events, most = [], [], 0
        runtime = runtime_of(model)
        reduce, visit = GroupGradients.reduce, runtime.use

        def counted(gradients, *args, trace=trace, events=events, reduce=reduce, **kwargs):
            events.append((len(trace), gradients))
            return reduce(gradients, *args, **kwargs)

        def watched(*args, visit=visit):
            nonlocal most
            visit(*args)
            most = max(most, sum(each.resident for each in units_under(model)))

        with mock.patch.object(GroupGradients, "reduce", counted), mock.patch.object(runtime, "use", watched):
            forward_backward(model, data(3), trace=trace, **switches)
        steps = list(one_piece(stages, 3, overlap=True, **switches))
        assert trace == steps

        # Each group once per microbatch, right after the last weight gradient of its layer or of the experts.
        expected = [group.gradients for unit in units_under(model) for group in unit.trainable_groups]
        assert Counter(each for _, each in events) == dict.fromkeys(expected, 3)
        suffix = ".weights" if switches["delay_wgrad"] else ""
        for number, layer in enumerate(model.staged_layers):
            for module, slot in ((layer, "attend"), *((experts, "experts") for experts in layer.expert_modules())):
                own = [group.gradients for group in unit_of(module).groups]
                reduced = [position for position, each in events if each in own]
                last = ("backward", number, slot + suffix)
                done = [
                    place + 1 for place, step in enumerate(trace) if (step.direction, step.layer, step.slot) == last
                ]
                assert sorted(set(reduced)) == done, last

        # The root, the layers of a pair, the experts of one of them, and two more on their way.
        assert most == max(len(each.gathered) for each in plan_of(model).alive) <= 1 + 2 + 1 + 2


DEPTHS = dataclasses.replace(CFG, pattern="[*E]-/[*E]*/[*E]*", recompute=("experts",))


@pytest.mark.long
@distributed(2)
@pytest.mark.parametrize("strategy", [pytest.param("none", marks=pytest.mark.long), "optim_grads_params"])
def test_prediction_depths_run_as_layers_of_the_schedule_and_change_no_bit(strategy):
    """What the trunk, its head and the depths share is added up in another order than by autograd alone."""
    options = {} if strategy == "none" else {"strategy": strategy}
    model, microbatches = build(DEPTHS, weft.init_meshes("cpu", ep=2), **options), data(2)
    expected = plain(model, microbatches), gradients(model)
    apart = forward_backward(model, microbatches, overlap=False), gradients(model)
    torch.testing.assert_close(apart, expected)
    if strategy == "optim_grads_params":  # the shares of each microbatch are reduced before those of the next
        same(apart, expected)
    for switches in SWITCHES[1:3] if strategy == "optim_grads_params" else (SWITCHES[0], SWITCHES[3]):
        same((forward_backward(model, microbatches, **switches), gradients(model)), apart)
    model.eval()
    trace = []
    losses = forward_backward(model, microbatches, trace=trace)
    assert all(loss < other for loss, other in zip(losses, apart[0]))
    assert not any(step.layer is not None and step.layer > 1 for step in trace)  # depths count in training only


def test_depths_that_a_schedule_cannot_run_are_refused_with_the_fix(monkeypatch):
    model, microbatches = HybridModel(DEPTHS), [torch.zeros(2, 2, 6, dtype=torch.int64).unbind()]

    def refused(kind, message):
        with pytest.raises(kind, match=message):
            forward_backward(model, microbatches, overlap=False)

    with mock.patch.object(HybridModel, "depths", [nn.Linear(2, 2)]):
        refused(
            TypeError,
            r"depth 0, a Linear, is not a weft\.overlap\.StagedDepth, because it lacks staged_layers, enter, leave",
        )
    with mock.patch.object(PredictionDepth, "staged_layers", []):
        refused(ValueError, "depth 0, a PredictionDepth, has no layers: it needs at least one")
    with mock.patch.object(PredictionDepth, "staged_layers", [nn.Linear(2, 2)]):
        refused(
            TypeError, r"layer 0 of depth 0, a Linear, is not a weft\.overlap\.StagedLayer, because it lacks stages"
        )
    with monkeypatch.context() as patch:
        patch.delattr(HybridModel, "following")
        refused(TypeError, r"HybridModel is not a weft\.overlap\.StagedPredictor, because it lacks following")
    hook = model.depths[1].register_forward_hook(print)
    refused(ValueError, r"mtp\.layers\.1 \(PredictionDepth\) has hooks")
    hook.remove()
    model.mtp.layers[1] = checkpoint_wrapper(model.depths[1])
    refused(ValueError, "depth 1 is inside an activation checkpoint: recompute inside the stages")


@pytest.mark.slow
@distributed(2)
def test_the_units_of_a_prediction_depth_are_held_while_it_runs_and_reduced_once():
    model = build(DEPTHS, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    for switches in (SWITCHES[0], SWITCHES[3]):
        trace, events = [], []
        reduce = GroupGradients.reduce

        def counted(gradients, *args, trace=trace, events=events, reduce=reduce, **kwargs):
            events.append((len(trace), gradients))
            return reduce(gradients, *args, **kwargs)

        with mock.patch.object(GroupGradients, "reduce", counted):
            forward_backward(model, data(2), trace=trace, **switches)
        last = ".weights" if switches["delay_wgrad"] else ""
        for number, depth in enumerate(model.depths):
            first = 2 + 2 * number
            for module, layer, slot in (
                (depth, first, "enter"),
                (depth.layers[0].mlp.experts, first, "experts"),
            ):
                own = [group.gradients for group in unit_of(module).groups]
                done = [
                    place + 1
                    for place, step in enumerate(trace)
                    if (step.direction, step.layer, step.slot) == ("backward", layer, slot + last)
                ]
                assert sorted({position for position, each in events if each in own}) == done and len(done) == 2
        alive = [each.gathered for each in plan_of(model).alive]
        for depth in model.depths:
            assert 0 < sum(unit_of(depth).number in here for here in alive) < len(alive)


@pytest.mark.slow
@distributed(2)
def test_strategies_that_keep_gradients_reduce_once_per_call():
    for strategy in ("no_shard", "optim"):
        model = build(CFG, weft.init_meshes("cpu", ep=2), strategy=strategy)
        with mock.patch.object(GroupGradients, "reduce", autospec=True, side_effect=GroupGradients.reduce) as reduce:
            forward_backward(model, data(3))
        reduced = Counter(call.args[0] for call in reduce.call_args_list)
        groups = [group for unit in units_under(model) for group in unit.trainable_groups]
        assert reduced == {group.gradients: 1 for group in groups}


@pytest.mark.slow
@distributed(2)
def test_an_exception_leaves_a_model_that_runs_again():
    model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    microbatches = data(3)
    expected = forward_backward(model, microbatches), gradients(model)
    layer = model.decoder.layers[1]
    with mock.patch.object(type(layer), "attend", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
        forward_backward(model, microbatches)
    assert not any(unit.holders for unit in units_under(model))
    same((forward_backward(model, microbatches), gradients(model)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", pytest.param("optim_grads_params", marks=pytest.mark.long)])
@distributed(2)
def test_a_schedule_that_fails_takes_all_gradients_and_an_evaluation_takes_none(strategy):
    def accumulated(evaluation):
        model = build(CFG, weft.init_meshes("cpu", ep=2), strategy=strategy)
        failing = mock.patch.object(type(model.decoder.layers[1]), "attend", side_effect=ArithmeticError)
        model.set_is_last_backward(False)
        forward_backward(model, data(2))
        if evaluation:
            with failing, pytest.raises(ArithmeticError):
                evaluate(model, data(1))
        model.set_is_last_backward(True)
        forward_backward(model, data(3))
        return model, failing

    (whole, failing), (model, _) = accumulated(False), accumulated(True)
    same(gradients(model), gradients(whole))
    with failing, pytest.raises(ArithmeticError):
        forward_backward(whole, data(2))
    assert all(parameter.grad is None for parameter in whole.parameters())


@pytest.mark.long
@distributed(2)
def test_a_rank_that_fails_in_a_schedule_is_named_to_the_others():
    own = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")  # the communicator does not survive
    meshes, rank = dataclasses.replace(weft.init_meshes("cpu"), dense=own), dist.get_rank()
    model = build(dataclasses.replace(CFG, pattern="[*-]*"), meshes, strategy="optim_grads_params")
    microbatches = data(2)
    forward_backward(model, microbatches, overlap=False)
    layer = model.decoder.layers[1]
    failing = mock.patch.object(type(layer), "attend", side_effect=ArithmeticError("boom"))
    with failing if rank else nullcontext(), pytest.raises((ArithmeticError, CollectiveMismatch)) as raised:
        forward_backward(model, microbatches, overlap=False)
    if not rank:
        text = "rank 1: raised ArithmeticError in the forward of microbatch 0, layer 0.attend: boom"
        assert text in str(raised.value)


@distributed(2)
def test_a_tensor_that_bypasses_the_crossing_is_refused_with_the_node_s_name():
    model = build(CFG, weft.init_meshes("cpu", ep=2))
    layer = model.decoder.layers[2]
    kind = type(layer)

    def attend(self, hidden):
        self.hidden = hidden
        return kind.attend(self, hidden)

    def finish(self, rows, kept, handle):
        return kind.finish(self, rows, kept, handle) + self.hidden

    layer.__class__ = type("Smuggler", (kind,), {"attend": attend, "finish": finish})
    with pytest.raises(UndeclaredTensor, match=r"node microbatch 0, layer 2\.finish"):
        forward_backward(model, data(1), overlap=False)


class Plain(nn.Module):
    def embed(self, tokens):
        return tokens

    def loss(self, hidden, tokens, labels, losses):
        return hidden


def test_wrong_calls_are_refused_with_the_fix():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*E][*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    with pytest.raises(ValueError, match=r"expert parallel 1.*overlap=False"):
        forward_backward(model, [batch])
    with pytest.raises(ValueError, match="at least one pair"):
        forward_backward(model, [], overlap=False)
    with pytest.raises(TypeError, match=r"one tensor as microbatches: pass a sequence of pairs"):
        forward_backward(model, torch.stack(batch), overlap=False)
    with pytest.raises(TypeError, match=r"microbatch 1: 'tokens' is missing"):
        forward_backward(model, [batch, {}], overlap=False)
    with pytest.raises(ValueError, match=r"early_release=True without overlap"):
        forward_backward(model, [batch], overlap=False, early_release=True)
    for without in (torch.inference_mode, torch.no_grad):
        said = f"inside torch.{without.__name__}: there would be no gradients; call it outside"
        with without(), pytest.raises(RuntimeError, match=said):
            forward_backward(model, [batch], overlap=False)
    for scale, error, said in (
        (
            [0.5, 0.25, 0.25],
            ValueError,
            r"loss_scale has 3 factors for 2 microbatches: pass one for each, or one number",
        ),
        ([0.5, math.nan], ValueError, r"loss_scale\[1\]=nan: .*finite"),
        (math.inf, ValueError, r"loss_scale=inf: .*finite"),
        ([0.5, None], TypeError, r"loss_scale\[1\] is a NoneType: pass a number"),
        (torch.ones(2), TypeError, r"loss_scale is a Tensor: pass .*tolist\(\)"),
    ):
        with pytest.raises(error, match=said):
            forward_backward(model, [batch, batch], overlap=False, loss_scale=scale)
    with pytest.raises(TypeError, match=r"Plain is not a .*it lacks staged_layers"):
        forward_backward(Plain(), [batch], overlap=False)
    unstaged = Plain()
    unstaged.staged_layers = [nn.Linear(2, 2)]
    with pytest.raises(TypeError, match=r"layer 0, a Linear, is not a .*stages, dispatcher, attend"):
        forward_backward(unstaged, [batch], overlap=False)
    for module, what in (
        (model, "the model"),
        (model.decoder, "decoder"),
        (model.decoder.layers[0], "decoder.layers.0"),
        (model.decoder.layers[0].mlp, "decoder.layers.0.mlp"),
        (model.decoder.layers[1].mlp, "decoder.layers.1.mlp"),
    ):
        hook = module.register_forward_hook(lambda *args: None)
        with pytest.raises(ValueError, match=rf"^{re.escape(what)} \(.*\) has hooks"):
            forward_backward(model, [batch], overlap=False)
        hook.remove()
    model.decoder.layers[0] = checkpoint_wrapper(model.decoder.layers[0])
    with pytest.raises(ValueError, match=r"layer 0 is inside a full-layer activation checkpoint.*recompute"):
        forward_backward(model, [batch], overlap=False)


@pytest.mark.long
def test_compiled_modules_that_a_schedule_would_bypass_are_refused():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*E][*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    for layer in model.decoder.layers:
        mlp = layer.mlp
        layer.mlp = torch.compile(mlp)
        with pytest.raises(ValueError, match=r"layers\.\d\.mlp \(OptimizedModule\) is compiled.*the modules inside"):
            forward_backward(model, [batch], overlap=False)
        layer.mlp = mlp
        for module in (mlp, layer):
            module.compile()
            with pytest.raises(ValueError, match=r"layers\.\d.* is compiled.*the modules inside"):
                forward_backward(model, [batch], overlap=False)
            module._compiled_call_impl = None


def test_hooks_run_on_what_stages_call():
    model, called = HybridModel(dataclasses.replace(CFG, pattern="[*E][*-]")), []
    experts, dense = (layer.mlp for layer in model.decoder.layers)
    modules = [model.embedding, experts.norm, experts.router, experts.experts, dense.norm, dense.down_proj]
    for module in modules:
        module.register_forward_hook(lambda module, *_: called.append(module))
    forward_backward(model, [torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()], overlap=False)
    assert called == modules


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["ep", "pp", "cp", "tp"])
@distributed(2)
def test_an_evaluation_in_inference_mode_gives_the_losses_and_the_next_step_trains(axis):
    """Tensors that are made in inference mode can be written to in this mode only, and by no backward saved."""
    cfg, how = config("[*E]M[*E]", num_experts_per_tok=1), {"schedule": "1f1b"} if axis == "pp" else {}
    meshes = weft.init_meshes("cpu", **{axis: 2})
    model = build(cfg, meshes, strategy="optim_grads_params")
    tokens, labels = torch.randint(cfg.vocab_size, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens, "labels": labels}
    given = [weft.models.context_part(given, meshes) if axis == "cp" else given] * 2
    with torch.no_grad():
        expected = evaluate(model, given)
    for _ in range(2):
        with torch.inference_mode():
            same(evaluate(model, given), expected)
        same(forward_backward(model, given, overlap=False, **how), expected)


@distributed(1)
def test_a_schedule_of_a_model_inside_one_of_its_own_is_refused():
    model = build(CFG, weft.init_meshes("cpu"), strategy="optim")
    hook = model.embedding.register_forward_hook(lambda *args: evaluate(model, data(1)) and None)
    with pytest.raises(RuntimeError, match=r"'begin schedule' is not possible while its schedule runs: call it before"):
        forward_backward(model, data(1), overlap=False)
    hook.remove()
    assert len(forward_backward(model, data(1), overlap=False)) == 1


class Adapter:
    """The protocol, around a model of somebody else's."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


def test_models_and_layers_that_are_no_modules_are_refused_with_the_fix():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    with pytest.raises(TypeError, match=r"Adapter is a .*StagedModel, but not a torch.nn.Module.*: derive it from"):
        forward_backward(Adapter(model), [batch], overlap=False)
    layers = mock.patch.object(HybridModel, "staged_layers", [Adapter(model.decoder.layers[0])])
    with layers, pytest.raises(TypeError, match=r"layer 0, a Adapter, .*but not a torch.nn.Module.*: derive it from"):
        forward_backward(model, [batch], overlap=False)
    kind = type(model.decoder.layers[0])
    for stages, dispatcher, said in (
        (("attend", "experts"), None, r"layer 0 has the stages \('attend', 'experts'\) and no dispatcher: choose"),
        (
            ("attend",),
            LocalDispatcher(2),
            r"layer 0 has the stages \('attend',\) and a dispatcher: .* only the last has",
        ),
    ):
        layers = mock.patch.multiple(kind, stages=stages, dispatcher=dispatcher)
        with layers, pytest.raises(ValueError, match=said):
            forward_backward(model, [batch], overlap=False)


def test_a_crossing_with_what_is_no_tensor_is_refused():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    layer = model.decoder.layers[0]
    crossing = Crossing(torch.ones(2, 6, 16), {"shared": None})
    wrong = r"microbatch 0, layer 0: the kept\['shared'\] .* a NoneType, not a tensor"
    with mock.patch.object(type(layer), "attend", lambda self, hidden: crossing), pytest.raises(TypeError, match=wrong):
        forward_backward(model, [batch], overlap=False)


def test_what_parts_of_a_model_return_is_checked():
    """A loss for each label has a gradient too: that of its sum."""
    model = HybridModel(dataclasses.replace(CFG, pattern="[*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    kind, hidden = type(model.decoder.layers[0]), torch.ones(2, 6, 16)
    for owner, name, result, said in (
        (
            HybridModel,
            "loss",
            torch.ones(12, requires_grad=True),
            r"the loss of HybridModel is a tensor \[12\]: return the mean",
        ),
        (HybridModel, "loss", (torch.ones(()), {}), r"the loss of HybridModel is a tuple: .* a scalar tensor"),
        (HybridModel, "loss", torch.ones(()), r"is a number that depends on no trainable parameter"),
        (HybridModel, "loss", 1.0, r"the loss of HybridModel is a float"),
        (kind, "attend", hidden, r"microbatch 0, layer 0: its attend returned a Tensor: return weft.overlap.Crossing"),
        (kind, "attend", Crossing(hidden, [hidden]), r"layer 0: its attend returned a Crossing whose kept is a list"),
        (
            kind,
            "attend",
            Crossing(hidden, loss=torch.ones(3)),
            r"0: the loss of its Crossing has the shape \(3,\)",
        ),
        (kind, "experts", (hidden, None), r"microbatch 0, layer 0\.experts returned a tuple, not a tensor"),
        (kind, "finish", None, r"microbatch 0, layer 0\.finish returned a NoneType, not a tensor"),
    ):
        wrong = mock.patch.object(owner, name, lambda *args, result=result, **beside: result)
        with wrong, pytest.raises(TypeError, match=said):
            forward_backward(model, [batch], overlap=False)
    one = mock.patch.object(HybridModel, "loss", lambda self, hidden, *rest: hidden.mean().view(1))
    with one:
        (loss,) = forward_backward(model, [batch], overlap=False)
    assert loss.shape == ()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 2.0**16), (torch.float32, 1e39)])
def test_a_factor_that_the_dtype_of_the_loss_cannot_hold_overflows_as_in_a_plain_backward(dtype, factor):
    """A GradScaler then skips the step, and lowers the factor."""
    model = HybridModel(dataclasses.replace(CFG, pattern="[*-]"))
    batch = torch.randint(CFG.vocab_size, (2, 2, 6)).unbind()
    with mock.patch.object(HybridModel, "loss", lambda self, hidden, *rest: hidden.to(dtype).square().mean()):
        (model(*batch) * factor).backward()
        expected = gradients(model)
        forward_backward(model, [batch], overlap=False, loss_scale=factor)
    torch.testing.assert_close(gradients(model), expected, equal_nan=True)
    assert not all(each is None or each.isfinite().all() for each in expected.values())


@pytest.mark.slow
@distributed(2)
def test_a_checkpoint_inside_a_layer_is_recomputed_with_delayed_weights_and_around_its_experts_refused():
    meshes = weft.init_meshes("cpu", ep=2)
    model = HybridModel(CFG, meshes=meshes)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Attention))
    weft.models.shard(model, meshes)
    microbatches = data(2)
    expected = plain(model, microbatches), gradients(model)
    same((forward_backward(model, microbatches, delay_wgrad=True), gradients(model)), expected)

    model = HybridModel(CFG, meshes=meshes)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, weft.moe.MoE))
    with pytest.raises(ValueError, match=r"mlp is inside an activation checkpoint.*recompute=\('experts',\)"):
        weft.models.shard(model, meshes)


def test_layers_without_a_sharded_root_are_refused():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*-]"))
    found = mock.patch("weft.overlap.units.units_under", lambda part, without=(): [] if part is model else [object()])
    with found, pytest.raises(ValueError, match="fully_shard on it too, last"):
        ModelUnits.of(model, model.staged_layers)


@pytest.mark.slow
@distributed(2)
def test_units_of_modules_inside_and_outside_of_layers_are_held_for_both_and_reduced_once():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*E][*-][*-]"))
    first, second, last = model.decoder.layers
    attention, experts = first.self_attention, first.mlp.experts
    for modules in ([model.embedding, second], [attention, experts], first, [last, model.output_layer]):
        weft.fully_shard(modules)
    weft.fully_shard(model)
    for microbatches, schedule in ((data(2), "combined"), (data(3), "paired")):
        expected = plain(model, microbatches), gradients(model)
        with mock.patch.object(GroupGradients, "reduce", autospec=True, side_effect=GroupGradients.reduce) as reduced:
            losses = forward_backward(model, microbatches, schedule=schedule, delay_wgrad=True)
        torch.testing.assert_close((losses, gradients(model)), expected)
        assert set(Counter(call.args[0] for call in reduced.call_args_list).values()) == {2}


def tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class Census(list):
    """A trace that counts at each step what is alive: handles, and when a microbatch ends, tensors that are no loss."""

    def __init__(self):
        super().__init__()
        self.handles, self.alive, self.tensors = [], [], []

    def append(self, step):
        super().append(step)
        self.alive.append(sum(handle() is not None for handle in self.handles))
        if (step.direction, step.slot) == ("backward", "embed"):
            self.tensors.append(
                sum(issubclass(type(each), torch.Tensor) and each.dim() > 0 for each in gc.get_objects())
            )

    def plan(self, plan):
        """A dispatcher's `plan`, whose handles are counted."""

        def counted(dispatcher, *counts):
            handle = plan(dispatcher, *counts)
            self.handles.append(weakref.ref(handle))
            return handle

        return counted


def count_what_lives(dispatcher, model, microbatches, **switches):
    census = Census()
    with mock.patch.object(dispatcher, "plan", census.plan(dispatcher.plan)):
        gc.collect()
        gc.disable()
        try:
            forward_backward(model, microbatches, trace=census, **switches)
        finally:
            gc.enable()
    return census


@pytest.mark.slow
def test_what_a_microbatch_holds_goes_with_its_backward_layer_by_layer():
    model = HybridModel(dataclasses.replace(CFG, pattern="[*E]" * 3))
    microbatches = [torch.randint(CFG.vocab_size, (2, 2, 6)).unbind() for _ in range(5)]
    for delay_wgrad in (False, True):
        census = count_what_lives(LocalDispatcher, model, microbatches, overlap=False, delay_wgrad=delay_wgrad)
        assert len(census.handles) == 5 * 3 and max(census.alive) == 3
        ends = [
            alive for step, alive in zip(census, census.alive) if (step.direction, step.slot) == ("backward", "embed")
        ]
        assert ends == [0] * 5
        attends = [step.direction == "backward" and step.layer is not None and step.slot == "attend" for step in census]
        assert [alive for alive, attend in zip(census.alive, attends) if attend] == [3, 2, 1] * 5
        assert len(set(census.tensors[1:])) == 1, census.tensors  # the first one made the gradients


@pytest.mark.long
@distributed(2)
def test_the_memory_of_a_schedule_does_not_grow_with_its_microbatches():
    model = build(dataclasses.replace(CFG, pattern="[*E]" * 3), weft.init_meshes("cpu", ep=2), strategy="optim")
    microbatches = data(2) * 4
    for switches in SWITCHES:
        forward_backward(model, microbatches[:2], **switches)
        census = count_what_lives(AllToAll, model, microbatches, **switches)
        assert len(census.handles) == 8 * 3
        # All layers of one microbatch; one more layer where a pair is at work.
        assert max(census.alive) == 3 + 1
        assert len(set(census.tensors[1:-1])) == 1, census.tensors


@pytest.mark.slow
@distributed(2)
def test_a_step_leaves_nothing_behind_with_the_cyclic_collector_off():
    meshes = weft.init_meshes("cpu", ep=2)
    model = build(CFG, meshes, strategy="optim_grads_params")
    microbatches = data(2)
    for switches in (SWITCHES[0], SWITCHES[3]):
        counts = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                forward_backward(model, microbatches, **switches)
                model.zero_grad()
                counts.append(tensors())
        finally:
            gc.enable()
        gc.collect()
        assert counts == [tensors()] * 2, switches


@distributed(1)
def test_a_schedule_that_cannot_begin_keeps_gradients_that_wait_for_their_reduction():
    model = build(CFG, weft.init_meshes("cpu"), strategy="optim")
    given = data(1)
    forward_backward(model, given, overlap=False)
    once = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    forward_backward(model, given, overlap=False)
    model.late = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="late"):
        evaluate(model, given)
    del model.late
    model.set_requires_gradient_sync(True)
    forward_backward(model, given, overlap=False)
    torch.testing.assert_close([parameter.grad.to_local() for parameter in model.parameters()], [2 * g for g in once])
