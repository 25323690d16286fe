"""Files that are whole or not there: written beside their place, flushed, then renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from aphq.errors import RunError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` and rename to `path`; on failure the temporary goes and what was at `path` stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except Exception as problem:
        _discard(temporary)
        if is_disk_problem(problem):
            raise RunError(f"cannot write {path}: {problem}; what was saved before is intact") from None
        raise
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    with suppress(OSError):  # what went wrong before is the news
        temporary.unlink()


def is_disk_problem(problem: BaseException) -> bool:
    """Disk full, read-only, no permission: also when a library wraps the system's words in its own exception."""
    codes = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EIO)
    words = tuple(os.strerror(code) for code in codes)
    return isinstance(problem, OSError) or any(word in str(problem) for word in words)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(path, lambda p: save_file(plain, str(p), dict(metadata or {})))
