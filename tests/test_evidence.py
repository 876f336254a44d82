"""Evidence and prose: every test named as evidence exists, no page names one, and sentences have real subjects."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVIDENCE = runpy.run_path(str(ROOT / "scripts" / "evidence.py"))
FEWEST_CLAIMS = 412
"""With evidence. Lower it only where a claim leaves the documentation; a claim that loses its test needs another."""
TEST = re.compile(r"test_\w+\.py(?:::\w+)?|\btest_\w{20,}")
MAP_OF_TESTS = "faults.md"  # its subject is which test finds which fault


@cache
def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def assert_exists(test: str) -> None:
    name, _, function = test.partition("::")
    assert (ROOT / "tests" / name).is_file(), test
    assert not function or function in functions_of(ROOT / "tests" / name), test


@pytest.mark.slow
def test_every_test_that_is_named_as_evidence_exists():
    claims = [claim for page in EVIDENCE["pages"]() for claim in EVIDENCE["claims"](page.read_text())]
    for claim in claims:
        assert claim.text and claim.tests, claim
        for test in claim.tests:
            assert_exists(test)
    for test in TEST.findall((ROOT / "docs" / MAP_OF_TESTS).read_text()):
        assert "::" in test
    for test in re.findall(r"`([\w/]+\.py::\w+)`", (ROOT / "docs" / MAP_OF_TESTS).read_text()):
        assert_exists(test)
    assert len(claims) >= FEWEST_CLAIMS
    built = EVIDENCE["markdown"]()
    assert all(f"`{test}`" in built for claim in claims for test in claim.tests)


def test_no_page_names_a_test_to_its_reader():
    for page in EVIDENCE["pages"]():
        shown = EVIDENCE["hidden"](page.read_text())
        assert "<!-- evidence" not in shown, page
        assert page.name == MAP_OF_TESTS or not TEST.findall(shown), (page, TEST.findall(shown))


def test_evidence_belongs_to_the_sentence_or_row_before_it():
    page = """# Page
## Section
One. Two (with [a link](x.md)). <!-- evidence: test_a.py::test_b --> Three.

| a | b <!-- evidence: test_a.py::test_c --> |

<!-- evidence
hidden claim | test_a.py::test_d test_e.py
-->
"""
    claims = [tuple(claim) for claim in EVIDENCE["claims"](page)]
    assert claims == [
        ("Section", "Two (with a link).", ("test_a.py::test_b",)),
        ("Section", "a: b", ("test_a.py::test_c",)),
        ("", "hidden claim", ("test_a.py::test_d", "test_e.py")),
    ]
    assert "test_" not in EVIDENCE["hidden"](page) and "Two (with [a link](x.md)). Three." in EVIDENCE["hidden"](page)


def test_evidence_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="evidence without a claim"):
        list(EVIDENCE["claims"]("<!-- evidence: test_a.py -->"))


STUMBLES = re.compile(r"\b(whoever|whatever|somebody|nobody|goes on|of one\\?'s own|for ever)\b", re.IGNORECASE)


@pytest.mark.slow
def test_prose_says_who_acts():
    """A sentence about "whoever" or "whatever" has a better subject: the rank, the caller, the reader, "you"."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    shown = {file: EVIDENCE["hidden"](file.read_text()) for file in files if file.name != MAP_OF_TESTS}
    found = [f"{file.relative_to(ROOT)}: {word}" for file, text in shown.items() for word in STUMBLES.findall(text)]
    assert len(found) < 20, found
