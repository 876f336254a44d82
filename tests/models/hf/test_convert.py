"""Directories into ours and back, and weights into sharded models."""

import dataclasses
import json
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.models.hf.families import CASES, KINDS
from tests.models.hf.released import FAMILIES as RELEASES
from tests.models.hf.released import config as released
from weft.cli import main
from weft.errors import ConversionError
from weft.models import HybridConfig, HybridModel, hf
from weft.models.hf import places
from weft.models.hf.directory import TensorFiles, TensorWriter
from weft.models.hf.families import FAMILIES
from weft.models.hf.spelling import text_of


def tensors(directory):
    files = TensorFiles(directory)
    return {name: files[name][:] for name in files}


def replace_tensors(directory, files):
    with TensorWriter(directory) as writer:
        for name, tensor in files.items():
            writer.put(name, tensor)


def config(directory):
    return json.loads((directory / "config.json").read_text())


def rewrite(directory, **changes):
    (directory / "config.json").write_text(json.dumps({**config(directory), **changes}))


@pytest.fixture
def there(tmp_path):
    """A directory with a small Qwen3-Next."""
    KINDS["qwen3_next"].make().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


VARIED = [case for case in CASES if case[1] != "plain" or case[0] == "llama"]
"""Of other families test_released.py converts a release, and back."""


@pytest.mark.slow
@pytest.mark.parametrize("kind, variation", VARIED, ids=[" ".join(case) for case in VARIED])
def test_a_directory_converted_and_back_is_the_same_bit_for_bit(tmp_path, kind, variation):
    model = KINDS[kind].make(variation).to(torch.bfloat16)
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    model.save_pretrained(theirs)
    (theirs / "tokenizer.json").write_text("{}")
    hf.convert(theirs, ours)
    hf.convert(ours, back)
    expected, found = tensors(theirs), tensors(back)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert (back / "tokenizer.json").read_text() == "{}" and (back / "generation_config.json").exists()
    again, original = config(back), config(theirs)
    changed = {name for name, value in original.items() if again.get(name, value) != value}
    assert all(original[name] is None for name in changed)  # a width that followed from others is spelled out
    if again != original:
        loaded = AutoModelForCausalLM.from_pretrained(back, dtype=torch.bfloat16).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded[name], tensor), name


