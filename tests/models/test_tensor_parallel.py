"""Tensor parallelism: ranks that share every layer compute what one process computes."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models.test_context import CLOSE, ROWS, averaged, batch, build, cut, same, trained, whole
from tests.models.test_documents import config
from tests.pool import distributed, each_on_one_rank
from weft.models import HybridConfig, HybridModel, hf, shard
from weft.models.shared import check_shared
from weft.models.tensor_parallel import cuts_of
from weft.overlap import evaluate, forward_backward

KINDS = {
    "*": {"qk_norm": "full", "attention_bias": "all", "attention_sinks": True, "sliding_window": 5},
    "* with a norm for each head and a gate": {"qk_norm": "head", "attention_output_gate": True},
    "+": {"q_lora_rank": 12, "attention_bias": "all"},
    "M": {"chunk_size": 4, "mamba_bias": True, "mamba_n_groups": 1},
    "G": {"linear_num_value_heads": 4, "linear_num_key_heads": 1},
    "P": {"mamba_n_groups": 1, "ssm_multipliers": (0.5, 2.0, 1.5, 0.7, 3.0), "attention_out_multiplier": 2.0},
    "K": {"kda_num_heads": 4, "kda_head_dim": 4},
    "E": {
        "shared_expert_intermediate_size": 8,
        "shared_expert_gate": True,
        "moe_latent_size": 12,
        "mlp_bias": True,
        "experts_bias": True,
        "router_bias": True,
        "aux_loss_coef": 0.1,
        "z_loss_coef": 0.1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}
"""With fewer key and value heads, groups and experts than ranks."""


@pytest.mark.long
@distributed(2)
def test_attention_and_mlps_equal_one_process_over_five_clipped_steps():
    meshes = weft.init_meshes("cpu", tp=2)
    assert meshes.dp_size == 1
    cfg = config("[*-]*-")
    for options in (None, {}):
        same(trained(build(cfg, meshes, options), [batch(None)], 5), trained(build(cfg), [batch(None)], 5))


def perturb(model):
    """Biases and norms that are neither 0 nor 1, the same in every run."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            values = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))).double()
            with torch.no_grad():
                parameter.add_(weft_like(values, parameter))
    return model


