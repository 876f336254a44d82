"""docs/schedules.md shows what the code says."""

import re
import shlex
from pathlib import Path

import pytest

from weft.cli import main
from weft.pipeline import Costs, TableError, check, parse_table, table

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\d) \| (.*) \|$", re.MULTILINE)


def simulated(name, chunks, transfer=0.0, heavier=0.0):
    """As the page says: 4 ranks, 16 microbatches, 2 for each part of all chunks of a rank."""
    made = table(name, ranks=4, chunks=chunks, microbatches=16)
    times = [2 / chunks] * made.stages
    times[-1] += heavier
    return check(made, Costs(times, times, times, pair=0.8, transfer=transfer))


def cells(name, chunks):
    found = simulated(name, chunks)
    slow, heavy = simulated(name, chunks, transfer=0.2), simulated(name, chunks, heavier=0.5)
    yield from (f"{found.time:.1f}", f"{found.idle_share:.1%}", f"{max(found.live):g}", f"{sum(found.live):g}")
    yield from (f"{slow.time:.1f}", f"{heavy.time:.1f}")


def test_the_costs_on_the_page_are_those_of_the_checker():
    rows = ROW.findall(PAGE)
    assert len(rows) == 8
    for name, chunks, shown in rows:
        assert shown.split(" | ") == list(cells(name, int(chunks))), name


def test_what_the_page_says_to_choose_follows_from_its_table():
    rows = {(name, int(chunks)): row.split(" | ") for name, chunks, row in ROW.findall(PAGE)}
    time, idle, most, total, slow = ({key: float(row[n].rstrip("%")) for key, row in rows.items()} for n in range(5))
    v2, v4, dual, zbv = ("combined", 2), ("combined", 4), ("dualpipev", 2), ("zbv", 2)
    pairs = {v2, v4, dual}
    assert max(time[each] for each in pairs) < min(time[each] for each in rows if each not in pairs)
    assert min(idle, key=idle.get) == zbv
    assert most[dual] < min(most[v2], most[v4])
    assert slow[dual] - time[dual] < min(slow[v2] - time[v2], slow[v4] - time[v4])
    assert time[v4] < time[v2]
    assert slow[v4] > slow[v2]
    assert most[zbv] == most["1f1b", 1]
    assert min(total, key=total.get) == ("1f1b", 1)


def test_the_drawing_on_the_page_is_what_the_command_prints(capsys):
    command, shown = re.search(r"^```\n\$ weft (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE).groups()
    assert main(shlex.split(command)) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_the_message_on_the_page_is_that_of_its_table():
    text = re.search(r'^text = """(.*?)"""$', PAGE, re.MULTILINE | re.DOTALL)[1]
    with pytest.raises(TableError) as raised:
        parse_table(text)
    assert f"```\n{raised.value}\n```" in PAGE


def test_the_pictures_of_the_page_are_there():
    pictures = re.findall(r"\((pictures/[\w-]+\.png)\)", PAGE)
    assert len(pictures) == 6
    assert all((Path(__file__).parents[2] / "docs" / picture).is_file() for picture in pictures)
