"""Does a run stay under its host budget? The shapes of Swin-B, effort `paper`, few steps per unit.

Memory does not depend on the number of steps, so one step per unit tells as much as 20 000. The memory that counts is
private memory (RssAnon): pages of the mapped files in which activations are kept on disk can be taken back at any time.
`--enforce` also lets the system hold the process to the budget, page cache and all (needs a writable cgroup).

    python benchmarks/memory_ceiling.py --images 1024 --host-memory 8 --enforce
    python benchmarks/memory_ceiling.py --images 128 --depths 1 1 1 1 --host-memory 8        # a smaller machine
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import timm
import torch

import aphq
from aphq.engine.memory import private_bytes
from aphq.presets import preset

GIB = 2**30
NAME = "swin_base_patch4_window7_224"


class Sampler(threading.Thread):
    """The peak of this process's private memory, looked at twenty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            self.peak = max(self.peak, private_bytes())


def enforce(budget: int) -> bool:
    """Put this process into a cgroup of its own with a limit; False where that is not permitted."""
    group = Path(f"/sys/fs/cgroup/aphq-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(budget))
        (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as problem:
        print(f"the limit cannot be enforced here: {problem}")
        return False
    return True


def recipe_of(options: argparse.Namespace) -> Any:
    recipe = preset("w4a4", "paper").with_value("calibration.images", options.images)
    recipe = recipe.with_value("steps", options.steps)
    for stage in ("scale_search", "layernorm_reparameterisation"):
        recipe = recipe.with_value(f"{stage}.candidates", options.candidates)
    return recipe.with_value("scale_search.rounds", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--host-memory", type=float, default=8.0, help="GiB")
    parser.add_argument("--gpu-memory", type=float, default=0.0, help="GiB of cached activations, if there is a GPU")
    parser.add_argument("--steps", type=int, default=1, help="per unit")
    parser.add_argument("--candidates", type=int, default=4, help="of the searches")
    parser.add_argument("--depths", type=int, nargs=4, default=(2, 2, 18, 2), help="blocks of each stage")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="of the run: where activations spill to")
    options = parser.parse_args()
    budget = int(options.host_memory * GIB)
    enforced = options.enforce and enforce(budget)
    torch.manual_seed(0)
    model = timm.create_model(NAME, pretrained=False, depths=tuple(options.depths))
    images = torch.randint(0, 256, (options.images, 3, 224, 224), dtype=torch.uint8)
    start = private_bytes()
    sampler, began = Sampler(), time.monotonic()
    sampler.start()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        limits: dict[str, Any] = {"host_memory_gb": options.host_memory, "gpu_memory_gb": options.gpu_memory}
        out = Path(folder) / "run"
        run = aphq.quantize(model, recipe_of(options), images, out=out, device=options.device, **limits)
        lines = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
    sampler.done.set()
    stages = [event for event in map(json.loads, lines) if event["event"] == "stage_finished"]
    found = {
        "model": NAME,
        "depths": list(options.depths),
        "images": options.images,
        "steps": options.steps,
        "host_budget_gib": options.host_memory,
        "enforced": enforced,
        "seconds": round(time.monotonic() - began),
        "private_at_start_gib": round(start / GIB, 2),
        "private_peak_gib": round(sampler.peak / GIB, 2),
        "rss_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "cached_peak_gib": {tier: round(size / GIB, 2) for tier, size in stages[-1]["cached"].items()},
        "stages": {event["stage"]: round(event["seconds"], 1) for event in stages},
        "under_the_budget": sampler.peak <= budget,
        "layers": len(run.coverage),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
