"""Models read from what transformers wrote compute what transformers computes."""

import pytest
import torch
from torch.testing import assert_close

from tests.models.hf.families import CASES, KINDS
from weft.models import HybridModel, hf
from weft.models.hf.directory import TensorFiles, TensorWriter
from weft.models.hf.places import write

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def both(tmp_path, kind, variation):
    """The model of transformers, and ours, read from its directory."""
    theirs = KINDS[kind].make(variation)
    theirs.save_pretrained(tmp_path)
    ours = HybridModel(hf.config_of(tmp_path))
    hf.load(ours, tmp_path)
    return theirs, ours.eval()


def written(model, directory):
    """The gradients of ours, by the names in the directory that it came from: written as weights are."""
    (directory / "ours").mkdir()
    family, _ = hf.family_for(model.cfg, model.origin.family)
    gradients = ((name, weight.grad) for name, weight in model.named_parameters())
    with TensorWriter(directory / "ours") as writer:
        write(family.places(model.cfg), gradients, writer)
    files = TensorFiles(directory / "ours")
    return {model.origin.spelling.theirs(name): files[name][...] for name in files}


def assert_same_gradients(theirs, ours, directory):
    """Of all weights, under the names on disk: theirs are written as weights are."""
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    theirs.save_pretrained(directory / "gradients")
    files = TensorFiles(directory / "gradients")
    gradients = written(ours, directory)
    assert {name for name in files if not name.endswith("e_score_correction_bias")} == set(gradients)
    for name, gradient in gradients.items():
        assert_close(gradient, files[name][...], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind, variation", CASES, ids=[" ".join(case) for case in CASES])
def test_logits_and_gradients_are_those_of_transformers(tmp_path, kind, variation):
    """Of whole rows; of each plain model also of those before padding at the end, which changes neither, and then the
    gradients are of both."""
    theirs, ours = both(tmp_path, kind, variation)
    tokens, labels = torch.randint(61, (2, 2, 21), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=tokens, use_cache=False).logits
    assert_close(ours(tokens), expected, **CLOSE)
    backward(theirs, ours, expected, tokens, labels)
    if variation == "plain":
        mask = torch.ones_like(tokens)
        mask[0, 13:], labels[0, 13:] = 0, -100
        expected = theirs(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        kept = mask.bool()
        assert_close(ours(tokens)[kept], expected[kept], **CLOSE)
        backward(theirs, ours, expected, tokens, labels)
    assert_same_gradients(theirs, ours, tmp_path)


def backward(theirs, ours, logits, tokens, labels):
    """Half of the gradients of the mean loss of each."""
    (torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2).backward()
    (ours(tokens, labels=labels) / 2).backward()


HYBRIDS = ["nemotron_h", "qwen3_next", "qwen3_5_text", "bamba", "granitemoehybrid", "falcon_h1", "kimi_linear"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_lengths_that_are_and_are_not_multiples_of_a_chunk_give_the_same_scores_and_gradients(tmp_path, kind):
    theirs, ours = both(tmp_path, kind, "plain")
    for length in (8, 64, 70):
        tokens, labels = torch.randint(61, (2, 2, length), generator=torch.Generator().manual_seed(1))
        expected = theirs(input_ids=tokens, use_cache=False).logits
        assert_close(ours(tokens), expected, **CLOSE)
        backward(theirs, ours, expected, tokens, labels)
    assert_same_gradients(theirs, ours, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_fp32_as_that_of_transformers(tmp_path, kind):
    theirs, ours = both(tmp_path, kind, "plain")
    tokens = torch.randint(61, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = theirs(input_ids=tokens).logits
        found = ours.to(torch.bfloat16)(tokens).float()
        rounded = theirs.to(torch.bfloat16)(input_ids=tokens).logits.float()
    # Of the median token: where two experts score almost the same, rounding chooses, and one token's error is large.
    errors = [(logits - exact).norm(dim=-1).median() for logits in (found, rounded)]
    assert errors[0] < 1.1 * errors[1]  # of which a tenth is chance
