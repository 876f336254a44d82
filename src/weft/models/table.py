"""A pattern as a table: for each symbol, its layer, its sharding unit and its number of parameters."""

from dataclasses import dataclass

import torch

from weft.models.config import HybridConfig
from weft.models.model import HybridModel
from weft.models.pattern import LAYER_KEYS, LAYER_NAMES


@dataclass(frozen=True)
class Row:
    """The row of one symbol of a pattern. Symbols and logical layers are numbered separately in each prediction part.

    - `layer`: the name of the kind of layer that the symbol stands for.
    - `physical`: the number of the symbol, from 1.
    - `logical`: the number of the symbol's logical layer, from 0.
    - `segment`: the number of the pipeline segment, from 0. In a prediction part: "depth n", with n from 1.
    - `unit`: the name of the module that contains the symbol's block and becomes a unit in `weft.models.shard`.
    - `parameters`: the number of parameter elements of the symbol's block.
    """

    symbol: str
    layer: str
    physical: int
    logical: int
    segment: str
    unit: str
    parameters: int


def rows_of(cfg: HybridConfig) -> tuple[list[Row], int]:
    """Return one row per symbol of the pattern of `cfg`, and the number of parameter elements of the whole model, with
    embedding, norms and head. The parameters are counted in a model on the meta device, which uses no memory."""
    with torch.device("meta"):
        model = HybridModel(cfg)
    pattern = cfg.parsed
    parts = [(str(number), "decoder", layers) for number, layers in enumerate(pattern.segments)]
    parts += [(f"depth {number + 1}", f"mtp.layers.{number}", pattern.prediction) for number in range(pattern.depths)]
    rows = []
    for segment, stack, layers in parts:
        for layer in layers:
            name = f"{stack}.layers.{layer.index}"
            unit = name if stack == "decoder" else stack
            for place, symbol in enumerate(layer.symbols):
                block = model.get_submodule(f"{name}.{LAYER_KEYS[symbol]}")
                count = sum(weight.numel() for weight in block.parameters())
                number = layer.physical + place
                rows.append(Row(symbol, LAYER_NAMES[symbol], number, layer.index, segment, unit, count))
    return rows, sum(weight.numel() for weight in model.parameters())
