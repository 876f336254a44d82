"""Programs around other libraries, run with torch's FSDP2 and with weft in its place: the same losses and norms."""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import Imported
from tests.train.command import free_port

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = re.compile(r"\b(loss|norm|exact|evaluation) (\S+)")

TRAINER = "hf_trainer.py"
ACCELERATE = "accelerate_loop.py"
FABRIC = "lightning_fabric.py"
LIGHTNING = "lightning_trainer.py"
LLAMA = "torchtitan_llama3.py"
DEEPSEEK = "torchtitan_deepseek_v3.py"


TORCHTITAN = (
    "import torchtitan_debug, torchtitan.models.llama3.config_registry, torchtitan.models.deepseek_v3.config_registry"
)
IMPORTS = {
    TRAINER: "import transformers, transformers.models.llama, transformers.trainer, accelerate",
    ACCELERATE: "import accelerate",
    FABRIC: "import lightning.fabric.strategies",
    LIGHTNING: "import lightning.pytorch.strategies, lightning.pytorch.callbacks",
    LLAMA: TORCHTITAN,
    DEEPSEEK: TORCHTITAN,
}
"""What takes seconds to import: all ranks of all programs with the same are forked from one process that has."""
SMALL = ["--layers", "3"]
"""The first three of the six layers of torchtitan's debug models."""


@pytest.fixture(scope="module")
def steps():
    """`run_steps` with processes that hold the imports."""
    with contextlib.ExitStack() as ending:
        place = f"sys.path.insert(0, {str(EXAMPLES)!r})\nimport torch.distributed, weft.fsdp\n"
        having = functools.cache(lambda imports: ending.enter_context(Imported(place + imports)))
        yield functools.partial(run_steps, having)


def run_steps(
    having: Callable[[str], Imported], program: str, *variants: list[str], ranks: int = 2
) -> list[tuple[list[dict[str, float]], str]]:
    """Runs at once, one for each list of options: the numbers of each line, by name, and all that it prints."""
    programs, environments = [], []
    for options in variants:
        if IMPORTS[program] == TORCHTITAN:
            options = [*options, *SMALL]
        port = free_port()
        for rank in range(ranks):
            programs.append(
                f"import runpy, sys; sys.argv = [{program!r}, *{options!r}]; "
                f"runpy.run_path({str(EXAMPLES / program)!r}, run_name='__main__')"
            )
            places = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
            sizes = {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
            environments.append({**places, **sizes, **meeting, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"})
    ended = having(IMPORTS[program]).run(programs, environments, timeout=600, together=True)
    failed = [each for each in ended if each.returncode > 0]
    assert not failed, failed[0].stdout[-2000:] + failed[0].stderr[-4000:]
    assert all(each.returncode == 0 for each in ended), ended
    texts = ["".join(each.stdout for each in ended[at : at + ranks]) for at in range(0, len(ended), ranks)]
    found = [
        [{name: float(number) for name, number in NUMBER.findall(line)} for line in text.splitlines()] for text in texts
    ]
    kept = [[numbers for numbers in lines if "loss" in numbers or "evaluation" in numbers] for lines in found]
    return list(zip(kept, texts, strict=True))


def need(*libraries: str) -> None:
    """Skip where one of them is absent."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}: pip install 'weft[ecosystem]'")


def assert_alike(program: str, actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [each.keys() for each in actual] == [each.keys() for each in expected]
    for mine, theirs in zip(actual, expected):
        for name, value in theirs.items():
            # In float32 the CPU's norm of half a million elements is up to 7e-5 too small, that of shorter parts less.
            # DeepSeek-V3 has such tensors, so its norm in double precision is what must agree.
            bound = 1e-4 if (program, name) == (DEEPSEEK, "norm") else 1e-5
            assert mine[name] == pytest.approx(value, rel=bound, abs=bound), name


@pytest.mark.parametrize(
    ("program", "libraries", "ranks", "options"),
    [
        (TRAINER, ["transformers", "accelerate"], 2, ""),
        (ACCELERATE, ["accelerate"], 2, ""),
        (FABRIC, ["lightning"], 2, ""),
        (LIGHTNING, ["lightning"], 2, ""),
        (LLAMA, ["torchtitan", "triton"], 4, "--tp 2"),
        (LLAMA, ["torchtitan", "triton"], 4, "--replicate 2"),
        (LLAMA, ["torchtitan", "triton"], 2, "--ac selective"),
        (LLAMA, ["torchtitan", "triton"], 2, "--compile"),
        (LLAMA, ["torchtitan", "triton"], 2, "--spmd full_dtensor"),
        (LLAMA, ["torchtitan", "triton"], 4, "--spmd full_dtensor --tp 2"),
        (DEEPSEEK, ["torchtitan", "triton"], 4, "--ep 2 --fp32-experts"),
        (DEEPSEEK, ["torchtitan", "triton"], 4, "--tp 2 --ep 2 --fp32-experts"),
    ],
)
def test_a_program_trains_alike_with_weft_in_the_place_of_fsdp2(steps, program, libraries, ranks, options):
    need(*libraries)
    variants = [["--torch", *options.split()], options.split()]
    # One after the other where layers are compiled: the second finds the kernels of the first in inductor's cache.
    at_once = [variants] if "--compile" not in options else [[each] for each in variants]
    (expected, said), (actual, said_with_weft) = [run for each in at_once for run in steps(program, *each, ranks=ranks)]
    assert len(expected) >= 3 and "weft in place of" not in said
    assert "weft in place of torch's FSDP2" in said_with_weft
    assert_alike(program, actual, expected)


@pytest.mark.parametrize(("program", "options"), [(LLAMA, ""), (DEEPSEEK, "--ep 2 --fp32-experts")])
def test_a_program_trains_alike_and_what_one_library_saves_the_other_resumes(steps, tmp_path, program, options):
    need("torchtitan", "triton")
    saves = {library: ["--save", str(tmp_path / library)] for library in ("torch", "weft")}
    (expected, said), (actual, said_with_weft) = steps(
        program, [*options.split(), "--torch", *saves["torch"]], [*options.split(), *saves["weft"]]
    )
    assert len(expected) == 4 and "weft in place of" not in said
    assert "weft in place of torch's FSDP2" in said_with_weft
    assert_alike(program, actual, expected)
    with_weft = [*options.split(), "--resume", str(tmp_path / "torch")]
    with_torch = [*options.split(), "--torch", "--resume", str(tmp_path / "weft")]
    for (rest, said), is_weft in zip(steps(program, with_weft, with_torch), (True, False)):
        assert ("weft in place of" in said) == is_weft
        assert len(rest) == 2
        assert_alike(program, rest, expected[2:])
