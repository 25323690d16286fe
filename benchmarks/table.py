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
        cells = [row["model"], f"`{row['run']}`", row["seed"], row["images"], f"{row['float']:.2f}", f"{row['top1']:.2f}"]
        cells += [f"{row['float'] - row['top1']:.2f}", f"{row['agreement']:.1f}", f"{row['seconds']:.0f}", row["device"]]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
