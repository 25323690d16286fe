import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from aphq.data import CalibrationSet, Preprocessing, load_calibration, open_images
from aphq.data.calibration import draw_order
from aphq.errors import DataError

from .conftest import picture

Save = Callable[..., Path]


def spoil(folder: Path, *indices: int) -> None:
    for i in indices:
        (folder / f"{i:04d}.png").write_bytes(b"spoiled")


class TestFiles:
    def test_draws_a_seeded_permutation_of_the_sorted_names(self, save: Save, small: Preprocessing) -> None:
        folder = save(count=12)
        loaded = load_calibration(folder, small, count=5, seed=7)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(7))[:5].tolist()
        assert loaded.names == tuple(f"{i:04d}.png" for i in order)
        assert loaded.images.shape == (5, 3, 16, 16)
        assert loaded.images.dtype == torch.uint8
        for image, i in zip(loaded.images, order, strict=True):
            assert image.equal(small.eval_transform(picture(seed=i)))
        assert load_calibration(folder, small, count=5, seed=8).names != loaded.names

    def test_goes_round_the_folders(self) -> None:
        names = [f"{folder}/{i}.png" for folder, count in (("a", 50), ("b", 3), ("c", 9)) for i in range(count)]
        order = draw_order(names, seed=7)
        assert sorted(order) == list(range(len(names)))
        folders = [names[i][0] for i in order]
        for start in range(0, 9, 3):  # as long as each of them has some
            assert sorted(folders[start : start + 3]) == ["a", "b", "c"]
        assert sorted(folders[9:21]) == ["a"] * 6 + ["c"] * 6
        assert draw_order(names, seed=8) != order

    @pytest.mark.parametrize("augment", [False, True])
    def test_the_number_of_threads_changes_nothing(self, save: Save, small: Preprocessing, augment: bool) -> None:
        folder = save(count=30)
        spoil(folder, 3)
        sets = [load_calibration(folder, small, count=20, augment=augment, threads=n) for n in (1, 2, 7)]
        assert len({s.fingerprint for s in sets}) == 1
        assert len({s.names for s in sets}) == 1

    def test_augmented_views_depend_on_seed_and_rank(self, save: Save, small: Preprocessing) -> None:
        folder = save(count=6)
        plain = load_calibration(folder, small, count=6, seed=1)
        some = load_calibration(folder, small, count=4, seed=1, augment=True)
        all_ = load_calibration(folder, small, count=6, seed=1, augment=True)
        assert some.images.equal(all_.images[:4])
        assert not all_.images.equal(plain.images)

    def test_the_same_image_gets_another_view_at_every_rank_and_seed(
        self, tmp_path: Path, small: Preprocessing
    ) -> None:
        for i in range(4):
            picture().save(tmp_path / f"{i}.png")
        sets = [load_calibration(tmp_path, small, count=4, seed=seed, augment=True) for seed in (1, 2)]
        assert len({view.numpy().tobytes() for loaded in sets for view in loaded.images}) == 8

    def test_corrupt_images_are_replaced_and_named(
        self, save: Save, small: Preprocessing, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = save(count=12)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(7)).tolist()
        spoil(folder, order[2], order[11])  # the last is never read
        with caplog.at_level(logging.WARNING):
            loaded = load_calibration(folder, small, count=5, seed=7)
        bad = f"{order[2]:04d}.png"
        assert loaded.names == tuple(f"{order[rank]:04d}.png" for rank in (0, 1, 3, 4, 5))
        assert loaded.skipped == ((bad, "not an image of a known format"),)
        assert [bad in record.message for record in caplog.records] == [True]

    def test_too_many_corrupt_images_are_an_error(self, save: Save, small: Preprocessing) -> None:
        folder = save(count=40)
        spoil(folder, *range(3))
        with pytest.raises(DataError, match=r"3 of the first \d+ images cannot be decoded"):
            load_calibration(folder, small, count=40, max_corrupt=0.05)
        loaded = load_calibration(folder, small, count=40, max_corrupt=0.1)
        assert len(loaded) == 37
        assert {name for name, _ in loaded.skipped} == {f"{i:04d}.png" for i in range(3)}

    def test_the_log_names_ten_corrupt_images_at_most(
        self, save: Save, small: Preprocessing, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = save(count=14)
        spoil(folder, *range(13))
        with caplog.at_level(logging.WARNING):
            load_calibration(folder, small, count=14, max_corrupt=1.0)
        assert sum("another image" in record.message for record in caplog.records) == 10
        assert "13 images" in caplog.text

    def test_no_usable_image_is_an_error(self, save: Save, small: Preprocessing) -> None:
        folder = save(count=1)
        spoil(folder, 0)
        with pytest.raises(DataError, match="no usable calibration image"):
            load_calibration(folder, small)

    def test_fewer_images_than_asked_for_are_all_used(
        self, save: Save, small: Preprocessing, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            loaded = load_calibration(save(count=3), small, count=10)
        assert sorted(loaded.names) == ["0000.png", "0001.png", "0002.png"]
        assert "3 calibration images instead of the 10" in caplog.text

    def test_reports_progress(self, save: Save, small: Preprocessing) -> None:
        seen: list[tuple[int, int]] = []
        load_calibration(save(count=5), small, count=3, progress=lambda done, total: seen.append((done, total)))
        assert seen == [(1, 3), (2, 3), (3, 3)]

    def test_grey_models_get_one_channel(self, save: Save) -> None:
        grey = Preprocessing((16, 16), channels=1, mean=(0.5,), std=(0.5,))
        assert load_calibration(save(count=2), grey, count=2).images.shape == (2, 1, 16, 16)

    def test_real_images(self, imagenet: Path) -> None:
        p = Preprocessing((224, 224), crop_pct=0.9)
        loaded = load_calibration(imagenet / "calib", p, count=8)
        assert not loaded.skipped
        files = open_images(imagenet / "calib")
        index = files.names.index(loaded.names[3])
        assert loaded.images[3].equal(p.eval_transform(files.open(index)))
        assert abs(float(loaded.batch(slice(None), "cpu").mean())) < 0.5


class TestMemory:
    @pytest.mark.parametrize("kind", ["tensor", "loader", "images", "batches", "dicts", "generator", "dataset"])
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_any_source_gives_its_first_images(self, small: Preprocessing, kind: str, dtype: torch.dtype) -> None:
        x = torch.randint(0, 256, (10, 3, 16, 16)).to(dtype)
        dataset = TensorDataset(x, torch.arange(10))
        sources: dict[str, Any] = {
            "tensor": x,
            "loader": DataLoader(dataset, batch_size=4),
            "images": list(x),
            "batches": x.split(3),
            "dicts": [{"pixel_values": part, "labels": None} for part in x.split(3)],
            "generator": (image for image in x),
            "dataset": dataset,
        }
        loaded = load_calibration(sources[kind], small, count=7)
        assert loaded.images.equal(x[:7])
        assert loaded.images.dtype == dtype
        assert loaded.names == ()

    def test_an_endless_iterable_is_read_no_further_than_needed(self, small: Preprocessing) -> None:
        drawn: list[int] = []

        def forever() -> Any:
            while True:
                drawn.append(1)
                yield torch.zeros(4, 3, 16, 16)

        assert len(load_calibration(forever(), small, count=10)) == 10
        assert len(drawn) == 3

    def test_a_calibration_set_passes_through(self, small: Preprocessing) -> None:
        given = CalibrationSet(torch.zeros(4, 3, 16, 16), small, names=("a", "b", "c", "d"))
        assert load_calibration(given, small, count=4) is given
        assert load_calibration(given, small, count=2).names == ("a", "b")
        with pytest.raises(DataError, match=r"\[N, 3, 8, 8\], got \[4, 3, 16, 16\]"):
            load_calibration(given, Preprocessing((8, 8)))

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (torch.zeros(2, 3, 16, 17), r"\[N, 3, 16, 16\], got \[2, 3, 16, 17\]"),
            (torch.zeros(3, 16, 16), r"got \[3, 16, 16\]"),
            ([torch.zeros(1, 16, 16)], r"got \[1, 1, 16, 16\]"),
            ([torch.full((3, 16, 16), float("nan"))], "NaN"),
            ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 16, dtype=torch.uint8)], "mix"),
            ([], "no usable calibration image"),
            (torch.zeros(0, 3, 16, 16), "no usable calibration image"),
            (["a.jpg"], "got str"),
            (5, "int"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, small: Preprocessing, data: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_calibration(data, small, count=4)

    def test_count_must_be_positive(self, small: Preprocessing) -> None:
        with pytest.raises(DataError, match="at least 1"):
            load_calibration(torch.zeros(2, 3, 16, 16), small, count=0)

    def test_augmentation_is_refused_aloud(self, small: Preprocessing, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            load_calibration(torch.zeros(2, 3, 16, 16), small, count=2, augment=True)
        assert "needs image files" in caplog.text


class TestCalibrationSet:
    def test_batches_are_normalised(self, small: Preprocessing) -> None:
        pixels = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
        loaded = CalibrationSet(pixels, small)
        assert loaded.batch(slice(1, 3), "cpu").equal(small.normalise(pixels[1:3]))
        assert loaded.batch(torch.tensor([4, 0]), torch.device("cpu")).equal(small.normalise(pixels[[4, 0]]))

    def test_first_shares_memory(self, small: Preprocessing) -> None:
        loaded = CalibrationSet(torch.zeros(4, 3, 16, 16), small, names=("a", "b", "c", "d"), skipped=(("e", "why"),))
        part = loaded.first(3)
        assert len(part) == 3
        assert part.names == ("a", "b", "c")
        assert part.skipped == loaded.skipped
        assert part.images.data_ptr() == loaded.images.data_ptr()

    def test_the_fingerprint_follows_what_the_model_sees(self, small: Preprocessing) -> None:
        pixels = torch.arange(6 * 3 * 16 * 16).view(6, 3, 16, 16).to(torch.uint8)
        base = CalibrationSet(pixels, small)
        changed = pixels.clone()
        changed[5, 2, 15, 15] += 1
        prints = {
            base.fingerprint,
            base.first(5).fingerprint,
            CalibrationSet(changed, small).fingerprint,
            CalibrationSet(pixels.float(), small).fingerprint,
            CalibrationSet(pixels, Preprocessing((16, 16), mean=(0.5, 0.5, 0.5))).fingerprint,
        }
        assert len(prints) == 5
        assert all(len(p) == 64 for p in prints)
        same = CalibrationSet(pixels.clone(), Preprocessing((16, 16), crop_pct=1.0), names=tuple("abcdef"))
        assert same.fingerprint == base.fingerprint

    def test_wrong_types_are_refused(self, small: Preprocessing) -> None:
        with pytest.raises(DataError, match="int64"):
            CalibrationSet(torch.zeros(1, 3, 16, 16, dtype=torch.int64), small)
