"""What one unit costs when it alone is quantized and learned, and which of its quantizers that comes from.

    python benchmarks/unit_alone.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR \\
        --use 800 --unit blocks.0 --run w3a3:best:-joint_tuning --run w3a3:best:-joint_tuning@mlp.fc1 --out R.jsonl

A run is one of `accuracy.py`. Behind an `@` stands what has eight bits in it: `weights`, `inputs`, or the inputs of one
layer or product of the unit by its name (`mlp.fc1`, `attn.qk`). All other units stay in float, with their GELU; so a
run with joint tuning, which moves the norms of all of them, is refused. A line has the KL divergence from the float
model on images that were used and on others, each with its mirror image.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from dataclasses import replace
from unittest import mock

from subject import model_of, parser_for


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--unit", action="append", required=True)
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--use", type=int, default=800, help="learn from so many images")
    parser.add_argument("--hold", type=int, default=224, help="measure on so many others")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch
    from explore import measure

    import aphq
    from aphq.data import Preprocessing, load_calibration

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = model_of(args).to(device).eval()
    preprocessing = Preprocessing.of_model(model)
    images = load_calibration(args.calib, preprocessing, count=args.use + args.hold, seed=args.seed, whole=True)
    if len(images) < args.use + args.hold:
        parser.error(f"{args.calib} has {len(images)} images for --use {args.use} and --hold {args.hold}")
    used = images.first(args.use)
    held = replace(images, images=images.images[args.use :], names=(), whole=None, aspects=None)
    for unit in args.unit:
        for run in args.run:
            with only(unit):
                quantized = aphq.quantize(model, recipe_of(run, unit, args.seed), used).model
            line = {"model": args.model, "unit": unit, "run": run, "seed": args.seed, "quantized_with": len(used)}
            line["used"] = measure(model, quantized, used.first(min(len(used), args.hold)), device)
            line["held"] = measure(model, quantized, held, device)
            line["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            with open(args.out, "a") as handle:
                handle.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def recipe_of(run: str, unit: str, seed: int):
    """The recipe, with everything outside the unit in float and what stands behind the `@` at eight bits."""
    import accuracy

    from aphq.recipe import Override

    text, _, wide = run.partition("@")
    recipe = accuracy.recipe_of(text, seed)
    if recipe.stage("joint_tuning") is not None:
        raise SystemExit(f"{run}: joint tuning moves all units; leave it out with {text}:-joint_tuning")
    inside = Override(
        8 if wide == "weights" else recipe.weights.bits,
        8 if wide == "inputs" else recipe.activations.bits,
    )
    layers = unit if unit == "head" else f"{unit}.*"  # the head is one layer, other units hold several
    overrides = {"*": None, layers: inside}
    if wide not in ("", "weights", "inputs"):
        overrides[f"{unit}.{wide}"] = replace(inside, activations=8)
    return replace(recipe, overrides=overrides)


@contextlib.contextmanager
def only(unit: str):
    """Inside the block the other units learn nothing, and keep their MLPs."""
    import torch

    from aphq.engine.loop import Curve
    from aphq.stages import block_reconstruction, mlp_reconstruction

    learn, units = block_reconstruction._reconstruct, mlp_reconstruction._units

    def learn_one(work, config, importances, visit):
        return learn(work, config, importances, visit) if visit.unit.name == unit else Curve(torch.empty(0), None)

    with (
        mock.patch.object(block_reconstruction, "_reconstruct", learn_one),
        mock.patch.object(mlp_reconstruction, "_units", lambda work: [u for u in units(work) if u.name == unit]),
    ):
        yield


if __name__ == "__main__":
    main()
