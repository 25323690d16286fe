"""The paper's figure of loss curves, on the embedded model: how much the reconstruction error fluctuates with an
importance per image (`ph`) and with its average over the images (`aph`).

    python benchmarks/fluctuation.py --out runs/fluctuation --lines results/fluctuation.jsonl

The recipe is the demo's (W3A3, 100 steps per unit) with the importance replaced. A line gives, for each block, the
fluctuation that the report prints: the median difference of neighbouring points of the curve, relative to them, without
the term that decides the rounding. The page that compares the runs is written too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder for the runs")
    parser.add_argument("--lines", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    parser.add_argument("--kinds", nargs="+", default=["ph", "aph"], help="importances")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    import aphq
    from aphq.demo.assets import load_assets
    from aphq.demo.run import demo_recipe
    from aphq.report import write_report
    from aphq.report.run_data import read_run

    assets = load_assets()
    for kind in args.kinds:
        recipe = demo_recipe("w3a3").with_value("importance.kind", kind).with_value("steps", args.steps)
        options = {"val": assets.test, "preprocessing": assets.preprocessing, "device": "cpu"}
        run = aphq.quantize(assets.model, recipe, assets.calibration, out=args.out / kind, **options)
        curves = [
            c for c in read_run(args.out / kind).curves if c.stage == "block_reconstruction" and "block" in c.unit
        ]
        by_unit = {curve.unit: round(100 * curve.fluctuation, 2) for curve in curves}
        line = {
            "importance": kind, "steps": args.steps, "seed": recipe.seed, "fluctuation": by_unit,
            "median": round(statistics.median(by_unit.values()), 2), "top1": run.accuracy["quantized"].top1,
        }  # fmt: skip
        with open(args.lines, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    if len(args.kinds) > 1:
        print(write_report([args.out / kind for kind in args.kinds], args.out / "comparison.html"))


if __name__ == "__main__":
    main()
