"""LibriSpeech, WikiText, SkyScript and Polyvore, as they are distributed."""

import csv
import functools
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from experiments.datasets import base
from experiments.optional import require
from sotalign_jax import checks

# --- LibriSpeech --------------------------------------------------------------------------------


def librispeech(request: base.Request) -> base.Source:
    """LibriSpeech: SPLIT/SPEAKER/CHAPTER/ID.flac with transcripts in *.trans.txt."""
    folder = base.find(request.root, request.split, f"LibriSpeech/{request.split}")
    return base.Source(
        {
            "audio": functools.partial(_utterances, folder),
            "text": functools.partial(_transcripts, folder),
        }
    )


def _transcripts(folder: pathlib.Path) -> Iterator[base.Item]:
    for path in sorted(folder.glob("*/*/*.trans.txt")):
        for line in base.lines(path):
            name, _, text = line.partition(" ")
            yield base.text_item(name, text, name)


def _utterances(folder: pathlib.Path) -> Iterator[base.Item]:
    for item in _transcripts(folder):
        speaker, chapter, _ = item.id.split("-")
        path = folder / speaker / chapter / f"{item.id}.flac"
        yield base.Item(item.id, functools.partial(base.sound, path), item.id)


# --- WikiText -----------------------------------------------------------------------------------


def wikitext(request: base.Request) -> base.Source:
    """WikiText-103 or -2: a text per paragraph of wiki.SPLIT.raw (or .tokens), no headings."""
    split = {"val": "valid"}.get(request.split, request.split)
    path = base.find(request.root, f"wiki.{split}.raw", f"wiki.{split}.tokens")
    return base.Source({"text": functools.partial(_paragraphs, path)})


def _paragraphs(path: pathlib.Path) -> Iterator[base.Item]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if text and not (text.startswith("= ") and text.endswith(" =")):
                yield base.text_item(str(number), text, str(number))


# --- SkyScript ----------------------------------------------------------------------------------

SKYSCRIPT = {
    "train": "SkyScript_train_top30pct_filtered_by_CLIP_openai.csv",
    "train50": "SkyScript_train_top50pct_filtered_by_CLIP_openai.csv",
    "val": "SkyScript_val_5K_filtered_by_CLIP_openai.csv",
    "test": "SkyScript_test_30K_filtered_by_CLIP_openai.csv",
}
SKYSCRIPT_COLUMN = "title_multi_objects"


def skyscript(request: base.Request) -> base.Source:
    """SkyScript: a CSV per split (or one given as captions) and pictures in images2/, ..."""
    path = request.captions
    if path is None:
        checks.choice("split", request.split, tuple(SKYSCRIPT))
        name = SKYSCRIPT[request.split]
        path = base.find(request.root, name, f"dataframe/{name}")
    with path.open(newline="", encoding="utf-8") as file:
        columns = next(csv.reader(file), [])
    missing = {"filepath", SKYSCRIPT_COLUMN} - set(columns)
    if missing:
        raise checks.InputError(
            f"captions: {path} has no column {', '.join(sorted(missing))} but "
            f"{', '.join(columns)}; pass a file of multi-object captions"
        )
    return base.Source(
        {
            "image": functools.partial(_satellite_images, request.root, path),
            "text": functools.partial(_satellite_titles, path),
        }
    )


def _table(path: pathlib.Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _satellite_images(root: pathlib.Path, path: pathlib.Path) -> Iterator[base.Item]:
    for row in _table(path):
        name = row["filepath"]
        yield base.Item(name, functools.partial(base.picture, root / name), name)


def _satellite_titles(path: pathlib.Path) -> Iterator[base.Item]:
    for row in _table(path):
        yield base.text_item(row["filepath"], row[SKYSCRIPT_COLUMN] or "", row["filepath"])


# --- Polyvore -----------------------------------------------------------------------------------


def polyvore(request: base.Request) -> base.Source:
    """Polyvore items as parquet files with the columns image (bytes), text and item_ID."""
    files = sorted([*request.root.glob("*.parquet"), *request.root.glob("data/*.parquet")])
    if not files:
        raise checks.InputError(f"root: {request.root} holds no .parquet, nor does its data/")
    return base.Source(
        {
            "image": functools.partial(_rows, files, "image", _embedded_picture),
            "text": functools.partial(_rows, files, "text", str),
        }
    )


def _embedded_picture(cell: dict[str, Any]) -> Any:
    return base.picture(cell["bytes"])


def _rows(
    files: list[pathlib.Path], column: str, decode: Callable[[Any], Any]
) -> Iterator[base.Item]:
    for file in files:
        with require("pyarrow.parquet").ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                # Pictures are large: a row group is read once, when the first of it is asked for.
                cells = _Once(functools.partial(_column, file, group, column))
                names = table.read_row_group(group, columns=["item_ID"])["item_ID"].to_pylist()
                for row, name in enumerate(map(str, names)):
                    yield base.Item(name, functools.partial(_cell, cells, row, decode), name)


def _column(file: pathlib.Path, group: int, column: str) -> Any:
    with require("pyarrow.parquet").ParquetFile(file) as table:
        return table.read_row_group(group, columns=[column])[column]


def _cell(cells: "_Once", row: int, decode: Callable[[Any], Any]) -> Any:
    value = cells()[row].as_py()
    if value is None:
        raise ValueError("is empty")
    return decode(value)


class _Once:
    """Calls a function once, however many threads ask for its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._lock, self._result = function, threading.Lock(), None

    def __call__(self) -> Any:
        with self._lock:
            if self._result is None:
                self._result = self._function()
            return self._result
