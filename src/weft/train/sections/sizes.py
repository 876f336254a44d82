"""Sizes against the memory of this host."""

import os
from typing import TYPE_CHECKING

from weft.models import HybridConfig
from weft.train.sections.rules import require

if TYPE_CHECKING:
    from weft.train.config import TrainConfig


def check_sizes(config: "TrainConfig") -> None:
    """Raise ConfigError for sizes that this host's memory does not hold, before they take any."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    loop, length = config.train, config.data.sequence_length
    sizes = [
        ("train.global_batch_size", loop.global_batch_size, 32, "the positions of a step"),
        ("train.microbatch_size", loop.microbatch_size, 8 * length, "the tokens of a microbatch"),
        ("data.sequence_length", length, 8 * loop.microbatch_size, "the tokens of a microbatch"),
    ]
    if isinstance(config.model, HybridConfig):
        hidden, widest = config.model.hidden_size, max(config.model.vocab_size, config.model.intermediate_size)
        wide = "vocab_size" if widest == config.model.vocab_size else "intermediate_size"
        sizes += [
            ("model.hidden_size", hidden, 4 * widest, f"one weight, with model.{wide} = {widest},"),
            (f"model.{wide}", widest, 4 * hidden, f"one weight, with model.hidden_size = {hidden},"),
        ]
    for name, value, each, what in sorted(sizes, key=lambda size: -size[1]):
        rule = f"{what} takes {value * each:.3g} bytes, and this host has {have:.3g}; lower it"
        require(name, value, value * each <= have, rule)
