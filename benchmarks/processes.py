"""Several runs side by side, a process each: small models leave most of a GPU idle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence


def side_by_side(script: str, jobs: Sequence[list[str]], at_once: int) -> int:
    """Run `script --worker ...` for each list of arguments, at most `at_once` at a time; how many failed."""
    waiting, failed = list(jobs), 0
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(subprocess.Popen([sys.executable, script, "--worker", *waiting.pop(0)]))
        time.sleep(0.5)
        failed += sum(p.poll() not in (None, 0) for p in running)
        running = [p for p in running if p.poll() is None]
    return failed
