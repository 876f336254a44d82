"""CUDA graphs of parts of a model: each part is captured once and then replayed."""

from weft.graphs.entry import Graphs
from weft.graphs.report import drop_graphs, graph_report

__all__ = ["Graphs", "drop_graphs", "graph_report"]
