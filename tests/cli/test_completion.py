"""What Tab suggests: the script is sourced by the shell itself."""

import shutil
import subprocess

import pytest

from weft.cli import main
from weft.cli.completion import SHELLS, script
from weft.cli.parser import make_parser
from weft.train.settings import settings


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "weft"
    path.write_text(script(make_parser(), "bash"))

    def suggested(*words):
        """For the last of the words."""
        said = 'COMP_WORDS=(weft "$@"); COMP_CWORD=$#; _weft; printf "%s\\n" "${COMPREPLY[@]}"'
        command = ["bash", "--norc", "-c", f"source {path}; {said}", "-", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()

    return suggested


@pytest.mark.slow
def test_bash_completes_commands_options_and_settings(bash):
    assert {"train", "eval", "report", "inspect"} <= set(bash(""))
    assert bash("ins") == ["inspect"]
    assert bash("train", "--resu") == ["--resume", "--resume-or-start"]
    assert bash("inspect", "--v") == ["--verify"]
    every = [f"{each.section}.{each.name}=" for each in settings()]
    assert bash("train", "a.toml", "--set", "") == every
    assert bash("train", "a.toml", "--set", "train.warm") == []
    assert bash("train", "a.toml", "--set", "schedule.warm") == ["schedule.warmup_steps="]
    assert bash("--completion", "") == list(SHELLS)
    assert bash("train", "conf") == [], "files, which the shell knows itself"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script_of_every_shell(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--completion", shell])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("train", "schedule", "--resume-or-start", "--microbatches", "--verify", "optimizer.lr="):
        assert (f"-l {word[2:]}" if shell == "fish" and word.startswith("--") else word) in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=20)


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "tcsh"])
    assert ended.value.code == 2 and "'tcsh'" in capsys.readouterr().err
