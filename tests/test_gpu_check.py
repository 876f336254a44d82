"""The script for whoever has a card, without one: its first run there is no adventure."""

import os
import re
import subprocess
import sys
import time
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
        "Tests of graphs",
        "Tests under torch's stream sanitizer",
        "Compared with torch FSDP2",
        "Compared with torch FSDP2, two ranks on one card",
    ]
    assert "failed" not in report.lower() and "cannot" not in report
    one, several = parts[3:]
    assert "host time" in one and "one rank over NCCL" in one and "2 ranks that share the card, over gloo" in several
    for part in (one, several):
        sizes = ["small", "large"] if part is one else ["small"]
        compared_of = part.split("time of a step of these layers")[1:]
        assert len(compared_of) == len(sizes) and all(f"{size} transformer layers" in part for size in sizes)
        for compared in compared_of:
            assert "weft / side" in compared
            assert all(side in compared for side in ("graphs", "FSDP2", "DDP", "plain"))
        replays = [int(line.split()[3]) for line in part.splitlines() if re.match(r"graphs +\d+ +\d+ +\d+$", line)]
        assert len(replays) == len(sizes) and all(replays), "the rows of graphs are of replays"


@pytest.mark.long
def test_a_part_that_fails_is_in_the_report_and_in_the_exit_status(tmp_path):
    broken = tmp_path / "python"
    fails, runs = "*pytest*) echo no such luck; exit 3;;", "*'weft bench'*) echo measured; exit;;"
    broken.write_text(f'#!/bin/sh\ncase "$*" in {fails} {runs} esac\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    found, report = rehearse(tmp_path, PYTHON=str(broken))
    assert found.returncode == 1
    assert "no such luck" in report and "**Failed: exit status 3.**" in report
    assert "measured" in report.split("## Compared with torch FSDP2")[1], "what comes behind runs all the same"


@pytest.mark.long
def test_a_part_that_hangs_ends_at_its_limit_and_the_parts_behind_it_run(tmp_path):
    hanging = tmp_path / "python"
    hangs, runs = "*pytest*) echo begun; sleep 60;;", "*'weft bench'*) echo measured; exit;;"
    hanging.write_text(f'#!/bin/sh\ncase "$*" in {hangs} {runs} esac\nexec {sys.executable} "$@"\n')
    hanging.chmod(0o755)
    found, report = rehearse(tmp_path, PYTHON=str(hanging), WEFT_PART_SECONDS="1")
    assert found.returncode == 1
    assert report.count("begun") == report.count("**Failed: not done after 1 seconds.**") == 3
    assert "measured" in report.split("## Compared with torch FSDP2")[1]


@pytest.mark.long
@pytest.mark.parametrize(("hangs", "running"), [pytest.param("pytest", 3, marks=pytest.mark.long), ("weft bench", 1)])
def test_a_check_that_is_interrupted_reports_what_is_done_and_what_ran(tmp_path, hangs, running):
    broken, target = tmp_path / "python", tmp_path / "gpu.md"
    fails = "*pytest*) echo no such luck; exit 3;;"
    waits = f"*'{hangs}'*) echo begun; echo $$ >>{tmp_path}/pids; exec sleep 60;;"
    broken.write_text(f'#!/bin/sh\ncase "$*" in {waits} {fails} esac\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    command = ["sh", str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", str(target)]
    check = subprocess.Popen(command, env={**os.environ, "PYTHON": str(broken)}, stdout=subprocess.DEVNULL)
    deadline, pids = time.monotonic() + 60, tmp_path / "pids"
    while (not pids.exists() or len(pids.read_text().split()) < running) and time.monotonic() < deadline:
        time.sleep(0.05)
    check.terminate()
    assert check.wait(30) == 130
    report = target.read_text()
    assert report.count("begun") == report.count("**Failed: interrupted.**") == running
    assert report.count("no such luck") == report.count("exit status 3") == (0 if hangs == "pytest" else 3)
    for pid in map(int, pids.read_text().split()):
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists(), "it runs on"


def test_the_limits_of_all_parts_together_are_thirty_minutes():
    text = (ROOT / "scripts" / "gpu_check.sh").read_text()
    limits = [int(seconds) for seconds in re.findall(r'^ *part \S+ ".*?" (\d+) ', text, re.MULTILINE)]
    assert len(limits) == 3 and sum(limits) + 10 * len(limits) <= 30 * 60  # those of the tests run at once


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
