"""Build the evidence page: which test shows each claim of the documentation.

Pages name tests in HTML comments, which neither the site nor the code host shows. A test has the name that pytest gives
it, relative to `tests/`. There are two forms:

    Gradients equal those of one process. <!-- evidence: fsdp/test_numbers.py::test_two_axes_equal_one_process -->

    <!-- evidence
    a claim that the page does not spell out | fsdp/test_plan.py::test_this fsdp/test_plan.py::test_that
    -->

A comment of the first form refers to the sentence before it or, in a table, to its row. `python scripts/evidence.py`
prints the page.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMMENT = re.compile(r"[ \t]*<!-- evidence(:.*?|\n.*?)\s*-->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"\x00(\d+)\x00")
SENTENCE = re.compile(r"(?:(?<=[.!?:])|(?<=[.!?]\)))((?:\x00\d+\x00)*)\s+(?=[^\s\x00a-z])")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Claim(NamedTuple):
    """A sentence or table row of a page, and the tests that show it."""

    heading: str
    text: str
    tests: tuple[str, ...]


def pages() -> list[Path]:
    """Return the pages that may name tests: README.md, the pages of docs/, and those of docs/howto/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]


def hidden(markdown: str) -> str:
    """Return the page without its evidence, as a reader sees it."""
    return COMMENT.sub("", markdown)


def sentences(block: str) -> Iterator[str]:
    """Yield the parts of a paragraph, list item or table row that may each have evidence."""
    if block.startswith("|"):
        cells = [cell.strip() for cell in block.strip("| ").split(" | ")]
        named = [cell for cell in cells if MARK.sub("", cell).strip()][:3]
        yield ": ".join(MARK.sub("", cell).strip() for cell in named) + "".join(m.group() for m in MARK.finditer(block))
        return
    start = 0
    for end in SENTENCE.finditer(block):
        yield block[start : end.end(1)]
        start = end.end()
    yield block[start:]


def claims(markdown: str) -> Iterator[Claim]:
    """Yield all claims of a page that have evidence, in the order of the page."""
    found: list[str] = []

    def mark(comment: re.Match[str]) -> str:
        found.append(comment.group(1))
        return f"\x00{len(found) - 1}\x00"

    heading = ""
    for block in COMMENT.sub(mark, FENCE.sub("", markdown)).split("\n"):
        if head := re.match(r"#+ (.*)", block):
            heading = head.group(1)
        inline: list[Claim] = []
        for sentence in sentences(block):
            tests: list[str] = []
            for number in MARK.findall(sentence):
                kind, rest = found[int(number)][0], found[int(number)][1:]
                if kind == ":":
                    tests += rest.split()
                    continue
                for line in rest.strip().split("\n"):
                    claim, _, named = line.rpartition(" | ")
                    yield Claim("", claim.strip(), tuple(named.split()))
            text = LINK.sub(r"\1", MARK.sub("", sentence)).strip(" -")
            if text:
                inline.append(Claim(heading, text, tuple(tests)))
            elif tests and inline:
                inline[-1] = inline[-1]._replace(tests=(*inline[-1].tests, *tests))
            elif tests:
                raise ValueError(
                    f"evidence without a claim: {' '.join(tests)}; write it after a sentence or in a table row"
                )
        yield from (claim for claim in inline if claim.tests)


def markdown() -> str:
    """Return the evidence page."""
    parts = [
        "# Evidence\n",
        "Each claim of the documentation that a test shows, page by page, with its tests. Paths begin at `tests/`. "
        "This page is generated from comments in the pages.\n",
    ]
    for page in pages():
        rows = list(claims(page.read_text()))
        if not rows:
            continue
        title = next(line for line in page.read_text().split("\n") if line.startswith("# "))[2:]
        name = str(page.relative_to(ROOT / "docs")) if page.is_relative_to(ROOT / "docs") else "index.md"
        parts.append(f"## {title}\n\nFrom [{name}]({name}).\n")
        for heading, claimed in groupby(rows, attrgetter("heading")):
            parts += [f"**{heading}**\n"] if heading not in ("", title) else []
            parts += ["<br>".join([f"- {row.text}", *(f"`{test}`" for test in row.tests)]) for row in claimed]
            parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown())
