"""`[*-]` stacks against a Llama that nobody here wrote."""

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from weft.models import HybridConfig, HybridModel

CASES = {
    "grouped queries": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one head each": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one key and value head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "free head width": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    "tied embeddings": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "other base and eps": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-3,
    },
}
LAYERS = 3


def pair(noise=0.2, **options):
    """A Llama with random weights and the hybrid model that holds the same weights."""
    torch.manual_seed(3)
    cfg = HybridConfig(pattern="[*-]" * LAYERS, vocab_size=61, hidden_size=48, intermediate_size=80, **options)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            num_hidden_layers=LAYERS,
            num_attention_heads=cfg.num_attention_heads,
            num_key_value_heads=cfg.num_key_value_heads,
            head_dim=cfg.attention_head_dim,
            rms_norm_eps=cfg.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
            tie_word_embeddings=cfg.tie_word_embeddings,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for weight in llama.parameters():  # larger than usual weights, norms too: a wrong term shows
            weight.add_(torch.randn_like(weight) * noise)
    model = HybridModel(cfg)
    weights = dict(llama.named_parameters())
    model.load_state_dict({name: weights[llama_name(name)].detach() for name in model.state_dict()})
    return llama, model


def llama_name(name):
    for ours, theirs in {
        "embedding.": "model.embed_tokens.",
        "output_layer.": "lm_head.",
        "decoder.layers.": "model.layers.",
        "decoder.final_layernorm.": "model.norm.",
        "self_attention.norm.": "input_layernorm.",
        "self_attention.": "self_attn.",
        "mlp.norm.": "post_attention_layernorm.",
    }.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_logits_and_gradients_are_those_of_llama(options):
    llama, model = pair(**options)
    tokens = torch.randint(model.cfg.vocab_size, (2, 17))
    labels = torch.randint(model.cfg.vocab_size, (2, 17))

    expected = llama(input_ids=tokens).logits
    assert_close(model(tokens), expected)

    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    model(tokens, labels=labels).backward()
    gradients = {name: weight.grad for name, weight in llama.named_parameters()}
    for name, weight in model.named_parameters():
        assert_close(weight.grad, gradients.pop(llama_name(name)), msg=lambda text, name=name: f"{name}: {text}")
    assert not gradients, "every weight of Llama has its counterpart"


@pytest.mark.slow
def test_sequences_longer_than_the_first_rotary_table_agree_with_llama():
    llama, model = pair(noise=0.02, num_attention_heads=2, num_key_value_heads=1)
    rotary = model.decoder.layers[0].self_attention.rotary
    tokens = torch.randint(model.cfg.vocab_size, (1, rotary.cos.shape[0] + 5))
    with torch.no_grad():
        assert_close(model(tokens), llama(input_ids=tokens).logits)
