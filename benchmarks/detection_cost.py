"""Time and memory of every stage on a detector of true size: Swin-T Mask R-CNN, random weights, images like COCO's.

    python benchmarks/detection_cost.py --images 16 --steps 50 --out detection_cost.jsonl

What a stage costs does not depend on what the weights are, so none are needed. One JSON line per stage, with seconds,
the peak of GPU and host memory, and of cached activations by tier; then one with the milliseconds of a step in every
unit. Seconds of a pass grow with the images, those of a reconstruction with the steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

SIZES = ((480, 640), (640, 480), (427, 640), (375, 500), (640, 427), (612, 612))  # height, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detector", default="mask_rcnn_swin_t")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--short-side", type=int, default=800)
    parser.add_argument("--gpu-memory", type=float, default=None, help="GiB of cached activations on the GPU")
    parser.add_argument("--host-memory", type=float, default=None, help="GiB of cached activations in host memory")
    parser.add_argument("--out", type=Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch

    import aphq
    from aphq.data.scenes import ScenePreprocessing
    from aphq.detection import DETECTORS, Detector
    from aphq.presets import preset

    torch.manual_seed(0)
    model = Detector(DETECTORS[args.detector]).eval()
    recipe = preset(args.bits, "balanced").with_value("steps", args.steps).with_value("calibration.images", args.images)
    rules = ScenePreprocessing(args.short_side, round(args.short_side * 1333 / 800))
    with tempfile.TemporaryDirectory() as folder:
        run = aphq.quantize(
            model,
            recipe,
            pictures(args.images),
            preprocessing=rules,
            out=Path(folder) / "run",
            gpu_memory_gb=args.gpu_memory,
            host_memory_gb=args.host_memory,
        )
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    common = {
        "detector": args.detector,
        "bits": args.bits,
        "images": args.images,
        "steps": args.steps,
        "short_side": args.short_side,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    assert run.sizes is not None
    lines = [{**common, **{k: e[k] for k in STAGE_KEYS}} for e in events if e["event"] == "stage_finished"]
    steps = {f"{e['stage']}/{e['unit']}": e["step_ms"] for e in events if e["event"] == "unit" and e.get("step_ms")}
    lines.append({**common, "layers": len(run.coverage), "ratio": round(run.sizes.ratio, 2), "step_ms": steps})
    with open(args.out, "a") as handle:
        for line in lines:
            handle.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


STAGE_KEYS = ("stage", "seconds", "memory", "cached")


def pictures(count: int) -> list[Any]:
    """Smooth random images of COCO's sizes, uint8 [3, height, width]."""
    import torch
    from torch.nn.functional import interpolate

    generator = torch.Generator().manual_seed(0)
    images = []
    for number in range(count):
        coarse = torch.rand(1, 3, 12, 16, generator=generator)
        image = interpolate(coarse, size=SIZES[number % len(SIZES)], mode="bilinear")[0]
        images.append((image * 255).to(torch.uint8))
    return images


if __name__ == "__main__":
    main()
