"""What the source keeps to, read from it."""

import ast
import functools
import importlib
import pickle
import re
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import weft
from weft import errors
from weft.fsdp.driver import Engine

PACKAGE = Path(__file__).parents[1] / "src" / "weft"
COLLECTIVES = re.compile(
    r"^(all_gather|all_reduce|all_to_all|barrier|batch_isend|broadcast|gather|irecv|isend|monitored_barrier|recv|reduce"
    r"|scatter|send)(_|$)"
)
ENGINE_ROOMS = ("comm", "fsdp", "dtensor", "layout", "memory", "debug", "pipeline")
MOST_LINES = 400


def files(*rooms: str) -> list[Path]:
    return sorted(chain.from_iterable((PACKAGE / room).rglob("*.py") for room in rooms or ("",)))


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Parsing and walking all files takes seconds: several tests do it once."""
    return list(ast.walk(ast.parse(file.read_text())))


def above_comm() -> list[tuple[str, list[ast.AST]]]:
    return [(name_of(file), nodes_of(file)) for file in files() if not name_of(file).startswith("comm/")]


def documentation(nodes: list[ast.AST]) -> set[int]:
    """The ids of the strings that are documentation."""
    return {id(node.value) for node in nodes if isinstance(node, ast.Expr)}


def test_every_lock_of_weft_may_be_taken_again_by_the_thread_that_holds_it():
    """Garbage collection can run while a lock is held, and call `__del__` or `close` of anything, such as a file that
    a failed save has left open. With a plain lock, the thread would wait for itself."""
    found = {
        f"{name_of(file)}: {ast.unparse(node)}"
        for file in files()
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Lock", "threading.Lock")
    }
    # A thread of `weft check` holds the mailbox as long as it runs, and finalizers release it when they wait.
    assert found == {"train/check/threads/mailbox.py: threading.Lock()"}


def test_only_comm_calls_the_collectives_of_torch():
    """What it does not call the detector of hangs does not see."""
    calls = [
        f"{name}:{node.lineno} {ast.unparse(node.func)}"
        for name, nodes in above_comm()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and COLLECTIVES.match(node.func.attr)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
    ]
    assert not calls


def test_no_room_above_comm_names_a_backend_or_asks_how_a_group_sends():
    named = [
        f"{name}:{node.lineno} {node.value!r}"
        for name, nodes in above_comm()
        for known in [documentation(nodes)]
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in known
        and re.search("gloo|nccl", node.value)
    ]
    assert not named
    asked = [name_of(file) for file in files() if re.search("sends_directly|(?<!def _)get_backend", file.read_text())]
    assert all(name.startswith("comm/") for name in asked), asked


def test_every_tensor_of_the_engine_names_its_device_and_dtype():
    """`torch.set_default_device` and `torch.set_default_dtype` are the user's: neither may decide where hosts talk."""
    made = re.compile(r"^torch\.(tensor|empty|zeros|ones|full|arange|empty_strided)$")
    left = [
        f"{name_of(file)}:{node.lineno}"
        for file in [*files(*ENGINE_ROOMS, "optim", "quantize"), PACKAGE / "diagnostics.py"]
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and made.match(ast.unparse(node.func))
        for given in [{each.arg: ast.unparse(each.value) for each in node.keywords}]
        if None not in given and not {"device", "dtype"} <= given.keys() and given.get("device") != "'meta'"
    ]
    assert not left


def test_every_mutation_quotes_what_is_once_in_its_class_or_function():
    script = Path(__file__).parents[1] / "scripts" / "mutate.py"
    listed = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stdout[-2000:] + listed.stderr


def test_every_mutation_names_a_test_or_a_case_that_is_there(collected, monkeypatch):
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "scripts")
    named = {f"tests/{each.test}" for each in importlib.import_module("mutate").mutations()}
    files = {name for name in named if (root / name.partition("::")[0]).is_file()}
    assert named == files
    there = collected | {test.partition(mark)[0] for test in collected for mark in ("::", "[")}
    assert not {name for name in named - there if name.partition("::")[0] in there}


def test_files_of_the_engine_hold_one_noun_each():
    rooms = [*files(*ENGINE_ROOMS, "quantize"), PACKAGE / "diagnostics.py", PACKAGE / "replacement.py"]
    lengths = {name_of(file): len(file.read_text().splitlines()) for file in rooms}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}


def imports_of(file: Path, there: set[str]) -> set[str]:
    """The modules of weft that `file` imports, for types too, wherever it does."""
    found = set()
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("weft"):
            inside = {f"{node.module}.{each.name}" for each in node.names}
            found |= inside & there or {node.module}
    return found


