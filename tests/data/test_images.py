import logging
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from aphq.data import images
from aphq.data.images import CorruptImage, ImageFiles, open_images, to_mode, to_tensor
from aphq.errors import DataError

from .conftest import picture

Save = Callable[..., Path]


def zipped(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def only(path: Path, channels: int = 3) -> Image.Image:
    return open_images(path).open(0, channels)


class TestFolder:
    def test_finds_all_kinds_at_all_depths_in_sorted_order(self, tmp_path: Path) -> None:
        for name in ["b.JPG", "a/z.png", "a/b/c.webp", "k.bmp", "m.Gif", "n.tiff", "o.tif", "p.jpeg"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            picture().save(tmp_path / name)
        for name in ["notes.md", ".hidden.png", ".cache/x.png"]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"x")
        files = open_images(str(tmp_path))
        expected = ("a/b/c.webp", "a/z.png", "b.JPG", "k.bmp", "m.Gif", "n.tiff", "o.tif", "p.jpeg")
        assert files.names == expected
        assert len(files) == 8
        assert {files.open(i).size for i in range(8)} == {(48, 40)}
        assert {files.open(i).mode for i in range(8)} == {"RGB"}

    def test_follows_links_to_folders_but_not_in_circles(self, tmp_path: Path, save: Save) -> None:
        elsewhere, root = save("elsewhere", 1), save("root/sub", 1).parent
        os.symlink(elsewhere, root / "linked")
        os.symlink(root, root / "sub" / "circle")
        assert open_images(root).names == ("linked/0000.png", "sub/0000.png")

    def test_missing_and_empty_folders_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nowhere.*no such file or folder"):
            open_images(tmp_path / "nowhere")
        (tmp_path / "readme.txt").write_text("no images here")
        with pytest.raises(DataError, match=r"no images in folder"):
            open_images(tmp_path)


class TestList:
    def test_paths_are_relative_to_the_list_and_keep_its_order(self, tmp_path: Path, save: Save) -> None:
        folder = save("images", 3)
        absolute = folder / "0001.png"
        (tmp_path / "list.txt").write_text(f"# chosen\n\nimages/0002.png\n  {absolute}  \nimages/0000.png\n")
        files = open_images(tmp_path / "list.txt")
        assert files.names == ("images/0002.png", str(absolute), "images/0000.png")
        assert files.open(1).tobytes() == picture(seed=1).tobytes()

    def test_missing_files_are_counted_and_named(self, tmp_path: Path, save: Save) -> None:
        save("images", 1)
        (tmp_path / "a.lst").write_text("images/0000.png\ngone.png\nlost.png\n")
        with pytest.raises(DataError, match=r"2 of 3 files .*'gone.png', 'lost.png'"):
            open_images(tmp_path / "a.lst")

    @pytest.mark.parametrize("content", [b"# nothing\n\n", b"\xff\xfe\x00\x81"])
    def test_a_list_without_paths_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match="one image path per line"):
            open_images(tmp_path / "a.txt")


class TestZip:
    def test_reads_sorted_entries_without_extracting(self, tmp_path: Path, save: Save) -> None:
        content = [path.read_bytes() for path in sorted(save("images", 2).iterdir())]
        entries = {
            "d/b.png": content[1],
            "d/a.png": content[0],
            "__MACOSX/d/._a.png": b"",
            "d/.x.png": b"",
            "n.txt": b"",
        }
        before = set(tmp_path.rglob("*"))
        path = zipped(tmp_path / "images.zip", entries)
        files = open_images(path)
        assert files.names == ("d/a.png", "d/b.png")
        assert files.open(1).tobytes() == picture(seed=1).tobytes()
        assert set(tmp_path.rglob("*")) - before == {path}

    def test_is_safe_in_threads(self, tmp_path: Path, save: Save) -> None:
        entries = {path.name: path.read_bytes() for path in save("images", 8).iterdir()}
        files = open_images(zipped(tmp_path / "images.zip", entries))
        with ThreadPoolExecutor(8) as pool:
            for i, image in enumerate(pool.map(files.open, [i % 8 for i in range(200)])):
                assert image.tobytes() == picture(seed=i % 8).tobytes()

    def test_huge_entries_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = zipped(tmp_path / "images.zip", {"big.png": bytes(5000), "small.png": b"x"})
        monkeypatch.setattr(images, "MAX_ENTRY_BYTES", 4999)
        with caplog.at_level(logging.WARNING):
            assert open_images(path).names == ("small.png",)
        assert "1 entries" in caplog.text

    def test_bad_and_empty_zips_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "bad.zip").write_bytes(b"PK not really")
        with pytest.raises(DataError, match="not a readable zip"):
            open_images(tmp_path / "bad.zip")
        with pytest.raises(DataError, match="no images in zip"):
            open_images(zipped(tmp_path / "empty.zip", {"readme.md": b"x"}))

    def test_a_damaged_entry_is_a_corrupt_image(self, tmp_path: Path) -> None:
        path = zipped(tmp_path / "images.zip", {"a.bmp": bytes(range(256)) * 20})
        content = bytearray(path.read_bytes())
        content[60] ^= 0xFF
        path.write_bytes(content)
        with pytest.raises(CorruptImage, match=r"a\.bmp"):
            open_images(path).open(0)


class TestSingleFile:
    def test_one_image_is_a_source(self, save: Save) -> None:
        assert open_images(save("images", 1) / "0000.png").names == ("0000.png",)

    @pytest.mark.parametrize(("name", "reason"), [("a.jpg", "not an image"), ("a.npy", "not an image source")])
    def test_anything_else_is_refused(self, tmp_path: Path, name: str, reason: str) -> None:
        (tmp_path / name).write_text("hello")
        with pytest.raises(DataError, match=reason):
            open_images(tmp_path / name)


