"""Partial graphs: parts of a model that are captured once and replayed."""

from weft.graphs.entry import Graphs
from weft.graphs.report import drop_graphs, graph_report

__all__ = ["Graphs", "drop_graphs", "graph_report"]
