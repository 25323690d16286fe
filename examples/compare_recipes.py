"""Quantize one model by several recipes and put them side by side: a table here, a page with charts for the browser.

    python examples/compare_recipes.py deit_tiny_patch16_224 calib/ --out runs/compare \\
        --recipe w8a8:fast --recipe w4a4:fast

A recipe is BITS:EFFORT or a YAML file. Runs that are finished are not repeated, so recipes can be added later.
"""

import argparse
from pathlib import Path

import aphq
from aphq.models.loading import load_model
from aphq.report import write_report
from aphq.report.run_data import read_run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a timm name")
    parser.add_argument("images", help="a folder of unlabelled images")
    parser.add_argument("--out", type=Path, required=True, help="the folder for all runs")
    parser.add_argument("--recipe", action="append", required=True, help="BITS:EFFORT or a file; repeat for more")
    parser.add_argument("--weights", help="a local weights file")
    parser.add_argument("--val", help="labelled images to measure on")
    args = parser.parse_args()

    model = load_model(args.model, args.weights)
    folders = []
    for recipe in args.recipe:
        bits, _, effort = recipe.partition(":")
        folders.append(args.out / Path(recipe.replace(":", "-")).stem)
        aphq.quantize(model, bits, args.images, effort=effort or None, out=folders[-1], val=args.val)

    print(f"{'recipe':<16} {'top-1':>6} {'same as float':>14} {'MB':>7} {'seconds':>8}")
    for run in map(read_run, folders):
        top1 = f"{run.accuracy['quantized']:.2f}" if run.accuracy else "-"
        same = f"{run.agreement[0]:.1f} %" if run.agreement else "-"
        print(f"{run.name:<16} {top1:>6} {same:>14} {run.sizes['artifact'] / 1e6:>7.2f} {run.seconds:>8.1f}")
    if len(folders) > 1:
        print("open", write_report(folders, args.out / "comparison.html"))


if __name__ == "__main__":
    main()
