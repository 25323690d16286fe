"""The command line; importing this module must stay cheap, for `aphq --help` answers at once."""

from aphq.cli.app import main

__all__ = ["main"]
