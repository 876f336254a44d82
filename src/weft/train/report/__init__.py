"""The report of a run: its page, its figures, and the timeline of one step."""

from weft.train.report.page import write_report

__all__ = ["write_report"]
