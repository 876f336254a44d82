"""A configuration that leaves out a field, or has it in an older place, means what it means to transformers."""

import json

import pytest
from transformers import CONFIG_MAPPING

from tests.models.hf.released import FAMILIES, IGNORED, config
from weft.errors import ConversionError
from weft.models.hf.family import differences
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
def test_the_base_and_the_part_of_a_rotation_may_stand_in_the_older_place(kind):
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