def circle(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left once everything is gone that needs only what is gone."""
    left = {name: needed - {name} for name, needed in below.items()}
    while lowest := {name for name, needed in left.items() if not needed}:
        left = {name: needed - lowest for name, needed in left.items() if name not in lowest}
    return left


def test_imports_in_comm_fsdp_and_graphs_make_no_circle_nor_do_their_folders():
    rooms = files("comm", "fsdp", "graphs", "quantize")
    modules = {"weft." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in rooms}
    names = {name.removesuffix(".__init__") for name in modules}
    below = {
        name: {f"{each}.__init__" if f"{each}.__init__" in modules else each for each in imports_of(file, names)}
        & modules.keys()
        for name, file in modules.items()
    }
    assert not circle(below)
    folder = {name: name.rsplit(".", 1)[0] if name.count(".") > 2 else name for name in modules}
    folders = {folder[name]: set() for name in modules}
    for name, needed in below.items():
        folders[folder[name]] |= {folder[each] for each in needed}
    assert not circle(folders)


def test_messages_of_the_trainer_and_the_commands_count_in_singular_and_plural():
    """A number that may be 1 goes through `words.counted`, so that no message has "1 steps"."""
    plural = re.compile(r" (?:steps|sequences|tokens|ranks|files|microbatches|parameters|tensors|texts)\b")
    others = {
        (name_of(file), ast.unparse(before.value))
        for file in files("train", "cli")
        for node in nodes_of(file)
        if isinstance(node, ast.JoinedStr)
        for before, after in pairwise(node.values)
        if isinstance(before, ast.FormattedValue) and isinstance(after, ast.Constant) and plural.match(after.value)
    }
    assert others == {
        ("train/report/account.py", "format_count(self._parameters)"),
        ("train/report/figures.py", "window"),
        ("train/report/page.py", "format_count(facts['parameters'])"),
        ("train/run/world.py", "self.local_ranks"),
        ("train/task/own.py", "self.ranks"),
    }


def test_every_error_is_defined_in_one_module_under_one_base_class():
    defined = {
        (name_of(file), node.name)
        for file in files()
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef)
        and any(re.search("Error$|^Exception$|Warning$", ast.unparse(base)) for base in node.bases)
    }
    private = {  # which the trainer turns into a line, or into a ConfigError
        ("graphs/capture.py", "CaptureRefused"),
        ("train/data/cache.py", "Damaged"),
        ("train/files.py", "NotReadable"),
        ("train/run/failures.py", "Interrupted"),
    }
    assert {file for file, _ in defined - private} == {"errors.py"}
    classes = [getattr(errors, name) for name in errors.__all__]
    assert {cls.__name__ for cls in classes} == {name for _, name in defined - private}
    for cls in classes:
        assert issubclass(cls, errors.WeftError)
        assert cls is errors.WeftError or issubclass(cls, (RuntimeError, ValueError))


def test_errors_keep_what_they_say_between_processes():
    for error in (
        errors.PatternError("*x", 1, "x", "no such layer"),
        errors.TableError("no rank can run", 1, 3, "it waits"),
        errors.CollectiveMismatch("ranks wait"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and vars(again) == vars(error) and isinstance(again, weft.errors.WeftError)


def test_rooms_that_may_not_know_stages_ask_in_one_place_how_a_model_is_cut():
    asks = {name_of(file) for file in files() if re.search(r'getattr\([^)]*"cut"', file.read_text())}
    assert asks == {"mesh.py", "overlap/arguments.py"}


def test_drivers_use_the_protocol_of_the_engine_and_nothing_else_of_it():
    faces = {"weft.fsdp.driver", "weft.fsdp.module", "weft.fsdp.precision", "weft.fsdp.trees", "weft.fsdp.unit"}
    for driver in ("fsdp/hooks.py", "overlap/units.py", "overlap/run.py", "overlap/chunk_pass.py"):
        text = (PACKAGE / driver).read_text()
        used = set(re.findall(r"^\s*(?:from|import) (weft\.fsdp[\w.]*)", text, re.MULTILINE))
        assert used <= faces, (driver, used - faces)
    said = set(re.findall(r"\b(?:engine|self\.engine|driver\.engine)\.(\w+)", (PACKAGE / "fsdp/hooks.py").read_text()))
    said |= set(re.findall(r"\bengine\.(\w+)", (PACKAGE / "overlap/units.py").read_text()))
    assert said <= {name for name in vars(Engine) if not name.startswith("_")}, said
