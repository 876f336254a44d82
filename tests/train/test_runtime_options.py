"""Every option of how units run together is a setting of the trainer."""

import dataclasses

import pytest
from torch import nn

import weft
from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.sections.sharding import ShardingConfig
from weft.train.task.sharding import options_of

CHOICES = {
    "prefetch_bytes": 1000,
    "bucket_bytes": 2000,
    "max_live_reduce_buffers": 3,
    "separate_all_gather_group": True,
    "allocator": "caching",
    "check_collectives": False,
}
GRAPHS = {"graphs": ("attn",), "graphs_backend": "tape"}


def runtime_of(**sharding):
    config = dataclasses.replace(TrainConfig(), sharding=ShardingConfig(**sharding))
    return options_of(config, nn.Linear(2, 2))["runtime"]


def test_settings_are_the_options_and_their_defaults_the_same():
    assert {field.name for field in dataclasses.fields(weft.RuntimeOptions)} == {*CHOICES, "graphs"}
    assert runtime_of(**GRAPHS) == weft.RuntimeOptions(graphs=weft.Graphs(("attn",), backend="tape"))
    assert runtime_of() == weft.RuntimeOptions()
    assert runtime_of(**CHOICES) == weft.RuntimeOptions(**CHOICES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"graphs": ("full_iteration",)},
        {"graphs": ("moe_preprocess",)},
        {"graphs": ("attn",), "allocator": "caching"},
        {"graphs_backend": "tape"},
    ],
)
def test_graphs_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=rf"sharding\.{next(iter(wrong))} = "):
        ShardingConfig(**wrong)


@pytest.mark.parametrize("wrong", [{"prefetch_bytes": -1}, {"bucket_bytes": -1}, {"max_live_reduce_buffers": 0}])
def test_values_that_fit_no_option_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"sharding\.{name} = -?\d.*: must be"):
        ShardingConfig(**wrong)
