"""A published model goes into a run and out of it, and generates as transformers does."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.models.hf.families import KINDS
from tests.train.command import weft, write_config
from tests.train.test_conversations import CHATML, tokenizer_in
from weft.cli import main
from weft.models import HybridConfig, HybridModel, hf
from weft.models.generate import continuations
from weft.models.hf.generation import NEUTRAL, generation_of
from weft.models.hf.origin import origin_of
from weft.train.source import Source


@pytest.fixture
def published(tmp_path):
    """A small Llama with a tokenizer, a chat template and a generation configuration."""
    directory = tmp_path / "published"
    fast, _ = tokenizer_in(directory, CHATML)
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*-]", vocab_size=len(fast), hidden_size=16))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    hf.save(model, directory)
    fields = {"eos_token_id": [7, 11], "repetition_penalty": 1.3, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(fields))
    raw = json.loads((directory / "config.json").read_text())
    raw |= {"max_position_embeddings": 4321, "eos_token_id": 7, "_name_or_path": "somewhere"}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.long
def test_what_a_model_came_with_goes_through_a_run(published, tmp_path):
    cfg = hf.config_of(published)
    sizes = ("pattern", "vocab_size", "hidden_size", "head_dim", "num_key_value_heads", "intermediate_size")
    changes = {f"model__{name}": getattr(cfg, name) for name in (*sizes, "num_attention_heads")}
    config = write_config(tmp_path, train__steps=2, data__tokenizer=str(published / "tokenizer.json"), **changes)
    done = weft("train", str(config), "--from", str(published))
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in (tmp_path / "runs").iterdir() if (path / "checkpoints").is_dir())
    assert main(["convert", str(run), str(tmp_path / "again")]) == 0
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (raw["max_position_embeddings"], raw["eos_token_id"], raw["_name_or_path"]) == (4321, 7, "somewhere")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.generation_config.eos_token_id == [7, 11]
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == CHATML
    assert Source(run).generation == Source(published).generation
    assert Source(run).template.render([{"role": "user", "content": "a"}]).startswith("<|im_start|>user")


@pytest.mark.slow
def test_a_published_model_is_sampled_as_transformers_generates(published, capsys):
    theirs, words = AutoModelForCausalLM.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    prompts = ["hello there", "a", "these are all of the words"]
    expected = []
    for prompt in prompts:
        ids = words(prompt, return_tensors="pt")["input_ids"]
        assert ids[0, 0] == words.bos_token_id
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0)
        expected.append([each for each in found[0, ids.shape[1] :].tolist() if each not in (7, 11)])
    source = Source(published)
    parts = ["", "", ""]
    for row, part in source.added(prompts, tokens=20):
        parts[row] += part
    for text, ids in zip(parts, expected):
        assert words.decode(ids).startswith(text)  # a last character may be unfinished
    assert main(["sample", str(published), "--prompt", prompts[0], "--tokens", "20"]) == 0
    assert capsys.readouterr().out == prompts[0] + parts[0] + "\n"
    assert (
        main(["sample", str(published), "--tokens", "3", *(word for each in prompts for word in ("--prompt", each))])
        == 0
    )
    assert capsys.readouterr().out.count("\n\n") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_together_are_continued_as_each_alone_by_transformers(tmp_path, kind):
    theirs = KINDS[kind].make()
    theirs.save_pretrained(tmp_path)
    model = hf.from_pretrained(tmp_path)
    prompts = [[5, 9, 11, 2, 40], [3], [7, 8, 9]]
    first = [
        theirs.generate(torch.tensor([each]), **PLAIN, max_new_tokens=9)[0, len(each) :].tolist() for each in prompts
    ]
    ends = [first[0][4]]
    theirs.generation_config.eos_token_id = ends
    found: list[list[int]] = [[], [], []]
    from weft.models.generate import Sampling

    for step in continuations(model, prompts, ends=ends, most=9, sampling=Sampling(temperature=0)):
        for row, token in enumerate(step):
            found[row] += [] if token is None else [token]
    for row, tokens in zip(found, first):
        until = tokens.index(ends[0]) if ends[0] in tokens else len(tokens)
        assert row == tokens[:until]


PLAIN = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_the_files_of_a_model_say_how_it_chooses_tokens(published):
    path = published / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "num_beams": 4, "min_p": 0.1}))
    generation = generation_of(origin_of(published))
    assert (generation.sampling.temperature, generation.sampling.top_p, generation.sampling.top_k) == (0.6, 0.9, 50)
    assert generation.ends == {7} and generation.not_followed == ("num_beams=4", "min_p=0.1")
    for damage in ("{", "[]", '{"do_sample": true, "temperature": "warm"}', '{"eos_token_id": "x"}'):
        path.write_text(damage)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            generation_of(origin_of(published))


WITHOUT_EFFECT = {
    *(
        "max_length",
        "max_new_tokens",
        "max_time",
        "num_return_sequences",
        "renormalize_logits",
        "remove_invalid_values",
    ),
    *("early_stopping", "length_penalty", "diversity_penalty"),  # of beams
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_logits", "return_dict_in_generate", "use_cache", "cache_implementation", "cache_config"),
    *("max_cache_len", "low_memory", "prefill_chunk_size", "compile_config", "disable_compile", "use_mtp"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "continuous_batching_config"),
    *("transformers_version", "_from_model_config"),
}


def test_every_field_of_transformers_is_followed_or_told_or_without_effect():
    followed = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id"}
    assert vars(GenerationConfig()).keys() == {*NEUTRAL, *followed, *WITHOUT_EFFECT}


def test_options_without_effect_and_values_without_meaning_are_refused(published, capsys):
    assert main(["sample", str(published), "--top-p", "0.5"]) == 2
    assert "has no effect when the most likely token is chosen" in capsys.readouterr().err
    assert main(["sample", str(published), "--top-k", "-1"]) == 2
    assert "--top-k -1: must be at least 0" in capsys.readouterr().err


def test_the_model_section_of_a_directory_is_printed(published, capsys):
    from weft.train.config import parse_config

    assert main(["config", "--from", str(published)]) == 0
    section = capsys.readouterr().out
    assert section.startswith("# settings that are not listed have their defaults") and "\n[model]\n" in section
    assert parse_config(section).model == hf.config_of(published)
