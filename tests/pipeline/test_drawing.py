"""Schedules as people see them: in the terminal, and as a picture."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.pipeline.test_check import tables
from weft.cli import main
from weft.pipeline import Costs, check, format_table, parse_table, table
from weft.pipeline.drawing import Drawing


def drawn(simulation, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Drawing(simulation))
    return console.export_text()


def rows(text, ranks):
    """What stands in the row of each rank, its lines joined."""
    joined = [""] * ranks
    for rank, row in re.findall(r"^rank (\d+)  ?(.*)\n", text, re.MULTILINE):
        joined[int(rank)] += row
    return joined


@pytest.mark.slow
@settings(max_examples=30)
@given(tables(), st.integers(60, 200), st.sampled_from([Costs(), Costs(1, 1, 1, pair=0.8), Costs(2, 3, 1)]))
def test_no_line_is_wider_than_the_terminal_and_nothing_of_a_rank_is_left_out(made, width, costs):
    text = drawn(check(made, costs), width)
    assert max(map(len, text.splitlines())) <= width
    for row, entries in zip(rows(text, len(made.ranks)), made.ranks):
        if "microbatch 2" in text:
            shown = re.findall(r"([FBIW])(\d+)", row)
            assert shown == [(each.kind, str(each.microbatch)) for entry in entries for each in entry]
        else:
            assert re.findall(r"[FBIWP]", row) == ["P" if len(entry) == 2 else entry[0].kind for entry in entries]


def test_a_drawing_of_1f1b_is_what_everybody_knows():
    text = drawn(check(table("1f1b", ranks=3, microbatches=4)))
    assert (
        text
        == """\
1f1b on 3 ranks, 4 microbatches
time 18, idle 33.3%, activations of up to 3 microbatches alive

        0     2     4     6     8     10    12    14    16    18
rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---
rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---

F2: microbatch 2
F forward  B backward

rank   stages   idle   share   live activations
   0   0           6   33.3%                  3
   1   1           6   33.3%                  2
   2   2           6   33.3%                  1
"""
    )


def test_a_drawing_is_wrapped_between_whole_units_and_a_pair_takes_its_own_time():
    text = drawn(check(table("dualpipev", ranks=2, microbatches=5), Costs(pair=0.8)), 60)
    assert (
        text.partition("alive\n\n")[2].partition("\nF2.1: microbatch 2 through chunk 1\n")[0]
        == """\
        0         2         4         6         8
rank 0  F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 F3.0+B1.1--
rank 1       F0.0 F0.1 F1.0 F1.1 F2.0 B0.1----- F2.1+B0.0-

        10        12        14        16        18
rank 0    F2.1+B0.0-- F4.0+B2.1-- F3.1+B1.0-- B3.1-----
rank 1  - F3.0+B1.1-- F3.1+B1.0-- F4.0+B2.1-- F4.1+B2.0--

        20        22        24        26        28
