"""The package is what CONTRIBUTING.md says it is: rooms that import downward only."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = re.findall(r"^\| (`.*?`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
ROOMS = [[name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`(.*?)`", row)] for row in TABLE]
IMPORT = re.compile(r"^\s*(?:from|import) weft\.(\w+)|^\s*from weft import (.+)$", re.MULTILINE)


def rooms_used_by(room):
    package = ROOT / "src" / "weft"
    files = list((package / room).rglob("*.py")) or [package / f"{room}.py"]
    for file in files:
        for inside, names in IMPORT.findall(file.read_text()):
            yield from [inside] if inside else (name.strip() for name in names.split(","))


def test_every_room_is_listed_and_imports_only_what_is_below_it():
    listed = [room for row in ROOMS for room in row]
    there = {path.name.removesuffix(".py") for path in (ROOT / "src" / "weft").iterdir() if "__" not in path.name}
    assert there - {"py.typed"} == set(listed)
    for level, row in enumerate(ROOMS):
        for room in row:
            allowed = {below for rows in ROOMS[level:] for below in rows}
            assert set(rooms_used_by(room)) <= allowed, room
