"""Draw the images that travel with the package from Fashion-MNIST.

Writes `images.npz` with unlabelled calibration images out of the training split, and a class-balanced set of labelled
images out of the test split, so that nothing the demo is scored on was seen in training or calibration. The same seed
gives the same bytes. The dataset's notice goes next to it.

    python scripts/demo/build_images.py [FOLDER]
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from idx import CLASS_NAMES, DEFAULT_FOLDER, read_split

CALIBRATION_COUNT = 1024
TEST_PER_CLASS = 200
SEED = 0
OUT = Path(__file__).resolve().parents[2] / "src" / "aphq" / "demo" / "data"

NOTICE = """\
images.npz holds images and labels of Fashion-MNIST (https://github.com/zalandoresearch/fashion-mnist), and
model.safetensors was trained on that dataset. Fashion-MNIST comes under the MIT (Expat) licence:

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def balanced_draw(labels: npt.NDArray[np.uint8], per_class: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices of `per_class` images of every class, shuffled so that any prefix is roughly balanced too."""
    drawn = [rng.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in range(len(CLASS_NAMES))]
    return rng.permutation(np.concatenate(drawn))


def build(folder: Path, out: Path, seed: int = SEED) -> Path:
    """Write `images.npz` and `NOTICE` into `out`; returns the path of the images."""
    rng = np.random.default_rng(seed)
    train, test = read_split(folder, "train"), read_split(folder, "t10k")
    calibration = rng.choice(len(train.images), CALIBRATION_COUNT, replace=False)
    chosen = balanced_draw(test.labels, TEST_PER_CLASS, rng)

    out.mkdir(parents=True, exist_ok=True)
    path = out / "images.npz"
    np.savez_compressed(
        path,
        calibration=train.images[calibration],  # [1024, 28, 28]
        test=test.images[chosen],  # [2000, 28, 28]
        test_labels=test.labels[chosen],  # [2000]
        class_names=np.array(CLASS_NAMES),  # unicode, so it loads with allow_pickle=False
    )
    (out / "NOTICE").write_text(NOTICE, encoding="utf-8")
    return path


def main() -> None:
    """Parse the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="where the four IDX files are")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write into (default: the package's demo data)")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    path = build(args.folder, args.out, args.seed)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
