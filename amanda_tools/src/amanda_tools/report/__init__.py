"""The report: one page with the results of a run, their charts and their tables."""

from amanda_tools.report.contents import report

__all__ = ["report"]
