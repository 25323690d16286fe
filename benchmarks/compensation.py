"""What error compensation leaves of the rounding error of weights, on calibration images that it did not read.

    python benchmarks/compensation.py --model vit_tiny_patch16_224 --weights W.safetensors --calib DIR \\
        --run w6a6:fast --use 64 --use 128 --out R.jsonl

A run is one of `accuracy.py`; its stages before error compensation are run. Then each layer alone, on what the float
layers before it give: the error of its output on the images held out, over that of the nearest codes. A line has the
geometric mean over the layers, the layer that is worst off, and the head apart, for every damping and for the choice
that the stage makes (`chosen`).
"""

from __future__ import annotations

import json
import math
import pathlib

from subject import model_of, parser_for

BEFORE = ("layernorm_reparameterisation", "scale_search")
DAMPINGS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--use", type=int, action="append", required=True, help="compensate with so many images")
    parser.add_argument("--rows", type=int, default=16384, help="of the inputs, drawn from those images")
    parser.add_argument("--hold", type=int, default=192, help="measure on so many others")
    parser.add_argument("--damping", type=float, action="append", help="default: seven from 0.003 to 3")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--run", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch
    from accuracy import recipe_of

    from aphq.data import Preprocessing, load_calibration

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = model_of(args).to(device).eval()
    images = load_calibration(args.calib, Preprocessing.of_model(model), count=1024, seed=args.seed)
    if max(args.use) + args.hold > len(images):
        parser.error(f"--use and --hold are parts of the same {len(images)} images")
    student = searched(model, recipe_of(args.run, args.seed), images.first(max(args.use)), device)
    last = len(images) - args.hold
    held = inputs_of(student, [images.batch(slice(i, i + 32), device) for i in range(last, len(images), 32)], args.rows)
    for use in args.use:
        seen = inputs_of(
            student, [images.batch(slice(i, min(i + 32, use)), device) for i in range(0, use, 32)], args.rows
        )
        line = {"model": args.model, "run": args.run, "seed": args.seed, "used": use, "held": args.hold}
        line |= {"rows": args.rows, **summary(student, seen, held, args.damping or DAMPINGS)}
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def searched(model, recipe, images, device):
    """A float student whose quantizers have their ranges."""
    from explore import workspace

    from aphq.models.architecture import architecture_of
    from aphq.models.student import make_student, opened_copy
    from aphq.stages import RUN_STAGE

    architecture = architecture_of(model)
    teacher = opened_copy(model, architecture)
    work = workspace(
        teacher, make_student(teacher, architecture, architecture.units(teacher), recipe), recipe, images, device
    )
    for stage in recipe.stages:
        if stage.NAME in BEFORE:
            RUN_STAGE[type(stage)](work, stage)
    return work.student.eval()


def layers_of(student):
    from aphq.quant.layers import quantized_sites
    from aphq.stages.error_compensation import can_be_compensated

    return {name: site for name, site in quantized_sites(student) if can_be_compensated(site)}


def inputs_of(student, batches, rows):
    """{layer: [rows, in]}, quantized, what comes before them in float."""
    import torch

    from aphq.analysis.held_out import switched
    from aphq.engine.hooks import watch_inputs

    layers, found, generator = layers_of(student), {}, torch.Generator().manual_seed(0)

    def see(name, inputs):
        count = layers[name].row_count(inputs[0])
        picked = torch.randperm(count, generator=generator)[: max(1, rows // len(batches))]
        found.setdefault(name, []).append(layers[name].rows_at(inputs[0], picked.to(inputs[0].device)))

    with torch.no_grad(), watch_inputs(layers, see):
        for batch in batches:
            student(batch)
    inputs = {name: torch.cat(parts) for name, parts in found.items()}
    quantizers = {name: layer.input_quantizer for name, layer in layers.items() if layer.input_quantizer is not None}
    with torch.no_grad(), switched(list(quantizers.values()), True):
        return {name: quantizers[name](x) if name in quantizers else x for name, x in inputs.items()}


def summary(student, seen, held, dampings):
    """{damping or "chosen": {"mean", "worst", "head"}}: errors over those of the nearest codes."""
    from aphq.quant.compensation import compensated, compensated_for, nearest_codes

    found = {}
    for name, layer in layers_of(student).items():
        weight, quantizer, rows = layer.weight_rows().detach(), layer.weight_quantizer, seen[name]
        gram = rows.T @ rows
        tried = {f"{damping:g}": compensated(weight, gram, quantizer, damping) for damping in dampings}
        tried["chosen"] = compensated_for(weight, rows, quantizer)
        plain = error(weight, nearest_codes(weight, quantizer), rows, held[name])
        for key, rounded in tried.items():
            found.setdefault(key, {})[name] = error(weight, rounded, rows, held[name]) / max(plain, 1e-30)
    return {key: condensed(ratios) for key, ratios in found.items()}


def error(weight, rounded, seen, held):
    """Of the output on `held`, with a bias that takes up the mean of `seen`."""
    return float(((held - seen.mean(0)) @ (rounded - weight).T).square().sum())


def condensed(ratios):
    head = [ratio for name, ratio in ratios.items() if name.startswith("head")]
    others = [ratio for name, ratio in ratios.items() if not name.startswith("head")]
    mean = math.exp(sum(map(math.log, others)) / len(others))
    return {"mean": round(mean, 3), "worst": round(max(others), 3), "head": [round(x, 3) for x in head]}


if __name__ == "__main__":
    main()
