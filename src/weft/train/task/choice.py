"""Builds the task that a configuration describes."""

import dataclasses
from collections.abc import Callable

import torch

from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.imported import imported
from weft.train.sections import DataConfig, OwnModelConfig
from weft.train.task.own import OwnTask
from weft.train.task.task import Task
from weft.train.task.text import TextTask, factory_of


def task_of(config: TrainConfig, device: torch.device, say: Callable[[str], None] = print) -> Task:
    """Return the task that `config` describes: an `OwnTask` if `data.factory` is set, otherwise a `TextTask`.
    Collective."""
    model, data = config.model, config.data
    if not data.factory:
        return TextTask(config, device, say)
    assert isinstance(model, OwnModelConfig)
    if dataclasses.replace(data, factory="", validation_factory="") != DataConfig():
        raise ConfigError("[data]: the other settings have no effect with data.factory; leave them out")
    if not model.loss:
        raise ConfigError(
            'model.loss = "": your own data (data.factory) needs its own loss; set model.loss to its path'
        )
    held = imported("data.validation_factory", data.validation_factory) if data.validation_factory else None
    loss = imported("model.loss", model.loss)
    return OwnTask(factory_of(model), loss, imported("data.factory", data.factory), held, None, config, device)
