"""What a report shows, as plain values in Python: accuracy, time, the layers that lost most, loss curves.

python examples/read_report.py runs/deit_s [--json]
"""

import argparse
import json

from aphq.report.run_data import read_run


def facts(path, worst):
    run = read_run(path)
    layers = [layer for layer in run.measurements.get("layers", ()) if layer["output_snr"] is not None]
    layers.sort(key=lambda layer: layer["output_snr"])
    return {
        "model": run.model,
        "recipe": run.recipe.name,
        "accuracy": run.accuracy,  # empty if the run was given no labels
        "agreement": run.agreement,
        "bytes": dict(run.sizes),
        "bits_per_weight": round(run.average_bits, 3),
        "seconds": {stage.name: stage.seconds for stage in run.stages},
        "worst_layers_db": {layer["name"]: round(layer["output_snr"], 1) for layer in layers[:worst]},
        "error_first_to_last": {f"{c.stage}/{c.unit}": (c.shown[0], c.shown[-1]) for c in run.curves},
        "not_quantized": {row.name: row.note for row in run.layers if row.note},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a finished run folder")
    parser.add_argument("--worst", type=int, default=5, help="how many of the worst layers to name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = facts(args.run, args.worst)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
