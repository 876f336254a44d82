"""Which units `weft.models.shard` makes. The engine's own tests say what a unit does."""

import dataclasses
import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import weft.fsdp
import weft.overlap
from tests.fsdp import nets
from tests.fsdp.nets import full
from tests.pool import distributed
from weft.mesh import Meshes, init_meshes
from weft.models import HybridConfig, HybridModel, shard
from weft.models.sharding import _for_experts

CFG = HybridConfig(pattern="[*-]*-", vocab_size=37, hidden_size=32, intermediate_size=48, num_attention_heads=4)


def recorded(model, **options):
    """The calls that sharding makes, as (module, options), and the meshes it was given."""
    calls = []
    meshes = Meshes(dense="the dense mesh", expert="the dense mesh")
    record = lambda module, **options: calls.append((module, options))  # noqa: E731
    with mock.patch.object(weft.fsdp, "fully_shard", record):
        assert shard(model, meshes, **options) is model
    return calls, meshes


def test_every_logical_layer_is_a_unit_and_the_root_comes_last():
    model = HybridModel(CFG)
    calls, meshes = recorded(model)
    assert [module for module, _ in calls] == [*model.decoder.layers, model]
    assert all(options == {"mesh": meshes.dense} for _, options in calls)


def test_options_reach_every_unit_and_runtime_the_root_only():
    calls, _ = recorded(HybridModel(CFG), strategy="optim", runtime="options of the run")
    assert all(options["strategy"] == "optim" for _, options in calls)
    assert ["runtime" in options for _, options in calls] == [False] * (len(calls) - 1) + [True]


def test_experts_over_replicas_have_no_outer_axis_to_shard(world):
    world(0, 2)
    meshes = init_meshes("cpu", dp_replicate=2, ep=2)
    assert meshes.dense.ndim == 2 and meshes.expert.ndim == 1
    assert _for_experts({"outer_strategy": "optim"}, meshes)["outer_strategy"] == "no_shard"


