"""The pages: every public name has an entry, every link holds on the code host, every page is in the site."""

import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]
)
PUBLIC = ["weft", *(f"weft.{name}" for name in ("checkpoint", "debug", "errors", "fsdp", "models", "models.hf", "moe"))]
PUBLIC += [f"weft.{name}" for name in ("optim", "overlap", "pipeline", "quantize", "train")]
ENTRY = re.compile(r"^::: (\S+)$|^### `(weft\.\S+)`$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def value_of(path):
    """What a dotted path names: the name that a package exports comes before a module of that name."""
    room, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(room), name)
    except ModuleNotFoundError:
        return getattr(value_of(room), name)


def entries():
    for page in (DOCS / "reference").glob("*.md"):
        for pair in ENTRY.findall(page.read_text()):
            yield page, "".join(pair)


def public_names():
    for room in PUBLIC:
        for name in importlib.import_module(room).__all__:
            yield f"{room}.{name}"


def test_every_public_name_has_an_entry_in_the_reference():
    described = [value_of(path) for _, path in entries()]
    for path in public_names():
        value = value_of(path)
        if isinstance(value, types.ModuleType) and path in PUBLIC:
            continue  # a page of its own
        assert any(value is each for each in described), f"{path}: has no entry in docs/reference"


def test_every_public_name_says_what_it_is():
    for path in public_names():
        value = value_of(path)
        if inspect.isclass(value) or inspect.isroutine(value):
            said = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert said and not said.startswith(f"{value.__name__}("), f"{path}: has no docstring"


def test_every_group_of_entries_has_an_example_or_a_link_to_one():
    for page in (DOCS / "reference").glob("*.md"):
        for group in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            if ENTRY.search(group):
                assert ".md" in group or "```python" in group, (page.name, group.splitlines()[0])


def test_every_room_with_public_names_has_a_page_that_the_site_lists():
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in listed, page
    for room in PUBLIC:
        assert f"reference/{room.split('.')[-1]}.md" in listed, room
    outside = {"index.md", "evidence.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert all((DOCS / name).is_file() for name in set(listed) - outside)


def anchors_of(page):
    """The anchors that a code host makes of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = [
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return set(heads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_hold_where_the_files_are_read(page):
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT) and file.exists(), target
        assert not anchor or anchor in anchors_of(file), target
