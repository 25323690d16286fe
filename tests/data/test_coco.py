import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aphq.data.coco import open_coco
from aphq.errors import DataError

from ..coco_set import SIZES, write

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def coco(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path)


def change(file: Path, how: Change) -> None:
    source = json.loads(file.read_text())
    how(source)
    file.write_text(json.dumps(source))


def test_reads_images_and_categories_in_order_of_ids(coco: tuple[Path, Path]) -> None:
    data = open_coco(*coco)
    assert len(data) == 3
    assert data.categories == (3, 7, 9)
    assert data.names == ("car", "tree", "lake")
    assert data.unannotated == 1
    assert [(i.open().height, i.open().width) for i in data.images] == list(SIZES)


def test_another_folder_is_refused(coco: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"3 of the 3 images .* are not in .*other' \('0.png', .*another folder"):
        open_coco(coco[0], tmp_path / "other")
    with pytest.raises(DataError, match="no folder"):
        open_coco(coco[0], tmp_path / "nowhere")


def test_an_image_of_another_size_is_refused(coco: tuple[Path, Path]) -> None:
    Image.new("RGB", (50, 20)).save(coco[1] / "1.png")
    with pytest.raises(DataError, match=r"1.png' is 50 x 20 pixels, but its annotations are for 48 x 48"):
        open_coco(*coco).images[1].open()


def test_other_classes_than_the_models_are_refused(coco: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="3 categories, the model 80 classes"):
        open_coco(*coco).check_classes(80)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda s: s["annotations"][1].update(bbox=[4, 4, 0, 9]), "annotation 2 of .*'0.png'.* box without area"),
        (lambda s: s["annotations"][1].update(image_id=5), "annotation 2 .* image 5, which the file does not list"),
        (lambda s: s["annotations"][0].update(category_id=5), "annotation 1 .* category 5"),
        (lambda s: s["annotations"][0].pop("segmentation"), "annotation 1 .* has no segmentation"),
        (lambda s: s.update(annotations=[]), "no annotations"),
        (lambda s: s.pop("categories"), "not a COCO instances file: it has no list categories"),
        (lambda s: s["images"].append(s["images"][0]), "2 entries for image 100"),
        (lambda s: s["images"][0].pop("height"), "without 'height'"),
        (lambda s: s.update(images=[]), "lists no images"),
    ],
)
def test_what_does_not_fit_is_named(coco: tuple[Path, Path], how: Change, words: str) -> None:
    change(coco[0], how)
    with pytest.raises(DataError, match=words):
        open_coco(*coco)


def test_something_else_than_annotations(coco: tuple[Path, Path], tmp_path: Path) -> None:
    for text, words in (("[1, 2]", "not a COCO instances file"), ("{", "cannot read")):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(DataError, match=words):
            open_coco(tmp_path / "odd.json", coco[1])
