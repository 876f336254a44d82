"""The sections of a configuration as frozen dataclasses: every field has a default and one line below it.

    [section]     ->  SectionConfig
    name = value      .name

What a section can know of its own values it checks when it is made; what needs several, `TrainConfig` does.
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
