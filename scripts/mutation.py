"""Mutations of the source. A `Mutation` says what to replace and where; `Source` finds the place by its syntax.

`where` is the dotted name of a class, of a function or of a module's variable, anywhere in src/weft: `Freshness._make`.
If several modules have this name, put the first parts of the module's path before it: `moe:Router.forward`.

`old` and `new` are Python code and are compared as syntax: line breaks, indentation, comments and quotes make no
difference. `old` must occur in `where` exactly once, as one of these:

| old                                | what it is                                                                     |
|------------------------------------|--------------------------------------------------------------------------------|
| `self.decay > 0`                   | an expression, if `new` is one too                                             |
| `first, second`                    | a tuple, or neighbors in a longer tuple or among the arguments of a call       |
| `unit.free()`                      | a statement, or several that follow each other; an empty `new` deletes them    |
| `halves=self.halves`               | an assignment, or a keyword argument of a call                                 |
| `if skipped: ...`                  | a statement with any body; `...` in `new` stands for the same body             |
| `class Mode(threading.local): ...` | a class or function with its bases, decorators and defaults, and any body      |
"""

import ast
import gc
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """Replaces `old`, which occurs once in `where`, with `new`. Then `test`, a test below tests/, must fail."""

    name: str
    where: str
    old: str
    new: str
    test: str


class Misfit(Exception):
    """A mutation does not fit the source, for the reason in the message."""


class Place(NamedTuple):
    """Where `old` is: neighboring `nodes` of `file`, and the bodies for which each `...` stands."""

    file: Path
    nodes: Sequence[Any]
    bodies: list[list[ast.stmt]]


class Source:
    """The files of a package, each parsed once."""

    def __init__(self, package: Path) -> None:
        self.package = package

    @cached_property
    def _scopes(self) -> dict[str, dict[Path, list[ast.stmt]]]:
        """For each dotted name, the statements that define it, by file."""
        found: dict[str, dict[Path, list[ast.stmt]]] = {}
        was_enabled = gc.isenabled()
        gc.disable()  # parsing then takes half as long
        for file in sorted(self.package.rglob("*.py")):
            for name, node in _named(ast.parse(file.read_bytes())):
                found.setdefault(name, {}).setdefault(file, []).append(node)
        if was_enabled:
            gc.enable()
        return found

    def find(self, mutation: Mutation) -> Place:
        """Return the place of `old`. Raises `Misfit` unless `old` occurs exactly once."""
        path, _, name = mutation.where.rpartition(":")
        having = {
            file: nodes for file, nodes in self._scopes.get(name, {}).items() if _is_in(path, self._module_of(file))
        }
        if len(having) != 1:
            modules = ", ".join(map(self._module_of, having))
            raise Misfit(f"{mutation.where} is in {'several modules: ' if modules else 'no module'}{modules}")
        ((file, scope),) = having.items()
        places = [Place(file, *each) for each in _matches(scope, mutation)]
        if len(places) != 1:
            where = f"{mutation.where} ({file.relative_to(self.package)})"
            raise Misfit(f"{mutation.old!r} is {len(places)} times in {where}: it must be there once")
        return places[0]

    def misfits(self, mutations: Iterable[Mutation]) -> list[str]:
        """Return one line for each mutation that does not fit the source."""
        found = []
        for each in mutations:
            try:
                self.find(each)
            except Misfit as misfit:
                found.append(f"{each.name}: {misfit}")
        return found

    def mutated(self, mutation: Mutation) -> tuple[Path, str]:
        """Return a file and its text with the mutation. The text around the replaced nodes is unchanged."""
        file, nodes, bodies = self.find(mutation)
        text = file.read_bytes()
        starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        lines = [each.lineno for each in (nodes[0], *getattr(nodes[0], "decorator_list", ()))]
        begin = starts[min(lines) - 1] + nodes[0].col_offset
        end = starts[nodes[-1].end_lineno - 1] + nodes[-1].end_col_offset
        new = _new(mutation, nodes, bodies)
        if text.startswith(b"elif", begin):
            new = "else:\n" + textwrap.indent(new, " " * 4)
        new = new.replace("\n", "\n" + " " * nodes[0].col_offset)
        return file, (text[:begin] + new.encode() + text[end:]).decode()

    def _module_of(self, file: Path) -> str:
        return ".".join(file.relative_to(self.package).with_suffix("").parts)


