"""The script for whoever has a card, without one: its first run there is no adventure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_check_of_a_gpu_runs_without_one_and_reports_each_part(tmp_path):
    found, report = rehearse(tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    parts = report.split("## ")[1:]
    assert [part.splitlines()[0] for part in parts] == [
        "Tests",
        "Tests under torch's stream sanitizer",
        "Beside torch FSDP2",
        "Beside torch FSDP2, two ranks on one card",
    ]
    assert "failed" not in report.lower() and "cannot" not in report
    assert "host time" in parts[2] and "one rank over NCCL" in parts[2] and "2 ranks over gloo" in parts[3]
    for part in parts[2:]:
        compared = part.split("step of the same")[1]
        assert "weft / side" in compared and all(side in compared for side in ("FSDP2", "DDP", "plain"))


@pytest.mark.slow
def test_a_part_that_fails_is_in_the_report_and_in_the_exit_status(tmp_path):
    broken = tmp_path / "python"
    fails, runs = "*pytest*) echo no such luck; exit 3;;", "*bench*) echo measured; exit;;"
    broken.write_text(f'#!/bin/sh\ncase "$*" in {fails} {runs} esac\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    found, report = rehearse(tmp_path, PYTHON=str(broken))
    assert found.returncode == 1
    assert "no such luck" in report and "**Failed: exit status 3.**" in report
    assert "measured" in report.split("## Beside torch FSDP2")[1], "what comes behind runs all the same"


def rehearse(tmp_path, **environment) -> tuple[subprocess.CompletedProcess, str]:
    target = tmp_path / "results" / "gpu.md"
    found = subprocess.run(
        ["sh", str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", str(target)],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return found, target.read_text() if target.exists() else found.stderr
