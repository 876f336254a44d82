"""What the pages print runs as it is printed: Python, configurations, and commands with the launcher they name.

A reader's folder stands around it: `configs/`, with the names of this repository's and small models in them, models of
others, and a package of one's own.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from tests.pool import distributed, run_blocks
from tests.train import command
from tests.train.command import WITHOUT_PICTURES
from weft.cli import main
from weft.models import HybridConfig, HybridModel, hf
from weft.train.config import from_tables, load_config, parse_config, to_toml
from weft.train.loop import train

ROOT = Path(__file__).parents[1]
PAGES = ("training", "recipes", "checkpoints", "models", "huggingface", "settings", "pipelines")
ELSEWHERE = {
    "pattern '[**-]', position 2": "models/test_docs.py: an error",
    "embedding.weight": "models/test_docs.py: a list of keys",
    "weft chat": "train/test_conversations.py: a model with a chat template",
    "torchrun --nnodes 2": "train/test_launch.py: two hosts are needed for the line itself",
}
"""Beginnings of blocks that are no code, or need what a test has not."""
SMALL = {
    "model": {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24},
    "data": {"paths": ["text.txt"], "cache_dir": "cache", "sequence_length": 16, "validation_fraction": 0.2},
    "train": {"steps": 200, "global_batch_size": 8, "microbatch_size": 2, "validation_batches": 1},
    "schedule": {"warmup_steps": 4},
}
OF_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
OWN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def build(width=64):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))

def loss(model, microbatch):
    return cross_entropy(model(microbatch["x"]), microbatch["y"])

def batches(rank, ranks):
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(4, 4, generator=generator), "y": torch.arange(4) % 3} for _ in range(5)]

held_out = batches
"""


