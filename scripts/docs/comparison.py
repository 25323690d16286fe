"""The page behind docs/images/comparison.png: the embedded model at three widths by search alone.

    python scripts/docs/comparison.py runs/comparison
    chromium --headless=new --hide-scrollbars --window-size=1000,1250 --screenshot=comparison.png \\
        runs/comparison/comparison.html

Its neighbours are the report of `aphq quantize deit_tiny_patch16_224 --bits w3a3 --effort fast --val-limit 500`.
"""

import sys
from pathlib import Path

import aphq
from aphq.demo.assets import load_assets
from aphq.report import write_report


def main(out: Path) -> None:
    assets = load_assets()
    options = {"effort": "fast", "val": assets.test, "preprocessing": assets.preprocessing, "device": "cpu"}
    folders = [out / bits for bits in ("w8a8", "w4a4", "w3a3")]
    for folder in folders:
        print(aphq.quantize(assets.model, folder.name, assets.calibration, out=folder, **options).summary())
    print(write_report(folders, out / "comparison.html"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
