"""Runs whose weights travel quantized."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.train.command import write_config
from tests.train.test_loop import train_on
from weft import quantize
from weft.models import HybridModel
from weft.models.narrow import choose_weights
from weft.train.config import TrainConfig, load_config
from weft.train.errors import ConfigError
from weft.train.record.metrics import read_metrics
from weft.train.sections.loop import LoopConfig
from weft.train.task.sharding import _RECIPES, options_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_precision_is_a_recipe():
    recipes = {
        "fp8": quantize.tensorwise(),
        "fp8_rowwise": quantize.rowwise(),
        "fp8_blockwise": quantize.blockwise(128, 128),
        "mxfp8": quantize.mx(32),
        "nvfp4": quantize.nvfp4(),
        "bf16": None,
        "fp32": None,
    }
    for name, recipe in recipes.items():
        config = dataclasses.replace(TrainConfig(), train=LoopConfig(precision=name))
        policy = options_of(config, nn.Linear(2, 2))["mp_policy"]
        assert policy.param_quantization == recipe and policy.quantize is None
        assert policy.param_dtype == (None if name == "fp32" else torch.bfloat16)
    config = dataclasses.replace(TrainConfig(), train=LoopConfig(precision="fp8", unquantized_ends=2))
    assert options_of(config, nn.Linear(2, 2))["mp_policy"].quantize == quantize.except_ends(2, 2)
    with pytest.raises(ConfigError, match=r"train\.unquantized_ends.*no effect without a quantized train\.precision"):
        LoopConfig(precision="bf16", unquantized_ends=1)
    with pytest.raises(ConfigError, match=r"train\.quantization_shares_every.*no effect without a quantized"):
        LoopConfig(quantization_shares_every=1)


def test_the_example_fits_every_precision():
    config = load_config(ROOT / "configs" / "stdlib.toml")
    with torch.device("meta"):
        model = HybridModel(config.model)
    for recipe in _RECIPES.values():
        policy = choose_weights(model, weft.MixedPrecisionPolicy(param_quantization=recipe()))
        chosen = [(n, p) for n, p in model.named_parameters() if policy.quantize(n, p)]
        assert len(chosen) == 7 * 4, "projections of attention and of the MLP"
        for name, parameter in chosen:
            recipe().check(parameter.shape, name)


@pytest.mark.long
def test_a_quantized_run_resumes_bit_for_bit_and_under_another_recipe(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=2, train__precision="nvfp4", train__quantization_shares_every=3)
    whole = pool.run(2, train_on, path, tmp_path / "run", stop_at=6)[0]
    pool.run(2, train_on, path, tmp_path / "parts", stop_at=3)
    lines = [each for each in read_metrics(tmp_path / "run") if each["kind"] == "quantization"]
    assert [each["step"] for each in lines] == [3, 6]
    assert all(0 < share < 1 for each in lines for share in each["underflowed"].values())
    assert lines[0]["saturated"].keys() == lines[0]["underflowed"].keys() == {"decoder.layers.0"}
    parts = pool.run(2, train_on, path, tmp_path / "parts", stop_at=6, resume_from=3)[0]
    assert parts[:2] == whole[:2]
    for mine, theirs in zip(parts[2:4], whole[2:4]):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    changed = pool.run(2, train_on, path, tmp_path / "parts", ["train.precision=fp8"], stop_at=8, resume_from=6)[0]
    assert [each["step"] for each in changed[0]] == list(range(1, 9))
    assert changed[0][-1]["loss"] < whole[0][0]["loss"]
