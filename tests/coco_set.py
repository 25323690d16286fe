"""A COCO set small enough for a test: coloured rectangles on grey, with a crowd and an image without anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((60, 90), (48, 48), (80, 64))  # height, width; the last image shows nothing
OBJECTS = (  # image, category, x, y, width, height
    (0, 3, 10, 10, 30, 20),
    (0, 7, 45, 25, 40, 30),
    (0, 3, 5, 40, 12, 15),
    (1, 9, 8, 8, 33, 30),
)
CROWD = (1, 3, 0, 38, 48, 10)


def polygon(x: int, y: int, w: int, h: int) -> list[list[int]]:
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def annotation(number: int, image: int, category: int, x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {
        "id": number,
        "image_id": 100 + image,
        "category_id": category,
        "bbox": [x, y, w, h],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": polygon(x, y, w, h),
    }


def runs(height: int, width: int, x: int, y: int, w: int, h: int) -> dict[str, Any]:
    """A rectangle as COCO's uncompressed run lengths, down the columns."""
    mask = np.zeros((height, width), np.uint8)
    mask[y : y + h, x : x + w] = 1
    flat = mask.T.reshape(-1)
    changes = np.flatnonzero(np.diff(np.concatenate([[0], flat])) != 0)
    return {"size": [height, width], "counts": np.diff(np.concatenate([[0], changes, [len(flat)]])).tolist()}


def write(folder: Path) -> tuple[Path, Path]:
    """(instances.json, folder of images)"""
    images = folder / "images"
    images.mkdir(parents=True)
    colours = {3: (220, 60, 40), 7: (40, 200, 80), 9: (60, 80, 230)}
    for number, (height, width) in enumerate(SIZES):
        pixels = np.full((height, width, 3), 128, np.uint8)
        for image, category, x, y, w, h in OBJECTS:
            if image == number:
                pixels[y : y + h, x : x + w] = colours[category]
        Image.fromarray(pixels).save(images / f"{number}.png")
    image, category, *box = CROWD
    crowd = {
        **annotation(99, image, category, *box),
        "iscrowd": 1,
        "segmentation": runs(*SIZES[image], *box),
    }
    entries = [
        {"id": 100 + number, "file_name": f"{number}.png", "height": height, "width": width}
        for number, (height, width) in enumerate(SIZES)
    ]
    source = {
        "images": entries,
        "annotations": [*(annotation(i + 1, *o) for i, o in enumerate(OBJECTS)), crowd],
        "categories": [{"id": 7, "name": "tree"}, {"id": 3, "name": "car"}, {"id": 9, "name": "lake"}],
    }
    file = folder / "instances.json"
    file.write_text(json.dumps(source))
    return file, images
