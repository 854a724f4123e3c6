"""Pictures, texts and sounds to embed. They have a fixed order and are read when needed."""

import functools
import io
import math
import os
import pathlib
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sotalign_jax import checks, storage

FORMATS = {"JPEG": 6, "PNG": 8, "WEBP": 16, "GIF": 8, "BMP": 8, "TIFF": 8}
"""Picture formats of PIL that are read, and the memory of their decoder in bytes per pixel.

JPEG is that of a progressive file. The memory of averaging transparent pixels is included.
"""
MEMORY = 800 * 10**6
"""Most memory that one picture may take: 133 million pixels of JPEG, 100 million of PNG."""
LARGE = 8 * 10**6
"""Larger pictures are read at a smaller size. No encoder and no page shows as many pixels."""
NARROW = 256
"""Longest side divided by the shortest. Encoders resize the shortest side to a fixed length."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

require = functools.partial(checks.require, extra="extract")
"""Imports a module that belongs to the extra `extract`."""


class Item(NamedTuple):
    """A picture, text or sound. If `load` raises, the item is skipped."""

    id: str  # unique within a modality of a dataset
    group: str  # shared by a picture and its captions, or by a class and its pictures
    origin: pathlib.Path | str  # the file that holds the content, or the text itself
    read: Callable[[Any], Any] = str

    def load(self) -> Any:
        """Reads the content: a `PIL.Image.Image`, a str or a `Sound`."""
        return self.read(self.origin)


class Sound(NamedTuple):
    """Mono waveform [samples] and its sampling rate."""

    wave: np.ndarray
    rate: int


class Source(NamedTuple):
    """A dataset.

    Attributes:
        items: Functions that iterate over the items, by modality.
        classes: Class names of a classification set. The group of its items is a class number.
        counts: Numbers of items by modality, if they are known without listing the items.
    """

    items: Mapping[str, Callable[[], Iterator[Item]]]
    classes: tuple[str, ...] | None = None
    counts: Mapping[str, int] = types.MappingProxyType({})


def picture(file: pathlib.Path | bytes, *, upright: bool = False, memory: int = MEMORY) -> Any:
    """Reads and decodes a picture. One of more than `LARGE` pixels is decoded at a smaller size.

    Args:
        file: Path or bytes of a picture file.
        upright: Apply the EXIF orientation.
        memory: Most memory of the decoder in bytes.

    Returns:
        A `PIL.Image.Image`.

    Raises:
        OSError: The file is damaged, too large, too narrow or no picture.
    """
    import PIL.Image
    import PIL.ImageOps

    name = "the picture" if isinstance(file, bytes) else file.name
    # PIL warns from 89 million pixels on. The limit below is another one.
    warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)
    content = io.BytesIO(file) if isinstance(file, bytes) else storage.open_regular(file)
    try:
        # Other formats of PIL start programs, such as Ghostscript, with the content of the file.
        with content as stream, PIL.Image.open(stream, formats=tuple(FORMATS)) as image:
            _check_size(name, image, memory)
            factor = _reduction(image)
            # Only JPEG files can be decoded at a smaller size. Other files ignore this line.
            image.draft(None, (image.width // factor, image.height // factor))
            image.load()  # PIL decodes lazily, and would raise for a damaged file only later
            if upright:
                PIL.ImageOps.exif_transpose(image, in_place=True)
            return _reduced(image)
    except PIL.UnidentifiedImageError as error:
        text = f"{name} is not a picture of a known format"
        raise PIL.UnidentifiedImageError(f"{text}; convert it to {' or '.join(FORMATS)}") from error
    except PIL.Image.DecompressionBombError as error:
        most = 2 * (PIL.Image.MAX_IMAGE_PIXELS or 0) // 10**6
        raise OSError(f"{name} has more than {most} million pixels; make it smaller") from error


oriented = functools.partial(picture, upright=True)
"""Reads a picture and applies its EXIF orientation."""


def _check_size(name: str, image: Any, memory: int) -> None:
    """Raises if decoding takes more memory, or if the picture is extremely narrow."""
    shape = f"{name} has {image.width:,} x {image.height:,} pixels"
    most = memory // FORMATS.get(image.format, FORMATS["JPEG"])  # MPO is a kind of JPEG
    if image.width * image.height > most:
        text = f"{shape} but at most {most / 1e6:.0f} million can be read"
        raise OSError(f"{text}; make the picture smaller")
    if max(image.size) > NARROW * min(image.size):
        text = f"{shape} and one side is more than {NARROW} times the other"
        raise OSError(f"{text}; crop the picture")


def _reduction(image: Any) -> int:
    """Returns the factor by which both sides are to be divided."""
    return math.ceil(math.sqrt(image.width * image.height / LARGE))


def _reduced(image: Any) -> Any:
    """Averages squares of pixels, so that at most `LARGE` are left."""
    factor = _reduction(image)
    if factor == 1 or image.mode.startswith("I;16"):  # PIL does not average 16-bit integers
        return image
    if "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode in ("1", "P"):  # palettes cannot be averaged
        image = image.convert("RGB")
    return image.reduce(factor)


def is_transparent(image: Any) -> bool:
    """Returns True if a picture has transparent pixels or an alpha channel."""
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def on_white(image: Any) -> Any:
    """Converts a picture to RGB. Transparent pixels become white."""
    # PIL's own conversion drops the alpha channel and shows the colours below it.
    import PIL.Image

    if is_transparent(image):
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def sound(file: pathlib.Path) -> Sound:
    """Reads a sound file and averages its channels."""
    soundfile = require("soundfile")
    with storage.open_regular(file) as content:
        wave, rate = soundfile.read(content, dtype="float32", always_2d=True)
    return Sound(wave.mean(axis=1), rate)


def fail(reason: str) -> NoReturn:
    """Raises ValueError. As the `read` of an item, it lists the item as skipped with a reason."""
    raise ValueError(reason)


def find(root: pathlib.Path, *names: str) -> pathlib.Path:
    """Returns the first existing path below `root`.

    Args:
        root: Folder of the dataset.
        *names: Paths relative to it.

    Raises:
        InputError: None of them exists.
    """
    for name in names:
        if (root / name).exists():
            return root / name
    wanted = " or ".join(names)
    raise checks.InputError(f"root {root} has no {wanted}; pass the folder of the dataset")


def leaves(name: str) -> bool:
    """Returns True if a path is absolute or contains "..", and may thus lead out of its folder."""
    path = pathlib.PurePath(name)
    return path.is_absolute() or ".." in path.parts


def below(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file that a table of a dataset names.

    Args:
        root: Folder of the files.
        name: Path relative to it.

    Raises:
        InputError: The name leads out of the folder.
    """
    if leaves(name):
        raise checks.InputError(f"root {root} has a table that names {name!r}; remove that row")
    return root / name


def regular(files: list[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the files. Raises InputError if one of them is a FIFO, a device or missing."""
    for file in files:
        if not file.is_file():
            raise checks.InputError(f"root holds {file}, which is not a regular file; remove it")
    return files


def lines(file: pathlib.Path) -> list[str]:
    """Returns the non-empty lines of a text file."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def pictures_below(root: pathlib.Path) -> Iterator[str]:
    """Yields the paths of all pictures relative to `root`, in a fixed order."""
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()  # in place: os.walk then visits them in this order
        for name in sorted(names):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
