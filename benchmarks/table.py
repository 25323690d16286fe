"""Print the JSON lines that `accuracy.py` wrote as a Markdown table.

python benchmarks/table.py results/core.jsonl
"""

from __future__ import annotations

import json
import pathlib
import sys


def main() -> None:
    rows = [json.loads(line) for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
    rows.sort(key=lambda row: (row["model"], row["run"], row["seed"]))
    print("| model | run | seed | images | float | quantized | drop | agreement | seconds | device |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        drop = row["float"] - row["top1"]
        accuracy = [f"{value:.2f}" for value in (row["float"], row["top1"], drop, row["agreement"])]
        cells = [row["model"], f"`{row['run']}`", row["seed"], row["images"], *accuracy]
        print(f"| {' | '.join(map(str, [*cells, round(row['seconds']), row['device']]))} |")


if __name__ == "__main__":
    main()
