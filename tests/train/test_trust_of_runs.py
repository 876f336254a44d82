"""Code that a run directory names is imported where this user made it, or says so."""

import os
import shutil

import pytest

from tests.train.command import forked, write_config
from weft.train.config import ConfigError, load_config
from weft.train.run.runs import CONFIG
from weft.train.run.trust import mark_as_own, named_code, require_trust

IMPORTED = "imported.txt"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run directory of this user that names a logger."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / CONFIG).write_text(
        '[data]\nsequence_length = 8\n[run]\nloggers = ["bad:Logger"]\n[optimizer]\nname = "bad:Optimizer"\n'
    )
    mark_as_own(run, load_config(run / CONFIG))
    return run


def check(run, overrides=(), trust=False):
    config = load_config(run / CONFIG, overrides)
    require_trust(run, config, overrides, trust=trust, asked=f"--resume {run}")


def test_own_directories_are_trusted_and_others_name_their_code(own, tmp_path, monkeypatch):
    check(own)
    moved = tmp_path / "moved"
    shutil.copytree(own, moved)
    with pytest.raises(ConfigError, match=r"optimizer\.name = bad:Optimizer; run\.loggers = bad:Logger.*add --trust"):
        check(moved)
    check(moved, trust=True)
    with pytest.raises(ConfigError, match=r"imported \(run\.loggers = bad:Logger\)"):
        check(moved, ["optimizer.name=AdamW"])
    check(moved, ["optimizer.name=AdamW", "run.loggers=[]"])  # a person names all that is imported
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another-user"))
    with pytest.raises(ConfigError, match="add --trust"):
        check(own)


def test_another_name_in_a_trusted_directory_is_asked_for_again(own):
    text = (own / CONFIG).read_text()
    (own / CONFIG).write_text(text.replace("bad:Logger", "worse:Logger"))
    with pytest.raises(ConfigError, match=r"run\.loggers = worse:Logger"):
        check(own)


def test_a_configuration_without_code_needs_no_trust(tmp_path):
    config = load_config(write_config(tmp_path))
    assert named_code(config) == {}
    require_trust(tmp_path, config, [], trust=False, asked="it")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train", "--resume"], ["eval"]])
def test_neither_resume_nor_eval_imports_what_a_directory_from_elsewhere_names(own, pool, tmp_path, command):
    (tmp_path / "bad.py").write_text(f"open({str(tmp_path / IMPORTED)!r}, 'w')\n")
    (own / "checkpoints" / "step-00000001").mkdir()
    shutil.move(own, tmp_path / "from-elsewhere")
    state = os.environ["XDG_STATE_HOME"]
    code, said = forked(pool, *command, "from-elsewhere", folder=tmp_path, XDG_STATE_HOME=state)
    assert code == 2 and "add --trust" in said
    assert not (tmp_path / IMPORTED).exists()
