"""Progress with an ETA: a bar on a terminal, plain lines in a log, nothing for callers who did not ask."""

from __future__ import annotations

import logging
import time
from typing import Any

log = logging.getLogger("aphq.progress")
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Says nothing; the base that the others refine."""

    def start(self, stage: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def advance(self, steps: int, note: str = "") -> None:
        """Some steps are done; `note` names what they worked on."""

    def finish(self) -> None:
        """The stage is over."""

    def close(self) -> None:
        """The run is over, well or not."""


class PlainProgress(Progress):
    """A line every few seconds."""

    def __init__(self) -> None:
        self.stage, self.total, self.done = "", 0, 0
        self.started = self.last = 0.0

    def start(self, stage: str, total: int) -> None:
        self.stage, self.total, self.done = stage, max(total, 1), 0
        self.started = self.last = time.monotonic()
        log.info("%s: started", stage)

    def advance(self, steps: int, note: str = "") -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            share = self.done / self.total
            left = (now - self.started) * (1 - share) / max(share, 1e-9)
            log.info("%s: %3.0f %%  %s  ETA %s", self.stage, 100 * share, note, clock(left))

    def finish(self) -> None:
        log.info("%s: done in %s", self.stage, clock(time.monotonic() - self.started))


class RichProgress(Progress):
    """A live bar with elapsed and remaining time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns: tuple[Any, ...] = (
            TextColumn("{task.description:<30}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bars = Bars(*columns, console=Console(stderr=True))
        self.task: Any = None
        self.bars.start()

    def start(self, stage: str, total: int) -> None:
        self.task = self.bars.add_task(stage.replace("_", " "), total=max(total, 1), note="")

    def advance(self, steps: int, note: str = "") -> None:
        self.bars.update(self.task, advance=steps, note=note)

    def finish(self) -> None:
        total = self.bars.tasks[self.task].total
        self.bars.update(self.task, completed=total, note="")

    def close(self) -> None:
        self.bars.stop()


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
