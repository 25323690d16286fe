"""Exported files on real images beside the fake-quantized and the float model: one JSON line per run folder.

    python benchmarks/deploy_accuracy.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --val DIR \\
        --bits w8a8 --bits w4a8 --bits w4a4 --bits w3a3 --limit 500 --runs runs/ --out results/deploy_accuracy.jsonl

Each recipe is quantized at effort `fast` (unless its folder is there already), exported to ONNX through the parity gate
and evaluated in ONNX Runtime and OpenVINO, all on the same images in one pass. `--run FOLDER` takes a finished
run instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib

from subject import model_of, parser_for


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--val", required=True)
    parser.add_argument("--bits", action="append", default=[])
    parser.add_argument("--run", action="append", type=pathlib.Path, default=[], help="the folder of a finished run")
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--limit", type=int, default=None, help="validation images, spread over the classes")
    parser.add_argument("--runs", type=pathlib.Path, default="runs", help="the folders of --bits are below this one")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for source in [*args.bits, *args.run]:
        line = measure(args, source)
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def measure(args: argparse.Namespace, source: str | pathlib.Path) -> dict:
    """`source`: bits to quantize to, or the folder of a run."""
    import torch

    import aphq
    from aphq.artifact import info_of
    from aphq.data import as_labelled
    from aphq.evaluation.classification import compare
    from aphq.export import export
    from aphq.export.parity import in_float64
    from aphq.runtimes.session import open_exported

    model = model_of(args)
    folder = source
    if isinstance(source, str):
        folder = args.runs / f"{args.model}-{source}"
        aphq.quantize(model, source, args.calib, effort=args.effort, out=folder, device="cpu")
    quantized = aphq.load(folder)
    sizes = json.loads((folder / "config.json").read_text())["sizes"]
    info = info_of(quantized)
    exported = export(quantized, "onnx", out=folder / "model", data=args.calib)
    models = {  # the first is what the others are compared with
        "fake_quantized": quantized,
        "float": model,
        "in_float64": in_float64(quantized),
        **{name: open_exported(exported.path, name, torch.get_num_threads()) for name in ("onnxruntime", "openvino")},
    }
    found = compare(models, as_labelled(args.val, model.num_classes), info.preprocessing, limit=args.limit)
    return {
        "model": args.model,
        "recipe": info.recipe.name,
        "images": found.accuracy["float"].images,
        "top1": {name: round(accuracy.top1, 2) for name, accuracy in found.accuracy.items()},
        "agreement_with_fake_quantized": {k: round(v, 2) for k, v in found.agreement.items()},
        "parity": exported.parity.to_dict(),
        "bytes": {
            "float32": sizes["float32"],
            "artifact": sizes["artifact"],
            "onnx": exported.bytes,
        },
    }


if __name__ == "__main__":
    main()
