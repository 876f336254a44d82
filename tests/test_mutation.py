"""How a mutation finds its place in the source, and what it leaves as it is."""

import ast
import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "mutation.py"))
Mutation, Source = TOOL["Mutation"], TOOL["Source"]

SHORT = """\
class Average(Base):
    def take(self, weights, decay=0.9):
        if self.on and weights: return lerp(self.values, weights, 1, by=decay)
"""
LONG = """\
import math

class Average(
    Base,
):
    def take(
        self, weights, decay=0.9,  # in each step
    ):
        # the first step has none
        if (
            self.on
            and weights  # of this rank
        ):
            return lerp(
                self.values, weights, 1,
                by=decay,
            )
"""
MUTATIONS = [
    ("Average.take", "self.on and weights", "True"),
    ("Average.take", "if self.on and weights: ...", "..."),
    ("Average.take", "return lerp(self.values, weights, 1, by=decay)", ""),
    ("Average.take", "by=decay", "by=0"),
    ("Average.take", "self.values, weights", "weights"),
    ("Average.take", "def take(self, weights, decay=0.9): ...", "@cache\ndef take(self, weights, decay=1): ..."),
    ("Average", "class Average(Base): ...", "class Average: ..."),
]


def source_of(folder: Path, **files: str):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return Source(folder)


def shown(text: str) -> str:
    return ast.unparse(ast.parse(text.replace("import math\n", "")))


@pytest.mark.parametrize("where, old, new", MUTATIONS)
def test_a_function_that_moves_to_another_file_and_is_formatted_anew_keeps_its_mutation(where, old, new, tmp_path):
    mutation = Mutation("a step is lost", where, old, new, "test.py")
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    file, before = source_of(tmp_path / "before", average=SHORT).mutated(mutation)
    moved, after = source_of(tmp_path / "after", average="", moved=LONG).mutated(mutation)
    assert (file.name, moved.name) == ("average.py", "moved.py")
    assert shown(before) == shown(after) != shown(SHORT)


def test_all_around_the_replaced_place_stays_as_it_is(tmp_path):
    text = "def run(a):\n    if a:  # kept\n        b( 1 )\n    elif c( a ):  # gone\n        d()\n    e( 2 )  # kept\n"
    source = source_of(tmp_path, run=text)
    _, mutated = source.mutated(Mutation("", "run", "c(a)", "not c(a)", ""))
    assert mutated == text.replace("c( a )", "(not c(a))")
    _, mutated = source.mutated(Mutation("", "run", "if c(a): ...", "", ""))
    assert mutated == text.replace("elif c( a ):  # gone\n        d()", "else:\n        pass")
    _, mutated = source.mutated(Mutation("", "run", "e(2)", "f()\ng()", ""))
    assert mutated == text.replace("e( 2 )", "f()\n    g()")


def test_misfits_say_what_is_gone_or_how_often_it_occurs(tmp_path):
    source = source_of(tmp_path, one="def run():\n    a()\n    b(a())\n", two="SIZE = 2\ndef run():\n    pass\n")
    mutations = [
        Mutation("fits", "one:run", "b(a())", "", ""),
        Mutation("fits too", "SIZE", "SIZE = 2", "SIZE = 0", ""),
        Mutation("twice", "one:run", "a()", "c()", ""),
        Mutation("not there", "one:run", "c()", "", ""),
        Mutation("of two", "run", "a()", "", ""),
        Mutation("gone", "Gone.run", "a()", "", ""),
        Mutation("no Python", "one:run", "if a", "", ""),
    ]
    twice, not_there, of_two, gone, no_python = source.misfits(mutations)
    assert twice == "twice: 'a()' is 2 times in one:run (one.py): it must be there once"
    assert not_there == "not there: 'c()' is 0 times in one:run (one.py): it must be there once"
    assert of_two == "of two: run is in several modules: one, two"
    assert gone == "gone: Gone.run is in no module"
    assert no_python.startswith("no Python: 'if a' is no Python")
