import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from aphq.data.coco import class_names, open_coco
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
    with pytest.raises(DataError, match="3 categories, the model 8 classes"):
        open_coco(*coco).class_ids(8, by_id=True)  # 9 is among the ids


def test_classes_are_counted_by_rank_or_by_id(coco: tuple[Path, Path]) -> None:
    """torchvision's published detectors have an output for every id of COCO, used or not."""
    data = open_coco(*coco)
    assert data.class_ids(3) == data.class_ids(3, by_id=True) == (3, 7, 9)
    assert data.class_ids(9, by_id=True) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert class_names(coco[0], 3, by_id=True) == ("car", "tree", "lake")
    assert class_names(coco[0], 9, by_id=True) == ("1", "2", "car", "4", "5", "6", "tree", "8", "lake")
    with pytest.raises(DataError, match="3 categories, the model 9 classes"):
        class_names(coco[0], 9)


def test_names_of_cocos_ids_are_torchvisions() -> None:
    from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

    theirs = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]
    ours = class_names(None, 90, by_id=True)
    assert [name for name in ours if not name.isdecimal()] == [name for name in theirs if name != "N/A"]
    assert [i for i, name in enumerate(ours) if name.isdecimal()] == [i for i, n in enumerate(theirs) if n == "N/A"]
    assert class_names(None, 90)[0] == "0"


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
