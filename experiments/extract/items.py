"""Items to embed, in a fixed order. Their content is read when it is needed."""

import functools
import io
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sotalign_jax import checks

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

require = functools.partial(checks.require, extra="extract")
"""Imports a module that belongs to the extra `extract`."""


class Item(NamedTuple):
    """A picture, text or sound. It is skipped if `load` raises."""

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
    """Items of a dataset by modality, and its class names if groups are numbers of classes."""

    items: Mapping[str, Callable[[], Iterator[Item]]]
    classes: tuple[str, ...] | None = None


def picture(file: pathlib.Path | bytes) -> Any:
    """Reads a whole picture; OSError if it is damaged or has too many pixels to decode."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()
            return image
    except PIL.Image.DecompressionBombError as error:
        raise OSError(f"{checks.first_line(error)}; make the picture smaller") from error


def oriented(file: pathlib.Path) -> Any:
    """Reads a picture and turns it as its camera was held."""
    import PIL.ImageOps

    return PIL.ImageOps.exif_transpose(picture(file))


def on_white(image: Any) -> Any:
    """Converts a picture to RGB with transparent pixels in white, where PIL would reveal them."""
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
    """Raises, so that an unusable item is listed as skipped with this reason."""
    raise ValueError(reason)


def find(root: pathlib.Path, *names: str) -> pathlib.Path:
    """Returns the first path below `root` that exists."""
    for name in names:
        if (root / name).exists():
            return root / name
    wanted = " or ".join(names)
    raise checks.InputError(f"root: {root} has no {wanted}; pass the folder of the dataset")


def lines(file: pathlib.Path) -> list[str]:
    """Returns the lines of a text file that are not empty."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def pictures_below(root: pathlib.Path) -> Iterator[str]:
    """Yields the paths of all pictures relative to `root`, in a fixed order."""
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
