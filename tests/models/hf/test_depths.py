"""Prediction depths as releases have them: read, written, computed as transformers does, left out by it otherwise."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.models.hf.families import KINDS
from tests.models.hf.test_convert import config, replace_tensors, rewrite, tensors
from weft.errors import ConversionError
from weft.models import HybridModel, hf

BEHIND = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
AROUND = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
NEMOTRON = ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm", "mtp.layers.0.eh_proj")
# Of which layers of the model a depth has the like, under which prefixes; the rest; what our pattern ends in.
PUBLISHED = {
    "deepseek_v3": ([("model.layers.{last}.", "model.layers.{next}.")] * 2, "model.layers.{next}.", "/[+E]/[+E]"),
    "glm4_moe": ([("model.layers.{last}.", "model.layers.{next}.")], "model.layers.{next}.", "/[*E]"),
    "qwen3_next": ([("model.layers.{last}.", "mtp.layers.0.")], QWEN, "/[*E]"),
    "qwen3_5_text": ([("model.layers.{last}.", "mtp.layers.0.")], QWEN, "/[*-]"),
    "qwen3_5_moe_text": ([("model.layers.{last}.", "mtp.layers.0.")], QWEN, "/[*E]"),
    "nemotron_h": ([("backbone.layers.2.", "mtp.layers.0."), ("backbone.layers.1.", "mtp.layers.1.")], NEMOTRON, "/*E"),
}


def published(directory, kind):
    """A model of that family with random weights of prediction depths beside it, as releases have them."""
    main = KINDS[kind].make()
    main.save_pretrained(directory)
    files = tensors(directory)
    generator = torch.Generator().manual_seed(5)
    layers = main.config.num_hidden_layers
    prefixes, around, _ = PUBLISHED[kind]
    added = {}
    for number, (source, target) in enumerate(prefixes):
        source, target = (each.format(last=layers - 1, next=layers + number) for each in (source, target))
        for name, tensor in files.items():
            if name.startswith(source):
                like = torch.randn(tensor.shape, generator=generator) * 0.2
                added[target + name.removeprefix(source)] = like.to(tensor.dtype)
        if isinstance(around, str):
            before = around.format(next=layers + number)
            names = [before + each for each in AROUND]
            added |= {f"{before}{name}.weight": files[copy].clone() for name, copy in BEHIND.items()}
        elif number == 0:
            names = around
        width = main.config.hidden_size
        for name in names if number == 0 or isinstance(around, str) else ():
            shape = (width, 2 * width) if name.endswith(("eh_proj", "fc")) else (width,)
            added[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.2
    replace_tensors(directory, {**files, **added})
    return main


@pytest.mark.slow
@pytest.mark.parametrize("kind", PUBLISHED)
def test_depths_are_made_exactly_when_their_weights_are_there_and_come_back_bit_for_bit(tmp_path, kind):
    theirs, ours, back, again = (tmp_path / name for name in ("theirs", "ours", "back", "again"))
    main = published(theirs, kind)
    cfg = hf.config_of(theirs)
    assert cfg.pattern.endswith(PUBLISHED[kind][2])
    hf.convert(theirs, ours)
    hf.convert(ours, back)
    assert hf.config_of(ours) == cfg
    model = HybridModel(cfg)
    hf.load(model, theirs)
    hf.save(model, again, kind)
    expected = tensors(theirs)
    for directory in (back, again):
        found = tensors(directory)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert hf.config_of(directory) == cfg
    loaded = AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in main.state_dict().items())
    main.save_pretrained(tmp_path / "without")
    assert hf.config_of(tmp_path / "without").pattern == cfg.pattern.partition("/")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_transformers_reads_the_depths_that_are_written_and_computes_the_same(tmp_path, kind):
    published(tmp_path / "theirs", kind)
    model = HybridModel(hf.config_of(tmp_path / "theirs"))
    hf.load(model, tmp_path / "theirs")
    hf.save(model, tmp_path / "ours", kind)
    main = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    count = model.cfg.parsed.depths
    main.config.num_mtp_layers, main.config.mtp_layer_types = count, ["full_attention"] * count
    if kind != "qwen3_next":  # transformers knows the numbers of the layers in releases only
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.[{main.config.num_hidden_layers}-9]\."]
    theirs = MtpModel.from_pretrained(main).eval()
    assert theirs.num_mtp_layers == count
    tokens = torch.randint(main.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = main.model(input_ids=tokens).last_hidden_state
    ours = model.final_norm(model.decoder(model.embed(tokens))[0])
    positions = torch.arange(9)[None].expand(2, -1)
    with torch.no_grad():
        for number, depth in enumerate(model.depths):
            following = torch.cat([tokens[:, number + 1 :], tokens.new_zeros(2, number + 1)], dim=1)
            hidden = theirs.forward_layer(number, hidden, positions, None, input_ids=following)
            ours, _ = depth(model.following(number, tokens), ours)
            assert_close(ours, hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_copy_that_is_not_equal_is_refused_and_one_that_is_missing_is_not(tmp_path):
    published(tmp_path, "glm4_moe")
    files, name = tensors(tmp_path), "model.layers.3.embed_tokens.weight"
    model = HybridModel(hf.config_of(tmp_path))
    replace_tensors(tmp_path, {each: tensor for each, tensor in files.items() if each != name})
    hf.load(model, tmp_path)
    replace_tensors(tmp_path, {**files, name: files[name] + 1})
    with pytest.raises(ConversionError, match=r"layers\.3\.embed_tokens\.weight differs from model\.embed_tokens"):
        hf.load(model, tmp_path)


def test_a_depth_with_a_missing_weight_is_refused(tmp_path):
    published(tmp_path, "qwen3_next")
    replace_tensors(tmp_path, {name: tensor for name, tensor in tensors(tmp_path).items() if name != "mtp.norm.weight"})
    with pytest.raises(ConversionError, match=r"missing: mtp\.norm\.weight"):
        hf.load(HybridModel(hf.config_of(tmp_path)), tmp_path)


def test_a_model_and_a_directory_with_other_depths_are_refused(tmp_path):
    published(tmp_path / "theirs", "qwen3_next")
    cfg = hf.config_of(tmp_path / "theirs")
    with pytest.raises(ConversionError, match=r"holds another model: pattern=.*, there .*/"):
        hf.load(HybridModel(dataclasses.replace(cfg, pattern=cfg.pattern.partition("/")[0])), tmp_path / "theirs")
    two = HybridModel(dataclasses.replace(cfg, pattern=cfg.pattern + "/[*E]"))
    with pytest.raises(ConversionError, match="qwen3_next has 1 prediction depth at most, not 2"):
        hf.save(two, tmp_path / "ours", "qwen3_next")
    other = HybridModel(dataclasses.replace(cfg, pattern=cfg.pattern.partition("/")[0] + "/[GE]"))
    with pytest.raises(ConversionError, match="qwen3_next cannot hold pattern="):
        hf.save(other, tmp_path / "ours", "qwen3_next")


def test_nemotron_s_field_says_what_a_depth_is_made_of(tmp_path):
    published(tmp_path, "nemotron_h")
    assert config(tmp_path)["mtp_layers_block_type"] == ["full_attention", "moe"]
    older = ({"mtp_hybrid_override_pattern": "*E"}, {"mtp_hybrid_override_pattern": None})
    for changes in ({"mtp_layers_block_type": ["attention", "moe"]}, *older):
        rewrite(tmp_path, **changes)
        assert hf.config_of(tmp_path).pattern.endswith("/*E")
    rewrite(tmp_path, mtp_hybrid_override_pattern="*Q")
    with pytest.raises(ConversionError, match=r"nemotron_h does not describe a model: .*'Q'"):
        hf.config_of(tmp_path)
