"""Directories as they are found: other weights beside, other spellings, other dtypes, and what a model came with."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from tests.models.hf.families import KINDS
from tests.models.hf.released import config, make, tensors
from weft.errors import ConversionError
from weft.models import HybridConfig, HybridModel, hf
from weft.models.hf.directory import DTYPES, TensorWriter
from weft.models.hf.spelling import full_text_of, text_of
from weft.models.layers.rotary import frequencies

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TOKENS = torch.arange(20)[None]


def replace_tensors(directory, files):
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    with TensorWriter(directory) as writer:
        for name, tensor in files.items():
            writer.put(name, tensor)


def rewrite(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def tied(tmp_path):
    """A directory with a tied Llama."""
    KINDS["llama"].make("tied").save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def test_a_tied_model_may_have_its_head_again_where_it_is_equal(tied):
    files = tensors(tied)
    embedding = files["model.embed_tokens.weight"]
    replace_tensors(tied, {**files, "lm_head.weight": embedding.clone()})
    model = hf.from_pretrained(tied)
    assert torch.equal(model.embedding.weight, embedding)
    hf.save(model, tied.parent / "again")
    assert tensors(tied.parent / "again").keys() == files.keys()
    replace_tensors(tied, {**files, "lm_head.weight": embedding + 1})
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        hf.from_pretrained(tied)
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        hf.convert(tied, tied.parent / "ours")
    assert not (tied.parent / "ours").exists()


def test_frequencies_of_older_releases_are_passed_over(tied):
    expected = hf.from_pretrained(tied)(TOKENS)
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    replace_tensors(tied, {**tensors(tied), **frequencies})
    assert torch.equal(hf.from_pretrained(tied)(TOKENS), expected)
    hf.convert(tied, tied.parent / "ours")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "nemotron_h", "deepseek_v3"])
def test_experts_in_one_tensor_are_read_and_written_as_they_came(tmp_path, kind):
    theirs = KINDS[kind].make()
    theirs.save_pretrained(tmp_path / "apart")
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, memory / "model.safetensors")
    assert any(name.endswith("experts.down_proj") for name in tensors(memory))
    model = hf.from_pretrained(memory)
    assert torch.equal(model(TOKENS), hf.from_pretrained(tmp_path / "apart")(TOKENS))
    hf.save(model, tmp_path / "again")
    hf.convert(memory, tmp_path / "ours")
    hf.convert(tmp_path / "ours", tmp_path / "back")
    for written in (tensors(tmp_path / "again"), tensors(tmp_path / "back")):
        assert written.keys() == tensors(memory).keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in tensors(memory).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-35b-a3b"])
def test_text_in_a_larger_model_is_read_and_everything_is_written_as_it_came(tmp_path, name):
    theirs = make(name, tmp_path / "text")
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text((tmp_path / "text" / "config.json").read_text())
    found = {
        each if each.startswith("lm_head") else each.replace("model.", "model.language_model.", 1): tensor
        for each, tensor in hf_names(tensors(tmp_path / "text")).items()
    }
    found["model.visual.patch_embed.proj.weight"] = torch.randn(4, 3)
    replace_tensors(nested, found)
    model = hf.from_pretrained(nested)
    assert_close(model(TOKENS), theirs(input_ids=TOKENS).logits, **CLOSE)
    hf.save(model, tmp_path / "again")
    hf.convert(nested, tmp_path / "ours")
    hf.convert(tmp_path / "ours", tmp_path / "back")
    for directory in (tmp_path / "again", tmp_path / "back"):
        written = tensors(directory)
        assert written.keys() == found.keys()
        assert all(torch.equal(written[each], tensor) for each, tensor in found.items())
        raw = json.loads((directory / "config.json").read_text())
        assert raw["model_type"] == theirs.config.model_type.removesuffix("_text") and "vision_config" in raw


@pytest.mark.slow
def test_gemma_3_with_images_is_read_and_everything_is_written_as_it_came(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    described = Gemma3Config(text_config=config("gemma-3-1b-it"), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(3)
    theirs = Gemma3ForConditionalGeneration(described).float().eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = hf.from_pretrained(tmp_path / "theirs")
    expected = theirs(input_ids=TOKENS).logits
    assert_close(model(TOKENS), expected, **CLOSE)
    hf.save(model, tmp_path / "again")
    hf.convert(tmp_path / "theirs", tmp_path / "ours")
    hf.convert(tmp_path / "ours", tmp_path / "back")
    found = tensors(tmp_path / "theirs")
    assert any(name.startswith("vision_tower.") or ".vision_tower." in name for name in found)
    for directory in (tmp_path / "again", tmp_path / "back"):
        written = tensors(directory)
        assert written.keys() == found.keys()
        assert all(torch.equal(written[each], tensor) for each, tensor in found.items())
    again = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    assert_close(again(input_ids=TOKENS).logits, expected, **CLOSE)
    larger = grown(model, 3)
    hf.save(larger, tmp_path / "larger")
    again, report = Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "larger", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_close(again.eval()(input_ids=TOKENS).logits[..., :-3], expected, **CLOSE)


def test_tensors_of_every_dtype_are_written_as_they_came(tmp_path):
    """Those that no weight of a text model has may lie beside it, such as scales."""
    found = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    with TensorWriter(tmp_path) as writer:
        for name, tensor in found.items():
            writer.put(name, tensor)
    written = tensors(tmp_path)
    assert {name: tensor.dtype for name, tensor in written.items()} == {str(dtype): dtype for dtype in DTYPES}
    assert all(written[name].view(torch.uint8).equal(tensor.view(torch.uint8)) for name, tensor in found.items())


def hf_names(files):
    """As a text model alone has them."""
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in files.items()}


def test_converting_into_weft_s_own_form_checks_shapes_before_it_writes(tied):
    files = tensors(tied)
    name = "model.layers.0.mlp.up_proj.weight"
    replace_tensors(tied, {**files, name: files[name][:5]})
    with pytest.raises(ConversionError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has the shape \[5, 32\]"):
        hf.convert(tied, tied.parent / "ours")
    assert not (tied.parent / "ours").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8, torch.bool])
def test_weights_that_are_no_plain_numbers_are_refused_by_tensor_and_dtype(tied, dtype):
    files = tensors(tied)
    replace_tensors(tied, {**files, "model.norm.weight": files["model.norm.weight"].to(dtype)})
    for action in (lambda: hf.from_pretrained(tied), lambda: hf.convert(tied, tied.parent / "ours")):
        with pytest.raises(ConversionError, match=r"model\.safetensors: model\.norm\.weight has the dtype [FIB]"):
            action()


def test_experts_of_different_dtypes_are_refused_and_of_doubles_are_read(tmp_path):
    theirs = KINDS["qwen3_moe"].make().double()
    theirs.save_pretrained(tmp_path / "doubles")
    theirs.set_experts_implementation("eager")  # its grouped products have no doubles either
    model = hf.from_pretrained(tmp_path / "doubles", dtype=torch.float64)
    assert_close(model(TOKENS), theirs(input_ids=TOKENS).logits, **CLOSE)
    hf.convert(tmp_path / "doubles", tmp_path / "ours")
    files = tensors(tmp_path / "doubles")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    replace_tensors(tmp_path / "doubles", {**files, name: files[name].float()})
    with pytest.raises(ConversionError, match=r"the parts of .*up_proj.* differ in dtype"):
        hf.from_pretrained(tmp_path / "doubles")


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), "8", None, True])
def test_a_factor_of_rotation_is_a_positive_number(tied, factor):
    rewrite(tied, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": factor})
    with pytest.raises(ConversionError, match=r"config\.json: .*factor"):
        hf.config_of(tied)


def test_tables_of_rotation_do_not_stay_rounded():
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*-]", hidden_size=32))
    cos = model.decoder.layers[0].self_attention.rotary.cos.clone()
    assert torch.equal(model.bfloat16().float().decoder.layers[0].self_attention.rotary.cos, cos)
    assert model.double().decoder.layers[0].self_attention.rotary.cos.dtype == torch.float64


def test_deepseek_with_another_width_than_that_which_is_rotated_is_refused(tmp_path):
    KINDS["deepseek_v3"].make().save_pretrained(tmp_path)
    rewrite(tmp_path, head_dim=16)
    with pytest.raises(ConversionError, match="head_dim=16: must be qk_rope_head_dim=8"):
        hf.config_of(tmp_path)


def test_yarn_without_a_first_context_takes_that_of_the_model(tmp_path):
    KINDS["llama"].make("yarn").save_pretrained(tmp_path)
    rewrite(
        tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}, max_position_embeddings=16
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(hf.from_pretrained(tmp_path)(TOKENS), theirs(input_ids=TOKENS).logits, **CLOSE)


@pytest.mark.parametrize("theta, first", [(100.0, 4), (100.0, 64), (10.0, 100_000)])
def test_pairs_that_yarn_stretches_end_at_the_first_and_the_last(theta, first):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": first}
    theirs = LlamaConfig(
        head_dim=8, max_position_embeddings=4 * first, rope_parameters={"rope_theta": theta, **scaling}
    )
    found, factor = frequencies(8, theta, scaling)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert_close(found, expected)
    assert factor == pytest.approx(expected_factor)


LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
ROTATIONS = {
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 8},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope with a factor": {"rope_type": "longrope", **LONG, "factor": 4.0},
}


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_a_field_that_a_larger_model_and_its_text_model_give_differently_is_refused():
    text = {"model_type": "llama", "tie_word_embeddings": True}
    assert full_text_of({"text_config": text, "tie_word_embeddings": True}) == text
    with pytest.raises(ConversionError, match="tie_word_embeddings=False, and True in text_config"):
        full_text_of({"text_config": text, "tie_word_embeddings": False})


def test_of_two_tables_of_rotation_the_older_one_applies_as_in_transformers():
    raw = {"rope_scaling": {**LLAMA3, "factor": 8.0}, "rope_parameters": LINEAR}
    theirs = LlamaConfig(**copy.deepcopy(raw))
    found = hf.FAMILIES["llama"].config({"model_type": "llama", **raw})
    assert found.rope_scaling["rope_type"] == theirs.rope_parameters["rope_type"] == "llama3"

    raw = {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 70.0}
    full = Gemma3TextConfig(**copy.deepcopy(raw)).rope_parameters["full_attention"]
    found = hf.FAMILIES["gemma3_text"].config({"model_type": "gemma3_text", **raw})
    assert (found.rope_theta, found.rope_scaling) == (full["rope_theta"], LINEAR) == (70.0, LINEAR)
    with pytest.raises(ConversionError, match="reads only rope_type here, not type"):
        hf.FAMILIES["gemma3_text"].config({"rope_scaling": {"type": "linear", "factor": 8.0}})
    with pytest.raises(ConversionError, match="rope_parameters: has factor, rope_type beside its tables"):
        hf.FAMILIES["gemma3_text"].config({"rope_parameters": LINEAR})


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("length", [12, 16, 17, 40])
def test_rotations_that_depend_on_the_length_are_those_of_transformers(tmp_path, rotation, length):
    KINDS["llama"].make().save_pretrained(tmp_path)
    longest = 16 if rotation == "dynamic" else 64
    rewrite(tmp_path, rope_parameters={"rope_theta": 100.0, **ROTATIONS[rotation]}, max_position_embeddings=longest)
    tokens = torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = hf.from_pretrained(tmp_path)
    assert_close(model(tokens), theirs(input_ids=tokens).logits, **CLOSE)
    hf.save(model, tmp_path / "again")
    assert hf.config_of(tmp_path / "again") == model.cfg
    family, raw = hf.family_for(model.cfg, "llama")
    assert family.config(raw) == model.cfg


def test_weights_are_fp32_whatever_torch_s_default_dtype_is(tied):
    expected = hf.from_pretrained(tied)(TOKENS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = hf.from_pretrained(tied)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert torch.equal(model(TOKENS), expected)


def test_a_field_that_is_not_known_is_passed_over_where_it_is_named(tied, capsys):
    from weft.cli import main

    rewrite(tied, mystery=3)
    with pytest.raises(ConversionError, match=r"llama has no mystery in weft: .*--ignore-field"):
        hf.config_of(tied)
    model = hf.from_pretrained(tied, ignored=["mystery"])
    hf.save(model, tied.parent / "again")
    assert json.loads((tied.parent / "again" / "config.json").read_text())["mystery"] == 3
    assert main(["convert", str(tied), str(tied.parent / "ours"), "--ignore-field", "mystery"]) == 0
    assert main(["convert", str(tied.parent / "ours"), str(tied.parent / "back")]) == 0
    assert json.loads((tied.parent / "back" / "config.json").read_text())["mystery"] == 3
    assert capsys.readouterr().out.count(str(tied.parent)) == 2
    assert main(["convert", str(tied.parent / "ours"), str(tied.parent / "more"), "--ignore-field", "mystery"]) == 2
    assert "ignored=['mystery']" in capsys.readouterr().err and not (tied.parent / "more").exists()
    with pytest.raises(ConversionError, match="is in weft's own format, which has no unknown fields"):
        hf.config_of(tied.parent / "ours", ignored=["mystery"])


def with_company(directory):
    """A tokenizer, a chat template and a generation configuration, as releases have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w7", unk_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast.save_pretrained(directory)
    fields = {"eos_token_id": [7, 11], "bos_token_id": 1, "do_sample": False, "max_new_tokens": 40}
    (directory / "generation_config.json").write_text(json.dumps(fields))


