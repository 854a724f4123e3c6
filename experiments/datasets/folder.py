"""A folder of pictures with captions in a CSV or JSONL file, or in a text file beside each."""

import csv
import functools
import json
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.datasets import base
from sotalign_jax import checks

FILE_COLUMNS = ("file", "file_name", "filename", "filepath", "image", "path")
CAPTION_COLUMNS = ("caption", "text", "title", "sentence")


class Caption(NamedTuple):
    """One row of a captions file."""

    file: str
    caption: str


def folder(request: base.Request) -> base.Source:
    """Pictures at any depth; a caption's group is its picture's path.

    With a captions file (columns `file` and `caption`, or other usual names; a row per caption)
    captions come from there, of the rows whose `split` column is the one asked for, if one is.
    Without it, a picture's caption is the first line of the .txt file beside it.
    """
    root = request.root
    if request.captions is None:
        pictures, texts = (functools.partial(f, root) for f in (_pictures, _sidecars))
        return base.Source({"image": pictures, "text": texts})
    rows = read_captions(request.captions, request.split)
    # A split names its own pictures; otherwise those without a caption are embedded as well.
    also = [] if request.split else list(base.pictures_below(root))
    return base.Source(
        {
            "image": functools.partial(_listed_pictures, root, rows, also),
            "text": functools.partial(_captions, rows, also),
        }
    )


def read_captions(path: pathlib.Path, split: str = "") -> list[Caption]:
    """Rows of a CSV or JSONL file of captions.

    Raises:
        InputError: the file is missing, of another format, or lacks a column.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise checks.InputError(f"captions: {path} is neither .csv nor .jsonl; convert it")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records: list[dict[str, Any]]
            if path.suffix == ".csv":
                records = list(csv.DictReader(file))
            else:
                records = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise checks.InputError(f"captions: {path} cannot be read ({error})") from error
    if not records:
        raise checks.InputError(f"captions: {path} has no rows; write one per caption")
    file_column = _column(path, records[0], FILE_COLUMNS)
    caption_column = _column(path, records[0], CAPTION_COLUMNS)
    if split and "split" not in records[0]:
        raise checks.InputError(f"split: {split!r} asked but {path} has no column 'split'")
    return [
        Caption(str(record.get(file_column) or ""), str(record.get(caption_column) or ""))
        for record in records
        if not split or record.get("split") == split
    ]


def _column(path: pathlib.Path, record: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if name in record:
            return name
    raise checks.InputError(
        f"captions: {path} has the columns {', '.join(map(str, record))}; name one {names[0]!r}"
    )


def _pictures(root: pathlib.Path) -> Iterator[base.Item]:
    for path in base.pictures_below(root):
        yield base.Item(str(path), functools.partial(base.oriented, root / path), str(path))


def _listed_pictures(
    root: pathlib.Path, rows: list[Caption], also: list[pathlib.Path]
) -> Iterator[base.Item]:
    for name in dict.fromkeys([*(row.file for row in rows), *map(str, also)]):
        yield base.Item(name, functools.partial(base.oriented, root / name), name)


def _captions(rows: list[Caption], also: list[pathlib.Path]) -> Iterator[base.Item]:
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        yield base.text_item(f"{row.file}#{count[row.file]}", row.caption, row.file)
        count[row.file] += 1
    for name in map(str, also):
        if name not in count:
            yield base.bad_item(f"{name}#0", "has no caption", name)


def _sidecars(root: pathlib.Path) -> Iterator[base.Item]:
    for path in base.pictures_below(root):
        load = functools.partial(_first_line, (root / path).with_suffix(".txt"))
        yield base.Item(f"{path}#0", load, str(path))


def _first_line(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
