"""Programs around other libraries, run with torch's FSDP2 and with weft in its place: the same losses and norms."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"

FABRIC = "lightning_fabric.py"
LLAMA = "torchtitan_llama3.py"
DEEPSEEK = "torchtitan_deepseek_v3.py"


def steps(program: str, *options: str, ranks: int = 2) -> tuple[list[list[float]], str]:
    """Loss, norm and, where it prints one, exact norm of each step, and all that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / program), *options], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"loss (\S+) norm (\S+)(?: exact (\S+))?", done.stdout)
    return [[float(number) for number in step if number] for step in found], done.stdout


def need(program: str) -> None:
    """Skip where its library is absent."""
    for library in ("lightning",) if program == FABRIC else ("torchtitan", "triton"):  # which torchtitan imports
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}: pip install 'weft[ecosystem]'")


def assert_alike(actual: list[list[float]], expected: list[list[float]]) -> None:
    assert len(actual) == len(expected)
    for (loss, norm, *exact), (wanted, wanted_norm, *wanted_exact) in zip(actual, expected):
        assert [loss, *exact] == pytest.approx([wanted, *wanted_exact], rel=1e-5, abs=1e-5)
        # In float32 the CPU's norm of half a million elements is up to 2e-5 too small, that of shorter parts less:
        # the exact norms are compared above.
        assert norm == pytest.approx(wanted_norm, rel=5e-5 if exact else 1e-5)


@pytest.mark.parametrize(
    ("program", "ranks", "options"),
    [
        (FABRIC, 2, ""),
        (LLAMA, 2, ""),
        (LLAMA, 4, "--tp 2"),
        (LLAMA, 2, "--ac full"),
        (LLAMA, 2, "--ac selective"),
        (LLAMA, 2, "--compile"),
        (DEEPSEEK, 2, ""),
        (DEEPSEEK, 4, "--ep 2"),
    ],
)
def test_a_program_trains_alike_with_weft_in_the_place_of_fsdp2(program, ranks, options):
    need(program)
    expected, said = steps(program, "--torch", *options.split(), ranks=ranks)
    assert len(expected) >= 3 and "in the place of" not in said
    actual, said = steps(program, *options.split(), ranks=ranks)
    assert "weft in the place of torch's FSDP2" in said
    assert_alike(actual, expected)


@pytest.mark.parametrize("saver", ["torch", "weft"])
@pytest.mark.parametrize(("program", "options"), [(LLAMA, ""), (DEEPSEEK, "--ep 2")])
def test_what_one_library_saves_the_other_resumes_as_if_nothing_had_been(tmp_path, program, options, saver):
    need(program)
    chosen = [["--torch"], []] if saver == "torch" else [[], ["--torch"]]
    whole, _ = steps(program, *options.split(), *chosen[0], "--save", str(tmp_path))
    rest, said = steps(program, *options.split(), *chosen[1], "--resume", str(tmp_path))
    assert ("in the place of" in said) == (saver == "torch")
    assert len(rest) == 2 and len(whole) == 4
    assert_alike(rest, whole[2:])