def grown(model, rows):
    """A copy of a model that has `rows` more tokens, and what the model came with."""
    larger = HybridModel(dataclasses.replace(model.cfg, vocab_size=model.cfg.vocab_size + rows)).eval()
    state = larger.state_dict()
    for name, tensor in model.state_dict().items():
        state[name][: len(tensor)] = tensor
    larger.origin = model.origin
    return larger


@pytest.mark.parametrize("name", ["deepseek-v3-bf16", "mixtral-8x7b-v0.1", "phi-3-mini-128k-instruct", "qwen3.5-0.8b"])
def test_a_change_of_the_configuration_is_all_that_changes_in_the_original_file(tmp_path, name):
    theirs = make(name, tmp_path / "theirs")
    hf.save(grown(hf.from_pretrained(tmp_path / "theirs"), 3), tmp_path / "larger")
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("theirs", "larger"))
    assert after.keys() - {"dtype"} == before.keys() - {"dtype"}
    before, after = text_of(before), text_of(after)
    changed = {each for each in before | after if before.get(each) != after.get(each) and before.get(each) is not None}
    assert changed - {"dtype", "torch_dtype"} == {"vocab_size"}
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "larger", dtype=torch.float32)(input_ids=TOKENS).logits
    assert_close(logits[..., :-3], theirs(input_ids=TOKENS).logits, **CLOSE)


