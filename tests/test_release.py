"""What is released: a version, a wheel and a source distribution that work without the checkout."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import weft
from weft.cli import main
from weft.cli.train import EXAMPLE
from weft.train.config import load_config

ROOT = Path(__file__).parents[1]
SHORT = [f"--set=train.{name}" for name in ("steps=4", "global_batch_size=4", "microbatch_size=2", "log_every=1")]
SHORT += ["--set=train.validation_batches=1", "--set=schedule.warmup_steps=2", "--set=data.sequence_length=32"]


def test_the_newest_entry_of_the_changelog_is_this_version():
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == weft.__version__


def test_an_import_of_weft_takes_less_than_a_tenth_of_a_second_and_loads_no_torch():
    program = (
        "import time; start = time.perf_counter(); import weft; spent = time.perf_counter() - start\n"
        "import sys; assert 'torch' not in sys.modules; print(spent)"
    )
    spent = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3)]
    assert min(spent) < 0.1


def test_the_example_of_the_command_line_is_the_first_configuration_of_the_repository():
    shipped, here = load_config(EXAMPLE), load_config(ROOT / "configs" / "stdlib.toml")
    assert dataclasses.replace(shipped, run=here.run) == here
    assert shipped.run == dataclasses.replace(here.run, name="example")


def test_the_example_and_another_configuration_are_refused(capsys):
    assert main(["train", "--example", "configs/stdlib.toml"]) == 2
    assert "--example configs/stdlib.toml: both name a configuration" in capsys.readouterr().err


def test_the_example_is_resumed_by_its_own_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("weft.train.run.launch.launch", lambda *given, **_: asked.append(given) or 0)
    assert main(["train", "--example", "--ranks", "2"]) == 0
    assert asked[0][3] == "weft train --example --ranks 2 --resume runs/example"


def needed_by(names: list[str]) -> set[str]:
    """The installed distributions that `names` depend on, transitively."""
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    while left:
        requirement = left.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        for each in map(Requirement, distribution.requires or []):
            asked = ("", *requirement.extras)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in asked):
                left.append(each)
    return found


def link(distributions: set[str], packages: Path) -> None:
    """Make installed distributions visible in an environment: copying torch would take minutes."""
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}:
            source, target = Path(str(distribution.locate_file(top))), packages / top
            if top != "__pycache__" and not target.exists():
                target.symlink_to(source)


def requirements(wheel: Path, extra: str = "") -> list[str]:
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        lines = re.findall(r"^Requires-Dist: (.+)$", content.read(metadata).decode(), re.MULTILINE)
    wanted = [Requirement(line) for line in lines]
    return [each.name for each in wanted if each.marker is None or (extra and each.marker.evaluate({"extra": extra}))]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source distribution, made from a copy of the files that git knows."""
    folder = tmp_path_factory.mktemp("release")
    copy = folder / "copy"
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


@pytest.mark.long
def test_a_source_distribution_holds_what_the_wheel_holds(built, tmp_path):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"weft-{weft.__version__}-")
    shutil.unpack_archive(source, tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build = "from setuptools import build_meta as b; b.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, check=True, capture_output=True)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(next(unpacked.glob("*.whl"))) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "weft").rglob("*.py")}
        assert modules | {"weft/py.typed", "weft/train/example.toml"} <= set(one.namelist())
    for name in ("CHANGELOG.md", "docs/sharding.md", "tests/pool.py", "examples/any_module.py"):
        assert (unpacked / name).is_file()


@pytest.mark.long
def test_the_wheel_trains_in_an_empty_environment_without_the_checkout(built, tmp_path):
    """The environment has the wheel and links to its dependencies, and later to those of the extra `train`."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    link(needed_by(requirements(wheel)), packages)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WEFT"))}
    plain |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    plain["OMP_NUM_THREADS"] = "1"

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr, done.stderr
        return done.stdout

    show = "import weft, sys; print(weft.__version__, weft.__file__); sys.exit('torch' in sys.modules)"
    version, file = run(str(python), "-c", show).split()
    assert version == weft.__version__
    assert Path(file).is_relative_to(home)
    for extra in ("matplotlib", "tensorboard", "tokenizers", "pytest"):
        assert not (packages / extra).exists()
    run("weft", "train", "--example", "--ranks", "2", *SHORT)
    assert "step 4" in run("weft", "inspect", "runs/example")
    run("weft", "train", "--resume", "runs/example", "--set=train.steps=6")
    assert not list((tmp_path / "runs" / "example").glob("loss.svg"))

    link(needed_by(requirements(wheel, "train")), packages)
    run("weft", "train", "--example", *SHORT)
    assert list((tmp_path / "runs" / "example-2").glob("loss.svg"))
