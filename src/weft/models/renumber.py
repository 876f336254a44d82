"""Loads checkpoints of models that group the same layers differently. For example, a model `[*-][*E]` loads a
checkpoint of a model `*-*E`, and vice versa.

If two patterns have the same symbols, the names of the weights differ only in the number of the logical layer:

    [*-][*E]   decoder.layers.0.self_attention   .0.mlp   .1.self_attention   .1.mlp
    *-*E       decoder.layers.0.self_attention   .1.mlp   .2.self_attention   .3.mlp

The keys of a checkpoint's weights show how many blocks each logical layer has. Weights, optimizer state and averages
of weights are loaded bit-exactly from any grouping.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.checkpoint.state import Stateful, is_stateful
from weft.models.config import HybridConfig
from weft.models.pattern import LAYER_KEYS, LogicalLayer

BLOCK = re.compile(r"((?:decoder|mtp\.layers\.\d+)\.layers)\.(\d+)\.(mixer|self_attention|mlp)\b")
"""Matches the stack, the number of the logical layer and the block in a key."""
Numbers = Mapping[tuple[str, int, str], int]
"""(stack, logical layer, block) -> the number of the logical layer in the other pattern."""


def renumbered(state: Mapping[str, Any], cfg: HybridConfig) -> dict[str, Any]:
    """Return `state` with its stateful objects wrapped, so that `CheckpointManager.load` can load a checkpoint whose
    pattern groups the same symbols differently.

    The first entry of `state` must be the model, and `cfg` its configuration. If the checkpoint has other symbols, or
    the same symbols in another order, `load` raises `CheckpointMismatch`, which lists the differences. The order of
    symbols within a logical layer of the checkpoint is not stored, and therefore not checked.
    """
    spelling = _Spelling(cfg)
    model = next(iter(state))
    return {
        name: _Renumbered(value, spelling, decides=name == model) if is_stateful(value) else value
        for name, value in state.items()
    }


class _Spelling:
    """How a checkpoint numbers the model's logical layers. `look_at` sets two mappings: `theirs` from the model's
    numbers to the checkpoint's numbers, and `ours` back."""

    def __init__(self, cfg: HybridConfig) -> None:
        pattern = cfg.parsed
        self.stacks = {"decoder.layers": pattern.layers}
        self.stacks |= {f"mtp.layers.{depth}.layers": pattern.prediction for depth in range(pattern.depths)}
        self.theirs: Numbers = {}
        self.ours: Numbers = {}

    def look_at(self, keys: Iterable[str]) -> None:
        """Derive how the checkpoint numbers its logical layers from `keys`, the keys of its weights."""
        blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for found in filter(None, map(BLOCK.match, keys)):
            blocks[found[1]][int(found[2])].add(found[3])
        theirs = [_numbers(stack, layers, blocks[stack]) for stack, layers in self.stacks.items()]
        self.theirs = {place: number for numbers in theirs for place, number in numbers.items()}
        self.ours = {(stack, number, key): ours for (stack, ours, key), number in self.theirs.items()}


def _numbers(stack: str, layers: Iterable[LogicalLayer], stored: Mapping[int, set[str]]) -> Numbers:
    """Map the model's numbers to the stored numbers. Return {} if the stored blocks differ from the blocks of `layers`
    or are in another order. The order within a stored logical layer is unknown, and not compared."""
    mine = [(layer.index, LAYER_KEYS[symbol]) for layer in layers for symbol in layer.symbols]
    places, start = {}, 0
    for number, keys in sorted(stored.items()):
        here = mine[start : start + len(keys)]
        if {key for _, key in here} != keys:
            return {}
        places.update({(stack, ours, key): number for ours, key in here})
        start += len(keys)
    return places if start == len(mine) else {}


class _Renumbered:
    """A stateful object whose state dict has a checkpoint's names in place of the model's names.

    `decides`: whether `inner` is the model, whose keys in the checkpoint show how the checkpoint numbers its layers.
    """

    def __init__(self, inner: Stateful, spelling: _Spelling, *, decides: bool) -> None:
        self.inner, self.spelling, self.decides = inner, spelling, decides
        self.per_rank = getattr(inner, "per_rank", False)
        if hasattr(inner, "load_from_other_ranks"):
            self.load_from_other_ranks = inner.load_from_other_ranks

    def prepare_load(self, stored: Mapping[str, Any]) -> None:
        if self.decides:
            self.spelling.look_at(stored)
        if hasattr(self.inner, "prepare_load"):
            self.inner.prepare_load(_translated(stored, self.spelling.ours))

    def state_dict(self) -> Mapping[str, Any]:
        return _translated(self.inner.state_dict(), self.spelling.theirs)

    def check_load(self, plain: Mapping[str, Any]) -> None:
        if hasattr(self.inner, "check_load"):
            self.inner.check_load(_translated(plain, self.spelling.ours))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(_translated(state, self.spelling.ours))


def _translated(tree: Any, numbers: Numbers) -> Any:
    """Return `tree` with the logical layers in its names renumbered."""

    def name(text: str) -> str:
        return BLOCK.sub(lambda found: _written(found, numbers), text)

    return _walked(tree, name) if numbers else tree


def _written(found: re.Match[str], numbers: Numbers) -> str:
    stack, number, key = found[1], int(found[2]), found[3]
    return f"{stack}.{numbers.get((stack, number, key), number)}.{key}"


def _walked(tree: Any, name: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return name(tree)
    if isinstance(tree, Mapping):
        return {_walked(key, name): _walked(value, name) for key, value in tree.items()}
    return [_walked(each, name) for each in tree] if isinstance(tree, list) else tree