def weft_like(values, parameter):
    if not isinstance(parameter, torch.distributed.tensor.DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return torch.distributed.tensor.distribute_tensor(values, mesh, placements, src_data_rank=None)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
@mock.patch("weft.models.layers.delta_net.CHUNK", 4)
def test_every_kind_of_layer_equals_one_process(kind):
    """Sharded, and with the whole gradients of what is not cut; test_many_steps.py has four ranks."""
    given = [batch(ROWS["a document over three slices"])]
    meshes = weft.init_meshes("cpu", tp=2)
    pattern = f"{kind[0]}{kind[0]}/[{kind[0]}-]" if kind != "E" else "[*E]E"
    cfg = config(pattern, num_attention_heads=4, **KINDS[kind])
    (expected,) = each_on_one_rank([cfg], lambda cfg: trained(perturb(build(cfg)), given))
    for sharded in (True, False):
        model = perturb(build(cfg, meshes))
        same(trained(shard(model, meshes) if sharded else model, given), expected)


BESIDE = {
    "reduced in fp32": (
        {},
        {"strategy": "optim_grads", "mp_policy": weft.MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    ),
    "recomputed": ({}, {}),
    "cut experts": ({"ep": 2}, {"strategy": "optim"}),
    "context ranks, whole experts": ({"ep": 2, "etp": 1, "cp": 2}, {"strategy": "optim"}),
    "replicas, whole experts": ({"ep": 4, "etp": 1, "dp_replicate": 2}, {}),
    "four, whole experts": ({"ep": 2, "etp": 1, "tp": 4}, {}),
    "stages, whole experts": ({"pp": 2, "ep": 2, "etp": 1}, {"strategy": "optim"}),
}


@pytest.mark.long
@pytest.mark.parametrize("beside", BESIDE)
@distributed(4)
def test_with_sharding_replicas_context_ranks_and_stages(beside):
    """Gradients and norms of tensor-parallel ranks beside what test_many_steps.py has not."""
    rows = ROWS["a document over three slices"]
    batches = [batch(rows, number=number) for number in range(4)]
    cfg = config("[PE][M-]G/[+-]", tie_word_embeddings=True, experts_bias=True, num_attention_heads=4)
    ((losses, gradients),) = each_on_one_rank([cfg], lambda cfg: averaged(cfg, batches))
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    if beside == "recomputed":
        cfg = dataclasses.replace(cfg, recompute=("attend", "experts"))
    sizes, options = BESIDE[beside]
    meshes = weft.init_meshes("cpu", **{"tp": 2, **sizes})
    model = build(cfg, meshes, options, torch.float32)
    mine = batches[meshes.dp_rank :: meshes.dp_size]
    mine = cut(mine, meshes) if "cp" in sizes else mine
    how = {"overlap": True, "delay_wgrad": "strategy" in options} if "ep" in sizes else {"overlap": False}
    how = {"overlap": False, "schedule": "1f1b"} if "pp" in sizes else how
    found = forward_backward(model, mine, **how, loss_scale=meshes.dp_size / 4)
    same(found, losses[meshes.dp_rank :: meshes.dp_size], **CLOSE)
    same([{name: whole(each.grad) for name, each in model.named_parameters()}], [gradients], **CLOSE)
    same([weft.optim.grad_norm(model)], [norm], **CLOSE)
    if "pp" in sizes:
        same(evaluate(model, batches), losses, **CLOSE)


@pytest.mark.long
@distributed(4)
def test_clipping_counts_each_parameter_once():
    """Spread experts that are cut too, what is cut, and what is whole on every tensor-parallel rank."""
    cfg = config("[*E][M-]", experts_bias=True)
    meshes = weft.init_meshes("cpu", tp=2, ep=2)
    given = [batch(None)]
    expected = trained(build(cfg), given, 2)
    same(trained(build(cfg, meshes, {}), given, 2), expected)
    model = build(cfg, meshes, {"strategy": "optim"})
    optimizer = weft.optim.flat(torch.optim.AdamW, model, lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(**given[0])
        loss.backward()
        weft.optim.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    same(losses, expected[0])


@pytest.mark.slow
@distributed(2)
def test_published_weights_come_in_and_go_out(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_experts": 4, "moe_intermediate_size": 16}
    cfg = HybridConfig(pattern="[*-][*E]", qk_norm="head", rms_norm_eps=1e-6, **sizes)
    hf.save(HybridModel(cfg), tmp_path / "theirs")
    dist.barrier()
    model = hf.from_pretrained(tmp_path / "theirs", meshes=weft.init_meshes("cpu", tp=2))
    tokens = torch.arange(20)[None]
    expected = hf.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(model(tokens), expected(tokens))
    hf.save_pretrained(model, tmp_path / "written")
    dist.barrier()
    again = hf.from_pretrained(tmp_path / "written").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.slow
@distributed(2)
def test_what_keeps_its_dtype_keeps_it_after_a_move_to_another():
    meshes = weft.init_meshes("cpu", tp=2)
    model = build(config("M"), meshes)
    shard(model, meshes, mp_policy=weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    model.decoder.layers[0].register_forward_hook(
        lambda layer, *_: seen.append({name.rpartition(".")[2]: each.dtype for name, each in layer.named_parameters()})
    )
    model(**batch(None)).backward()
    assert seen[0]["A_log"] is torch.float64 and seen[0]["weight"] is torch.bfloat16


@distributed(2)
def test_what_cannot_be_is_refused():
    meshes = weft.init_meshes("cpu", tp=2)
    for symbol, sizes in (
        ("*", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}),
        ("M", {"mamba_num_heads": 9, "mamba_n_groups": 3}),
        ("-", {"intermediate_size": 25}),
        ("K", {"kda_num_heads": 3}),
    ):
        with pytest.raises(ValueError, match=r"is split over tp=2 ranks: make it a multiple of tp"):
            HybridModel(config(symbol, **sizes), meshes)
    check_shared(dataclasses.replace(config("-"), vocab_size=7), 4, 4)
    with pytest.raises(ValueError, match="vocab_size=5 is split over tp=4 ranks: each needs at least one token"):
        check_shared(dataclasses.replace(config("-"), vocab_size=5), 4, 4)  # parts of 2, 2, 1 and 0
    with pytest.raises(ValueError, match="mamba_n_groups=3 on tp=2 ranks"):
        HybridModel(config("M", mamba_num_heads=6, mamba_n_groups=3), meshes)
    model = build(config("*"), meshes)
    with pytest.raises(ValueError, match="27 positions on tp=2 ranks"):
        model(**batch(None, 27))
    with pytest.raises(ValueError, match="tp=2: a cache needs whole layers"):
        model(torch.zeros(1, 4, dtype=torch.int64), cache={})


@distributed(2)
def test_numbers_that_are_no_tokens_are_refused_as_on_one_rank():
    cfg, size = config("-"), config("-").vocab_size
    for meshes, error in ((None, (IndexError, RuntimeError)), (weft.init_meshes("cpu", tp=2), RuntimeError)):
        model, tokens = build(cfg, meshes), torch.zeros(1, 4, dtype=torch.int64)
        for wrong in (-1, size):
            with pytest.raises(error, match=r"vocabulary|out of"):
                model(tokens.masked_fill(torch.arange(4) == 2, wrong))
            with pytest.raises(error, match=r"vocabulary|out of"):
                model(tokens, labels=tokens.masked_fill(torch.arange(4) == 2, wrong))


@pytest.mark.slow
@distributed(2)
def test_scores_are_those_of_one_process_and_so_are_losses_of_them():
    meshes, given = weft.init_meshes("cpu", tp=2), batch(None)
    cfg = config("[*-]", pad_token_id=int(given["tokens"][0, 0]))
    models = build(cfg, meshes), build(cfg)
    scores = [model(given["tokens"]) for model in models]
    for each in scores:
        each.logsumexp(-1).sum().backward()
    same([scores[0]], [scores[1]])
    same(*([{name: whole(each.grad) for name, each in model.named_parameters()}] for model in models))


@pytest.mark.slow
@distributed(2)
def test_experts_that_are_cut_start_from_the_same_weights_on_the_meta_device():
    cfg, meshes = config("E", shared_expert_intermediate_size=8), weft.init_meshes("cpu", tp=2)
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            model = HybridModel(cfg, meshes)
        found.append({name: whole(each.detach()) for name, each in shard(model, meshes).named_parameters()})
    same(found[:1], found[1:])


def test_every_parameter_of_every_kind_of_layer_is_in_the_list():
    every = {"attention_sinks": True, "shared_expert_intermediate_size": 8, "shared_expert_gate": True}
    biases = {"attention_bias": "all", "mamba_bias": True, "mlp_bias": True, "experts_bias": True, "router_bias": True}
    options = {**every, **biases, "moe_latent_size": 8, "q_lora_rank": 4, "norm_order": "both", "qk_norm": "head"}
    for cfg in (config("*PMGKE-", **options), config("+", **options)):
        for layer, symbol in zip(HybridModel(cfg).decoder.layers, cfg.pattern, strict=True):
            lies = cuts_of(symbol, cfg)
            for name, _ in next(layer.children()).named_parameters():
                assert name in lies or name.rpartition(".")[0] in lies, (symbol, name)


@pytest.mark.slow
@distributed(2)
def test_a_step_sends_activations_and_what_is_not_cut_and_no_more():
    """Between layers each rank has half of the positions, and no rank has the scores of all tokens."""
    meshes, given = weft.init_meshes("cpu", tp=2), batch(None)
    model = build(config("[*-]"), meshes)
    shapes = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda _, args, out: shapes.append(out[0].shape))
    model.output_layer.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    model(**given)
    scores = shapes.pop()
    assert all(shape == (2, 16, 16) for shape in shapes) and scores == (2, 32, 19 - dist.get_rank())
