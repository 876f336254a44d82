"""Functions that report on the graphs of a sharded model, and drop them."""

from typing import Any

from torch import nn

from weft.fsdp.module import checked, runtime_of
from weft.graphs.table import GraphTable


def graph_report(model: nn.Module) -> dict[str, Any]:
    """Return how often parts of the model were captured, replayed and run eagerly on this rank, and the bytes of the
    captures.

    The result is {"captures": int, "replays": int, "eager": {reason: int}, "bytes": int, "scopes": {...}}. "scopes"
    maps names to dicts with the first four keys. The names are those of all scopes (such as "attn") that were called or
    refused, and of all chosen modules.

    `model`: the root. Raises ValueError if the root is not sharded, or was sharded without
    `RuntimeOptions(graphs=...)`.
    """
    return _table(model).report()


def drop_graphs(model: nn.Module) -> None:
    """Free the memory of all captures. From then on the model runs eagerly, and nothing is captured again. Raises
    ValueError as `graph_report` does."""
    _table(model).drop()


def _table(model: nn.Module) -> GraphTable:
    table = runtime_of(checked(model)).graphs
    if not isinstance(table, GraphTable):
        raise ValueError(
            f"{type(model).__name__} has no graphs: pass runtime=weft.RuntimeOptions(graphs=weft.Graphs()) to "
            "fully_shard of the root"
        )
    return table
