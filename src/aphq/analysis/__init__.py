"""Which layers suffer from few bits, and how to spend bits on them."""

from aphq.analysis.findings import Analysis, analyze

__all__ = ["Analysis", "analyze"]
