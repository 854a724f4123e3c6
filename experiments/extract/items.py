"""What is embedded: items in a fixed order, whose content is read only when asked for."""

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
"""Imports a package of the extra `extract`, when it is needed."""


class Item(NamedTuple):
    """One picture, text or sound; if reading it raises, it is skipped."""

    id: str  # unique within a modality of a dataset
    group: str  # of what belongs together: a picture and its captions, a class and its pictures
    origin: pathlib.Path | str  # the file that holds the content, or the text; changes are noticed
    read: Callable[[Any], Any] = str

    def load(self) -> Any:
        """The content, read from the origin: a `PIL.Image.Image`, a str or a `Sound`."""
        return self.read(self.origin)


class Sound(NamedTuple):
    """A mono waveform [samples] and its sampling rate."""

    wave: np.ndarray
    rate: int


class Source(NamedTuple):
    """A dataset: iterators over its items by modality, and the class names that groups number."""

    items: Mapping[str, Callable[[], Iterator[Item]]]
    classes: tuple[str, ...] | None = None


def picture(file: pathlib.Path | bytes) -> Any:
    """Reads a whole picture, so that damage shows here."""
    import PIL.Image

    with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
        image.load()
        return image


def oriented(file: pathlib.Path) -> Any:
    """A picture turned as its camera was held."""
    import PIL.ImageOps

    return PIL.ImageOps.exif_transpose(picture(file))


def on_white(image: Any) -> Any:
    """A picture in RGB; what is transparent becomes white, where PIL would show what is hidden."""
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def sound(file: pathlib.Path) -> Sound:
    """Reads a sound file; several channels are averaged."""
    wave, rate = require("soundfile").read(file, dtype="float32", always_2d=True)
    return Sound(wave.mean(axis=1), rate)


def fail(reason: str) -> NoReturn:
    """Reads an item that is known to be unusable, so that it is listed among the skipped."""
    raise ValueError(reason)


def find(root: pathlib.Path, *names: str) -> pathlib.Path:
    """The first of several possible places below `root` that exists."""
    for name in names:
        if (root / name).exists():
            return root / name
    wanted = " or ".join(names)
    raise checks.InputError(f"root: {root} holds no {wanted}; pass the dataset's own folder")


def lines(file: pathlib.Path) -> list[str]:
    """The lines of a text file that are not empty."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def pictures_below(root: pathlib.Path) -> Iterator[str]:
    """Paths of the pictures at any depth, relative to `root` and in a fixed order."""
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        for name in sorted(names):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)
