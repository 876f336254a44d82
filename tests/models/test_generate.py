from itertools import islice

import pytest
import torch

from tests.models.hf.families import KINDS
from weft.models import HybridConfig, HybridModel, hf
from weft.models.generate import Sampling, continuations, generate


def small():
    torch.manual_seed(0)
    return HybridModel(HybridConfig(pattern="[M*-]G", vocab_size=37, hidden_size=32)).eval()


def first(model, count, seed=0, **options):
    prompt = torch.arange(10)[None]
    generator = torch.Generator().manual_seed(seed)
    among = options.pop("among", None)
    drawn = generate(model, prompt, sampling=Sampling(**options), among=among, generator=generator)
    return torch.cat(list(islice(drawn, count))).tolist()


def test_the_best_tokens_are_those_of_full_forwards():
    model, tokens = small(), torch.arange(10)[None]
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert first(model, 12, temperature=0) == tokens[0, 10:].tolist()


def test_no_prompts_have_no_continuations_and_an_empty_prompt_is_named():
    assert list(continuations(small(), [], most=4)) == []
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        next(continuations(small(), [[1], []], most=4))


def test_a_text_is_continued_on_the_device_of_the_model_whatever_the_default_device():
    model, greedy = small(), Sampling(temperature=0)
    expected = list(continuations(model, [[1, 2, 3], [4]], most=4, sampling=greedy))
    with torch.device("meta"):
        assert list(continuations(model, [[1, 2, 3], [4]], most=4, sampling=greedy)) == expected


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_next", "nemotron_h"])  # others: test_published.py
def test_the_best_tokens_are_those_of_transformers(tmp_path, kind):
    theirs = KINDS[kind].make()
    theirs.save_pretrained(tmp_path)
    ours = HybridModel(hf.config_of(tmp_path))
    hf.load(ours, tmp_path)
    prompt = torch.arange(10)[None]
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(prompt, max_new_tokens=8, **options)
    assert first(ours.eval(), 8, temperature=0) == expected[0, 10:].tolist()


@pytest.mark.slow
def test_the_same_seed_draws_the_same_and_another_seed_something_else():
    model = small()
    assert first(model, 20) == first(model, 20)
    assert first(model, 20) != first(model, 20, seed=1)


def test_a_small_share_or_temperature_leaves_the_best():
    model = small()
    best = first(model, 10, temperature=0)
    assert first(model, 10, top_p=1e-6) == best
    assert first(model, 10, temperature=1e-6) == best


def test_drawn_tokens_have_the_shares_of_the_scores():
    scores = torch.tensor([0.5, 0.3, 0.2]).log()

    def model(tokens, cache):
        return scores.expand(len(tokens), 1, 3)

    drawn = next(generate(model, torch.zeros(20000, 1).long(), generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(drawn.bincount() / 20000, scores.exp(), atol=0.02)
    options = {"sampling": Sampling(top_p=0.6), "generator": torch.Generator().manual_seed(0)}
    drawn = next(generate(model, torch.zeros(20000, 1).long(), **options))
    assert torch.allclose(drawn.bincount() / 20000, torch.tensor([0.625, 0.375]), atol=0.02)


def test_the_share_of_the_most_likely_is_of_what_the_most_likely_few_have():
    scores, sampling = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), Sampling(top_k=2, top_p=0.5)  # 0.57 of the two
    drawn = sampling.choose(scores.expand(100, 4), torch.zeros(100, 1).long(), torch.Generator().manual_seed(0))
    assert not drawn.any()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 5.0}, {"top_p": 0.5}])
def test_only_tokens_of_those_that_may_follow_are_chosen(options):
    among = torch.tensor([3, 4, 30])
    assert set(first(small(), 30, among=among, **options)) <= set(among.tolist())
    assert first(small(), 10, among=torch.arange(37), **options) == first(small(), 10, **options)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_values_without_meaning_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        first(small(), 1, **options)
