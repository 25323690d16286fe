"""Where a run happened: machine, versions and the command, as the report shows them."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from aphq import __version__

PACKAGES = ("torch", "torchvision", "timm", "numpy", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "aphq": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        **({"cuda": str(torch.version.cuda)} if on_gpu else {}),
    }


def command_line() -> str | None:
    """What was typed to start this process, or None where it is not the command line tool."""
    program = Path(sys.argv[0])
    is_tool = program.stem == "aphq" or program.parts[-2:] == ("aphq", "__main__.py")
    return shlex.join(["aphq", *sys.argv[1:]]) if is_tool else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