def test_a_change_that_an_older_field_would_hide_is_written_in_its_place(tmp_path):
    KINDS["llama"].make().save_pretrained(tmp_path / "theirs")
    older = {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    rewrite(tmp_path / "theirs", max_position_embeddings=4321, **older)
    model = hf.from_pretrained(tmp_path / "theirs")
    model.cfg = dataclasses.replace(model.cfg, rope_scaling={"rope_type": "linear", "factor": 4.0})
    hf.save(model, tmp_path / "longer")
    assert hf.config_of(tmp_path / "longer") == model.cfg
    raw = json.loads((tmp_path / "longer" / "config.json").read_text())
    assert raw["max_position_embeddings"] == 4321 and "rope_scaling" not in raw


def test_what_a_model_came_with_goes_into_another_family_as_far_as_it_has_meaning_there(tmp_path):
    KINDS["llama"].make().save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", max_position_embeddings=4321, eos_token_id=7, pretraining_tp=1)
    hf.save(hf.from_pretrained(tmp_path / "theirs"), tmp_path / "mistral", "mistral")
    raw = json.loads((tmp_path / "mistral" / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert (raw["max_position_embeddings"], raw["eos_token_id"]) == (4321, 7) and "pretraining_tp" not in raw
    changed = dataclasses.replace(hf.config_of(tmp_path / "mistral"), sliding_window=None)
    assert changed == hf.config_of(tmp_path / "theirs")
