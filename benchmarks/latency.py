"""Latency of W8A8 models against float32 in ONNX Runtime, OpenVINO and PyTorch: one JSON line per model.

    python benchmarks/latency.py --model deit_small_patch16_224 --seconds 60 --out results/latency.jsonl

Weights are random and ranges come from a few random images: time does not depend on them. Each model is measured with
GELU and with ReLU in its MLPs (as MLP reconstruction leaves it), against the float32 model with GELU, all by turns in
one process. `default` is the preset W8A8 in the file that serves both runtimes, `tuned` the same made for the runtime;
`probabilities` are these (`default` of ONNX Runtime, `tuned` of OpenVINO) with the softmax divided before its product.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--torch", action="store_true", help="PyTorch too, float32 and int8")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()
    line = measure(args)
    with open(args.out, "a") as handle:
        handle.write(json.dumps(line) + "\n")


def quantized(name: str, softmax: str = "exponentials"):
    import timm
    import torch

    import aphq
    from aphq.presets import round_to_nearest

    torch.manual_seed(0)
    recipe = round_to_nearest("w8a8").with_value("activations.softmax", softmax)
    recipe = recipe.with_value("calibration.images", 2).with_value("scale_search.images", 2)
    return aphq.quantize(timm.create_model(name).eval(), recipe, torch.randn(2, 3, 224, 224), device="cpu").model


def with_relu(model):
    """A copy with ReLU in every MLP, whose output needs no zero-point."""
    import copy

    from aphq.models.architecture import architecture_of
    from aphq.models.student import swap_activation

    units = architecture_of(model).units(model)
    result = copy.deepcopy(model)
    for mlp in (unit.mlp for unit in units if unit.mlp is not None):
        swap_activation(result, mlp)
        quantizer = result.get_submodule(mlp.fc2).input_quantizer
        lower, upper = quantizer.limits()
        quantizer.set_range(0 * lower, upper)
    return result


def measure(args: argparse.Namespace) -> dict:
    import copy
    from functools import partial

    import numpy as np
    import torch

    from aphq.bench import float_model, race, run_torch
    from aphq.export.onnx_file import build
    from aphq.export.registry import Options
    from aphq.runtimes import onnxruntime, openvino
    from aphq.runtimes.int8 import to_int8

    torch.set_num_threads(args.threads)
    images = torch.randn(args.batch, 3, 224, 224)
    runs, sizes = {}, {}

    def add(name: str, model, runtime, tuned: str) -> None:
        content = build(model, images, Options(args.batch, tuned)).SerializeToString()
        sizes[name] = len(content)
        runs[name] = partial(runtime.open_session(content, args.threads)[0], images.numpy())

    model = quantized(args.model)
    plain = float_model(model)
    add("onnxruntime float32", plain, onnxruntime, "any")
    add("openvino float32", plain, openvino, "any")
    if args.torch:
        runs["pytorch float32"] = partial(run_torch, plain, images)
    other = quantized(args.model, "probabilities")
    add("onnxruntime GELU probabilities", other, onnxruntime, "any")
    add("openvino GELU probabilities", other, openvino, "openvino")
    for kind in ("GELU", "ReLU"):
        if kind == "ReLU":
            model = with_relu(model)
        add(f"onnxruntime {kind} default", model, onnxruntime, "any")
        add(f"openvino {kind} default", model, openvino, "any")
        add(f"openvino {kind} tuned", model, openvino, "openvino")
        if args.torch:
            runs[f"pytorch {kind} int8"] = partial(run_torch, to_int8(copy.deepcopy(model)), images)
    times = dict(zip(runs, race(list(runs.values()), args.seconds), strict=True))
    cpu = {name: float(np.median(found[1])) for name, found in times.items()}
    rows = {}
    for name, (wall, worked) in times.items():
        own = cpu[f"{name.split()[0]} float32"]
        rows[name] = {
            "cpu_ms": round(1000 * cpu[name], 2),
            "cpu_ms_p10": round(1000 * float(np.percentile(worked, 10)), 2),
            "wall_ms": [round(1000 * float(value), 2) for value in np.percentile(wall, (10, 50, 90))],
            "over_openvino_float32": round(cpu["openvino float32"] / cpu[name], 2),
            "over_own_float32": round(own / cpu[name], 2),
            "bytes": sizes.get(name),
        }
        print(f"{name:45} {rows[name]}", flush=True)
    return {
        "model": args.model,
        "threads": args.threads,
        "batch": args.batch,
        "rounds": len(times["openvino float32"][0]),
        "cpu": cpu_name(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),  # of OpenVINO, where the user holds it down
        "rows": rows,
    }


def cpu_name() -> str:
    found = pathlib.Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