@pytest.mark.slow
@distributed(2)
def test_the_output_dtype_is_that_of_what_the_model_returns():
    """Between layers, and from the experts of other ranks, rows stay in what the model computes in."""
    meshes = init_meshes("cpu", ep=2)
    tokens, labels = torch.randint(CFG.vocab_size, (2, 2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    kinds = weft.MixedPrecisionPolicy, torch.distributed.fsdp.MixedPrecisionPolicy
    found = []
    for kind, output in itertools.product(kinds, (None, torch.float32)):
        model = with_experts(EXPERTS, meshes)
        shard(model, meshes, mp_policy=kind(torch.bfloat16, torch.float32, output))
        seen: list[torch.dtype] = []
        for layer in model.decoder.layers:
            hook = layer.register_forward_hook(lambda layer, args, outputs, seen=seen: seen.append(outputs[0].dtype))
            layer.mlp.norm.register_forward_hook(lambda norm, args, output, seen=seen: seen.append(output.dtype))
            assert model(tokens).dtype == (output or torch.bfloat16)
            hook.remove()
        assert set(seen) == {torch.bfloat16}
        losses = model(tokens, labels=labels), *weft.overlap.forward_backward(model, [(tokens, labels)] * 2)
        assert {loss.dtype for loss in losses} == {torch.float32}
        found.append([*losses, *(weight.grad.to_local() for weight in model.parameters())])
    for other in found[1:]:
        assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.slow
@distributed(2, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_trains_like_one_process(tied):
    rank, size = dist.get_rank(), dist.get_world_size()
    cfg = dataclasses.replace(CFG, tie_word_embeddings=tied)
    meshes = init_meshes("cpu")
    models = []
    for given in (None, meshes):
        torch.manual_seed(7)
        models.append(HybridModel(cfg, meshes=given))
    whole, parts = models
    shard(parts, meshes)
    assert all(isinstance(layer, weft.fsdp.FSDPModule) for layer in parts.decoder.layers)
    assert all(isinstance(weight, DTensor) for weight in parts.parameters())

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    tokens, labels = torch.randint(cfg.vocab_size, (2, 2 * size, 9), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * rank, 2 * rank + 2)
    for _ in range(3):
        expected = whole(tokens, labels=labels)
        loss = parts(tokens[mine], labels=labels[mine])
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert_close(mean / size, expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(parts.state_dict()) == list(whole.state_dict())
    for name, weight in parts.state_dict().items():
        assert_close(weight.full_tensor(), whole.state_dict()[name], rtol=1e-4, atol=1e-4)


EXPERTS = HybridConfig(
    pattern="[*E][*-]",
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_experts=4,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    aux_loss_coef=0.1,
)
ROUTERS = {
    "all experts": EXPERTS,
    "half of them": dataclasses.replace(
        EXPERTS, expert_bias=True, router_score="sigmoid", capacity_factor=1.0, z_loss_coef=0.01
    ),
}
ADAMW: Any = {"lr": 1e-2, "weight_decay": 0.1}


def with_experts(cfg, meshes=None):
    """The same weights everywhere. With a bias, only the first two of four experts are ever chosen."""
    torch.manual_seed(7)
    model = HybridModel(cfg, meshes)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            bias[2:] = -9
    return model


def clipped_steps(model, batches, optimizer, clip, forward_backward):
    """Losses, norms before clipping, the gradients of the last step after it, and the weights that come of it."""
    losses, norms = [], []
    for tokens, labels in batches:
        optimizer.zero_grad()
        losses += forward_backward(model, list(zip(tokens.chunk(2), labels.chunk(2))))
        norms.append(full(clip(model)))
        optimizer.step()
    gradients = nets.whole({name: weight.grad for name, weight in model.named_parameters()})
    return torch.stack(losses), norms, gradients, nets.whole(dict(model.named_parameters()))


def one_after_another(model, microbatches):
    losses = []
    for tokens, labels in microbatches:
        loss = model(tokens, labels=labels)
        (loss / len(microbatches)).backward()
        losses.append(loss.detach())
    return losses


def overlapped(model, microbatches):
    return weft.overlap.forward_backward(model, microbatches, delay_wgrad=True, loss_scale=1 / len(microbatches))


def torchs_clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def weft_clip(model):
    return weft.optim.clip_grad_norm_(model, 0.3)


WAYS = [
    ("optim_grads", overlapped, True),
    ("optim_grads_params", one_after_another, False),
    ("optim_grads_params", overlapped, True),
]


@distributed(2)
def test_a_module_in_place_of_spread_experts_is_refused_with_the_fix():
    """`peft` wraps experts so, if `target_parameters` names their weights."""
    meshes = init_meshes("cpu", ep=2)
    model = HybridModel(dataclasses.replace(CFG, pattern="E", num_experts=2), meshes)
    model.decoder.layers[0].mlp.experts = nn.Sequential(model.decoder.layers[0].mlp.experts)
    with pytest.raises(TypeError, match=r"experts of a Layer are a Sequential.*GroupedExperts.*parametrize"):
        shard(model, meshes)


@pytest.mark.long
@distributed()
@pytest.mark.parametrize(
    "ranks, chosen", [(2, "all experts"), (2, "half of them"), pytest.param(4, "half of them", marks=pytest.mark.long)]
)
def test_clipped_steps_with_experts_equal_one_process_that_has_them_all(chosen):
    """Expert parallel over two ranks and over all of them. Where two of four experts get all tokens, the ranks of the
    others get none, and half of the assignments exceed the capacity. Norms, clipping and optimizers count every expert
    once."""
    cfg, rank, ranks = ROUTERS[chosen], dist.get_rank(), dist.get_world_size()
    tokens, labels = torch.randint(37, (2, 2, 2 * ranks, 9), generator=torch.Generator().manual_seed(1))
    whole = with_experts(cfg)
    adamw = torch.optim.AdamW(whole.parameters(), **ADAMW)
    expected = clipped_steps(whole, list(zip(tokens, labels)), adamw, torchs_clip, one_after_another)
    assert min(expected[1]) > 0.3  # all steps are clipped
    (load,) = weft.moe.load_statistics(whole).values()
    assert bool(load[2:].any()) == (chosen == "all experts")

    mine = [batch[:, rank::ranks] for batch in (tokens, labels)]
    for ep, (strategy, run, flat) in zip(itertools.cycle(sorted({2, ranks}, reverse=True)), WAYS[: 4 - ranks // 2]):
        meshes = init_meshes("cpu", ep=ep)
        model = shard(with_experts(cfg, meshes), meshes, strategy=strategy)
        if flat:
            optimizer, clip = weft.optim.flat(torch.optim.AdamW, model, **ADAMW), weft_clip
        else:
            optimizer, clip = torch.optim.AdamW(model.parameters(), **ADAMW), torchs_clip
        losses, *actual = clipped_steps(model, list(zip(*mine)), optimizer, clip, run)
        dist.all_reduce(losses)
        at = f"ep={ep}, {strategy}, {run.__name__}"
        assert_close((losses / ranks, *actual), expected, msg=lambda text, at=at: f"{at}: {text}")
        norms = {name: torch.tensor(norms.weight) for name, norms in weft.parameter_norms(model).items()}
        assert_close(norms, {name: weight.norm() for name, weight in actual[2].items()})


@pytest.mark.slow
@distributed(4)
def test_spread_experts_built_on_the_meta_device_start_from_the_same_weights():
    meshes = init_meshes("cpu", ep=2)
    whole = with_experts(EXPERTS)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = HybridModel(EXPERTS, meshes)
    shard(model, meshes)
    for name, weight in model.named_parameters():
        assert torch.equal(full(weight), whole.get_parameter(name)), name


MIXED = {
    "num_attention_heads": 2,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kda_num_heads": 2,
    "kda_head_dim": 8,
}
WITH_EXPERTS = ["M[*-]M[*E]", "[*E]", "M*E-", "[GE][*-]", "[+E]/[+E]", "[*-][*E]/[*E]/[*E]"]
WITHOUT = ["M[M*]-", "[G-][*-]", "+-|M", "[P-]K"]
ON_FOUR = ["M[*-]M[*E]", "[GE][*-]", "+-|M"]
"""Of which shards have replicas. What layers compute is the same there as on two ranks."""


def gradients_of_both(cfg, meshes, run, **options):
    """Mean losses and gradients of two microbatches, of one process with all data and of ranks that share it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, labels = torch.randint(37, (2, 2 * ranks, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for given in (None, meshes):
        model = with_experts(cfg, given)
        mine = slice(None) if given is None else slice(rank, None, ranks)
        pairs = list(zip(tokens[mine].chunk(2), labels[mine].chunk(2)))
        if given is not None:
            shard(model, meshes, **options)
        losses = torch.stack((one_after_another if given is None else run)(model, pairs))
        if given is not None:
            dist.all_reduce(losses)
            losses /= ranks
        found.append((losses, nets.whole({name: weight.grad for name, weight in model.named_parameters()})))
    return found


SYMBOLS = ["M", "G", "*", "+", "-", "E", "[M*E]G/[*E]"]


@pytest.mark.parametrize("pattern", SYMBOLS)
def test_two_runs_of_every_symbol_are_bit_equal(pattern):
    cfg = dataclasses.replace(EXPERTS, pattern=pattern, **{**MIXED, "hidden_size": 32, "chunk_size": 4})
    runs = []
    for _ in range(2):
        model = with_experts(cfg)
        tokens, labels = torch.randint(37, (2, 4, 70), generator=torch.Generator().manual_seed(1))
        adamw = torch.optim.AdamW(model.parameters())
        runs.append(clipped_steps(model, [(tokens, labels)] * 2, adamw, torchs_clip, one_after_another))
    assert_close(*runs, rtol=0, atol=0)


@pytest.mark.long
@distributed(2)
@pytest.mark.parametrize("pattern", ["[M*E]/[GE]"])
def test_two_overlapped_runs_on_two_ranks_are_bit_equal(pattern):
    cfg, rank = dataclasses.replace(EXPERTS, pattern=pattern, **MIXED), dist.get_rank()
    meshes, runs = init_meshes("cpu", ep=2), []
    for _ in range(2):
        model = shard(with_experts(cfg, meshes), meshes)
        tokens, labels = torch.randint(37, (2, 4, 17), generator=torch.Generator().manual_seed(rank))
        adamw = torch.optim.AdamW(model.parameters())
        runs.append(clipped_steps(model, [(tokens, labels)] * 2, adamw, weft_clip, overlapped))
    assert_close(*runs, rtol=0, atol=0)


def unpaired(model, microbatches):
    return weft.overlap.forward_backward(
        model, microbatches, overlap=False, delay_wgrad=True, loss_scale=1 / len(microbatches)
    )


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("pattern", ["M[*-]M[*E]", "[GE][*-]", "[+E]/[+E]/[+E]"])
def test_a_stack_of_every_kind_has_the_gradients_of_one_process_under_the_schedule(pattern):
    cfg = dataclasses.replace(EXPERTS, pattern=pattern, **MIXED)
    expected, found = gradients_of_both(cfg, init_meshes("cpu", ep=2), overlapped)
    assert_close(found, expected)


def at_once(model, microbatches):
    return weft.overlap.forward_backward(model, microbatches, loss_scale=1 / len(microbatches))


RECOMPUTED = ((), ("attend",), ("experts",), ("attend", "experts"))
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
ALONE, PAIRED = (one_after_another, unpaired), (at_once, overlapped)
WAYS_WITHOUT = list(itertools.product(RECOMPUTED, (1,), (1, 2), STRATEGIES, ALONE))
WAYS_OF_EXPERTS = WAYS_WITHOUT + list(itertools.product(RECOMPUTED, (2,), (1, 2), STRATEGIES, ALONE + PAIRED))


def way_of(pattern, ranks):
    """One of all ways: recomputed, experts spread or not, replicas (of shards on four ranks), strategy, schedule."""
    ways = WAYS_OF_EXPERTS if "E" in pattern else WAYS_WITHOUT
    ways = [way for way in ways if way[2] == (1 if ranks == 2 else 2)]
    return random.Random(f"{pattern} on {ranks}, draw 109").choice(ways)


CASES = [(2, pattern) for pattern in (*WITH_EXPERTS, *WITHOUT)] + [(4, pattern) for pattern in ON_FOUR]


def test_the_ways_that_are_drawn_have_every_choice_with_experts_and_without():
    for patterns, ways in ((WITH_EXPERTS, WAYS_OF_EXPERTS), (WITHOUT, WAYS_WITHOUT)):
        drawn = [way_of(pattern, ranks) for ranks, pattern in CASES if pattern in patterns]
        assert [set(choices) for choices in zip(*drawn)] == [set(choices) for choices in zip(*ways)]
    ways = [way_of(pattern, ranks) for ranks, pattern in CASES if pattern in WITH_EXPERTS]
    strategies = {(way[1], way[3], way[4]) for way in ways}
    assert {(2, strategy, overlapped) for strategy in STRATEGIES} <= strategies


@pytest.mark.slow
@distributed()
@pytest.mark.parametrize(("ranks", "pattern"), CASES)
def test_every_mixed_pattern_has_the_gradients_of_one_process_in_every_way(pattern):
    """Spread experts and not, one after another, as nodes and overlapped, recomputed, by every strategy, HSDP too."""
    ranks = dist.get_world_size()
    # In one order always: torch's caches hold meshes of earlier worlds, whose groups are found by their numbers.
    of_ep = {ep: init_meshes("cpu", ep=ep, dp_replicate=1 if ranks == 2 else 2) for ep in (1, 2)}
    recompute, ep, replicas, strategy, run = way_of(pattern, ranks)
    cfg = dataclasses.replace(EXPERTS, pattern=pattern, recompute=recompute, **MIXED)
    expected, found = gradients_of_both(cfg, of_ep[ep], run, strategy=strategy)
    at = f"{recompute}, ep={ep}, replicas={replicas}, {strategy}, {run.__name__}"
    assert_close(found, expected, msg=lambda text: f"{at}: {text}")


SINKS = {
    "attention_sinks": True,
    "sliding_window": 4,
    "windowed": (1,),
    "attention_bias": "all",
    "experts_bias": True,
    "router_bias": True,
    "hidden_act": "clamped_swiglu",
}
MULTIPLIERS = {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 3.0}
NORMS = {
    "norm_order": "both",
    "zero_centered_norm": True,
    "hidden_act": "gelu_tanh",
    "sliding_window": 4,
    "windowed": (0,),
    "rope_local_theta": 100.0,
    "unrotated": (1,),
}


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("pattern, options", [("[*E]*E/[*E]", SINKS), ("[ME]*-", MULTIPLIERS), ("[*E]*-M", NORMS)])
def test_sinks_biases_multipliers_and_norms_have_the_gradients_of_one_process(pattern, options):
    cfg = dataclasses.replace(EXPERTS, pattern=pattern, **MIXED, **options)
    for run in (overlapped, one_after_another) if options is SINKS else (overlapped,):
        expected, found = gradients_of_both(cfg, init_meshes("cpu", ep=2), run)
        assert_close(found, expected)
        if options is SINKS:
            names = ("self_attention.sinks", "mlp.router.bias", "mlp.experts.up_proj_bias")
            assert all(found[1][f"decoder.layers.0.{name}"].abs().max() > 0 for name in names)


@distributed(2)
def test_decays_keep_their_dtype_where_everything_else_computes_in_bf16():
    cfg = dataclasses.replace(EXPERTS, pattern="MG", **MIXED)
    meshes = init_meshes("cpu")
    model = with_experts(cfg, meshes)
    shard(model, meshes, mp_policy=weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = {}
    for name, module in model.named_modules():
        names = [own for own, _ in module.named_parameters(recurse=False)]

        def note(module, args, output, name=name, names=names):
            seen.update({f"{name}.{own}": getattr(module, own).dtype for own in names})

        module.register_forward_hook(note)
    model(torch.zeros(2, 9, dtype=torch.int64), labels=torch.ones(2, 9, dtype=torch.int64)).backward()
    kept = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "D", "dt_bias"} and len(kept) == 5
    assert set(seen.values()) == {torch.float32, torch.bfloat16}
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())
