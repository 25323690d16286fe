"""Accuracy of many recipes on one model: one JSON line per run, several runs side by side on one GPU.

    python benchmarks/accuracy.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --val DIR \\
        --run w3a3:paper:steps=2000 --run w3a3:paper:steps=2000:importance.kind=mse:-mlp_reconstruction --out R.jsonl

A run is BITS:EFFORT followed by recipe fields to set (`steps=2000`), stages to leave out (`-mlp_reconstruction`) and
stages to add with their defaults (`+rotation`);
`float:EFFORT` runs the same stages in float, for what MLP reconstruction alone costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import pathlib
import sys
import time
from dataclasses import replace
from typing import Any

from processes import side_by_side
from subject import model_of, parser_for


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--val", required=True)
    parser.add_argument("--limit", type=int, default=None, help="validation images, spread over the classes")
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", help="default 3407; repeat for more")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    parser.add_argument("--skip-done", action="store_true", help="leave out the runs that --out holds already")
    parser.add_argument("--save", type=pathlib.Path, default=None, help="keep the run folders below this one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seed = args.seed or [3407]
    if args.worker:
        work(args)
    else:
        spread(args)


def spread(args: argparse.Namespace) -> None:
    """One process per run, at most `jobs` at a time."""
    shared = [
        a
        for name in ("model", "model_args", "weights", "calib", "val")
        for a in (f"--{name.replace('_', '-')}", getattr(args, name))
    ]
    shared += ["--out", str(args.out)] + (["--limit", str(args.limit)] if args.limit else [])
    shared += ["--save", str(args.save)] if args.save else []
    done = done_before(args) if args.skip_done else []
    waiting = [(run, seed) for seed in args.seed for run in args.run if what_runs(run, seed) not in done]
    jobs = [[*shared, "--run", run, "--seed", str(seed)] for run, seed in waiting]
    failed = side_by_side(__file__, jobs, args.jobs)
    sys.exit(f"{failed} runs failed" if failed else 0)


def done_before(args: argparse.Namespace) -> list[Any]:
    """The recipes of this model's lines in the file that lines are appended to."""
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    return [what_runs(row["run"], row["seed"]) for row in map(json.loads, lines) if row["model"] == args.model]


def what_runs(text: str, seed: int):
    """A run's recipe, however its fields came about; of a line older than the fields it names, only its text."""
    from aphq.errors import RecipeError

    try:
        return replace(recipe_of(text, seed), name="")
    except RecipeError:
        return text, seed


def recipe_of(text: str, seed: int):
    from aphq.presets import preset
    from aphq.recipe import STAGES

    bits, effort, *changes = text.split(":")
    recipe = preset("w4a4" if bits == "float" else bits, effort, seed=seed)
    if bits == "float":
        recipe = recipe.with_value("weights.bits", None).with_value("activations.bits", None)
        recipe = recipe.without("layernorm_reparameterisation", "scale_search", "block_reconstruction")
    for change in changes:
        if change.startswith("-"):
            recipe = recipe.without(change[1:])
            continue
        if change.startswith("+"):
            recipe = recipe.including(STAGES[change[1:]]())
            continue
        path, value = change.split("=", 1)
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        recipe = recipe.with_value(path, value)
    return replace(recipe, name=text)


def work(args: argparse.Namespace) -> None:
    import torch

    import aphq

    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(2 if torch.cuda.is_available() else torch.get_num_threads())
    started = time.time()
    model = model_of(args)
    (name,), (seed,) = args.run, args.seed
    out = args.save / f"{args.model}-{seed}-{name}".replace(":", "_") if args.save else None
    run = aphq.quantize(model, recipe_of(name, seed), args.calib, val=args.val, val_limit=args.limit, out=out)
    line = {
        "model": args.model,
        "run": name,
        "seed": seed,
        "float": round(run.accuracy["float"].top1, 2),
        "top1": round(run.accuracy["quantized"].top1, 2),
        "images": run.accuracy["float"].images,
        "agreement": round(run.agreement or 0, 2),
        "stage_seconds": {k: round(v, 1) for k, v in run.seconds.items()},
        "seconds": round(time.time() - started, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    with open(args.out, "a") as handle:
        handle.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
