"""Find images in a folder, a list or a zip, and decode them to 8-bit RGB or greyscale.

Pixels come out as timm's ImageFolder would give them (`image.convert("RGB")`), with two repairs: EXIF rotation is
applied, and 16-bit greyscale is scaled to 8 bits where Pillow would clip it to white.
"""

import hashlib
import io
import logging
import os
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from aphq.errors import DataError

logger = logging.getLogger(__name__)

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
LISTS = frozenset({".txt", ".lst"})
# Only these decoders run, whatever a file's name says: some of Pillow's others start external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
ORIENTATION = 274  # the EXIF tag, and what undoes each of its values; 1 is upright
TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MAX_ENTRY_BYTES = 256 * 2**20  # of one uncompressed zip entry
MAX_ASPECT = 200  # resizing the short side of a one-pixel stripe to 256 would take gigabytes


class CorruptImage(DataError):  # noqa: N818 - it names the image, the base class says that it is an error
    """One image that cannot be decoded; loaders skip it, count it and name it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot decode image '{name}': {reason}")
        self.name = name
        self.reason = reason


class ImageFiles:
    """Named images that can be decoded in any order, from any number of threads."""

    def __init__(self, names: Sequence[str], read: Callable[[int], bytes]) -> None:
        self.names = tuple(names)
        self._read = read
        Image.init()  # registers the decoders now, since threads would race to do it

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int, channels: int = 3) -> Image.Image:
        """Decode one image to mode RGB, or to L when `channels` is 1; raises CorruptImage."""
        try:
            return decode(self._read(index), channels)
        except UnidentifiedImageError as error:
            raise CorruptImage(self.names[index], "not an image of a known format") from error
        except Exception as error:  # decoders raise nearly anything on broken input: OSError, SyntaxError, struct.error
            raise CorruptImage(self.names[index], str(error) or type(error).__name__) from error

    def digest(self, index: int) -> str | None:
        """A hash of the file's bytes; None if it cannot be read."""
        try:
            return hashlib.sha256(self._read(index)).hexdigest()
        except Exception:  # a zip's entries raise what their decoders do
            return None

    def take(self, indices: Sequence[int]) -> "ImageFiles":
        """The images at `indices`, in that order."""
        return ImageFiles([self.names[i] for i in indices], lambda i: self._read(indices[i]))


def open_images(data: str | os.PathLike[str]) -> ImageFiles:
    """Open a folder (nested or flat), a .txt/.lst with one path per line, a .zip, or one image file.

    Folders and zips come in the sorted order of their names, lists in their own order.
    """
    path = Path(data).expanduser()
    try:
        if not path.exists():
            raise DataError(f"no images at '{path}': no such file or folder")
        if path.is_dir():
            return _open_folder(path)
        suffix = path.suffix.lower()
        if suffix in LISTS:
            return _open_list(path)
        if suffix == ".zip":
            return _open_zip(path)
        if suffix in SUFFIXES:
            files = ImageFiles([path.name], lambda _: path.read_bytes())
            files.open(0)  # a single broken image is better refused here than skipped later
            return files
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}': {getattr(error, 'strerror', None) or error}") from error
    raise DataError(f"'{path}' is not an image source: give a folder, a .zip, or a .txt with one image path per line")


def decode(content: bytes, channels: int = 3) -> Image.Image:
    """Decode a whole image file; raises whatever the decoder raises on broken input."""
    if not content:
        raise ValueError("the file is empty")
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        width, height = image.size
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{width} x {height} pixels, more than the limit of {Image.MAX_IMAGE_PIXELS}")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"{width} x {height} pixels, a longer strip than {MAX_ASPECT} to 1")
        image.load()
        return to_mode(_upright(image), channels)


def to_mode(image: Image.Image, channels: int) -> Image.Image:
    """Convert to RGB (3 channels) or L (1 channel), whatever the mode."""
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # same colours as going straight to RGB, without Pillow's warning
    return image.convert("L" if channels == 1 else "RGB")


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels of an RGB or L image as uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(image))  # [height, width] or [height, width, channels]
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF rotation; unlike ImageOps.exif_transpose this survives broken metadata around good pixels."""
    turn = TURNS.get(image.getexif().get(ORIENTATION))
    return image if turn is None else image.transpose(turn)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """16-bit integers (modes I;16, I) divide by 257; floats are taken as 0-1, or as 0-255 when larger."""
    pixels = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        pixels = pixels * 255 if pixels.max() <= 1 else pixels
    else:
        pixels = pixels / 257
    return Image.fromarray(np.nan_to_num(pixels).round().clip(0, 255).astype(np.uint8))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def _open_folder(folder: Path) -> ImageFiles:
    names = []
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_fail):
        real = Path(os.path.realpath(here))
        # Hidden folders are left out, and links to a folder above, which would never end.
        folders[:] = [
            name
            for name in folders
            if not _is_hidden(name) and not real.is_relative_to(os.path.realpath(os.path.join(here, name)))
        ]
        prefix = "" if Path(here) == folder else f"{Path(here).relative_to(folder).as_posix()}/"
        names += [prefix + name for name in files if _is_image(name) and not _is_hidden(name)]
    if not names:
        raise DataError(f"no images in folder '{folder}': looked for {_kinds()} in it and in all folders below")
    names.sort()
    return ImageFiles(names, lambda i: (folder / names[i]).read_bytes())


def _fail(error: OSError) -> None:
    raise error


def _open_list(path: Path) -> ImageFiles:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not a text file: give a list with one image path per line") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise DataError(f"the list '{path}' names no images: give one image path per line")
    paths = [path.parent / name for name in names]
    missing = [name for name, file in zip(names, paths, strict=True) if not file.is_file()]
    if missing:
        some = ", ".join(f"'{name}'" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(
            f"{len(missing)} of {len(names)} files named by '{path}' do not exist ({some}): "
            f"give one path per line, absolute or relative to '{path.parent}'"
        )
    return ImageFiles(names, lambda i: paths[i].read_bytes())


def _open_zip(path: Path) -> ImageFiles:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DataError(f"'{path}' is not a readable zip file: {error}") from error
    entries = [
        entry
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename)
        if not entry.is_dir() and _is_image(entry.filename) and not _is_hidden(entry.filename)
    ]
    small = [entry for entry in entries if entry.file_size <= MAX_ENTRY_BYTES]
    if len(small) < len(entries):
        limit = MAX_ENTRY_BYTES // 2**20
        logger.warning("%s: %d entries over %d MiB are left out", path, len(entries) - len(small), limit)
    if not small:
        archive.close()
        raise DataError(f"no images in zip '{path}': looked for {_kinds()}")
    lock = threading.Lock()  # the entries share one file handle

    def read(index: int) -> bytes:
        with lock:
            return archive.read(small[index])

    return ImageFiles([entry.filename for entry in small], read)


def _kinds() -> str:
    return " ".join(sorted(SUFFIXES))
