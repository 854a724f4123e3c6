"""Searches a few pictures with the installed package, in an empty folder away from the checkout."""

import pathlib
import subprocess
import sys

import PIL.Image

import sotalign_jax as sota

COLOURS = ("red", "green", "blue", "yellow", "black", "orange")
PLACES = ("left", "right", "top", "bottom")


def paint(folder: pathlib.Path) -> None:
    """Writes a picture with a caption for every colour and place."""
    folder.mkdir()
    boxes = dict(zip(PLACES, ((0, 0), (60, 0), (0, 60), (60, 60)), strict=True))
    for colour in COLOURS:
        for place, corner in boxes.items():
            picture = PIL.Image.new("RGB", (120, 120), "white")
            picture.paste(PIL.Image.new("RGB", (60, 60), colour), corner)
            picture.save(folder / f"{colour}-{place}.png")
            (folder / f"{colour}-{place}.txt").write_text(f"a {colour} square, {place}")


def main() -> None:
    """Trains, saves, loads and searches, and starts each command."""
    paint(pathlib.Path("squares"))
    options = {"steps": 2, "recipe": "paper", "method": "sail", "progress": False}
    made = sota.pictures("squares", workdir="embeddings", **options)
    made.save("model")
    loaded = sota.Model.load("model")
    assert loaded.search("a red square") == made.search("a red square")
    for command in ("extract", "pair", "search", "serve"):
        typed = [sys.executable, "-m", f"sotalign_jax.{command}", "--help"]
        subprocess.run(typed, check=True, stdout=subprocess.DEVNULL)
    print("searched pictures:", len(loaded.searched.features))


if __name__ == "__main__":
    main()
