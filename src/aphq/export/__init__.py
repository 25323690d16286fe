"""Artifact to something that runs elsewhere; nothing is written unless it computes what the artifact does."""

from aphq.export.exporting import Exported, export

__all__ = ["Exported", "export"]
