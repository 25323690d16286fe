"""What every quantizer of activations costs by itself, on calibration images that the run did not read.

    python benchmarks/sites.py --model vit_tiny_patch16_224 --weights W.safetensors --calib DIR --use 128 --hold 128 \\
        --run w6a6:fast --out R.jsonl

A run is one of `accuracy.py`, with the first `--use` of 1024 images. Its weights stay quantized and all activations are
in float; then one quantizer after the other is switched on alone. A line has the KL divergence that each makes from the
model with all of them off (`sites`, in units of 1e-4), what the weights make (`weights`), and everything together
(`all`).
"""

from __future__ import annotations

import argparse
import json
import pathlib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-args", default="{}", help="JSON of further arguments of timm.create_model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
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
    from aphq.models.loading import load_model

    if args.use + args.hold > 1024:
        parser.error("--use and --hold are parts of the same 1024 images")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    extra = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(args.model_args).items()}
    model = load_model(args.model, args.weights, **extra).to(device).eval()
    images = load_calibration(args.calib, Preprocessing.of_model(model), count=1024, seed=args.seed)
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
    operands = activation_quantizers(quantized)
    found = {"all": divergence(said(quantized, batches), said(model, batches)), "sites": {}}
    for quantizer in operands.values():
        quantizer.enabled = False
    plain = said(quantized, batches)
    found["weights"] = divergence(plain, said(model, batches))
    for name, quantizer in operands.items():
        quantizer.enabled = True
        found["sites"][name] = divergence(said(quantized, batches), plain)
        quantizer.enabled = False
    for quantizer in operands.values():
        quantizer.enabled = True
    return found


def activation_quantizers(quantized):
    """{name: quantizer} of the inputs of layers and of both sides of attention products."""
    from aphq.quant.layers import QuantizedLayer, quantized_sites

    found = {}
    for name, site in quantized_sites(quantized):
        sides = ("input_quantizer",) if isinstance(site, QuantizedLayer) else ("left", "right")
        found |= {f"{name}.{side.removesuffix('_quantizer')}": getattr(site, side) for side in sides}
    return {name: quantizer for name, quantizer in found.items() if quantizer is not None}


def said(model, batches):
    """The logarithms of the predictions."""
    import torch

    with torch.no_grad():
        return torch.cat([model(x).log_softmax(1) for x in batches])


def divergence(got, expected):
    import torch.nn.functional as F

    return round(1e4 * float(F.kl_div(got, expected, log_target=True, reduction="batchmean")), 2)


if __name__ == "__main__":
    main()
