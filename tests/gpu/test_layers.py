"""What computes otherwise on a card than on a CPU: the layers of hybrid models, and products of quantized operands."""

from itertools import islice

import pytest
import torch

import weft
from tests.fsdp import nets
from tests.gpu.cards import DEVICE, on_one_card, takes_time
from weft.models import HybridConfig, HybridModel
from weft.models.generate import Sampling, generate
from weft.quantize import dequantize, products, quantize, rowwise, scaled_product, tensorwise

pytestmark = [pytest.mark.gpu, takes_time]

PATTERNS = ["[*-][*E]", "[+-]", "[M-][ME]", "[G-]", "[K-]", "[P-]"]


def config(pattern: str) -> HybridConfig:
    return HybridConfig(
        pattern=pattern,
        vocab_size=61,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        chunk_size=8,
        intermediate_size=96,
        num_experts=4,
        moe_intermediate_size=32,
        aux_loss_coef=0.1,
    )


def loss_and_gradients(model, tokens, labels) -> dict[str, torch.Tensor]:
    loss = model(tokens, labels)
    loss.backward()
    return {"loss": loss.detach().cpu()} | {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layers_compute_on_a_card_what_they_do_on_a_cpu(pattern):
    torch.manual_seed(0)
    model = HybridModel(config(pattern))
    tokens, labels = torch.randint(0, 61, (2, 2, 37))
    expected = loss_and_gradients(model, tokens, labels)
    model.zero_grad()
    found = loss_and_gradients(model.to(DEVICE), tokens.to(DEVICE), labels.to(DEVICE))
    # Sums over positions and chunks are in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generation_on_a_card_continues_like_on_a_cpu(pattern):
    torch.manual_seed(0)
    model = HybridModel(config(pattern))
    prompt = torch.randint(0, 61, (2, 5))
    expected = list(islice(generate(model, prompt, sampling=Sampling(temperature=0)), 12))
    found = list(islice(generate(model.to(DEVICE), prompt.to(DEVICE), sampling=Sampling(temperature=0)), 12))
    assert torch.equal(torch.stack(found).cpu(), torch.stack(expected))


@pytest.mark.parametrize("make", [tensorwise, rowwise])
def test_products_of_quantized_operands_are_those_of_the_values_that_they_hold(make):
    recipe = make()
    torch.manual_seed(0)
    x, weight = (torch.randn(side, 64, dtype=torch.bfloat16, device=DEVICE) for side in (48, 32))
    assert products.missing_product(recipe, (32, 64), torch.bfloat16, torch.device(DEVICE)) is None
    payload, scales = quantize(weight, recipe)
    held = [dequantize(*quantize(each, recipe), recipe).double() for each in (x, weight)]
    expected = held[0] @ held[1].t()
    found = scaled_product(x, payload, scales, recipe)
    assert found.dtype == torch.bfloat16
    # Rounded to bf16, after sums whose terms the tensor cores cut to some bits below the largest.
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2e-3 * float(expected.abs().max()))


def scaled() -> None:
    """Steps with operands in eight bits end where steps with rounded weights do, about."""
    ends = []
    batches = nets.data(12, 4).to(DEVICE)
    for compute in ("dequantize", "scaled"):
        policy = weft.MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, param_quantization=tensorwise(compute=compute)
        )
        net = nets.make(width=64, hidden=128, vocabulary=32).to(DEVICE)
        for block in net.blocks:
            weft.fully_shard(block, mp_policy=policy)
        weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        losses = []
        for tokens in batches:
            optimizer.zero_grad()
            losses.append(nets.loss_of(net, tokens))
            losses[-1].backward()
            optimizer.step()
        ends.append(torch.stack(losses).detach())
    assert not torch.equal(*ends), "the products are those of different operands"
    torch.testing.assert_close(*ends, rtol=0.05, atol=0.05)  # activations have three bits of mantissa


def test_scaled_products_train_on_a_card(tmp_path):
    on_one_card(scaled, 1, "nccl", tmp_path)