rank 0  F4.1+B2.0-- B4.1----- I3.0 W3.0 I4.0 W4.0
rank 1  B3.1----- B3.0-----   I4.1 I4.0 W4.1 W4.0
"""
    )


def test_a_long_schedule_becomes_one_letter_an_action():
    text = drawn(check(table("dualpipev", ranks=8, microbatches=32)))
    assert len(text.splitlines()) < 60
    assert "P--P--P--" in text


@pytest.mark.long
def test_of_a_very_long_schedule_the_beginning_is_drawn_and_one_without_end_is_refused(tmp_path, capsys):
    whole = drawn(check(table("1f1b", ranks=2, microbatches=20)))
    lines = drawn(check(table("1f1b", ranks=2, microbatches=5000))).splitlines()
    assert (
        len(lines) < 300 and any("and so on from time 4320 to 15003" in line for line in lines) and "so on" not in whole
    )
    assert main(["schedule", "1f1b", "--pp", "2", "--microbatches", "100000"]) == 2
    assert "--microbatches 100000: 400,000 actions or more" in capsys.readouterr().err
    picture = str(tmp_path / "long.png")
    assert main(["schedule", "1f1b", "--pp", "2", "--microbatches", "2000", "--save", picture]) == 2
    assert "a picture has room for 3,000" in capsys.readouterr().err


def test_the_command_draws_a_schedule_with_its_costs(capsys):
    assert main(["schedule", "dualpipev", "--pp", "4", "--microbatches", "8", "--costs", "1,1,1", "--pair", "0.8"]) == 0
    text = capsys.readouterr().out
    found = check(table("dualpipev", ranks=4, microbatches=8), Costs(pair=0.8))
    assert f"time {found.time:g}, idle {found.idle_share:.1%}, activations of up to 4.5 microbatches alive" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_is_saved_changed_and_drawn_again(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    assert main(["schedule", "combined", "--pp", "2", "--microbatches", "4", "--save", str(path)]) == 0
    made = table("combined", ranks=2, microbatches=4)
    assert parse_table(path.read_text()) == made
    path.write_text(format_table(made).replace("table combined", "table mine"))
    capsys.readouterr()
    assert main(["schedule", str(path)]) == 0
    assert "mine on 2 ranks, 2 chunks each, 4 microbatches" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_has_a_box_for_each_action_at_its_time(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from weft.train.report import pipeline_figure
    from weft.train.report.figures import LIGHT

    found = check(table("dualpipev", ranks=2, microbatches=4), Costs(pair=0.8))
    figure = Figure()
    pipeline_figure.pipeline(found)(figure, LIGHT)
    boxes = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    times = [
        (pytest.approx(start), pytest.approx(end - start), rank)
        for rank, (entries, spans) in enumerate(zip(found.table.ranks, found.spans))
        for entry, (start, end) in zip(entries, spans)
        for _ in entry
    ]
    assert [(box.get_x(), box.get_width(), round(box.get_y() + 0.2)) for box in boxes] == times
    assert f"idle {found.idle_share:.1%}" in figure.axes[0].get_xlabel()

    path = tmp_path / "a.png"
    assert main(["schedule", "dualpipev", "--pp", "2", "--microbatches", "4", "--save", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("unit", ["1e-30", "1e30"])
def test_times_of_any_unit_are_drawn(capsys, unit):
    words = ["schedule", "1f1b", "--pp", "2", "--microbatches", "4", "--costs"]
    assert main([*words, f"{unit},{unit},{unit}"]) == 0
    found = capsys.readouterr().out
    assert main([*words, "1,1,1"]) == 0
    rows = [
        [line for line in text.splitlines() if line.startswith(("rank 0", "rank 1"))]
        for text in (found, capsys.readouterr().out)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dualpipe"], "'dualpipe' is neither a schedule nor a file; did you mean dualpipev?"),
        (["1f1b", "--pp", "2"], "needs a number of ranks and of microbatches (--pp, --microbatches)"),
        (["1f1b", "--pp", "2", "--microbatches", "4", "--costs", "1,2"], "--costs 1,2: must be three numbers"),
        (
            ["1f1b", "--pp", "2", "--microbatches", "4", "--costs", "0,0,0"],
            "--costs 0,0,0: give the whole schedule the time 0",
        ),
        (["1f1b", "--pp", "2", "--microbatches", "4", "--costs", "1e308,1,1"], "give the whole schedule the time inf"),
        (["1f1b", "--pp", "2", "--microbatches", "4", "--pair", "-1"], "pair = -1.0; times must be finite"),
        (["1f1b", "--pp", "2", "--microbatches", "4", "--save", "a.pdf"], "--save a.pdf: must end in .png"),
        (["1f1b", "--pp", "2", "--microbatches", "4", "--save", "/none/a.txt"], "/none/a.txt: cannot be written"),
        (["dualpipev", "--pp", "4", "--microbatches", "4"], "on 4 ranks it needs 8 or more"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, said, capsys):
    assert main(["schedule", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("weft schedule: ")
    assert said in line
    assert line.count("\n") == 1
