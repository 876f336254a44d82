"""Tables as text: written, read back, and refused with the line at fault."""

import pytest
from hypothesis import given, settings

from tests.pipeline.test_check import tables
from weft.pipeline import format_table, parse_table, read_table, table


@settings(max_examples=30)
@given(tables())
def test_what_is_written_is_read_back_the_same(made):
    text = format_table(made)
    assert parse_table(text) == made
    assert max(map(len, text.splitlines())) <= 110


def test_a_custom_table_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("""
        # a comment
        table mine: chunks 1, microbatches 2, placement loop
        rank 0: F0.0 B0.0  # another
                F1.0 B1.0
        rank 1: F0.0 B0.0 F1.0 B1.0
    """)
    made = table(str(path), ranks=2, chunks=1, microbatches=2)
    assert made == table(str(path)) == read_table(path)
    assert made.name == "mine"
    assert made.ranks[0] == made.ranks[1] == table("1f1b", ranks=1, microbatches=2).ranks[0]


def test_a_file_for_other_numbers_than_asked_for_is_refused(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(format_table(table("1f1b", ranks=2, microbatches=2)))
    with pytest.raises(ValueError, match=r"mine.txt: is a table for ranks = 2, not 4"):
        table(str(path), ranks=4, microbatches=2)


HEAD = "table x: chunks 1, microbatches 1, placement loop\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mine: is empty"),
        ("rank 0: F0.0", "mine, line 1: 'rank 0: F0.0': the first line must be `table NAME"),
        ("table x: chunks 1, microbatches 1, placement w", "line 1: .* placement loop"),
        (HEAD + "F0.0 B0.0", "line 2: 'F0.0 B0.0': entries must belong to a rank"),
        (HEAD + "rank 1: F0.0 B0.0", "line 2: 'rank 1:': ranks must be in order; `rank 0:` is next"),
        (HEAD + "rank 0: F0.0\nB0", "line 3: 'B0': an entry is F, B, I or W with MICROBATCH.CHUNK"),
        (HEAD + "rank 0: F0.0", "table 'x', rank 0, entry 1 \\(the end\\): B0.0 is missing"),
        (HEAD, "table 'x': ranks = 0; must be at least 1"),
    ],
)
def test_text_that_is_no_table_is_refused_with_its_line(text, said):
    with pytest.raises(ValueError, match=said):
        parse_table(text, source="mine")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_table(tmp_path / "none.txt")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    made = table("1f1b", ranks=2, microbatches=2)
    (tmp_path / "marked.txt").write_text(format_table(made), encoding="utf-8-sig")
    assert read_table(tmp_path / "marked.txt") == made
