"""Exported files on real images beside the fake-quantized and the float model: one JSON line per run folder.

    python benchmarks/deploy_accuracy.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --val DIR \\
        --bits w8a8 --bits w4a8 --bits w4a4 --bits w3a3 --limit 500 --runs runs/ --out results/deploy_accuracy.jsonl

Each recipe is quantized at effort `fast` (unless its folder is there already), exported to ONNX through the parity gate
and evaluated in ONNX Runtime and OpenVINO, all on the same images in one pass.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-args", default="{}", help="JSON of further arguments of timm.create_model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--bits", action="append", required=True)
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--limit", type=int, default=None, help="validation images, spread over the classes")
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the run folders are below this one")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for bits in args.bits:
        line = measure(args, bits)
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def measure(args: argparse.Namespace, bits: str) -> dict:
    import torch

    import aphq
    from aphq.artifact import info_of
    from aphq.data import as_labelled
    from aphq.evaluation.classification import compare
    from aphq.models.loading import load_model
    from aphq.runtimes.session import open_exported

    extra = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(args.model_args).items()}
    model = load_model(args.model, args.weights, **extra)
    folder = args.runs / f"{args.model}-{bits}"
    run = aphq.quantize(model, bits, args.calib, effort=args.effort, out=folder, device="cpu")
    exported = run.export("onnx")
    models = {  # the first is what the others are compared with
        "fake_quantized": run.model,
        "float": model,
        **{name: open_exported(exported.path, name, torch.get_num_threads()) for name in ("onnxruntime", "openvino")},
    }
    preprocessing = info_of(run.model).preprocessing
    found = compare(models, as_labelled(args.val, model.num_classes), preprocessing, limit=args.limit)
    return {
        "model": args.model,
        "recipe": run.recipe.name,
        "images": found.accuracy["float"].images,
        "top1": {name: round(accuracy.top1, 2) for name, accuracy in found.accuracy.items()},
        "agreement_with_fake_quantized": {k: round(v, 2) for k, v in found.agreement.items()},
        "parity": exported.parity.to_dict(),
        "bytes": {
            "float32": run.sizes.float32,
            "artifact": run.sizes.artifact,
            "onnx": exported.bytes,
        },
    }


if __name__ == "__main__":
    main()
