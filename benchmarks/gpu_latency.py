"""W8A8 on a GPU against bf16: integer kernels, eager and compiled, by turns in one process.

    python benchmarks/gpu_latency.py --model deit_small_patch16_224 --batch 256 --out results/gpu_latency.jsonl

Weights and images are random: time does not depend on them. Times are of CUDA events, one run of each model per round.
`int8` is the artifact as `aphq.load(path, "cuda", runtime="int8")` runs it. `int8, bf16 between` keeps what is still
float between its layers, the residual stream above all, in bf16: the same integers, other roundings between them.
`error` is the distance of the logits from the simulation; `kernels` says whether the integer kernels ran. A variant
that cannot be compiled or run is reported with its error instead of a time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--mode", default="default", help="of torch.compile; max-autotune takes minutes")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()
    line = measure(args)
    with open(args.out, "a") as handle:
        handle.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))


def measure(args: argparse.Namespace) -> dict:
    import copy
    from functools import partial

    import timm
    import torch

    import aphq
    from aphq.presets import round_to_nearest
    from aphq.runtimes.int8 import to_int8
    from aphq.runtimes.int8_layers import OnBytes

    torch.manual_seed(0)
    model = timm.create_model(args.model).eval()
    recipe = round_to_nearest("w8a8").with_value("calibration.images", 8).with_value("scale_search.images", 8)
    simulated = aphq.quantize(model, recipe, torch.randn(8, 3, 224, 224)).model
    images = torch.randn(args.batch, 3, 224, 224, device="cuda")
    integer = to_int8(copy.deepcopy(simulated)).cuda()
    half = copy.deepcopy(model).cuda().bfloat16()
    between = copy.deepcopy(integer).bfloat16()
    variants = {
        "float32": (model.cuda(), images, False),
        "bf16": (half, images.bfloat16(), False),
        "bf16 compiled": (half, images.bfloat16(), True),
        "int8": (integer, images, False),
        "int8 compiled": (integer, images, True),
        "int8, bf16 between": (between, images.bfloat16(), False),
        "int8, bf16 between, compiled": (between, images.bfloat16(), True),
    }
    ready, rows = {}, {}
    with torch.inference_mode():
        expected = simulated.cuda()(images[:8])
        for name, (one, pixels, compiled) in variants.items():
            try:
                call = partial(torch.compile(one, mode=args.mode) if compiled else one, pixels)
                for _ in range(5):
                    out = call()
                ready[name] = call
                rows[name] = {"error": round(float((out[:8].float() - expected).norm() / expected.norm()), 4)}
            except Exception as problem:
                rows[name] = {"failed": " ".join(str(problem).split())[:300]}
        for name, times in race(ready, args.rounds).items():
            middle = statistics.median(times)
            rows[name] |= {"ms": round(middle, 3), "images_per_second": round(1000 * args.batch / middle)}
    best = rows["bf16 compiled"].get("ms")
    for row in rows.values():
        if best and "ms" in row:
            row["over_bf16_compiled"] = round(best / row["ms"], 3)
    return {
        "model": args.model,
        "batch": args.batch,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        "mode": args.mode,
        "kernels": all(part.by_kernels for part in integer.modules() if isinstance(part, OnBytes)),
        "rows": rows,
    }


def race(calls, rounds: int) -> dict:
    """{name: milliseconds of each round}; the calls take turns."""
    import torch

    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


if __name__ == "__main__":
    main()
