"""A PNG of pictures with a line of text below each, to look at what a search found."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from experiments import workdir
from experiments.encoders import base

TILE, GAP, LINE = 180, 12, 18
INK, PALE = (30, 30, 30), (110, 110, 110)


class Tile(NamedTuple):
    """A picture, and the two lines below it."""

    image: Any
    title: str
    detail: str


def save(path: pathlib.Path, heading: str, tiles: Sequence[Tile], *, columns: int = 5) -> None:
    """Writes the tiles, in rows of `columns`, under a heading."""
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    height = TILE + 2 * LINE + GAP
    sheet = PIL.Image.new(
        "RGB", (GAP + columns * (TILE + GAP), 2 * GAP + LINE + rows * height), "white"
    )
    pen = PIL.ImageDraw.Draw(sheet)
    large, small = (PIL.ImageFont.load_default(size) for size in (16, 12))
    pen.text((GAP, GAP - 4), fitted(pen, heading, large, sheet.width - 2 * GAP), INK, large)
    for number, tile in enumerate(tiles):
        left = GAP + number % columns * (TILE + GAP)
        top = 2 * GAP + LINE + number // columns * height
        picture = _within(tile.image, TILE)
        place = left + (TILE - picture.width) // 2, top + (TILE - picture.height) // 2
        sheet.paste(picture, place)
        for line, (text, ink) in enumerate([(tile.title, INK), (tile.detail, PALE)]):
            below = (left, top + TILE + 2 + line * LINE)
            pen.text(below, fitted(pen, text, small, TILE), ink, small)
    _write(path, sheet)


def save_answers(path: pathlib.Path, image: Any, lines: Sequence[str]) -> None:
    """Writes one picture with lines of text beside it."""
    sheet = PIL.Image.new("RGB", (960, 2 * GAP + max(2 * TILE, len(lines) * 24)), "white")
    pen, font = PIL.ImageDraw.Draw(sheet), PIL.ImageFont.load_default(15)
    picture = _within(image, 2 * TILE)
    sheet.paste(picture, (GAP, GAP))
    left = 3 * GAP + 2 * TILE
    for number, line in enumerate(lines):
        text = fitted(pen, line, font, sheet.width - left - GAP)
        pen.text((left, GAP + number * 24), text, INK, font)
    _write(path, sheet)


def _within(image: Any, side: int) -> Any:
    """A picture on white, as large as fits a square."""
    picture = base.on_white(image)
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, PIL.Image.Resampling.LANCZOS)


def _write(path: pathlib.Path, sheet: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with workdir.replacing(path) as file:
        # Few colours keep a sheet small; it is to be looked at, not measured.
        sheet.quantize(128).save(file, "PNG", optimize=True)


def fitted(pen: Any, text: str, font: Any, width: int) -> str:
    """The text, or as much of it as fits."""
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}…", font) > width:
        text = text[:-1]
    return f"{text}…"
