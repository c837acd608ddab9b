"""A run directory to one HTML page: curves, tables with intervals, and episodes to walk through."""

from memopd.report.page import write_report

__all__ = ["write_report"]
