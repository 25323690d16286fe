import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.data
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from aphq.data import Preprocessing, as_labelled, open_labelled
from aphq.data.labelled import Labelled, LabelledImages, LabelledLoader, LabelledTensors, spread
from aphq.errors import DataError

from .conftest import picture

Save = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, save: Save) -> Path:
    """Two classes: five cats, two dogs, one of them nested."""
    save("val/cat", 5)
    save("val/dog", 1, start=10)
    save("val/dog/puppies", 1, start=11)
    return tmp_path / "val"


def joined(labelled: Labelled, p: Preprocessing, batch_size: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    images, labels = zip(*labelled.batches(p, batch_size, **options), strict=True)
    return torch.cat(images), torch.cat(labels)


class TestFolder:
    def test_labels_follow_the_class_folders(self, folder: Path) -> None:
        labelled = open_labelled(folder, 2)
        assert labelled.names[-2:] == ("dog/0010.png", "dog/puppies/0011.png")
        assert labelled.labels.tolist() == [0, 0, 0, 0, 0, 1, 1]
        assert labelled.labels.dtype == torch.int64
        assert labelled.class_names == ("cat", "dog")
        assert len(labelled) == 7

    @pytest.mark.parametrize("threads", [1, 3])
    def test_batches_hold_every_image_once_in_order(self, folder: Path, small: Preprocessing, threads: int) -> None:
        labelled = open_labelled(folder, 2)
        sizes = [len(images) for images, _ in labelled.batches(small, 3, threads)]
        assert sizes == [3, 3, 1]
        images, labels = joined(labelled, small, threads=threads)
        expected = torch.stack([small.eval_transform(picture(seed=i)) for i in (0, 1, 2, 3, 4, 10, 11)])
        assert images.equal(small.normalise(expected))
        assert labels.equal(labelled.labels)

    def test_a_limit_spreads_over_the_classes(self, folder: Path, small: Preprocessing) -> None:
        _, labels = joined(open_labelled(folder, 2), small, limit=4)
        assert Counter(labels.tolist()) == {0: 2, 1: 2}

    def test_corrupt_images_are_left_out_and_named(
        self, folder: Path, small: Preprocessing, caplog: pytest.LogCaptureFixture
    ) -> None:
        (folder / "cat" / "0003.png").write_bytes(b"")
        labelled = open_labelled(folder, 2)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):  # the second reading starts to count anew
                assert joined(labelled, small)[1].tolist() == [0, 0, 0, 0, 1, 1]
                assert labelled.skipped == (("cat/0003.png", "the file is empty"),)
        assert "cat/0003.png" in caplog.text

    def test_too_many_corrupt_images_are_an_error(self, folder: Path, small: Preprocessing) -> None:
        for i in (1, 3):
            (folder / "cat" / f"{i:04d}.png").write_bytes(b"")
        with pytest.raises(DataError, match=r"labelled images cannot be decoded.*0003\.png"):
            joined(open_labelled(folder, 2), small)

    def test_a_reader_may_stop_early(self, folder: Path, small: Preprocessing) -> None:
        before = threading.active_count()
        batches = open_labelled(folder, 2).batches(small, 2)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert threading.active_count() == before

    def test_images_outside_class_folders_are_left_out(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        picture().save(folder / "a_preview.png")
        with caplog.at_level(logging.WARNING):
            labelled = open_labelled(folder, 2)
        assert "1 images outside" in caplog.text
        assert len(labelled) == 7
        assert labelled.files.open(5).tobytes() == picture(seed=10).tobytes()

    def test_folders_without_classes_are_refused(self, tmp_path: Path, save: Save) -> None:
        with pytest.raises(DataError, match="no class folders"):
            open_labelled(save("flat", 2), 2)
        with pytest.raises(DataError, match="one folder per class"):
            open_labelled(tmp_path / "missing", 2)

    def test_real_imagenet_ids(self, imagenet: Path) -> None:
        labelled = open_labelled(imagenet / "val", 1000)
        info = timm.data.ImageNetInfo()
        assert set(labelled.labels.tolist()) == set(range(1000))
        for i in range(0, len(labelled), 100):
            assert info.index_to_label_name(int(labelled.labels[i])) == labelled.names[i].split("/")[0]
        p = Preprocessing((64, 64))
        images, labels = joined(labelled, p, limit=5)
        assert images.shape == (5, 3, 64, 64)
        assert labels.tolist() == [0, 200, 400, 600, 800]


class TestTensors:
    def test_same_face_as_a_folder(self, small: Preprocessing) -> None:
        pixels = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
        labelled = LabelledTensors(pixels, torch.tensor([1, 0, 1, 0, 1, 0, 1], dtype=torch.int32), small)
        images, labels = joined(labelled, small)
        assert images.equal(small.normalise(pixels))
        assert labels.dtype == torch.int64
        assert len(labelled) == 7
        assert joined(labelled, small, limit=2)[1].tolist() == [1, 0]

    def test_what_does_not_fit_is_refused(self, small: Preprocessing) -> None:
        images = torch.zeros(2, 3, 16, 16)
        with pytest.raises(DataError, match="2 images but 3 labels"):
            LabelledTensors(images, torch.tensor([0, 1, 2]), small)
        with pytest.raises(DataError, match="class indices"):
            LabelledTensors(images, torch.zeros(2, 10), small)
        with pytest.raises(DataError, match=r"got \[2, 3, 16, 16\]"):
            LabelledTensors(images, torch.tensor([0, 1]), Preprocessing((8, 8)))
        with pytest.raises(DataError, match=r"got \[2, 3, 16, 16\]"):
            next(LabelledTensors(images, torch.tensor([0, 1]), small).batches(Preprocessing((8, 8)), 2))


class TestAsLabelled:
    X = torch.randn(10, 3, 16, 16)
    Y = torch.arange(10)

    @pytest.mark.parametrize("kind", ["loader", "generator", "dicts", "pair"])
    def test_loaders_can_be_read_again_and_again(self, small: Preprocessing, kind: str) -> None:
        parts = list(zip(self.X.split(4), self.Y.split(4), strict=True))
        sources: dict[str, Any] = {
            "loader": DataLoader(TensorDataset(self.X, self.Y), batch_size=4),
            "generator": (part for part in parts),
            "dicts": [{"pixel_values": x, "labels": y.tolist()} for x, y in parts],
            "pair": (self.X, self.Y),
        }
        labelled = as_labelled(sources[kind], 10)
        for _ in range(2):
            images, labels = joined(labelled, small)
            assert images.equal(self.X)
            assert labels.equal(self.Y)
        assert all(len(images) <= 3 for images, _ in labelled.batches(small, 3))
        assert joined(labelled, small, limit=6)[1].tolist() == [0, 1, 2, 3, 4, 5]
        assert len(labelled) == 10
        assert labelled.labels.equal(self.Y)

    def test_paths_and_own_classes_pass(self, folder: Path, small: Preprocessing) -> None:
        labelled = as_labelled(folder, 2)
        assert isinstance(labelled, LabelledImages)
        assert as_labelled(labelled, 2) is labelled
        tensors = LabelledTensors(self.X, self.Y, small)
        assert as_labelled(tensors, 10) is tensors
        loader = as_labelled(as_labelled((self.X, self.Y), 10), 12)
        assert isinstance(loader, LabelledLoader)
        assert loader.num_classes == 12

    def test_labels_outside_the_model_are_refused(self, small: Preprocessing) -> None:
        with pytest.raises(DataError, match="labels run from 0 to 9, but the model has 9 classes"):
            as_labelled(LabelledTensors(self.X, self.Y, small), 9)
        with pytest.raises(DataError, match="labels run from 0 to 9, but the model has 9 classes"):
            joined(as_labelled((self.X, self.Y), 9), small)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ([(X, Y[:9])], "10 images but 9 labels"),
            ([X], "give \\(images, labels\\) batches"),
            ([(X, torch.eye(10))], "class indices"),
            ([(X, None)], "NoneType"),
        ],
    )
    def test_loaders_without_proper_labels_are_refused(self, small: Preprocessing, data: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            joined(as_labelled(data, 10), small, batch_size=16)

    def test_other_things_are_refused(self) -> None:
        with pytest.raises(DataError, match="int"):
            as_labelled(5, 10)  # type: ignore[arg-type]


class TestSpread:
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70))
    def test_is_as_even_as_the_classes_allow(self, labels: list[int], limit: int) -> None:
        chosen = spread(torch.tensor(labels), limit)
        assert len(chosen) == len(set(chosen)) == min(limit, len(labels))
        assert chosen == sorted(chosen)
        have, got = Counter(labels), Counter(labels[i] for i in chosen)
        most = max(got.values())
        assert all(got[c] >= min(have[c], most - 1) for c in have)

    def test_a_cut_round_spans_all_classes(self) -> None:
        assert spread(torch.arange(100).repeat_interleave(2), 4) == [0, 50, 100, 150]

    def test_no_limit_takes_all(self) -> None:
        assert spread(torch.tensor([1, 0]), None) == [0, 1]
        with pytest.raises(DataError, match="at least 1"):
            spread(torch.tensor([1, 0]), 0)
