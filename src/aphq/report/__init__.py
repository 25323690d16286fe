"""The report of a run: what happened and what it did to the model, as one HTML file for a person."""

from aphq.report.page import REPORT, comparison_page, report_page, write_report

__all__ = ["REPORT", "comparison_page", "report_page", "write_report"]
