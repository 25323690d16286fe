"""What every quantizer of activations costs by itself, on calibration images that the run did not read.

    python benchmarks/sites.py --model vit_tiny_patch16_224 --weights W.safetensors --calib DIR --use 128 --hold 128 \\
        --run w6a6:fast --out R.jsonl

A run is one of `accuracy.py`, with the first `--use` of 1024 images. Its weights stay quantized and all activations are
in float; then one quantizer after the other is switched on alone. A line has the KL divergence that each makes from the
model with all of them off (`sites`, in units of 1e-4), what the weights make (`weights`), and everything together
(`all`).
"""

from __future__ import annotations

import json
import pathlib

from subject import model_of, parser_for


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--use", type=int, default=128, help="quantize with so many images")
    parser.add_argument("--hold", type=int, default=128, help="measure on so many others")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch
    from accuracy import recipe_of

    import aphq
    from aphq.data import Preprocessing, load_calibration

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = model_of(args).to(device).eval()
    images = load_calibration(args.calib, Preprocessing.of_model(model), count=1024, seed=args.seed)
    if args.use + args.hold > len(images):
        parser.error(f"--use and --hold are parts of the same {len(images)} images")
    starts = range(len(images) - args.hold, len(images), 64)
    held = [images.batch(slice(start, start + 64), device) for start in starts]
    for run in args.run:
        quantized = aphq.quantize(model, recipe_of(run, args.seed), images.first(args.use)).model
        line = {"model": args.model, "run": run, "seed": args.seed, "used": args.use, "held": args.hold}
        line |= each_quantizer(model, quantized, held)
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def each_quantizer(model, quantized, batches):
    """Divergences times 1e4: of everything, of the weights, and of each quantizer of activations by its name."""
    from aphq.analysis.held_out import switched

    operands, wanted = activation_quantizers(quantized), logits(model, batches)
    found = {"all": divergence(logits(quantized, batches), wanted), "sites": {}}
    with switched(list(operands.values()), False):
        plain = logits(quantized, batches)
        found["weights"] = divergence(plain, wanted)
        for name, quantizer in operands.items():
            with switched([quantizer], True):
                found["sites"][name] = divergence(logits(quantized, batches), plain)
    return found


def activation_quantizers(quantized):
    """{name: quantizer} of the inputs of layers and of both sides of attention products."""
    from aphq.quant.layers import quantized_sites
    from aphq.report.observe import incoming

    sites = quantized_sites(quantized)
    return {f"{name}.{side}": one for name, site in sites for side, one in incoming(site).items() if one is not None}


def logits(model, batches):
    import torch

    with torch.no_grad():
        return torch.cat([model(x) for x in batches])


def divergence(got, wanted):
    from aphq.models.distillation import LOGITS

    return round(1e4 * float(LOGITS.loss(got, wanted)), 2)


if __name__ == "__main__":
    main()
