"""Partial graphs: parts of a model that are captured once and replayed."""

from weft.graphs.report import drop_graphs, graph_report
from weft.graphs.settings import Graphs

__all__ = ["Graphs", "drop_graphs", "graph_report"]
