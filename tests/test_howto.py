"""The how-to pages: their Python runs on two ranks, their configurations and commands are those that weft takes."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import weft
from tests.pool import distributed, run_blocks
from weft.cli.parser import make_parser
from weft.train.config import parse_config

PAGES = Path(__file__).parents[1] / "docs" / "howto"
NAMES = sorted(page.stem for page in PAGES.glob("*.md"))


def blocks(name, language=""):
    text = (PAGES / f"{name}.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


RUNS = {"example", *(parse_config(toml, []).run.name for name in NAMES for toml in ["", *blocks(name, "toml")])}
"""The runs that the commands of the pages start."""


@distributed(2)
def test_the_python_of_a_page_trains_sharded():
    for page in ("any-module", "from-ddp", "from-deepspeed"):
        names = {}
        run_blocks(blocks(page, "python"), names)
        assert isinstance(names["model"], weft.FSDPModule)
        assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in names["model"].parameters())
        assert names["optimizer"].state


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "toml")])
def test_a_configuration_can_run_on_two_ranks(page):
    for block in blocks(page, "toml"):
        parse_config(block, []).validate(2)


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name)])
def test_the_command_line_takes_the_commands(page):
    for line in "".join(blocks(page)).replace("\\\n", "").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if "weft" in words:
            options, unknown = make_parser().parse_known_args(words[words.index("weft") + 1 :])
            assert not unknown and options.command in ("train", "config", "convert", "inspect", "sample"), line
            assert set(re.findall(r"runs/(\w+)", line)) <= RUNS, line
        elif "torchrun" in words:
            assert (PAGES.parents[1] / words[-1]).is_file(), line
        else:
            assert words[:2] == ["pip", "install"] or words[:3] == ["python3", "-m", "venv"], line
