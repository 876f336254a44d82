"""Compiles the blocks of a model and wraps them for activation checkpointing, before they are sharded."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from weft.train.errors import ConfigError
from weft.train.sections import LoopConfig
from weft.words import choice_of

_aten = torch.ops.aten
PRODUCTS = [
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default),
    *(_aten._grouped_mm.default, _aten._scaled_mm.default),
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operators whose outputs `train.keep_products` saves instead of recomputing."""

Row = nn.ModuleList | nn.Sequential
"""A container of blocks."""
Place = tuple[Row, int]
"""The place of a block: (container, index)."""


def prepare(places: Sequence[Place], loop: LoopConfig) -> None:
    """Compile the blocks at `places` and wrap them for activation checkpointing, as the settings in `loop` say. Raises
    ConfigError if `train.compile` is not a backend of torch.compile."""
    if loop.compile:
        _check_backend(loop.compile)
    for number, (row, at) in enumerate(places):
        block = row[at]
        if loop.compile:
            block.compile(backend=loop.compile)
        if loop.activation_checkpointing and number % loop.recompute_every == 0:
            options: dict[str, Any] = {}
            if loop.keep_products:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
            row[at] = checkpoint_wrapper(block, **options)


def repeated_blocks(model: nn.Module) -> list[Place]:
    """Return the places (container, index) of the repeated blocks of a model.

    A repeated block has parameters, and shares a `ModuleList` or `Sequential` with others of its type. Inner blocks
    come before those that contain them.
    """
    rows = [module for module in model.modules() if isinstance(module, Row)]
    found: list[Place] = []
    for row in reversed(rows):
        kinds = Counter(map(_kind, row))
        found += [(row, at) for at, block in enumerate(row) if kinds[_kind(block)] > 1 and _has_parameters(block)]
    return found


def outermost(places: Sequence[Place]) -> list[Place]:
    """Return the elements of `places` whose block is not inside the block of another element."""
    within = {id(inner) for row, at in places for inner in row[at].modules() if inner is not row[at]}
    return [(row, at) for row, at in places if id(row[at]) not in within]


def _kind(block: nn.Module) -> type:
    """Return the type of a block without its checkpoint wrapper."""
    return type(getattr(block, "_checkpoint_wrapped_module", block))


def _has_parameters(block: nn.Module) -> bool:
    return next(block.parameters(), None) is not None


def _check_backend(name: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise ConfigError(f'train.compile = "{name}": must be a backend of torch.compile; {choice_of(name, known)}')
