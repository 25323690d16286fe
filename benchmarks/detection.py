"""Box and mask AP of trained detectors in float, rounded to nearest and quantized by aphq: one JSON line per run.

    python benchmarks/detection.py --trained trained/mask_rcnn --trained trained/cascade --images-dir val2017 \\
        --run float --run w8a8:rtn --run w8a8:balanced --run w4a4:rtn --run w4a4:balanced:steps=400 \\
        --found found --out detection.jsonl --jobs 6

A run is `float`, BITS:rtn, or BITS:EFFORT followed by recipe fields to set, as in `accuracy.py`. AP is measured on the
images that `scripts/detection/train.py` learned, calibration sees only those it did not. What each run finds is kept in
`--found`; where faster-coco-eval is missing nothing is measured, and the same command, given elsewhere with the same
files, measures what it finds there without running again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from accuracy import recipe_of
from processes import side_by_side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, action="append", required=True, help="a folder that train.py wrote")
    parser.add_argument("--images-dir", type=Path, required=True)
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--found", type=Path, required=True, help="a folder for detections")
    parser.add_argument("--out", type=Path, required=True, help="a JSON lines file to append to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    args.found.mkdir(parents=True, exist_ok=True)
    failed = spread(args)
    measure_all(args)
    sys.exit(f"{failed} runs failed" if failed else 0)


def spread(args: argparse.Namespace) -> int:
    """One process per run that has not been made yet, at most `jobs` at a time; how many failed."""
    shared = ["--images-dir", str(args.images_dir), "--found", str(args.found), "--out", str(args.out)]
    shared += ["--seed", str(args.seed)]
    waiting = [
        ["--trained", str(trained), "--run", run]
        for run in args.run
        for trained in args.trained
        if not found_file(args, trained, run).exists()
    ]
    return side_by_side(__file__, [[*shared, *job] for job in waiting], args.jobs)


def found_file(args: argparse.Namespace, trained: Path, run: str) -> Path:
    return args.found / f"{trained.name}-{args.seed}-{run}.json.gz".replace(":", "_")


def work(args: argparse.Namespace) -> None:
    """One run: quantize, then look at every learned image."""
    import torch
    from PIL import Image

    import aphq
    from aphq.data.coco import open_coco
    from aphq.data.scenes import ScenePreprocessing
    from aphq.detection import load_detector
    from aphq.evaluation.coco import detect, to_results
    from aphq.presets import round_to_nearest

    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(2)
    (trained,), (run,) = args.trained, args.run
    facts = json.loads((trained / "model.json").read_text())
    rules = ScenePreprocessing.from_dict(facts["preprocessing"])
    kind, config = facts["config"]["kind"], facts["config"]
    model: Any = load_detector(f"{kind}_swin_t", trained / "model.safetensors", **config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line: dict[str, Any] = {"detector": trained.name, "run": run, "seed": args.seed}
    started = time.time()
    if run != "float":
        bits, _, rest = run.partition(":")
        recipe = round_to_nearest(bits) if rest == "rtn" else recipe_of(run, args.seed)
        unseen = (trained / "unseen.txt").read_text().split()
        images = [Image.open(args.images_dir / name).convert("RGB") for name in unseen]
        done = aphq.quantize(model, recipe, images, preprocessing=rules, device=device)
        model = done.model
        line |= {
            "calibration_images": len(images),
            "stage_seconds": {name: round(seconds, 1) for name, seconds in done.seconds.items()},
            "float_layers": [row.name for row in done.coverage if row.note],
        }
    model = model.to(device).eval()
    data = open_coco(trained / "learned.json", args.images_dir)
    results = [r for image in data.images for r in to_results(detect(model, image.open(), rules, device), image, data)]
    line |= {
        "seconds": round(time.time() - started, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    with gzip.open(found_file(args, trained, run), "wt") as handle:
        json.dump({"line": line, "results": results}, handle)
    print(json.dumps(line), flush=True)


def measure_all(args: argparse.Namespace) -> None:
    """AP of everything that was found, with the drop from float."""
    from aphq.data.coco import open_coco
    from aphq.errors import DataError
    from aphq.evaluation.coco import measure

    for trained in args.trained:
        data = open_coco(trained / "learned.json", args.images_dir)
        reference = None
        for run in sorted(args.run, key=lambda run: run != "float"):
            file = found_file(args, trained, run)
            if not file.exists():
                continue
            with gzip.open(file, "rt") as handle:
                found = json.load(handle)
            try:
                accuracy = measure(data, found["results"])
            except DataError as problem:
                print(f"not measured: {problem}; repeat the command where it is installed", file=sys.stderr)
                return
            reference = accuracy if run == "float" else reference
            line = {**found["line"], "images": accuracy.images}
            for kind in ("box", "mask"):
                precision = getattr(accuracy, kind)
                line[f"{kind}_ap"], line[f"{kind}_ap50"] = round(precision.ap, 2), round(precision.ap50, 2)
                if reference is not None:
                    line[f"{kind}_drop"] = round(getattr(reference, kind).ap - precision.ap, 2)
            with open(args.out, "a") as handle:
                handle.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
