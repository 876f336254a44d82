"""Checks that the sizes in a configuration fit into the memory of this host."""

import os

from weft.models import HybridConfig
from weft.train.sections.data import DataConfig
from weft.train.sections.loop import LoopConfig
from weft.train.sections.model import OwnModelConfig
from weft.train.sections.rules import require


def check_sizes(model: HybridConfig | OwnModelConfig, data: DataConfig, loop: LoopConfig) -> None:
    """Raise ConfigError if one weight, the tokens of a microbatch or the positions of a step's sequences do not fit
    into the memory of this host. The check allocates none of these."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    length = data.sequence_length
    sizes = [
        ("train.global_batch_size", loop.global_batch_size, 32, "the order of a step's sequences"),
        ("train.microbatch_size", loop.microbatch_size, 8 * length, "a microbatch"),
        ("data.sequence_length", length, 8 * loop.microbatch_size, "a microbatch"),
    ]
    if isinstance(model, HybridConfig):
        hidden, widest = model.hidden_size, max(model.vocab_size, model.intermediate_size)
        wide = "vocab_size" if widest == model.vocab_size else "intermediate_size"
        sizes += [
            ("model.hidden_size", hidden, 4 * widest, f"one weight, with model.{wide} = {widest},"),
            (f"model.{wide}", widest, 4 * hidden, f"one weight, with model.hidden_size = {hidden},"),
        ]
    for name, value, each, what in sorted(sizes, key=lambda size: -size[1]):
        rule = f"{what} takes {value * each:.3g} bytes, but this host has only {have:.3g}; lower it"
        require(name, value, value * each <= have, rule)
