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


def numbers(program: str, *options: str) -> tuple[list[float], str]:
    """Losses, norms and evaluations that it prints, and all that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / program), *options], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(number) for number in re.findall(r"\b(?:loss|norm|evaluation) (\S+)", done.stdout)], done.stdout


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("transformers", "hf_trainer.py"),
        ("accelerate", "accelerate_loop.py"),
        ("lightning", "lightning_fabric.py"),
        ("lightning", "lightning_trainer.py"),
        ("torchtitan", "torchtitan_llama3.py"),
    ],
)
def test_a_program_trains_alike_with_weft_in_the_place_of_fsdp2(library, program):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install 'weft[ecosystem]'")
    if library == "torchtitan" and importlib.util.find_spec("triton") is None:
        pytest.skip("torchtitan imports triton")
    expected, said = numbers(program, "--torch")
    assert len(expected) >= 6 and "in the place of" not in said
    actual, said = numbers(program)
    assert "weft in the place of torch's FSDP2" in said
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
