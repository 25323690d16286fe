"""What the perturbation Hessian measures behind a LayerNorm: |J(O + eps d) - J(O - eps d)| / (2 eps) at a block output.

    python benchmarks/perturbation.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --out R.jsonl
    python benchmarks/perturbation.py --table results/perturbation.jsonl

J is the gradient of the KL divergence between the float model's prediction and that behind the changed output O. The
direction d is all ones, as published, or +-1 at random (seeded); float64 shows what there is to measure, float32 what
the published code sees.
"""

from __future__ import annotations

import argparse
import json
import pathlib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--calib")
    parser.add_argument("--unit", default="blocks.6")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON lines file to append to")
    parser.add_argument("--table", type=pathlib.Path, help="print the lines of this file as a Markdown table instead")
    args = parser.parse_args()
    if args.table:
        print_table([json.loads(line) for line in args.table.read_text().splitlines()])
        return

    import torch

    from aphq.data import Preprocessing, load_calibration
    from aphq.models.loading import load_model

    model = load_model(args.model, args.weights).requires_grad_(False)
    images = load_calibration(args.calib, Preprocessing.of_model(model), count=args.images, seed=args.seed)
    pixels = images.batch(slice(None))
    for precision in (torch.float64, torch.float32):
        for direction in ("ones", "random"):
            for step in (1e-6, 1e-4, 1e-2):
                slope = mean_slope(model.to(precision), pixels.to(precision), args, direction, step)
                line = {
                    "model": args.model, "unit": args.unit, "images": args.images, "temperature": args.temperature,
                    "seed": args.seed, "precision": str(precision).removeprefix("torch."), "direction": direction,
                    "epsilon": step, "mean_slope": float(f"{slope:.4g}"), "torch": torch.__version__,
                }  # fmt: skip
                with open(args.out, "a") as handle:
                    handle.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)


def mean_slope(model, images, args: argparse.Namespace, direction: str, step: float) -> float:
    """|J+ - J-| / (2 step), mean over all elements; each image counts as in a batch of one."""
    import torch

    from aphq.engine.hooks import change_outputs
    from aphq.models.distillation import LOGITS

    signs = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        target = model(images)
    shift = None
    gradients = []
    for sign in (1, -1):
        leaf: list[torch.Tensor] = []

        def change(_, output, sign=sign, leaf=leaf):
            nonlocal shift
            if shift is None:
                ones = torch.ones(output.shape, dtype=torch.float64)
                drawn = 2.0 * torch.randint(0, 2, output.shape, generator=signs) - 1
                shift = (ones if direction == "ones" else drawn).to(output)
            leaf.append((output.detach() + sign * step * shift).requires_grad_())
            return leaf[0]

        with change_outputs({args.unit: model.get_submodule(args.unit)}, change):
            loss = LOGITS.loss(model(images), target, args.temperature) * len(images)
        gradients.append(torch.autograd.grad(loss, leaf[0])[0])
    return float((gradients[0] - gradients[1]).abs().mean() / (2 * step))


def print_table(rows: list[dict]) -> None:
    steps = sorted({row["epsilon"] for row in rows})
    print(f"| precision | direction | {' | '.join(f'Δ = {step:g}' for step in steps)} |")
    print(f"|---|---{'|---' * len(steps)}|")
    names = {"ones": "all ones", "random": "random signs"}
    for precision, direction in dict.fromkeys((row["precision"], row["direction"]) for row in rows):
        mine = {
            r["epsilon"]: r["mean_slope"] for r in rows if (r["precision"], r["direction"]) == (precision, direction)
        }
        print(f"| {precision} | {names[direction]} | {' | '.join(f'{mine[step]:.2g}' for step in steps)} |")


if __name__ == "__main__":
    main()
