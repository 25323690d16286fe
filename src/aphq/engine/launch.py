"""How this process was started; answered from the environment alone, so that the command line stays cheap."""

from __future__ import annotations

import os

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # a scheduler may set a rank where there is nobody to meet


def is_shared() -> bool:
    """Whether `torchrun` started several processes for one run."""
    return all(name in os.environ for name in NEEDED) and os.environ["WORLD_SIZE"] != "1"


def is_first_process() -> bool:
    """Alone, or the first of several; the others write nothing and keep quiet."""
    return not is_shared() or os.environ["RANK"] == "0"
