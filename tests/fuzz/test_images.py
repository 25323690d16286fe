"""Image files, lists and archives of every supported kind, spoilt."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from aphq.data import Preprocessing, load_calibration

from .cases import cases
from .isolation import outcome_of
from .mutation import Spoiler

KINDS = {"png": "RGB", "jpeg": "RGB", "webp": "RGB", "bmp": "RGB", "gif": "P", "tiff": "RGB", "tif": "I;16"}
WANTED = Preprocessing(size=(16, 16))
BYTES = 1536 * 2**20  # the largest picture Pillow decodes without complaint takes a third of it


def picture(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if KINDS[kind] == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif KINDS[kind] != "RGB":
        image = image.convert(KINDS[kind])
    buffer = io.BytesIO()
    image.save(buffer, {"tif": "tiff"}.get(kind, kind))
    return buffer.getvalue()


def load_and_use(data: Path) -> None:
    found = load_calibration(data, WANTED, count=4, threads=1, max_corrupt=0.5, whole=True)
    assert found.images.shape[1:] == (3, 16, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@cases(0.2)
@given(data=st.data())
def test_image_file(folder: Path, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    kind = spoiler.one_of(sorted(KINDS))
    for old in folder.iterdir():
        old.unlink()
    content = spoiler.bytes(picture(kind))
    way = spoiler.below(6)
    if way == 0:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
            written.writestr(f"a.{kind}", content)
            written.writestr("b.png", picture("png"))
        (folder / "a.zip").write_bytes(spoiler.bytes(archive.getvalue()))
        source = folder / "a.zip"
    elif way == 1:
        (folder / "b.png").write_bytes(content)
        (folder / "a.txt").write_bytes(spoiler.bytes(b"b.png\nb.png\n# nothing\n"))
        source = folder / "a.txt"
    else:
        (folder / f"a.{spoiler.one_of([kind, 'png', 'jpg'])}").write_bytes(content)
        source = folder
    outcome_of(lambda: load_and_use(source), most=BYTES)
