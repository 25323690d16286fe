"""Print the JSON lines of `deploy_accuracy.py` and `latency.py` as Markdown tables.

python benchmarks/deploy_table.py results/deploy_accuracy.jsonl results/latency.jsonl
"""

from __future__ import annotations

import json
import pathlib
import sys


def main() -> None:
    rows = [json.loads(line) for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
    accuracy = [row for row in rows if "top1" in row]
    if accuracy:
        header = ("images", "float", "fake-quantized", "ONNX Runtime", "OpenVINO", "same prediction as fake-quantized")
        print(f"| model | recipe | {' | '.join(header)} |")
        print("|---|---|---|---|---|---|---|---|")
    for row in accuracy:
        top1, same = row["top1"], row["agreement_with_fake_quantized"]
        cells = [f"{top1[key]:.2f}" for key in ("float", "fake_quantized", "onnxruntime", "openvino")]
        agreement = f"{same['onnxruntime']:.1f} / {same['openvino']:.1f}"
        print(f"| {row['model']} | {row['recipe']} | {row['images']} | {' | '.join(cells)} | {agreement} |")
    if accuracy:
        gate = "gate: reference, in float64, ONNX Runtime, OpenVINO"
        print(f"\n| model | recipe | float32 | packed artifact | ONNX file | {gate} |")
        print("|---|---|---|---|---|---|")
    for row in accuracy:
        size, parity = row["bytes"], row["parity"]
        share = [f"{size[key]:,} ({size['float32'] / size[key]:.2f} x)" for key in ("artifact", "onnx")]
        errors = [f"{parity[key]['error']:.2g}" for key in ("reference", "in float64", "onnxruntime", "openvino")]
        print(f"| {row['model']} | {row['recipe']} | {size['float32']:,} | {' | '.join(share)} | {', '.join(errors)} |")
    for row in (row for row in rows if "rounds" in row):
        print(
            f"\n{row['model']}, {row['threads']} thread, batch {row['batch']}, {row['rounds']} rounds, {row['cpu']}\n"
        )
        times = "CPU ms, median (p10) | wall ms, p10 / median / p90"
        print(f"| | {times} | over OpenVINO float32, median (p10) | over own float32 | bytes |")
        print("|---|---|---|---|---|---|")
        for name, found in row["rows"].items():
            wall = " / ".join(f"{value:.1f}" for value in found["wall_ms"])
            quiet = row["rows"]["openvino float32"]["cpu_ms_p10"] / found["cpu_ms_p10"]
            ratios = f"{found['over_openvino_float32']:.2f} ({quiet:.2f}) | {found['over_own_float32']:.2f}"
            size = "" if found["bytes"] is None else f"{found['bytes']:,}"
            print(f"| {name} | {found['cpu_ms']:.1f} ({found['cpu_ms_p10']:.1f}) | {wall} | {ratios} | {size} |")


if __name__ == "__main__":
    main()
