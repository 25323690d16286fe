"""Time of a run's parts on this machine: step times, scale search, and what a whole run at 20 000 steps comes to.

    python benchmarks/speed.py --model deit_small_patch16_224 --steps 300 --out speed.jsonl
    python benchmarks/speed.py --model swin_small_patch4_window7_224 --steps 100 --out speed.jsonl

Weights and images are random: time does not depend on them. `--profile 0 3` prints where the time of the first and
fourth loop goes.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recipe", default="w3a3")
    parser.add_argument("--effort", default="paper")
    parser.add_argument("--steps", type=int, default=300, help="steps per unit that are really run")
    parser.add_argument("--whole", type=int, default=20_000, help="steps per unit of the run to extrapolate to")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--card-gb", type=float, default=None, help="hold the run to a smaller GPU with these GiB")
    parser.add_argument("--plain", action="store_true", help="without the fused kernels")
    parser.add_argument("--profile", type=int, nargs="+", help="print the kernels of the loops with these numbers")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="a JSON lines file to append to")
    args = parser.parse_args()
    line = measure(args)
    print(json.dumps(line, indent=1), flush=True)
    if args.out:
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")


def measure(args: argparse.Namespace) -> dict:
    import timm
    import torch

    import aphq
    from aphq import kernels
    from aphq.data import Preprocessing
    from aphq.engine.store import CACHED_SHARE
    from aphq.presets import preset

    logging.basicConfig(level=logging.WARNING)
    kernels.switched_on = not args.plain
    torch.manual_seed(0)
    model = timm.create_model(args.model, pretrained=False).eval()
    recipe = preset(args.recipe, args.effort)
    if any(hasattr(stage, "steps") for stage in recipe.stages):
        recipe = recipe.with_value("steps", args.steps)
    images = torch.randn(args.images, *Preprocessing.of_model(model).shape)
    options = {"device": args.device}
    if args.card_gb:  # torch refuses to allocate more; cached activations get the share they would have there
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.card_gb * 2**30 / total)
        options["gpu_memory_gb"] = CACHED_SHARE * args.card_gb
    if torch.cuda.is_available():  # compile the kernels and start the libraries before the clock does
        aphq.quantize(model, shortened(recipe), images[:64], **options)
        torch.cuda.reset_peak_memory_stats()
    if args.profile:
        profile_loops(args.profile)
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        run = aphq.quantize(model, recipe, images, out=pathlib.Path(folder) / "run", **options)
        seconds = time.time() - started
        events = [json.loads(text) for text in (pathlib.Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    steps = {}
    for event in events:
        if event.get("step_ms"):
            kind = f"{event['stage']}:{event['unit'].split('.')[0]}"
            steps.setdefault(kind, []).append(event["step_ms"] / event["together"])
    total_ms = sum(sum(values) for values in steps.values())
    return {
        "model": args.model,
        "recipe": f"{args.recipe}:{args.effort}",
        "kernels": not args.plain,
        "steps": args.steps,
        "images": args.images,
        "card_gb": args.card_gb,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and args.device != "cpu" else "cpu",
        "step_ms": {kind: [round(min(v), 3), round(max(v), 3)] for kind, v in steps.items()},
        "stage_seconds": {k: round(v, 2) for k, v in run.seconds.items()},
        "seconds": round(seconds, 1),
        "whole_run_seconds": round(seconds + total_ms * (args.whole - args.steps) / 1000, 1),
        "memory_gb": {
            event["stage"]: {k: round(v / 2**30, 2) for k, v in event["memory"].items()}
            for event in events
            if event.get("memory")
        },
        "cached_gb": {
            tier: round(size / 2**30, 2)
            for event in events
            if event["event"] == "stage_finished"
            for tier, size in event["cached"].items()
        },
    }


def shortened(recipe):
    from dataclasses import replace

    return replace(recipe, stages=tuple(replace(s, steps=6) if hasattr(s, "steps") else s for s in recipe.stages))


def profile_loops(numbers: list[int]) -> None:
    """Print the GPU kernels of the loops with these numbers, counted from 0 over the whole run."""
    import torch

    from aphq.engine import loop
    from aphq.stages import mlp_reconstruction

    original, count = loop.run_together, iter(range(10_000))

    def wrapped(*args, **options):
        if next(count) not in numbers:
            return original(*args, **options)
        where = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.profiler.profile() as profiler:
            result = original(*args, **options)
        averages = profiler.key_averages()
        print(averages.table(sort_by=f"self_{where}_time_total", row_limit=40, max_name_column_width=80))
        return result

    loop.run_together = mlp_reconstruction.run_together = wrapped


if __name__ == "__main__":
    main()