def _is_in(path: str, module: str) -> bool:
    return not path or f"{module}.".startswith(f"{path}.")


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the classes and functions in `node`, and the variables outside of them, each with its dotted name."""
    for each in _statements(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + each.name, each
            yield from _named(each, f"{prefix}{each.name}.")
        else:
            if not prefix and isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                yield from ((name.id, each) for name in names)
            yield from _named(each, prefix)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for block in _blocks(node):
        yield from block


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements of `node` and of its clauses."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield block
    for clause in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield clause.body


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and all nodes inside it, but not inside f-strings, because positions in f-strings are not known."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for each in ast.iter_child_nodes(node):
            yield from _inside(each)


def _parsed(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(textwrap.dedent(text).strip()).body
    except SyntaxError as error:
        raise Misfit(f"{text!r} is no Python: {error.msg}") from None


def _is_expression(statements: Sequence[ast.stmt]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr) and not _is_any(statements)


def _matches(scope: list[ast.stmt], mutation: Mutation) -> Iterator[tuple[Sequence[Any], list[list[ast.stmt]]]]:
    """Yield the nodes in `scope` that equal `old`, with the bodies for which each `...` in `old` stands."""
    old, new = _parsed(mutation.old), _parsed(mutation.new)
    everything = list(itertools.chain.from_iterable(map(_inside, scope)))
    if _is_expression(old) and _is_expression(new):
        wanted = _value(old)
        yield from (([each], []) for each in everything if isinstance(each, ast.expr) and _same(wanted, each, []))
        if isinstance(wanted, ast.Tuple) and len(wanted.elts) > 1:
            runs = itertools.chain.from_iterable(_runs(each, len(wanted.elts)) for each in everything)
            yield from ((each, []) for each in runs if _same(wanted.elts, each, []))
        return
    for block in itertools.chain([[each] for each in scope], *map(_blocks, everything)):
        for first in range(len(block) - len(old) + 1):
            nodes: list[Any] = block[first : first + len(old)]
            bodies: list[list[ast.stmt]] = []
            if _same(old, nodes, bodies):
                yield nodes, bodies
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Assign) and isinstance(new[0], ast.Assign):
        named = ast.keyword(ast.unparse(old[0].targets[0]), old[0].value)
        yield from (([each], []) for each in everything if isinstance(each, ast.keyword) and _same(named, each, []))


def _runs(node: ast.AST, length: int) -> Iterator[list[ast.expr]]:
    """Yield all runs of `length` neighbors among more elements of a tuple, list or set, or arguments of a call."""
    elements = getattr(node, "elts", None) or getattr(node, "args", None)
    if isinstance(elements, list) and length < len(elements):
        yield from (elements[first : first + length] for first in range(len(elements) - length + 1))


def _value(statements: Sequence[Any]) -> ast.expr:
    """Return the value of the only statement."""
    return statements[0].value


def _same(old: Any, there: Any, bodies: list[list[ast.stmt]]) -> bool:
    """Return whether both are the same syntax. Adds the bodies for which each `...` in `old` stands to `bodies`."""
    if isinstance(old, ast.AST):
        names = [name for name in old._fields if name not in ("ctx", "kind", "type_comment")]
        return type(old) is type(there) and all(
            _same(getattr(old, name, None), getattr(there, name, None), bodies) for name in names
        )
    if isinstance(old, list) and isinstance(there, list):
        if _is_any(old) and there and isinstance(there[0], ast.stmt):
            bodies.append(there)
            return True
        return len(old) == len(there) and all(_same(*pair, bodies) for pair in zip(old, there))
    return type(old) is type(there) and old == there


def _is_any(statements: Sequence[Any]) -> bool:
    """Return whether the only statement is `...`."""
    return len(statements) == 1 and isinstance(statements[0], ast.Expr) and _is_ellipsis(statements[0].value)


def _is_ellipsis(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is ...


class _Fill(ast.NodeTransformer):
    """Replaces each `...` with one of `bodies`, in order."""

    def __init__(self, bodies: list[list[ast.stmt]]) -> None:
        self.bodies = iter(bodies)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return next(self.bodies, node) if _is_ellipsis(node.value) else node


def _new(mutation: Mutation, nodes: Sequence[Any], bodies: list[list[ast.stmt]]) -> str:
    """Return the text that replaces `nodes`."""
    new, replaced = _parsed(mutation.new or "pass"), nodes[0]
    if isinstance(replaced, ast.expr) and len(nodes) > 1:
        value = _value(new)
        return ", ".join(map(ast.unparse, value.elts if isinstance(value, ast.Tuple) else [value]))
    if isinstance(replaced, ast.keyword):
        return f"{replaced.arg}=({ast.unparse(_value(new))})"
    if isinstance(replaced, ast.expr):
        return f"({ast.unparse(_value(new))})"
    return ast.unparse(_Fill(bodies).visit(ast.Module(new, [])))
