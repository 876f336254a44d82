"""Configurations that name a model, a loss and data of one's own."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.train.command import metrics, weft, write_config
from tests.train.test_trainer import batches
from weft.train.config import load_config, parse_config, to_toml
from weft.train.errors import ConfigError
from weft.train.evaluate import evaluate
from weft.train.loop import Trainer
from weft.train.run.runs import Run
from weft.train.task.choice import task_of


class Tokens(nn.Module):
    """A small model of tokens, filled by `reset_parameters`."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def plain_loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def configured(folder, data=True, **model):
    config = write_config(folder, train__validate_every=2)
    text = config.read_text().partition("[data]")[2]
    table = "".join(f"{name} = {value}\n" for name, value in model.items())
    config.write_text(f"[model]\n{table}" + ("[data]" + text if data else "[train]" + text.partition("[train]")[2]))
    return config


def trained(path, folder, steps, resume_from=None):
    config = load_config(path, [f"train.steps={steps}", "schedule.shape=constant"])
    trainer = Trainer(config, Run(folder, resume_from), say=lambda line: None)
    trainer.run()
    return metrics(folder), metrics(folder, "validation"), type(trainer.model).__name__, trainer.task.description


TEXT = {"factory": f'"{__name__}:Tokens"', "options": "{width = 16}"}


@pytest.mark.long
def test_a_model_by_import_path_learns_text_resumes_bit_for_bit_and_is_evaluated(pool, tmp_path):
    path = configured(tmp_path, **TEXT)
    whole = pool.run(2, trained, path, tmp_path / "whole", 6)[0]
    assert whole[2].endswith("Tokens") and whole[0][-1]["loss"] < whole[0][0]["loss"]
    pool.run(2, trained, path, tmp_path / "parts", 4)
    assert pool.run(2, trained, path, tmp_path / "parts", 6, 4)[0] == whole
    values = pool.run(1, evaluate, tmp_path / "whole", overrides=[])[0]
    assert values["loss"] == pytest.approx(whole[1][-1]["loss"], rel=1e-5)


def broken():
    return int("no number")


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_error_in_user_code_shows_its_traceback_and_is_not_a_configuration_error(tmp_path, command):
    path = configured(tmp_path, factory=f'"{__name__}:broken"')
    (tmp_path / "config.toml").write_text(path.read_text())
    done = weft(*(("train", path) if command == "train" else ("eval", tmp_path, "--trust")), real=command == "train")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "in broken" in done.stderr
    assert "ValueError: invalid literal for int() with base 10: 'no number'" in done.stderr


OWN = {"factory": f'"{__name__}:Plain"', "loss": f'"{__name__}:plain_loss"'}


@pytest.mark.slow
def test_data_by_its_place_trains_too(pool, tmp_path):
    path = configured(tmp_path, data=False, **OWN)
    text = path.read_text().replace("validation_batches = 2\n", "")
    place = f"{batches.__module__}:batches"
    path.write_text(f'{text}[data]\nfactory = "{place}"\nvalidation_factory = "{place}"\n')
    lines, validations, _, description = pool.run(2, trained, path, tmp_path / "run", 4)[0]
    assert description == "data: the function batches"
    assert len(lines) == 4 and lines[-1]["loss"] > 0
    assert len(validations) == 2


@pytest.mark.parametrize(
    ("loss", "data", "said"),
    [
        ("a:b", "sequence_length = 8", "[data]: the other settings have no effect with data.factory"),
        ("", "", 'model.loss = "": your own data'),
    ],
)
def test_custom_data_excludes_other_data_and_needs_a_loss(loss, data, said):
    text = f'[model]\nfactory = "a:b"\nloss = "{loss}"\n[data]\nfactory = "a:b"\n{data}\n'
    with pytest.raises(ConfigError) as error:
        task_of(parse_config(text), torch.device("cpu"))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_options_that_the_factory_does_not_take_are_one_line():
    own = f'factory = "{__name__}:Tokens"\nloss = "{__name__}:plain_loss"\noptions = {{ width = 16, depth = 2 }}'
    text = f'[model]\n{own}\n[data]\nfactory = "a:b"\n'
    with pytest.raises(ConfigError, match=r"the class Tokens is called with \(width=16, depth=2\): got an"):
        task_of(parse_config(text), torch.device("cpu"))


def test_a_configuration_with_a_factory_reads_back_equal(tmp_path):
    config = load_config(configured(tmp_path, **TEXT))
    assert config.model.options == {"width": 16} and parse_config(to_toml(config)) == config


WRONG = {
    'factory = "nocolon"': "must be the path of a Python object",
    'factory = "a:b"\nhidden_size = 3': "model.hidden_size: unknown together with model.factory",
    'factory = "a:b"\nloss = "x"': 'model.loss = "x": must be the path',
    'factory = "a:b"\n[sharding]\nep = 2': "has no effect on your own model",
    'pattern = "[*-]"\n[data]\nfactory = "a:b"': "has no effect on a model described by a pattern",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_work_is_one_line(text):
    with pytest.raises(ConfigError) as error:
        parse_config(f"[model]\n{text}\n")
    assert WRONG[text] in str(error.value) and "\n" not in str(error.value)
