"""CUDA graphs of parts of a model: a part is captured for its inputs, and later calls with such inputs replay it."""

from weft.graphs.entry import Graphs
from weft.graphs.report import drop_graphs, graph_report

__all__ = ["Graphs", "drop_graphs", "graph_report"]
