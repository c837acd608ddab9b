"""Reports: run directories as one HTML page with curves, tables with intervals, and episodes to step through."""

from memopd.report.page import write_report

__all__ = ["write_report"]
