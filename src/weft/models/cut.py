"""Cuts a hybrid model into pipeline stages. The borders are the `|` of its pattern. Without `|`, stages have about the
same cost.

The cost of a layer is the number of weights that one token uses. Routed experts to which the token is not sent are not
counted. The last stage also has the head and the prediction depths (multi-token prediction). The cost of a prediction
depth is the cost of its projection, its layers and the head.
"""

from collections import Counter
from itertools import pairwise

import torch

from weft.comm.groups import group_of
from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.layers import Beside, rotary_of
from weft.models.pattern import LogicalLayer
from weft.models.stack import Layer
from weft.moe.source import WeightSource
from weft.pipeline.actions import LOOP
from weft.pipeline.placement import Cut, balanced
from weft.words import counted


def cut_of(cfg: HybridConfig, meshes: Meshes | None, chunks: int | None, placement: str) -> Cut | None:
    """Return the pipeline stages of a model of `cfg` on `meshes`. If there are no pipeline ranks and `chunks` is None
    or 1, return None.

    `chunks`: the number of stages on each rank. Default: the number of the pattern's segments divided by the number of
    pipeline ranks, or 1 if the pattern has no `|`. `placement`: which stages a rank gets, "loop" or "v" (see
    `weft.pipeline.placement`). Raises `ValueError` if `chunks` or `placement` does not fit the pattern and the ranks.
    """
    mesh = meshes.pp if meshes is not None else None
    ranks = mesh.size() if mesh is not None else 1
    segments = cfg.parsed.segments
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"chunks={chunks!r}: each rank has at least 1 stage; pass a positive integer, or None")
    if mesh is None and chunks in (None, 1):
        if placement != LOOP:
            raise ValueError(f"placement={placement!r} has no effect on a model without pipeline stages; leave it out")
        return None
    if len(segments) > 1:
        cfg.parsed.stage(0, pp_size=ranks)  # raises if the number of segments does not fit
        if chunks is not None and len(segments) != ranks * chunks:
            raise ValueError(
                f"chunks={chunks} on pp={ranks} ranks are {ranks * chunks} stages, but pattern {cfg.pattern!r} has "
                f"{counted(len(segments), 'segment')}: write one segment per stage, or no '|' for equal stages, or "
                f"leave chunks out"
            )
        bounds = [0]
        for segment in segments:
            bounds.append(bounds[-1] + len(segment))
        cuts = tuple(range(start, stop) for start, stop in pairwise(bounds))
    else:
        head = cfg.hidden_size * cfg.vocab_size
        depth = head + 2 * cfg.hidden_size**2 + sum(layer_costs(cfg, cfg.parsed.prediction))
        ends = head + cfg.parsed.depths * depth
        cuts = balanced(layer_costs(cfg, cfg.parsed.layers), ranks * (chunks or 1), last=ends)
    rank = mesh.get_local_rank() if mesh is not None else 0
    apart = ranks > 1 and placement == LOOP
    shares = apart and (cfg.tie_word_embeddings or cfg.parsed.depths > 0)
    return Cut(cuts, ranks, rank, placement, group_of(mesh, 0) if mesh is not None else None, shares)


def layer_costs(cfg: HybridConfig, layers: tuple[LogicalLayer, ...]) -> list[float]:
    """Return the cost of each of `layers`: the number of weights that one token uses, on average."""
    kinds = {symbols: _cost(cfg, symbols) for symbols in Counter(layer.symbols for layer in layers)}
    return [kinds[layer.symbols] for layer in layers]


def _cost(cfg: HybridConfig, symbols: str) -> float:
    with torch.device("meta"):
        layer = Layer(cfg, LogicalLayer(0, symbols, 1), WeightSource(), Beside(rotary_of(cfg, symbols), None, 0))
    routed = {weight for module in layer.expert_modules() for weight in module.parameters() if "E" in symbols}
    visited = cfg.num_experts_per_tok / cfg.num_experts
    return sum(weight.numel() * (visited if weight in routed else 1.0) for weight in layer.parameters())
