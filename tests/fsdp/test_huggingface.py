"""Hugging Face models, unchanged, one unit per decoder layer: the numbers of one process."""

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.ecosystem.llama import SIZES, llama, prepared
from tests.fsdp import nets
from tests.pool import distributed

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def mixtral(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, **options))


MODELS = {"llama": llama, "mixtral": mixtral}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """One unit per decoder layer, the root last."""
    for layer in model.model.layers:
        weft.fully_shard(layer, **options)
    return weft.fully_shard(model, **options)


def batches(steps: int = 2, rows: int = 4) -> torch.Tensor:
    """Tokens `[steps, rows, 10]`."""
    return torch.randint(0, SIZES["vocab_size"], (steps, rows, 10), generator=torch.Generator().manual_seed(1))


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def compare(plain: nn.Module, sharded: nn.Module) -> None:
    """Two AdamW steps: losses, gradients and weights of the sharded model are those of the plain one."""
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3) for model in (plain, sharded)
    ]
    for batch in batches():
        expected = plain(input_ids=batch, labels=batch, use_cache=False).loss
        actual = sharded(input_ids=mine(batch), labels=mine(batch), use_cache=False).loss
        expected.backward()
        actual.backward()
        mean = actual.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
        torch.testing.assert_close(gradients(sharded), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(sharded), weights(plain))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients by name; a parameter without gradient is left out."""
    return nets.whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict."""
    return nets.whole(model.state_dict())


@pytest.mark.parametrize("name", MODELS)
@distributed(2)
def test_a_model_trains_like_one_process(name):
    for tied in (False, True):
        compare(MODELS[name](tie_word_embeddings=tied), shard(MODELS[name](tie_word_embeddings=tied)))


@distributed(2)
def test_every_way_to_run_the_experts():
    for way in ("eager", "batched_mm", "grouped_mm"):
        compare(mixtral(experts_implementation=way), shard(mixtral(experts_implementation=way)))


@pytest.mark.parametrize("name", MODELS)
@distributed(2)
def test_the_model_s_own_gradient_checkpointing(name):
    for reentrant in (True, False):
        model = recomputing(MODELS[name](), reentrant)
        calls: list[str] = []
        hook = functools.partial(note, calls)
        model.model.layers[0].self_attn.q_proj.register_forward_hook(hook)
        compare(MODELS[name](), shard(model))
        assert len(calls) == 2 * len(batches())  # once in forward, once more in backward


def recomputing(model: nn.Module, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def note(calls: list[str], *_: Any) -> None:
    calls.append("forward")


class Adapter(nn.Module):
    """A frozen linear layer and a trainable correction of low rank, as LoRA does it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapted(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    return model


@pytest.mark.parametrize("name", MODELS)
@distributed(2)
def test_low_rank_adapters_on_a_frozen_base(name):
    plain, sharded = adapted(MODELS[name]), shard(adapted(MODELS[name]))
    before = weights(plain)
    compare(plain, sharded)
    after = weights(sharded)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name, p in plain.named_parameters() if p.requires_grad}


@distributed(2)
def test_checkpointed_adapters_train_through_inputs_that_need_no_gradient():
    """The embedding is frozen: `enable_input_require_grads` is what reentrant checkpoints need, weft or not."""
    for reentrant in (True, False):
        plain, sharded = (recomputing(adapted(llama), reentrant) for _ in range(2))
        for model in (plain, sharded):
            model.enable_input_require_grads()
        compare(plain, shard(sharded))


@distributed(2)
def test_generation_from_a_sharded_model():
    plain, sharded = llama().eval(), shard(llama()).eval()
    prompt = batches()[0][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(sharded.generate(prompt, **options), plain.generate(prompt, **options))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())


@pytest.mark.parametrize("name", MODELS)
@distributed(2)
def test_a_model_on_the_meta_device_is_loaded_after_it_is_sharded(name):
    """Norms and routers have no `reset_parameters()`, and the rotary embedding's buffers are in no state dict."""
    with torch.device("meta"):
        model = MODELS[name]()
    shard(model)
    with pytest.raises(ValueError, match=r"parameters .*norm.weight.* have values"):
        model(input_ids=batches()[0])
    plain = MODELS[name]()
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict(), assign=True)
    for buffer, value in zip(model.buffers(), plain.buffers(), strict=True):
        buffer.copy_(value)
    compare(plain, model)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@distributed(2)
def test_accelerate_runs_the_loop_around_a_sharded_model():
    """The loader, the optimizer, accumulation, backward, clipping; the model is sharded before, and not prepared."""
    import accelerate

    rows = batches(steps=4)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = shard(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows.flatten(0, 1), batch_size=2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch, use_cache=False).loss)
            if accelerator.sync_gradients:
                norms.append(nets.full(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = []
    for pair in rows.view(2, 2, *rows.shape[1:]):
        for batch in pair:
            (plain(input_ids=batch, labels=batch, use_cache=False).loss / 2).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(norms, expected)
    torch.testing.assert_close(weights(model), weights(plain))


def prepared_by_accelerate(fsdp: ModuleType) -> nn.Module:
    """Llama, with the names that Accelerate imports from torch taken from `fsdp`."""
    with mock.patch.multiple(torch_fsdp, fully_shard=fsdp.fully_shard, FSDPModule=fsdp.FSDPModule):
        return prepared(llama(tie_word_embeddings=True))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@distributed(2)
def test_accelerate_prepares_a_model_with_weft_in_the_place_of_fsdp2():
    """Tied embedding, norm and head are one unit, of which the embedding runs first and the others last."""
    theirs, ours = prepared_by_accelerate(torch_fsdp), prepared_by_accelerate(weft)
    units = [
        sorted(n for n, m in model.named_modules() if isinstance(m, fsdp.FSDPModule))
        for model, fsdp in ((theirs, torch_fsdp), (ours, weft))
    ]
    assert units[0] == units[1] and len(units[1]) > 3
    results = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        norms = []
        for batch in batches():
            model(input_ids=mine(batch), labels=mine(batch), use_cache=False).loss.backward()
            norms.append(nets.full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        results.append([norms, weights(model)])
    torch.testing.assert_close(results[1], results[0])
