"""Reading Fashion-MNIST from its IDX files, plain or gzipped.

IDX is a big-endian header followed by the raw values: two zero bytes, a type code (8 is uint8), the number of
dimensions, then one 32-bit size per dimension. Fashion-MNIST only uses uint8.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DEFAULT_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
UINT8_CODE = 8

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


class Split(NamedTuple):
    """Images and their classes, in the order of the files."""

    images: npt.NDArray[np.uint8]  # [count, 28, 28]
    labels: npt.NDArray[np.uint8]  # [count]


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read one IDX file of uint8 values; a name ending in `.gz` is decompressed on the way."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != bytes([0, 0, UINT8_CODE]):
        raise ValueError(f"{path} is not an IDX file of uint8 values")
    header_end = 4 + 4 * data[3]
    shape = tuple(int(size) for size in np.frombuffer(data[4:header_end], dtype=">u4"))
    values = np.frombuffer(data, dtype=np.uint8, offset=header_end)
    if values.size != int(np.prod(shape)):
        raise ValueError(f"{path} promises {shape} values but holds {values.size}: is it cut short?")
    return values.reshape(shape)


def read_split(folder: Path, name: str) -> Split:
    """Read the images and labels of one split: `train` (60 000) or `t10k` (10 000)."""
    images = read_idx(_find(folder, f"{name}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{name}-labels-idx1-ubyte"))
    if len(images) != len(labels):
        raise ValueError(f"{folder} holds {len(images)} {name} images but {len(labels)} labels")
    return Split(images, labels)


def _find(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.gz", folder / stem):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} has neither {stem}.gz nor {stem}: give the folder of the Fashion-MNIST files")
