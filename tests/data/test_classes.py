import json
from pathlib import Path

import pytest
import timm.data

from aphq.data.classes import class_indices
from aphq.errors import DataError

TENCH, GOLDFISH, TOILET_PAPER = "n01440764", "n01443537", "n15075141"


def test_plain_folders_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    index, names = class_indices(tmp_path, {"dog", "cat", "ant"}, 3)
    assert index == {"ant": 0, "cat": 1, "dog": 2}
    assert names == ("ant", "cat", "dog")


def test_a_subset_of_imagenet_keeps_its_indices(tmp_path: Path) -> None:
    index, names = class_indices(tmp_path, {TOILET_PAPER, GOLDFISH, TENCH}, 1000)
    assert index == {TENCH: 0, GOLDFISH: 1, TOILET_PAPER: 999}
    assert len(names) == 1000
    assert names[999] == TOILET_PAPER


@pytest.mark.parametrize(
    ("num_classes", "subset"), [(11821, "imagenet-12k"), (21841, "imagenet-22k"), (21843, "imagenet-21k-goog")]
)
def test_larger_imagenets(tmp_path: Path, num_classes: int, subset: str) -> None:
    info = timm.data.ImageNetInfo(subset)
    index, _ = class_indices(tmp_path, {TENCH, GOLDFISH}, num_classes)
    assert [info.index_to_label_name(index[name]) for name in (TENCH, GOLDFISH)] == [TENCH, GOLDFISH]


def test_imagenet_ids_of_a_model_with_as_many_classes_are_numbered(tmp_path: Path) -> None:
    index, names = class_indices(tmp_path, {TOILET_PAPER, TENCH}, 2)
    assert index == {TENCH: 0, TOILET_PAPER: 1}
    assert names == (TENCH, TOILET_PAPER)


def test_numbers_that_do_not_fit_are_both_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 class folders.*10 classes.*class_to_idx\.json"):
        class_indices(tmp_path, {"cat", "dog"}, 10)
    with pytest.raises(DataError, match=r"1 ImageNet class folders.*10 classes.*no ImageNet label set"):
        class_indices(tmp_path, {TENCH}, 10)
    with pytest.raises(DataError, match="'n99999999'"):
        class_indices(tmp_path, {TENCH, "n99999999"}, 1000)


def test_a_mapping_file_wins_over_everything(tmp_path: Path) -> None:
    (tmp_path / "class_to_idx.json").write_text(json.dumps({TENCH: 7, GOLDFISH: 3, "extra": 0}))
    index, names = class_indices(tmp_path, {TENCH, GOLDFISH}, 1000)
    assert index == {TENCH: 7, GOLDFISH: 3}
    assert (names[7], names[0], names[1]) == (TENCH, "extra", "1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"cat": 0}', "no index for the class folder 'dog'"),
        ('{"cat": 0, "dog": 2}', r"maps 'dog' to 2: must be an integer in 0-1"),
        ('{"cat": 0, "dog": true}', "maps 'dog' to True"),
        ('{"cat": 0, "dog": "1"}', "maps 'dog' to '1'"),
        ("[0, 1]", "must map folder names"),
        ("{", "cannot read"),
    ],
)
def test_a_bad_mapping_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "class_to_idx.json").write_text(content)
    with pytest.raises(DataError, match=message):
        class_indices(tmp_path, {"cat", "dog"}, 2)
