"""The demo: round-to-nearest and aphq on the embedded model, side by side."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aphq.api import quantize
from aphq.demo.assets import load_assets
from aphq.engine.progress import Progress, clock
from aphq.presets import preset, round_to_nearest
from aphq.recipe import Recipe

STEPS = 100  # per unit; enough here, and under three minutes on two cores


def demo_recipe(bits: str) -> Recipe:
    """`balanced` with fewer steps and candidates, for a laptop's patience."""
    recipe = preset(bits, "balanced")
    for path, value in {
        "steps": STEPS,
        "importance.probes": 1,
        "block_reconstruction.weight_lr": 0.03,  # few steps must be large ones, and may go to any code
        "scale_search.candidates": 32,
        "scale_search.rounds": 1,
        "scale_search.tokens": 512,
        "layernorm_reparameterisation.candidates": 32,
    }.items():
        recipe = recipe.with_value(path, value)
    return recipe


def run_demo(bits: str, *, out: Path | None, device: str, progress: Progress) -> dict[str, Any]:
    """Float, round-to-nearest and aphq accuracy on the embedded test images, with sizes and times."""
    assets = load_assets()
    started = time.monotonic()
    shared: dict[str, Any] = {
        "val": assets.test,
        "preprocessing": assets.preprocessing,
        "device": device,
        "progress": progress,
    }
    nearest = quantize(assets.model, round_to_nearest(bits), assets.calibration, **shared)
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "run"
        run = quantize(assets.model, demo_recipe(bits), assets.calibration, out=folder, **shared)
    assert run.sizes is not None
    return {
        "bits": bits,
        "images": {"calibration": len(assets.calibration), "test": len(assets.test)},
        "top1": {
            "float": run.accuracy["float"].top1,
            "round_to_nearest": nearest.accuracy["quantized"].top1,
            "aphq": run.accuracy["quantized"].top1,
        },
        "sizes": asdict(run.sizes),
        "seconds": round(time.monotonic() - started, 1),
        "path": None if out is None else str(out),
    }


def demo_text(found: dict[str, Any]) -> str:
    top1, sizes, bits = found["top1"], found["sizes"], found["bits"].upper()
    return "\n".join(
        [
            f"A small ViT on Fashion-MNIST, {found['images']['test']} test images, "
            f"{found['images']['calibration']} unlabelled calibration images",
            f"  float32                {top1['float']:6.2f} %   {sizes['float32'] / 1e6:5.2f} MB",
            f"  {bits} round-to-nearest  {top1['round_to_nearest']:6.2f} %",
            f"  {bits} aphq              {top1['aphq']:6.2f} %   {sizes['artifact'] / 1e6:5.2f} MB",
            f"  time {clock(found['seconds'])}",
            *([f"  saved in {found['path']}, with a report.html to look at"] if found["path"] else []),
        ]
    )
