"""Training and evaluation mode of a model's modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode inside this context. Afterwards each module has its previous mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
