"""COCO annotations and the folder of their images, checked against each other before anything is measured.

Class i of a model is the i-th of the file's categories in the order of their ids; some detectors (torchvision's) have a
class for every id instead, with unused ones where COCO has gaps. Images without annotations are part
of a COCO set (a detector must find nothing there) and are counted; everything that would falsify the measurement is
refused, with the id of the annotation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from aphq.data.images import ImageFiles
from aphq.errors import DataError

COCO_NAMES = (
    "person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign|parking meter|"
    "bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag|tie|suitcase|frisbee|"
    "skis|snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard|tennis racket|bottle|wine glass|"
    "cup|fork|knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot|hot dog|pizza|donut|cake|chair|couch|"
    "potted plant|bed|dining table|toilet|tv|laptop|mouse|remote|keyboard|cell phone|microwave|oven|toaster|sink|"
    "refrigerator|book|clock|vase|scissors|teddy bear|hair drier|toothbrush"
)
COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # ids up to 90 that have no category


@dataclass(frozen=True)
class CocoImage:
    """One image of the set."""

    id: int
    file: Path
    size: tuple[int, int]  # height, width

    def open(self) -> Image.Image:
        """Decoded and upright; DataError if it is damaged or not the image that was annotated."""
        image = ImageFiles([str(self.file)], lambda _: self.file.read_bytes()).open(0)
        if (image.height, image.width) != self.size:
            raise DataError(
                f"'{self.file}' is {image.width} x {image.height} pixels, but its annotations are for "
                f"{self.size[1]} x {self.size[0]}: give the images the file was made for"
            )
        return image


@dataclass(frozen=True, eq=False)
class CocoData:
    """Annotated images to measure a detector on."""

    source: dict[str, Any]  # the parsed file
    images: tuple[CocoImage, ...]
    categories: tuple[int, ...]  # sorted ids
    names: tuple[str, ...]  # of the categories
    unannotated: int  # images without any annotation

    def __len__(self) -> int:
        return len(self.images)

    def check_classes(self, num_classes: int) -> None:
        if len(self.categories) != num_classes:
            raise DataError(
                f"the annotations have {len(self.categories)} categories, the model {num_classes} classes: "
                "give annotations with the categories it was trained on"
            )

    def class_ids(self, num_classes: int, by_id: bool = False) -> tuple[int, ...]:
        """The category of each class of a model; `by_id`: with more classes than categories, class i is id i + 1."""
        if by_id and _are_numbers_of_classes(self.categories, num_classes):
            return tuple(range(1, num_classes + 1))
        self.check_classes(num_classes)
        return self.categories


def open_coco(annotations: str | Path, images: str | Path) -> CocoData:
    """Read a COCO instances file and find its images in a folder."""
    path, folder = Path(annotations), Path(images)
    source = _read(path)
    if not folder.is_dir():
        raise DataError(f"there is no folder of images '{folder}'")
    listed = _images(source, path, folder)
    _check_annotations(source, path, {image.id: image for image in listed})
    annotated = {a["image_id"] for a in source["annotations"]}
    if not annotated:
        raise DataError(f"'{path}' has no annotations: there is nothing to measure against")
    categories = sorted(source["categories"], key=lambda category: category["id"])
    return CocoData(
        source,
        listed,
        tuple(category["id"] for category in categories),
        tuple(str(category.get("name", category["id"])) for category in categories),
        sum(image.id not in annotated for image in listed),
    )


def class_names(annotations: Path | None, num_classes: int, by_id: bool = False) -> tuple[str, ...]:
    """The names of a model's classes: those of an annotation file, COCO's if there are 80, else their numbers; `by_id`
    as in `CocoData.class_ids`."""
    numbers = tuple(str(number) for number in range(num_classes))
    if annotations is None:
        names = COCO_NAMES.split("|")
        if by_id and num_classes == len(names) + len(COCO_GAPS):
            for gap in COCO_GAPS:
                names.insert(gap - 1, str(gap))
        return tuple(names) if num_classes == len(names) else numbers
    listed = {int(c["id"]): str(c.get("name", c["id"])) for c in _read(annotations)["categories"]}
    ids = sorted(listed)
    if by_id and _are_numbers_of_classes(ids, num_classes):
        return tuple(listed.get(number, str(number)) for number in range(1, num_classes + 1))
    if len(ids) != num_classes:
        raise DataError(f"'{annotations}' has {len(ids)} categories, the model {num_classes} classes")
    return tuple(listed[number] for number in ids)


def _are_numbers_of_classes(ids: Sequence[int], num_classes: int) -> bool:
    """Whether sorted ids may be the numbers, from 1, of some of the classes."""
    return 0 < len(ids) < num_classes and ids[0] >= 1 and ids[-1] <= num_classes


def _read(path: Path) -> dict[str, Any]:
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(f"cannot read the annotations '{path}': {problem}") from None
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(_get(source, key), list)]
    if missing:
        raise DataError(f"'{path}' is not a COCO instances file: it has no list {', '.join(missing)}")
    return dict(source)


def _get(source: Any, key: str) -> Any:
    return source.get(key) if isinstance(source, dict) else None


def _images(source: dict[str, Any], path: Path, folder: Path) -> tuple[CocoImage, ...]:
    try:
        listed = tuple(
            CocoImage(int(entry["id"]), folder / entry["file_name"], (int(entry["height"]), int(entry["width"])))
            for entry in source["images"]
        )
        categories = [int(category["id"]) for category in source["categories"]]
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"'{path}' has an image or category without {problem}") from None
    if not listed or not categories:
        raise DataError(f"'{path}' lists no {'categories' if listed else 'images'}")
    for what, ids in (("image", [image.id for image in listed]), ("category", categories)):
        id_, count = Counter(ids).most_common(1)[0]
        if count > 1:
            raise DataError(f"'{path}' has {count} entries for {what} {id_}")
    absent = [image.file.name for image in listed if not image.file.is_file()]
    if absent:
        raise DataError(
            f"{len(absent)} of the {len(listed)} images of '{path}' are not in '{folder}' ({_some(absent)}): "
            "the annotations belong to another folder"
        )
    return listed


def _check_annotations(source: dict[str, Any], path: Path, images: dict[int, CocoImage]) -> None:
    categories = {category["id"] for category in source["categories"]}
    for annotation in source["annotations"]:
        where = f"annotation {_get(annotation, 'id')} of '{path}'"
        needed = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")
        missing = [key for key in needed if _get(annotation, key) is None]
        if missing:
            raise DataError(f"{where} has no {', '.join(missing)}")
        if annotation["image_id"] not in images:
            raise DataError(f"{where} is for image {annotation['image_id']}, which the file does not list")
        if annotation["category_id"] not in categories:
            raise DataError(f"{where} is of category {annotation['category_id']}, which the file does not list")
        box = annotation["bbox"]
        if len(box) != 4 or not (box[2] > 0 and box[3] > 0):
            name = images[annotation["image_id"]].file.name
            raise DataError(f"{where} ('{name}') has a box without area, {box}: correct or remove it")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
