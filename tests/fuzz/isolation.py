"""A case in a process of its own: crashes, hangs, greed and mischief show, whatever the code catches."""

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aphq.errors import AphqError

SECONDS = 20.0  # a shared machine may be slow; what takes a second here must not take a minute
BYTES = 768 * 2**20  # address space a case may add
FORBIDDEN = {  # audit events of a process that does more than read its files
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "pickle.find_class",
}


@dataclass(frozen=True)
class Outcome:
    """How a case ended: "loaded", or "refused" with a sentence; anything else is a failure of ours."""

    kind: str
    message: str


def outcome_of(
    work: Callable[[], object], *, seconds: float = SECONDS, most: int = BYTES, pickles: bool = False
) -> Outcome:
    """Run `work` in a child; fails the test unless it ends well. `pickles`: weights_only reads classes by name too."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    gc.freeze()  # collecting garbage in the child would copy the whole of the parent's memory
    child = os.fork()
    if child == 0:
        gc.disable()
        os.close(reader)
        _in_child(work, writer, pickles)
    gc.unfreeze()
    os.close(writer)
    report = _read(reader, time.monotonic() + seconds)
    if report is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert report is not None, f"no end after {seconds:.0f} s"
    assert report, f"the process died: status {status}"
    found: dict[str, Any] = json.loads(report)
    assert found["kind"] in ("loaded", "refused"), found["message"]
    assert found["bytes"] <= most, f"took {found['bytes'] / 2**20:.0f} MiB: {found['message']}"
    if found["kind"] == "refused":
        check_sentence(found["message"])
    return Outcome(found["kind"], found["message"])


def check_sentence(message: str) -> None:
    assert len(message.split()) >= 3, f"no sentence: {message!r}"
    assert len(message) < 5000, f"{len(message)} characters are no sentence"
    for greed in ("can't allocate", "not enough memory", "Cannot allocate memory", "MemoryError"):
        assert greed not in message, f"tried to take too much memory: {message}"


def _in_child(work: Callable[[], object], writer: int, pickles: bool) -> None:
    found: dict[str, Any] = {"kind": "crashed", "message": "no report"}
    try:
        torch.set_num_threads(1)
        sys.addaudithook(lambda event, _: _refuse(event, pickles))
        before = address_space("VmSize")
        try:
            work()
            found = {"kind": "loaded", "message": ""}
        except AphqError as problem:
            found = {"kind": "refused", "message": str(problem)}
        except BaseException as problem:
            text = "".join(traceback.format_exception(problem)[-8:])
            found = {"kind": "crashed", "message": f"{type(problem).__name__}: {text[-3000:]}"}
        found["bytes"] = address_space("VmPeak") - before
        os.write(writer, json.dumps(found).encode())
    finally:
        os._exit(0)


def _refuse(event: str, pickles: bool) -> None:
    if event in FORBIDDEN and not (pickles and event == "pickle.find_class"):
        os.write(2, f"forbidden: {event}\n".encode())
        os._exit(77)  # an exception could be caught


def address_space(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(pipe: int, deadline: float) -> bytes | None:
    """All that comes until the other end closes; None if that takes too long."""
    parts = []
    try:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(pipe, 65536)
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        os.close(pipe)