def test_a_model_that_is_saved_is_read_by_transformers(tmp_path):
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*E]*E", num_experts=4, head_dim=8, vocab_size=61)).eval()
    hf.save(model, tmp_path)
    assert config(tmp_path)["model_type"] == "mixtral"
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_close(loaded(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_one_file_is_written_into_several_with_an_index(tmp_path):
    torch.manual_seed(0)
    expected = {f"tensor {number}": torch.randn(10, number + 1) for number in range(5)}  # 40 to 200 bytes
    with TensorWriter(tmp_path, file_bytes=200) as writer:
        for name, tensor in expected.items():
            writer.put(name, tensor)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors"))[-1] == "model-00004-of-00004.safetensors"
    found = tensors(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tensor_that_is_missing_or_unused_is_named(there):
    files = tensors(there)
    files["model.extra"] = files.pop("model.norm.weight")
    replace_tensors(there, files)
    with pytest.raises(ConversionError, match=r"missing: model\.norm\.weight; unused: model\.extra"):
        hf.load(HybridModel(hf.config_of(there)), there)
    with pytest.raises(ConversionError, match=r"missing: model\.norm\.weight; unused: model\.extra"):
        hf.convert(there, there.parent / "ours")
    assert not (there.parent / "ours").exists()


def test_a_tensor_of_another_shape_is_named(there):
    files = tensors(there)
    replace_tensors(there, {**files, "lm_head.weight": files["lm_head.weight"][:5]})
    with pytest.raises(ConversionError, match=r"lm_head.weight has the shape \[5, 32\], but output_layer"):
        hf.load(HybridModel(hf.config_of(there)), there)


CHANGES = [
    ({"clip_qkv": 8.0}, "no clip_qkv in weft"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "factor": 2.0}}, "'longrope'"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1.0}}, "'proportional'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized by 'fp8'"),
    ({"model_type": "bert"}, "model_type='bert': choose from llama"),
    ({"layer_types": ["linear_attention", "windowed"]}, "full_attention, linear_attention only, not windowed"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types: 3, but qwen3_next needs .*num_hidden_layers=2"),
    ({"layer_types": 2}, "layer_types=2: must be a list"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
]


@pytest.mark.parametrize("changes, message", CHANGES, ids=[message for _, message in CHANGES])
def test_a_field_that_changes_the_result_and_is_not_supported_is_named(there, changes, message):
    rewrite(there, **changes)
    with pytest.raises(ValueError, match=message):
        hf.config_of(there)


HELD = {
    "falcon_h1": {"pattern": "[P-][P-]", "mamba_norm": "none", "mamba_num_heads": 4, "mamba_head_dim": 8},
    "gemma3_text": {
        "qk_norm": "head",
        "norm_order": "both",
        "zero_centered_norm": True,
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": 32**0.5,
        "embedding_multiplier_rounded": True,
    },
    "granite": {"residual_multiplier": 0.5},
    "granitemoe": {"pattern": "[*E]", "num_experts": 4},
    "granitemoehybrid": {"pattern": "[*-][M-]", "rope_theta": 0.0, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "gpt_oss": {
        "pattern": "[*E]",
        "num_experts": 4,
        "hidden_act": "clamped_swiglu",
        "attention_sinks": True,
        "experts_bias": True,
        "router_bias": True,
    },
    "olmo3": {"qk_norm": "full", "norm_order": "post"},
}
"""Models without what weft's fields may leave open (a head's width, a scale, a window) and transformers' may not."""


@pytest.mark.parametrize("kind", HELD)
def test_what_a_configuration_leaves_open_is_written_as_transformers_needs_it(tmp_path, kind):
    sizes = {"pattern": "[*-][*-]", "vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "chunk_size": 8}
    cfg = HybridConfig(**{**sizes, **HELD[kind]})
    torch.manual_seed(0)
    model = HybridModel(cfg).eval()
    hf.save(model, tmp_path, kind)
    assert not hf.differences(cfg, hf.config_of(tmp_path))
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert_close(loaded(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


OLDER = {
    "llama": ("yarn", {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "nemotron_h": ("plain", {"layers_block_type": None, "hybrid_override_pattern": "ME*-"}),
    "qwen3_next": ("plain", {"layer_types": None, "full_attention_interval": 2}),
}


@pytest.mark.parametrize("kind", OLDER)
def test_older_spellings_of_fields_mean_the_same(tmp_path, kind):
    variation, changes = OLDER[kind]
    KINDS[kind].make(variation).save_pretrained(tmp_path)
    expected = hf.config_of(tmp_path)
    if "rope_scaling" in changes:
        changes["rope_scaling"]["original_max_position_embeddings"] = 16
    rewrite(tmp_path, **changes)
    assert hf.config_of(tmp_path) == expected


UNHELD = [
    ({"pattern": "[M*-]"}, r"layers of bamba are pairs such as \[\*-\]"),
    ({"pattern": "[*E]", "capacity_factor": 1.0}, r"mixtral cannot hold capacity_factor=1.0 \(it has None\)"),
    ({"pattern": "[*-]", "zero_centered_norm": True}, r"llama cannot hold zero_centered_norm=True \(it has False\)"),
    ({"pattern": "*-M", "time_step_limit_min": 0.1}, "nemotron_h cannot hold .*rope_theta=10000.0"),
    ({"pattern": "[ME][M-]", "rope_theta": 0.0}, "granitemoehybrid has experts in all layers or in none"),
    ({"pattern": "*-*"}, r"layers of llama are pairs such as \[\*-\]"),
]


@pytest.mark.parametrize("options, message", UNHELD, ids=[options["pattern"] for options, _ in UNHELD])
def test_a_model_that_no_family_can_hold_is_refused_with_the_reasons(options, message):
    with pytest.raises(ConversionError, match=message) as error:
        hf.family_for(HybridConfig(**options))
    named = [name for name in FAMILIES if re.search(rf"\b{name}\b", str(error.value))]
    assert len(named) == 3 and f"the nearest of {len(FAMILIES)}: " in str(error.value)


NOT_READ = {
    "gemma3_text": ({"attention_scale": 0.3}, r"query_pre_attn_scalar=11\.1111 must be a whole number"),
    "granite": ({"hidden_act": "relu2"}, r"granite cannot hold hidden_act='relu2' \(it has 'silu'\)"),
    "kimi_linear": ({"tie_word_embeddings": True}, r"cannot hold tie_word_embeddings=True \(it has False\)"),
    "llama": ({"hidden_act": "gelu_tanh"}, r"llama cannot hold hidden_act='gelu_tanh' \(it has 'silu'\)"),
    "nemotron_h": ({"shared_expert_intermediate_size": 0}, "cannot hold shared_expert_intermediate_size=0"),
    "phi3": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'longrope' only, not 'linear'"),
}


@pytest.mark.parametrize("kind", NOT_READ)
def test_what_transformers_would_misread_is_refused(kind):
    changes, message = NOT_READ[kind]
    family, name = RELEASES[kind]
    cfg = dataclasses.replace(family.config(text_of(released(name))), **changes)
    with pytest.raises(ConversionError, match=message):
        hf.family_for(cfg, kind)


def adapted(model):
    model.decoder.layers[0].mixer.out_proj.lora_A = torch.nn.Linear(2, 2)


def parametrized(model):
    parametrize.register_parametrization(model.decoder.layers[1].mlp.experts, "up_proj", torch.nn.Identity())


def enlarged(model):
    model.output_layer.weight = torch.nn.Parameter(torch.zeros(70, model.cfg.hidden_size))


def shortened(model):
    del model.decoder.layers[1]


def stateful(model):
    """An extra state, which is no tensor."""
    layer = model.decoder.layers[0]
    layer.__class__ = type("Stateful", (type(layer),), {"get_extra_state": lambda self: {"step": 1}})


@pytest.mark.parametrize("change", [adapted, parametrized, enlarged, shortened, stateful])
def test_tensors_that_a_configuration_does_not_describe_are_named(there, tmp_path, change):
    model = hf.from_pretrained(there)
    change(model)
    with pytest.raises(ConversionError, match=r"differ in (decoder\.layers\.|output_layer)\S*.*: merge adapters"):
        hf.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ConversionError, match="the model and its configuration differ in"):
        hf.load(model, there)


def test_compiled_layers_are_saved_and_a_module_around_a_model_is_refused(there, tmp_path):
    model = hf.from_pretrained(there)
    for around in (torch.compile(model), torch.nn.DataParallel(model)):
        for use in (hf.save, hf.load):
            with pytest.raises(TypeError, match=r"got a (OptimizedModule|DataParallel): pass the HybridModel"):
                use(around, tmp_path / "saved")
    for number, layer in enumerate(model.decoder.layers):
        model.decoder.layers[number] = torch.compile(layer)
    hf.save(model, tmp_path / "saved")
    before, after = tensors(there), tensors(tmp_path / "saved")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_directory_of_another_model_is_refused(there):
    cfg = hf.config_of(there)
    with pytest.raises(ConversionError, match=r"num_experts_per_tok=1, there 2"):
        hf.load(HybridModel(dataclasses.replace(cfg, num_experts_per_tok=1)), there)
    with pytest.raises(ConversionError, match=r"pattern='\[GE\]', there '\[GE\]\[\*E\]'"):
        hf.load(HybridModel(dataclasses.replace(cfg, pattern="[GE]")), there)


def test_converting_onto_something_is_refused(there):
    with pytest.raises(ConversionError, match="not empty"):
        hf.convert(there, there)


@pytest.mark.slow
def test_the_command_converts_and_names_what_is_wrong(there, capsys):
    ours, back = there.parent / "ours", there.parent / "back"
    assert main(["convert", str(there), str(ours)]) == 0
    assert main(["convert", str(ours), str(back)]) == 0
    assert hf.config_of(back) == hf.config_of(there)
    assert main(["convert", str(ours), str(there.parent / "other"), "--family", "llama"]) == 2
    assert "llama has no layer" in capsys.readouterr().err


QUANTIZED = {"gpt_oss": "mxfp4", "granitemoehybrid": "fp8", "bamba": "compressed-tensors", "deepseek_v3": "fp8"}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_releases_are_refused_by_the_name_of_their_method(tmp_path, kind):
    KINDS[kind].make().save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", quantization_config={"quant_method": QUANTIZED[kind]})
    with pytest.raises(ConversionError, match=f"quantized by '{QUANTIZED[kind]}'"):
        hf.convert(tmp_path / "theirs", tmp_path / "ours")


WRITTEN_BY_OTHERS = [
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"}),
    ("granitemoehybrid", {"time_step_limit": None, "mamba_d_head": "auto"}),
    ("bamba", {"attn_rotary_emb": 4}),
    ("gpt_oss", {"layer_types": None}),
]


@pytest.mark.parametrize("kind, changes", WRITTEN_BY_OTHERS, ids=[str(changes) for _, changes in WRITTEN_BY_OTHERS])
def test_what_releases_have_in_other_words_means_the_same(tmp_path, kind, changes):
    KINDS[kind].make().save_pretrained(tmp_path)
    expected = hf.config_of(tmp_path)
    rewrite(tmp_path, **changes)
    assert hf.config_of(tmp_path) == expected


WRONG_WIDTHS = [
    ("bamba", {"attn_rotary_emb": 8}, "attn_rotary_emb=8: weft's bamba rotates half of a head, 4"),
    ("granitemoehybrid", {"mamba_d_head": 5}, "mamba_n_heads=4 times mamba_d_head=5 must equal .* 64"),
]


@pytest.mark.parametrize("kind, changes, message", WRONG_WIDTHS, ids=[str(case[1]) for case in WRONG_WIDTHS])
def test_numbers_that_weft_would_not_follow_are_refused(tmp_path, kind, changes, message):
    KINDS[kind].make().save_pretrained(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ConversionError, match=message):
        hf.config_of(tmp_path)


@pytest.mark.parametrize(
    "field, value", [("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_layer_freq", 2)]
)
def test_another_router_than_deepseek_s_is_refused(field, value):
    plain = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    family = hf.family_of(plain)
    family.config(plain)
    with pytest.raises(ConversionError, match=f"{field}={value!r}"):
        family.config({**plain, field: value})


def make_small():
    torch.manual_seed(0)
    return HybridModel(HybridConfig(pattern="[*-]", hidden_size=16))


@pytest.mark.parametrize("below", ["", "below"])
def test_a_target_that_cannot_be_made_is_one_line(there, tmp_path, capsys, below):
    (tmp_path / "file").write_text("as it was")
    target = tmp_path / "file" / below
    assert main(["convert", str(there), str(target)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{target} cannot be created (" in said and "name a new directory" in said
    with pytest.raises(ConversionError, match="cannot be created"):
        hf.save(HybridModel(HybridConfig(pattern="[*-]", hidden_size=16)), target)
    assert (tmp_path / "file").read_text() == "as it was"


def test_a_directory_with_a_model_is_not_written_over(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    hf.save(make_small(), tmp_path)
    with pytest.raises(ConversionError, match=r"already contains a model \(config\.json, model\.safetensors\)"):
        hf.save(make_small(), tmp_path)


def test_a_width_that_follows_from_others_is_that_width(tmp_path):
    model = make_small()
    hf.save(model, tmp_path)
    assert (model.cfg.head_dim, hf.config_of(tmp_path).head_dim) == (None, 4)
    hf.load(model, tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "", "..", 3])
def test_an_index_names_only_files_in_its_folder(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ConversionError, match="not a file in its directory"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match=r"index\.json .*undamaged copy"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"width": 3}}', '{"model": {"hidden_size": -1}}'])
def test_a_damaged_description_is_named(tmp_path, text):
    (tmp_path / "weft-model.json").write_text(text)
    with pytest.raises(ConversionError, match=r"weft-model\.json .*undamaged copy"):
        hf.config_of(tmp_path)


def test_folders_do_not_come_along(tmp_path):
    hf.save(make_small(), tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer_files").mkdir()
    hf.convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours" / "tokenizer_files").exists()


LARGEST = 24 << 20
WIDE = {"vocab_size": 64, "hidden_size": 512, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": LARGEST // 4 // 8 // 512}
LARGE = {
    "llama": {"pattern": "[*-]", "intermediate_size": LARGEST // 4 // 512},
    "mixtral": {"pattern": "[*E]", **EXPERTS},
    "qwen3_next": {
        "pattern": "[G-]",
        "attention_output_gate": True,
        "qk_norm": "head",
        "zero_centered_norm": True,
        "linear_num_key_heads": 64,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 96,
        "shared_expert_gate": False,
        "intermediate_size": 64,
    },
    "granitemoehybrid": {"pattern": "[*E]", "rope_theta": 0.0, "attention_scale": 1.0, **EXPERTS, "head_dim": None}
    | {"shared_expert_intermediate_size": 64},
    "gpt_oss": {
        "pattern": "[*E]",
        **EXPERTS,
        "attention_sinks": True,
        "experts_bias": True,
        "router_bias": True,
        "attention_bias": "all",
        "hidden_act": "clamped_swiglu",
        "sliding_window": 4,
    },
}


def memory():
    """Bytes of this process that no file has."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


def most_memory(action):
    """The largest `memory` while `action` runs, above that before it."""
    before, most, done = memory(), 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return most


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_converting_needs_less_memory_than_the_largest_weight_and_a_half(tmp_path, kind):
    """And a constant: what is read at once, twice."""
    cfg = HybridConfig(**{**WIDE, **LARGE[kind]})
    with torch.device("meta"):
        model = HybridModel(cfg)
    largest = max(weight.nbytes for weight in model.parameters())
    assert largest >= LARGEST * 0.99
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf.save(HybridModel(cfg), tmp_path / "theirs", kind)
    allowed = 1.5 * largest + 2 * places.BLOCK_BYTES
    assert most_memory(lambda: hf.convert(tmp_path / "theirs", tmp_path / "ours")) < allowed
    assert most_memory(lambda: hf.convert(tmp_path / "ours", tmp_path / "back")) < allowed
    for name, tensor in tensors(tmp_path / "theirs").items():
        assert torch.equal(TensorFiles(tmp_path / "back")[name][:], tensor), name


def test_a_writer_that_fails_leaves_no_file_behind(tmp_path):
    with pytest.raises(KeyError), TensorWriter(tmp_path) as writer:
        writer.put("first", torch.ones(3))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_dtypes_of_several_widths_shapes_of_all_kinds_and_views_are_written(tmp_path):
    torch.manual_seed(0)
    expected = {
        "odd": torch.randn(3).bfloat16(),
        "wide": torch.randn(4, 2),
        "scalar": torch.tensor(7.0).double(),
        "turned": torch.randn(5, 3).T,
        "empty": torch.randn(0, 4),
        "half": torch.randn(2).half(),
    }
    with TensorWriter(tmp_path) as writer:
        for name, tensor in expected.items():
            writer.put(name, tensor)
    files = TensorFiles(tmp_path)
    for name, tensor in expected.items():
        assert files.dtype(name) == tensor.dtype and torch.equal(files[name][...], tensor)
