"""A configuration with fewer fields, more fields or older places of fields means what it means to transformers."""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from tests.models.hf.released import FAMILIES, IGNORED, READ, config
from weft.errors import ConversionError
from weft.models import hf
from weft.models.hf.family import differences
from weft.models.hf.fields import KEPT, MEANINGLESS
from weft.models.hf.spelling import full_text_of

WITHOUT_DEFAULTS = {
    "glm4_moe": "hidden_size=4096 is not a multiple of num_attention_heads=96",
    "nemotron_h": "neither layers_block_type nor hybrid_override_pattern",
}
"""Families whose model_type alone describes no model here."""
POSITIONS = [each for each in FAMILIES if each not in ("mamba2", "nemotron_h", "kimi_linear")]
THETA = 12345.0


def filled(kind, raw):
    """The same with all defaults of transformers."""
    return json.loads(CONFIG_MAPPING[kind].from_dict(raw).to_json_string(use_diff=False))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_type_alone_is_the_model_of_all_defaults(kind):
    family, bare = FAMILIES[kind][0], {"model_type": kind}
    if kind in WITHOUT_DEFAULTS:
        with pytest.raises(ConversionError, match=WITHOUT_DEFAULTS[kind]):
            family.config(bare)
    else:
        assert differences(family.config(bare), family.config(filled(kind, bare))) == []


@pytest.mark.parametrize("kind", POSITIONS)
def test_the_base_and_the_fraction_of_a_rotation_may_be_in_the_older_fields(kind):
    family, name = FAMILIES[kind]
    raw = full_text_of(config(name))
    plain = {each: value for each, value in raw.items() if not each.startswith("rope_")}
    for each in ("attn_rotary_emb", "rotary_dim"):  # they must fit the part
        plain.pop(each, None)
    if kind == "granitemoehybrid":
        plain["position_embedding_type"] = "rope"
    more = {"rope_theta": THETA}
    if family.config(plain, ignored=IGNORED.get(name, ())).partial_rotary_factor != 1:
        more["partial_rotary_factor"] = 0.75
    if kind == "bamba":
        with pytest.raises(ConversionError, match=r"partial_rotary_factor=0\.75: transformers reads 0\.5"):
            family.config({**plain, **more})
        del more["partial_rotary_factor"]
    by_type = kind in ("gemma3_text", "olmo3")
    table = {"rope_type": "default", **more}
    newer = {"rope_parameters": {"full_attention": table, "sliding_attention": table} if by_type else table}
    for given in (more, newer):
        ours = family.config({**plain, **given}, ignored=IGNORED.get(name, ()))
        assert all(getattr(ours, each) == value for each, value in more.items())
        theirs = family.config(filled(kind, {**plain, **given}), ignored=IGNORED.get(name, ()))
        assert differences(ours, theirs) == []


PARTS = {"glm4_moe": 0.5, "qwen3_next": 0.25, "qwen3_5_text": 0.25}


@pytest.mark.parametrize("kind", PARTS)
def test_a_fraction_that_is_null_is_no_absent_one(kind):
    family, name = FAMILIES[kind]
    raw = {each: value for each, value in full_text_of(config(name)).items() if not each.startswith("rope_")}
    absent = family.config({each: value for each, value in raw.items() if each != "partial_rotary_factor"})
    null = {**raw, "partial_rotary_factor": None}
    assert (absent.partial_rotary_factor, family.config(null).partial_rotary_factor) == (PARTS[kind], 1.0)
    assert CONFIG_MAPPING[kind].from_dict(null).rope_parameters.get("partial_rotary_factor") is None  # whole heads


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_release_without_one_of_its_fields_is_refused_or_means_what_it_means_to_transformers(kind):
    family, name = FAMILIES[kind]
    raw, ignored = full_text_of(config(name)), IGNORED.get(name, ())
    same = 0
    for absent in raw.keys() - {"model_type"}:
        less = {each: value for each, value in raw.items() if each != absent}
        try:
            ours = family.config(less, ignored=ignored)
        except ConversionError:
            continue
        try:
            theirs = filled(kind, less)
        except ValueError:
            continue
        assert differences(family.config(theirs, ignored=ignored), ours) == [], absent
        same += 1
    assert same > 10


@pytest.mark.parametrize("name", READ)
def test_what_transformers_writes_of_a_release_in_short_and_in_full_describes_the_same_model(tmp_path, name):
    path, ignored = tmp_path / "config.json", IGNORED.get(name, ())
    path.write_text(json.dumps(config(name)))
    ours, theirs = hf.config_of(tmp_path, ignored=ignored), AutoConfig.from_pretrained(tmp_path)
    for part in (theirs, theirs.get_text_config()):
        for short in (True, False):
            path.write_text(part.to_json_string(use_diff=short))
            assert differences(ours, hf.config_of(tmp_path, ignored=ignored)) == []


OF_OTHER_PROGRAMS = {
    "gradient_checkpointing": True,
    "quantization_config": None,
    "sliding_window": None,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.1,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "_experts_implementation": "eager",
    "a_field_of_tomorrow": None,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_that_switch_nothing_on_pass_in_every_family_and_those_that_do_are_refused(kind):
    family, name = FAMILIES[kind]
    assert not family.kept & (KEPT | MEANINGLESS), "every family accepts these"
    raw, ignored = full_text_of(config(name)), IGNORED.get(name, ())
    more = {each: value for each, value in OF_OTHER_PROGRAMS.items() if each not in raw}
    assert differences(family.config(raw, ignored=ignored), family.config({**raw, **more}, ignored=ignored)) == []
    for each, value in (("dropout", 0.1), ("a_field_of_tomorrow", False), ("quantization", {"bits": 4})):
        with pytest.raises(ConversionError, match=f"has no {each} in weft"):
            family.config({**raw, each: value}, ignored=ignored)


def test_a_model_without_attention_may_have_the_fields_of_attention():
    family, name = FAMILIES["mamba2"]
    raw = config(name)
    more = json.loads(CONFIG_MAPPING["mamba2"](**raw, num_attention_heads=8, num_key_value_heads=2).to_json_string())
    assert more["num_attention_heads"] == 8
    assert differences(family.config(raw), family.config(more)) == []
