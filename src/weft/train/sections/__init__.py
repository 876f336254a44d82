"""The sections of a configuration as frozen dataclasses. Every field has a docstring of one line and,
except `model.factory`, a default.

    [section]     ->  SectionConfig
    name = value      .name

A section checks its values when it is constructed; `TrainConfig` checks combinations of sections.
"""

from weft.train.sections.data import DataConfig
from weft.train.sections.loop import LoopConfig
from weft.train.sections.model import OwnModelConfig
from weft.train.sections.optimizer import OptimizerConfig, ScheduleConfig
from weft.train.sections.run import CheckpointConfig, RunConfig
from weft.train.sections.sharding import ShardingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoopConfig",
    "OptimizerConfig",
    "OwnModelConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShardingConfig",
]
