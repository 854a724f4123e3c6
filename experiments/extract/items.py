"""Pictures, texts and sounds to embed. They have a fixed order and are read when needed."""

import functools
import io
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sotalign_jax import checks

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


def picture(file: pathlib.Path | bytes) -> Any:
    """Reads and decodes a picture.

    Args:
        file: Path or bytes of a picture file.

    Returns:
        A `PIL.Image.Image`.

    Raises:
        OSError: The file is damaged or has too many pixels.
    """
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()  # PIL decodes lazily, and would raise for a damaged file only later
            return image
    except PIL.Image.DecompressionBombError as error:
        raise OSError(f"{checks.first_line(error)}; make the picture smaller") from error


def oriented(file: pathlib.Path) -> Any:
    """Reads a picture and applies its EXIF orientation."""
    import PIL.ImageOps

    return PIL.ImageOps.exif_transpose(picture(file))


def on_white(image: Any) -> Any:
    """Converts a picture to RGB. Transparent pixels become white."""
    # PIL's own conversion drops the alpha channel and shows the colours below it.
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def sound(file: pathlib.Path) -> Sound:
    """Reads a sound file and averages its channels."""
    wave, rate = require("soundfile").read(file, dtype="float32", always_2d=True)
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
