"""Mixed precision against uniform bits of the same size, from `aphq analyze`'s budget: one JSON line per recipe.

    python benchmarks/mixed_precision.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --val DIR \\
        --target 4 --target 4.5 --out results/mixed_precision.jsonl
    python benchmarks/mixed_precision.py --table results/mixed_precision.jsonl

For a target of whole bits the mixed recipe stands against the uniform one of equal size; between two whole bits against
both neighbours and against every second block at the higher one, which is what a mixture costs without an analysis.
`--hold` of the calibration images are seen by no stage and no analysis: KL and agreement with the float model are
measured on those, top-1 on validation images, which decide nothing. Recipes that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import pathlib
import time
from dataclasses import replace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--calib")
    parser.add_argument("--val")
    parser.add_argument("--val-limit", type=int, default=None, help="validation images, spread over the classes")
    parser.add_argument("--hold", type=int, default=224, help="calibration images held out")
    parser.add_argument("--target", type=float, action="append", help="bits on average; repeat for more")
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--steps", type=int, default=None, help="steps per unit of efforts that learn")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON lines file to append to")
    parser.add_argument("--table", type=pathlib.Path, help="print the lines of this file as a Markdown table instead")
    args = parser.parse_args()
    if args.table:
        print_table([json.loads(line) for line in args.table.read_text().splitlines()])
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    import torch
    from explore import measure

    import aphq
    from aphq.data import Preprocessing, load_calibration
    from aphq.models.loading import load_model

    logging.basicConfig(level=logging.WARNING)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = load_model(args.model, args.weights).to(device)
    every = load_calibration(args.calib, Preprocessing.of_model(model), count=1024, seed=args.seed)
    used = every.first(len(every) - args.hold)
    held = replace(every, images=every.images[len(used) :], names=())
    reference = aphq.evaluate(model, args.val, limit=args.val_limit, device=device)
    done = already_there(args)
    for target in args.target:
        if f"mixed {target:g}" in done and not rivals(target, args.effort, args.seed, model).keys() - done:
            continue
        started = time.time()
        found = aphq.analyze(model, used, target_bits=target, effort=args.effort, seed=args.seed)
        analysed = time.time() - started
        mixed = found.proposal.recipe
        for name, recipe in {f"mixed {target:g}": mixed, **rivals(target, args.effort, args.seed, model)}.items():
            if name in done:
                continue
            done.add(name)
            if args.steps is not None:
                recipe = recipe.with_value("steps", args.steps)
            started = time.time()
            run = aphq.quantize(model, recipe, used)
            accuracy = aphq.evaluate(run.model, args.val, limit=args.val_limit, device=device)
            bits = mean_bits(run)
            line = {
                "model": args.model, "recipe": name, "target": target, "effort": args.effort, "steps": args.steps,
                "seed": args.seed, "weight_bits": bits[0], "activation_bits": bits[1],
                "held": measure(model, run.model, held, device),
                "float": round(reference.top1, 2), "top1": round(accuracy.top1, 2), "images": accuracy.images,
                "seconds": round(time.time() - started, 1),
                "analysis_seconds": round(analysed, 1) if recipe.name == mixed.name else None,
                "overrides": len(recipe.overrides),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
            }  # fmt: skip
            with open(args.out, "a") as handle:
                handle.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def already_there(args: argparse.Namespace) -> set[str]:
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.is_file() else []
    mine = {"model": args.model, "effort": args.effort, "steps": args.steps, "seed": args.seed}
    return {row["recipe"] for row in rows if all(row[name] == value for name, value in mine.items())}


def rivals(target: float, effort: str, seed: int, model):
    """The uniform recipes around the target and, between whole bits, their mixture block by block."""
    from aphq.presets import preset
    from aphq.recipe import Override

    low, high = math.floor(target), math.ceil(target)
    found = {f"uniform {bits}": preset(f"w{bits}a{bits}", effort, seed=seed) for bits in (low, high)}
    if low != high:
        second = {f"blocks.{i}.*": Override(high, high) for i in range(1, len(model.blocks), 2)}
        found[f"every second block {target:g}"] = replace(
            found[f"uniform {low}"], name=f"alternating-{target:g}-{effort}", overrides=second
        )
    return found


def mean_bits(run) -> tuple[float, float]:
    """(per weight, per activation of one image) of a quantized model, the picture itself left out."""
    import torch

    from aphq.analysis.held_out import sides
    from aphq.engine.hooks import watch_inputs
    from aphq.quant.layers import QuantizedLayer, quantized_sites

    sites = dict(quantized_sites(run.model))
    seen = {"weights": [0, 0], "activations": [0, 0]}  # numbers, bits

    def note(kind, count, bits):
        seen[kind][0] += count
        seen[kind][1] += count * bits

    def see(name, inputs):
        quantizers = sides(sites[name])["activations"]
        for x, quantizer in zip(inputs, quantizers, strict=False):
            note("activations", x.numel(), quantizer.bits)

    for site in sites.values():
        if isinstance(site, QuantizedLayer):
            note("weights", site.weight.numel(), sides(site)["weights"][0].bits)
    watched = {name: site for name, site in sites.items() if not name.startswith("patch_embed")}
    with torch.no_grad(), watch_inputs(watched, see):
        run.model(run.images.batch(slice(0, 1), next(run.model.parameters()).device))
    return tuple(round(bits / count, 3) for count, bits in seen.values())


def print_table(rows: list[dict]) -> None:
    names = "model, effort, recipe, bits per weight, per activation, held-out KL, agreement, float, top-1, images"
    print(f"| {names.replace(', ', ' | ')} |")
    print(f"{'|---' * len(names.split(', '))}|")
    for row in sorted(rows, key=lambda row: (row["model"], row["effort"], row["weight_bits"], row["recipe"])):
        effort = row["effort"] + (f", {row['steps']} steps" if row["steps"] else "")
        bits = [f"{row['weight_bits']:.2f}", f"{row['activation_bits']:.2f}"]
        kl, same = f"{row['held']['kl']:.3f}", f"{row['held']['agreement']:.1f}"
        top1 = (
            ["", "", ""] if row["top1"] is None else [f"{row['float']:.2f}", f"{row['top1']:.2f}", str(row["images"])]
        )
        print(f"| {' | '.join([row['model'], effort, row['recipe'], *bits, kl, same, *top1])} |")


if __name__ == "__main__":
    main()
