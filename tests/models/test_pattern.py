import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models import HybridConfig
from weft.models.pattern import LAYER_KEYS, PatternError, parse

STRUCTURE = [  # pattern, position, offending part, a word of the rule
    ("[*-]x", 4, "x", "unknown symbol"),
    ("* -", 1, " ", "unknown symbol"),
    ("[*-", 0, "[*-", "put its ']'"),
    ("*-[*-][-", 6, "[-", "put its ']'"),
    ("*]-", 1, "]", "put its '['"),
    ("*[]-", 1, "[]", "at least one layer"),
    ("[*[-]]", 2, "[", "do not nest"),
    ("[-*]", 1, "-", "must be the last layer"),
    ("[ME*]", 2, "E", "must be the last layer"),
    ("[*-E]", 2, "-", "must be the last layer"),
    ("[MM-]", 2, "M", "checkpoint key 'mixer'"),
    ("[**-]", 2, "*", "checkpoint key 'self_attention'"),
    ("M[*|-]", 3, "|", "before the next segment"),
    ("M[*/-]", 3, "/", "before the next segment or prediction part"),
    ("*/*|*", 3, "|", "only the main part"),
    ("*-/[*-]/*-", 8, "*-", "written like the first"),
    ("*-//*-", 2, "/", "at least one layer"),
    ("*-M+", 3, "+", "not both"),
    ("M+|*", 3, "*", "not both"),
    ("+/*+", 3, "+", "not both"),
    ("[MG-]", 2, "G", "checkpoint key 'mixer'"),
    ("[*+-]", 2, "+", "not both"),
    ("*/M[", 3, "[", "put its ']'"),
    ("", 0, "", "at least one layer"),
    ("|", 0, "|", "at least one layer"),
    ("/*", 0, "/", "at least one layer"),
]


@pytest.mark.parametrize("text, position, part, rule", STRUCTURE, ids=[case[0] for case in STRUCTURE])
def test_a_broken_rule_is_an_error_with_position_part_and_rule(text, position, part, rule):
    with pytest.raises(PatternError) as error:
        parse(text)
    assert (error.value.position, error.value.part) == (position, part)
    assert rule in error.value.rule
    for shown in (text, str(position), part, error.value.rule):
        assert shown in str(error.value)


@pytest.mark.parametrize("text, position, part, rule", STRUCTURE, ids=[case[0] for case in STRUCTURE])
def test_a_configuration_with_a_broken_pattern_cannot_be_made(text, position, part, rule):
    with pytest.raises(PatternError) as error:
        HybridConfig(pattern=text)
    assert error.value.position == position


def test_a_pattern_error_survives_the_way_between_processes():
    with pytest.raises(PatternError) as error:
        parse("[*")
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)


def test_groups_and_lone_symbols_are_logical_layers_and_symbols_are_physical_ones():
    layers = parse("M[*-]-").layers
    assert [layer.symbols for layer in layers] == ["M", "*-", "-"]
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.physical for layer in layers] == [1, 2, 4]


@pytest.mark.parametrize("text", ["M[*-]|M[*E]|G", "|[*-]", "[*-]|", "*||*"])
def test_numbers_run_on_over_segments(text):
    cut, whole = parse(text), parse(text.replace("|", ""))
    assert cut.layers == whole.layers
    assert len(cut.segments) == len(text.split("|"))


def test_prediction_parts_are_counted_and_numbered_on_their_own():
    pattern = parse("M[*-]/[*E]/[*E]")
    assert pattern.depths == 2
    assert pattern.prediction == parse("[*E]").layers
    assert pattern.layers == parse("M[*-]").layers


@pytest.mark.parametrize("text", ["[*-]/", "[*-]"])
def test_a_trailing_slash_adds_no_prediction_depth(text):
    assert parse(text).depths == 0


def test_a_prediction_part_may_use_the_other_kind_of_attention():
    assert parse("*-/[+-]").depths == 1


@pytest.mark.parametrize("symbol", LAYER_KEYS)
def test_a_group_of_one_is_the_same_logical_layer_as_its_lone_symbol(symbol):
    assert parse(f"[{symbol}]").layers == parse(symbol).layers


SIGNS = "MG*+-E[]|/"
PARTS = st.sampled_from(["M", "G", "*", "+", "-", "E", "[*-]", "[M-]", "[G*E]", "[+E]", "|", "/", "[", "]", "x"])


@pytest.mark.long
@settings(max_examples=300)
@given(st.one_of(st.text(SIGNS, max_size=12), st.text(max_size=6), st.lists(PARTS, max_size=8).map("".join)))
def test_any_string_is_a_pattern_or_an_error_that_points_into_it(text):
    try:
        pattern = parse(text)
    except PatternError as error:
        assert text[error.position :].startswith(error.part) or error.part == "[]"
        assert error.rule and error.shown.splitlines()[0] in (text, *text.splitlines()[:1])
        return
    main, *depths = text.split("/")
    assert "".join(layer.symbols for layer in pattern.layers) == "".join(sign for sign in main if sign not in "[]|")
    numbers = [
        number for layer in pattern.layers for number in range(layer.physical, layer.physical + len(layer.symbols))
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [layer.index for layer in pattern.layers] == list(range(len(pattern.layers)))
    assert pattern.depths == len([depth for depth in depths if depth])
    for ranks in (size for size in range(1, 5) if len(pattern.segments) % size == 0):
        chunks = range(len(pattern.segments) // ranks)
        dealt = [pattern.stage(rank, chunk, pp_size=ranks) for chunk in chunks for rank in range(ranks)]
        assert tuple(dealt) == pattern.segments


def test_segments_go_round_the_pipeline_ranks():
    pattern = parse("M|[*-]||[*E]")
    assert [layer.symbols for layer in pattern.stage(1, 0, pp_size=2)] == ["*-"]
    assert pattern.stage(0, 1, pp_size=2) == ()
    assert [layer.index for layer in pattern.stage(1, 1, pp_size=2)] == [2]


@pytest.mark.parametrize("text, pp_size, position", [("M|*|-", 2, 3), ("M*", 2, 0), ("M|*", 0, 1)])
def test_segments_that_cannot_be_dealt_evenly_are_an_error_with_position_part_and_rule(text, pp_size, position):
    with pytest.raises(PatternError, match=f"pp={pp_size} ranks") as error:
        parse(text).stage(0, pp_size=pp_size)
    assert error.value.position == position


@pytest.mark.parametrize("place", [{"pp_rank": 2}, {"pp_rank": -1}, {"pp_rank": 0, "chunk": 1}])
def test_a_stage_that_does_not_exist_is_refused(place):
    with pytest.raises(ValueError, match=r"has 0 to [01]"):
        parse("M|*").stage(**place, pp_size=2)


def test_an_error_is_shown_with_carets_under_the_part():
    with pytest.raises(PatternError) as error:
        parse("*-[**E]")
    pattern, caret = error.value.shown.splitlines()
    assert pattern[caret.index("^")] == "*" and caret.count("^") == 1 and caret.index("^") == 4