def blocks(page, language):
    """Texts of the page's fenced blocks in that language; "": without one."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return [
        body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if name == language
    ]


def commands(page, *, that_train):
    """Blocks of commands, with whether they start ranks that train."""
    found = [block for block in blocks(page, "") if not block.startswith(tuple(ELSEWHERE))]
    return [block for block in found if ("weft train" in block) is that_train]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    text = "".join(f"line {n} of {n * n % 97} words, mod {n % 7}\n" for n in range(400))
    for name in ("text.txt", "other.txt"):
        (folder / name).write_text(text)
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").glob("*.toml"):
        own = load_config(path)
        tables = {name: dict(values) for name, values in weft.train.config.to_dict(own).items()}
        for section, values in SMALL.items():
            tables[section] |= values
        if own.model.pattern == "[*-][*-][*-][*-]" and own.sharding.pp == 1:
            tables["model"]["pattern"] = "[*-]"
        if "E" in own.model.pattern:
            tables["model"] |= OF_EXPERTS
            tables["train"] |= {"steps": 6, "validate_every": 0}
        if own.sharding.pp > 1:
            tables["train"] |= {"steps": 6, "validate_every": 0}
        (folder / "configs" / path.name).write_text(to_toml(from_tables(tables)))
    (folder / "run.toml").write_text("[train]\nsteps = 3\nglobal_batch_size = 8\nmicrobatch_size = 4\n")
    prices = (f"{n % 90 + 20},{n % 5 + 1},{'AB'[n % 2]},{1000 * (n % 90) + 500 * (n % 2)}" for n in range(128))
    (folder / "prices.csv").write_text("\n".join(["area,rooms,city,price", *prices]) + "\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "module.py").write_text(OWN)
    publish(folder)
    return folder


def publish(folder):
    """Models of others: "theirs", a Llama, and THEIRS and SOURCE with experts and a tokenizer of single bytes."""
    sizes = {"vocab_size": 256, **SMALL["model"], **OF_EXPERTS}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    hf.save(HybridModel(HybridConfig(pattern="[*-]", **sizes)), folder / "theirs")
    for name in ("THEIRS", "SOURCE"):
        hf.save(HybridModel(HybridConfig(pattern="[*E]", **sizes)), folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    tables = {"model": {"pattern": "[*E]", **sizes}, **{name: SMALL[name] for name in ("data", "schedule")}}
    tables["train"] = {**SMALL["train"], "steps": 4}
    (folder / "CONFIG.toml").write_text(to_toml(from_tables({**tables, "run": {"name": "from-source"}})))


@contextlib.contextmanager
def standing_in(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        patched.setattr("weft.train.report.page.can_draw", lambda: False)
        yield


def names_of(page):
    """What the reader of the page has already."""
    if page == "training":
        own = {}
        exec(OWN, own)
        return {**own, "cross_entropy": cross_entropy}
    if page == "checkpoints":
        model = weft.fully_shard(nn.Linear(4, 4))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    return {}


def run_python(folder, page):
    names = names_of(page)
    with standing_in(folder):
        run_blocks(blocks(page, "python"), names)


@pytest.fixture(scope="module")
def read(reader, pool):
    """The folder after the Python of the pages has run on two ranks."""
    for page in ("training", "recipes", "checkpoints", "huggingface"):
        pool.run(1 if page == "huggingface" else 2, run_python, reader, page)
    (reader / "RUN").symlink_to("runs/stdlib")
    return reader


@pytest.mark.long
def test_the_python_of_the_pages_runs(read):
    assert weft.checkpoint.committed_steps(read / "runs" / "stdlib" / "checkpoints") == [100, 200]
    assert weft.checkpoint.committed_steps(read / "checkpoints") == [0]
    for name, step in (("images", 20), ("table", 20), ("gan", 10)):
        assert weft.checkpoint.committed_steps(read / "runs" / name / "checkpoints") == [step]
    assert "accuracy" in (read / "runs" / "images" / "report.html").read_text()
    assert hf.config_of(read / "again") == hf.config_of(read / "theirs")


@pytest.mark.long
@distributed(2)
def test_every_configuration_of_a_page_trains(reader):
    with standing_in(reader):
        for number, block in enumerate(blocks("training", "toml")):
            tables = SMALL if "[model]" not in block else {"train": {"microbatch_size": 4}}
            small = [
                f"{section}.{name}={value}"
                for section, values in tables.items()
                for name, value in values.items()
                if section != "model" or "factory" not in block
            ]
            changes = [*small, "train.steps=2", "train.global_batch_size=8", "schedule.warmup_steps=0"]
            config = parse_config(block, [*changes, f"run.name=block-{number}"])
            assert train(config).position.step == 2


@pytest.mark.long  # what the commands read is made by the runs of the test above
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, that_train=False)])
def test_commands_that_read_do_what_the_page_says(page, read, monkeypatch):
    monkeypatch.setenv("HOME", str(read))
    with standing_in(read):
        for line in "".join(commands(page, that_train=False)).splitlines():
            do(line)
    if page == "training":
        assert "_weft()" in (read / ".local/share/bash-completion/completions/weft").read_text()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, that_train=True)])
def test_commands_that_train_do_what_the_page_says(page, read, monkeypatch):
    for path in (read / "configs").glob("*.toml"):
        path.write_text(path.read_text().replace("steps = 200\n", "steps = 6\n"))  # what is read is made by now
    lines = "".join(commands(page, that_train=True)).splitlines()
    with standing_in(read):
        for line in lines:
            if not any(other.startswith(f"{line} ") for other in lines):  # which has options more
                said = do(line.replace("steps=200", "steps=6"))
                assert "step" in said or "weft train" not in line


def test_every_block_of_a_page_is_run_or_named_as_run_elsewhere():
    for page in PAGES:
        for block in blocks(page, ""):
            known = block.startswith(tuple(ELSEWHERE)) or re.match(r"(weft|mkdir) ", block)
            assert known, (page, block)
        assert set(re.findall(r"^```(\w+)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)) <= {
            "python",
            "toml",
        }
    assert all(blocks(page, "python") for page in ("training", "checkpoints", "models", "huggingface", "pipelines"))


def do(line):
    """What a command prints. Files are those of a shell; ranks are forked; another command runs here."""
    words = shlex.split(line, comments=True)
    if ">" in words or words[0] != "weft":
        return shell(line)
    if words[1] == "train":
        done = command.weft(*words[1:], timeout=180, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        return done.stdout
    if "BACK" in words:
        subprocess.run(["rm", "-rf", "BACK"], check=True)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = main(words[1:])
    if dist.is_initialized():  # what a command begins ends with its process
        dist.destroy_process_group()
    assert code == 0, (line, said.getvalue())
    return said.getvalue()


def shell(text):
    """What bash prints of it, without anything that goes wrong."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    source = f"{Path(weft.__file__).parents[1]}{os.pathsep}{WITHOUT_PICTURES}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
