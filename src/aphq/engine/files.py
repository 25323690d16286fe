"""Files that are whole or not there: written beside their place, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aphq.errors import RunError

MAX_JSON_BYTES = 64 * 2**20
DISK_CODES = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EIO, errno.EFBIG)
SEAL = "sha256"  # of names, types, shapes and values, in the file's own metadata


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` and rename to `path`; on failure the temporary goes and what was at `path` stays."""
    write_together({path: write})


def write_together(writers: Mapping[Path, Callable[[Path], object]]) -> None:
    """Files that belong to each other: all are written before the first is renamed, in their order."""
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in writers}
    path = next(iter(writers))
    try:
        for path, write in writers.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporaries[path])
            with open(temporaries[path], "rb+") as handle:
                os.fsync(handle.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    except Exception as problem:
        _discard(*temporaries.values())
        if is_disk_problem(problem):
            raise RunError(f"cannot write {path}: {problem}; what was saved before is intact") from None
        raise
    except BaseException:
        _discard(*temporaries.values())
        raise


def _discard(*temporaries: Path) -> None:
    for temporary in temporaries:
        with suppress(OSError):  # what went wrong before is the news
            temporary.unlink()


def discard_leftovers(folder: Path) -> None:
    """Remove the temporaries of processes that were killed while they wrote into a folder."""
    for file in folder.glob(".*.tmp"):
        owner = file.name.split(".")[-2]
        if owner.isdecimal() and not _is_alive(int(owner)):
            _discard(file)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def is_disk_problem(problem: BaseException) -> bool:
    """Disk full, read-only, no permission: also when a library wraps the system's words in its own exception."""
    words = tuple(os.strerror(code) for code in DISK_CODES)
    return isinstance(problem, OSError) or any(word in str(problem) for word in words)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


class UnreadableError(ValueError):
    """A file that does not hold what it should; callers turn it into their own named error."""


def read_json(path: Path) -> Any:
    """What `write_json` wrote, or whatever stands in its place."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UnreadableError(f"{path.stat().st_size} bytes are too many for what it should hold")
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None
    except (OSError, ValueError) as problem:
        raise UnreadableError(str(problem)) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda p: save_file(plain, str(p), dict(metadata or {})))


def write_sealed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors with a hash of themselves, so that a flipped bit is noticed when they are read."""
    write_tensors(path, tensors, {SEAL: seal_of(tensors)})


def read_sealed(path: Path) -> dict[str, Tensor]:
    """What `write_sealed` wrote, or an UnreadableError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            seal = (stored.metadata() or {}).get(SEAL)
    except (SafetensorError, OSError, ValueError, RuntimeError) as problem:
        raise UnreadableError(" ".join(str(problem).split())) from None
    if seal != seal_of(tensors):
        raise UnreadableError("its contents do not have the hash that was written with them")
    return tensors


def seal_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
