"""What a quantized model does to classes that its calibration images did not show.

    python benchmarks/classes_seen.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --val DIR \\
        --quantized RUN --out R.jsonl

Classes go by the float model's predictions, so no label is needed: `seen` are validation images of a class that it also
sees in a calibration image, `unseen` are the others. A line has their number, the share of predictions that stay the
same and the KL divergence. That unseen classes are not just harder is what `others` is for: the validation images
themselves take turns at being those that show classes, which the run did not learn from, 20 times.
"""

from __future__ import annotations

import json
import pathlib

from subject import model_of, parser_for

TURNS = 20


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--val", required=True)
    parser.add_argument("--quantized", required=True, help="the run's folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch

    import aphq
    from aphq.artifact.info import info_of
    from aphq.data import Preprocessing, load_calibration

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = model_of(args).to(device).eval()
    quantized = aphq.load(args.quantized).to(device).eval()
    recipe, preprocessing = info_of(quantized).recipe, Preprocessing.of_model(model)
    used = load_calibration(args.calib, preprocessing, count=recipe.calibration.images, seed=recipe.seed)
    val = load_calibration(args.val, preprocessing, count=10**6)
    before, after = logits(model, val, device), logits(quantized, val, device)
    found = before.argmax(1)
    same = (after.argmax(1) == found).float()
    divergence = (before.softmax(1) * (before.log_softmax(1) - after.log_softmax(1))).sum(1)

    def about(rows):
        return {"images": len(rows), "agreement": round(100 * float(same[rows].mean()), 2),
                "kl": round(float(divergence[rows].mean()), 4)}  # fmt: skip

    shown = logits(model, used, device).argmax(1).unique()
    seen = torch.isin(found, shown)
    others = {True: [], False: []}
    for turn in range(TURNS):
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(turn))
        showing, rest = order[: min(len(used), len(found) // 2)], order[min(len(used), len(found) // 2) :]
        also = torch.isin(found[rest], found[showing])
        for kind, rows in others.items():
            rows.append(100 * float(same[rest[also == kind]].mean()))
    line = {
        "model": args.model, "recipe": recipe.name, "quantized_with": len(used), "classes_shown": len(shown),
        "all": about(torch.arange(len(found))), "seen": about(seen.nonzero().flatten()),
        "unseen": about((~seen).nonzero().flatten()),
        "others": {"seen": round(sum(others[True]) / TURNS, 2), "unseen": round(sum(others[False]) / TURNS, 2)},
    }  # fmt: skip
    with open(args.out, "a") as handle:
        handle.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))


def logits(model, images, device):
    import torch

    with torch.no_grad():
        rows = [model(images.batch(slice(start, start + 50), device)).cpu() for start in range(0, len(images), 50)]
    return torch.cat(rows)


if __name__ == "__main__":
    main()
