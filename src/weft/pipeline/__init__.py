"""Pipelines: schedules as tables, what a table costs, and what moves between stages."""

from weft.pipeline.actions import Action, Table

__all__ = ["Action", "Table"]
