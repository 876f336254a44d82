"""The text form of a table, for schedules that you write yourself:

    # the first rank has one live microbatch fewer than in 1f1b
    table mine: chunks 1, microbatches 2, placement loop
    rank 0: F0.0 B0.0
            F1.0 B1.0
    rank 1: F0.0 B0.0 F1.0 B1.0

`F1.0` is the forward of microbatch 1 through chunk 0 (the rank's first stage); `F2.0+B1.1` is a pair of a forward and a
backward. A line may end anywhere between entries.
"""

import re
from pathlib import Path
from typing import NoReturn

from weft.pipeline.actions import LOOP, Action, Entry, Table, V
from weft.pipeline.rules import format_entry
from weft.pipeline.simulation import check

_WIDTH = 110
_HEAD = re.compile(rf"table (\S+): chunks (\d+), microbatches (\d+), placement ({LOOP}|{V})")
_RANK = re.compile(r"rank (\d+):")
_ACTION = re.compile(r"([FBIW])(\d+)\.(\d+)")


def format_table(table: Table) -> str:
    """Return `table` in the text form that `parse_table` reads. The name must not be empty or contain blanks or `#`."""
    head = f"table {table.name}: chunks {table.chunks}, microbatches {table.microbatches}, placement {table.placement}"
    rows = [_format_row(f"rank {rank}:", entries) for rank, entries in enumerate(table.ranks)]
    return "\n".join([head, *rows]) + "\n"


def _format_row(label: str, entries: tuple[Entry, ...]) -> str:
    lines = [label]
    for entry in entries:
        word = format_entry(entry)
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append(" " * len(label))
        lines[-1] += f" {word}"
    return "\n".join(lines)


def read_table(path: str | Path) -> Table:
    """Return the checked table in the file at `path`. Raises the errors of `parse_table`, and ValueError if the file
    cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"table {path}: cannot be read: {error}") from error
    return parse_table(text, source=str(path))


def parse_table(text: str, source: str = "table") -> Table:
    """Return the checked table that `text` describes.

    `source`: the name of the text in errors. Raises ValueError for text that is empty or invalid; for an invalid line,
    the message gives its number. Raises TableError for a table that cannot run.
    """
    head: re.Match[str] | None = None
    ranks: list[list[Entry]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        where = f"{source}, line {number}"
        if not words:
            continue
        if head is None:
            head = _HEAD.fullmatch(words) or _fail(
                where, words, "the first line must be `table NAME: chunks C, microbatches M, placement loop` (or `v`)"
            )
            continue
        if label := _RANK.match(words):
            if int(label[1]) != len(ranks):
                _fail(where, label[0], f"ranks must be in order; `rank {len(ranks)}:` is next")
            ranks.append([])
            words = words[label.end() :]
        elif not ranks:
            _fail(where, words, "entries must belong to a rank; begin with `rank 0:`")
        ranks[-1].extend(_parse_entry(word, where) for word in words.split())
    if head is None:
        raise ValueError(
            f"{source}: is empty; it must begin with `table NAME: chunks C, microbatches M, placement loop`"
        )
    table = Table(head[1], tuple(map(tuple, ranks)), int(head[2]), int(head[3]), head[4])
    check(table)
    return table


def _parse_entry(word: str, where: str) -> Entry:
    actions = []
    for part in word.split("+"):
        found = _ACTION.fullmatch(part) or _fail(where, word, "an entry is F, B, I or W with MICROBATCH.CHUNK: F0.1")
        actions.append(Action(found[1], int(found[2]), int(found[3])))
    return tuple(actions)


def _fail(where: str, value: str, rule: str) -> NoReturn:
    raise ValueError(f"{where}: {value!r}: {rule}")
