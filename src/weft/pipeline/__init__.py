"""Pipeline parallelism: schedules as tables, the cost of a table, and messages between stages."""

from weft.pipeline.actions import Action, Entry, Table
from weft.pipeline.placement import Cut, balanced
from weft.pipeline.rules import TableError
from weft.pipeline.schedules import SCHEDULES, table
from weft.pipeline.simulation import Costs, Simulation, check
from weft.pipeline.text import format_table, parse_table, read_table

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Cut",
    "Entry",
    "Simulation",
    "Table",
    "TableError",
    "balanced",
    "check",
    "format_table",
    "parse_table",
    "read_table",
    "table",
]