class TestDecoding:
    @pytest.mark.parametrize("suffix", [".png", ".tif"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_rotation_is_applied(self, tmp_path: Path, orientation: int, suffix: str) -> None:
        exif = Image.Exif()
        exif[274] = orientation
        picture().save(path := tmp_path / f"a{suffix}", exif=exif)
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
        assert upright.size == ((48, 40) if orientation < 5 else (40, 48))
        assert only(path).size == upright.size
        assert only(path).tobytes() == upright.tobytes()

    def test_broken_metadata_does_not_spoil_good_pixels(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[274], exif[282] = 6, 72.0
        broken = exif.tobytes().replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x01")  # a resolution of the wrong type
        assert broken != exif.tobytes()
        picture().save(tmp_path / "a.jpg", exif=broken)
        assert only(tmp_path / "a.jpg").size == (40, 48)

    def test_cmyk_becomes_the_same_colours(self, tmp_path: Path) -> None:
        picture().convert("CMYK").save(tmp_path / "a.jpg", quality=95)
        assert np.abs(np.asarray(only(tmp_path / "a.jpg")).astype(int) - np.asarray(picture())).mean() < 4

    @pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1"])
    def test_every_mode_converts_as_pillow_does(self, tmp_path: Path, mode: str) -> None:
        image = picture().convert(mode)
        image.save(tmp_path / "a.png")
        assert only(tmp_path / "a.png").tobytes() == image.convert("RGB").tobytes()
        assert only(tmp_path / "a.png", channels=1).tobytes() == image.convert("L").tobytes()

    @pytest.mark.filterwarnings("error")
    def test_a_transparent_palette_keeps_its_colours(self, tmp_path: Path) -> None:
        image = picture().convert("P")
        image.save(tmp_path / "a.png", transparency=bytes(range(200)))
        assert only(tmp_path / "a.png").tobytes() == image.convert("RGB").tobytes()

    def test_16_bit_grey_is_scaled_not_clipped(self, tmp_path: Path) -> None:
        levels = np.array([[0, 257, 128 * 257], [200 * 257, 65535, 300]], dtype=np.uint16)
        Image.fromarray(levels).save(tmp_path / "a.png")
        assert np.asarray(only(tmp_path / "a.png", channels=1)).tolist() == [[0, 1, 128], [200, 255, 1]]
        assert np.asarray(only(tmp_path / "a.png"))[1, 1].tolist() == [255, 255, 255]

    @pytest.mark.parametrize(("top", "expected"), [(1.0, 255), (200.0, 200)])
    def test_float_tiff_is_scaled(self, tmp_path: Path, top: float, expected: int) -> None:
        Image.fromarray(np.array([[0.0, top]], dtype=np.float32)).save(tmp_path / "a.tif")
        assert np.asarray(only(tmp_path / "a.tif", channels=1)).tolist() == [[0, expected]]

    def test_an_animation_gives_its_first_frame(self, tmp_path: Path) -> None:
        first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
        first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
        assert only(tmp_path / "a.gif").getpixel((0, 0)) == (255, 0, 0)

    def test_a_stereo_jpeg_gives_its_first_picture(self, tmp_path: Path) -> None:
        first, second = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8), "black")
        first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
        assert only(tmp_path / "a.jpg").getpixel((0, 0)) == (255, 255, 255)

    def test_a_single_pixel_is_an_image(self, tmp_path: Path) -> None:
        Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "a.png")
        assert to_tensor(only(tmp_path / "a.png")).flatten().tolist() == [1, 2, 3]

    def test_layout_of_tensors(self) -> None:
        image = picture(5, 3)
        assert tuple(to_tensor(image)[:, 1, 4].tolist()) == image.getpixel((4, 1))
        assert to_tensor(to_mode(image, 1)).shape == (1, 3, 5)


class TestCorrupt:
    def reason(self, content: bytes) -> str:
        with pytest.raises(CorruptImage, match="cannot decode image 'x'") as caught:
            ImageFiles(["x"], lambda _: content).open(0)
        assert caught.value.name == "x"
        return caught.value.reason

    def test_broken_content_says_why(self, tmp_path: Path) -> None:
        picture(200, 200).save(tmp_path / "a.jpg")
        whole = (tmp_path / "a.jpg").read_bytes()
        assert "truncated" in self.reason(whole[: len(whole) // 2])
        assert "empty" in self.reason(b"")
        assert "not an image" in self.reason(b"<html>not found</html>")

    def test_formats_that_start_programs_are_not_decoded(self, tmp_path: Path) -> None:
        picture().save(tmp_path / "a.eps")
        assert "not an image" in self.reason((tmp_path / "a.eps").read_bytes())

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    @pytest.mark.parametrize("limit", [48 * 40 - 1, 48 * 40 // 4])
    def test_decompression_bombs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        picture(48, 40).save(tmp_path / "a.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert "pixels" in self.reason((tmp_path / "a.png").read_bytes())

    def test_endless_strips(self, tmp_path: Path) -> None:
        Image.new("RGB", (1, 1000)).save(tmp_path / "a.png")
        assert "strip" in self.reason((tmp_path / "a.png").read_bytes())

    def test_a_file_that_vanished(self, save: Save) -> None:
        folder = save("images", 2)
        files = open_images(folder)
        (folder / "0001.png").unlink()
        with pytest.raises(CorruptImage, match=r"0001\.png"):
            files.open(1)
