"""Data sets of the packages `datasets` (hf:NAME) and `tensorflow_datasets` (tfds:NAME).

Their columns are read by type: a picture, a sound, a text, several texts, or a class. The id and
the group of an item are its row, so that a picture and its texts belong together. A set with
classes and without texts is a classification set.
"""

import functools
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks
from sotalign_jax.search import items
from sotalign_jax.search.items import Item, Sound, Source

TEXT_COLUMNS = ("caption", "text", "title", "sentence", "transcription", "captions")
"""Columns of texts to prefer if there are several."""
Read = Callable[[str], Iterator[Callable[[], Any]]]
"""Yields a function per row that returns the value of a column."""


class Column(NamedTuple):
    """Type of a column: "image", "audio", "text", "texts" or "class"."""

    kind: str
    classes: tuple[str, ...] = ()
    rate: int = 0  # sampling rate of sounds that are stored as numbers


class Table(NamedTuple):
    """A split of a data set."""

    name: str  # with a mark of its version
    columns: Mapping[str, Column]
    read: Read
    size: int | None  # rows, if known without reading them


def source(table: Table, column: str | None, classified: Callable[..., Source]) -> Source:
    """Returns the items of a table.

    Args:
        table: The table.
        column: Column to read among several of a modality, or None.
        classified: Makes a classification set from class names and pictures.

    Returns:
        The source.

    Raises:
        InputError: No column is a picture, a sound or a text.
    """
    kinds = {"image": ("image",), "audio": ("audio",), "text": ("text", "texts")}
    found = {
        modality: {name: one for name, one in table.columns.items() if one.kind in accepted}
        for modality, accepted in kinds.items()
    }
    if column is not None and not any(column in columns for columns in found.values()):
        has = ", ".join(name for columns in found.values() for name in columns)
        raise checks.InputError(f"column {column!r} is not in {table.name}; choose one of {has}")
    if not any(found.values()):
        text = f"data {table.name} has no column of pictures, sounds or texts"
        raise checks.InputError(f"{text}, only {', '.join(table.columns) or 'none'}")
    listed = {
        modality: functools.partial(_items, table, modality, columns, column)
        for modality, columns in found.items()
        if columns
    }
    labels = [name for name, one in table.columns.items() if one.kind == "class"]
    if len(labels) == 1 and found["image"] and not found["text"]:
        pictures = functools.partial(_labelled, table, listed["image"], labels[0])
        return classified(table.columns[labels[0]].classes, pictures)
    single = {m: table.size for m, columns in found.items() if table.size is not None and columns}
    if any(one.kind == "texts" for one in found["text"].values()):
        single.pop("text", None)
    return Source(listed, counts={m: n for m, n in single.items() if n is not None})


def _choose(table: Table, columns: Mapping[str, Column], wanted: str | None, modality: str) -> str:
    """Returns the column of a modality."""
    if wanted in columns:
        return str(wanted)
    usual = [name for name in TEXT_COLUMNS if name in columns]
    if len(columns) > 1 and (modality != "text" or not usual):
        has = ", ".join(columns)
        text = f"column is not set and {table.name} has several of {modality}: {has}"
        raise checks.InputError(f"{text}; pass --column=NAME")
    return next(iter([*usual, *columns]))


def _items(
    table: Table, modality: str, columns: Mapping[str, Column], wanted: str | None
) -> Iterator[Item]:
    name = _choose(table, columns, wanted, modality)
    column = columns[name]
    for row, get in enumerate(table.read(name)):
        if modality != "text":
            # The name stands for the content, which is not read before its turn.
            place = f"{table.name}/{name}/{row}"
            yield Item(str(row), str(row), place, functools.partial(_decode, get, column))
        elif column.kind == "text":
            yield Item(str(row), str(row), str(_text(get())))
        else:
            for n, text in enumerate(get()):
                yield Item(f"{row}#{n}", str(row), str(_text(text)))


def _labelled(table: Table, pictures: Callable[[], Iterator[Item]], label: str) -> Iterator[Item]:
    """Yields pictures whose group is their class."""
    for item, get in zip(pictures(), table.read(label), strict=True):
        yield item._replace(group=str(get()))


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _decode(get: Callable[[], Any], column: Column, _: str) -> Any:
    """Reads a picture or a sound from bytes, a path, or samples."""
    value = get()
    if isinstance(value, np.ndarray):  # of 16-bit integers
        wave = value.astype(np.float32) / 32768
        return Sound(wave.mean(axis=1) if wave.ndim == 2 else wave, column.rate)
    if isinstance(value, dict):
        value = value["bytes"] or pathlib.Path(value["path"])
    if value is None:
        raise ValueError("value is empty")
    if column.kind == "image":
        return items.picture(value)
    file = io.BytesIO(value) if isinstance(value, bytes) else value
    wave, rate = items.require("soundfile").read(file, dtype="float32", always_2d=True)
    return Sound(wave.mean(axis=1), rate)


# --- Hugging Face -------------------------------------------------------------------------------


def huggingface(name: str, split: str, *, streaming: bool) -> Table:
    """Opens a split of a data set of the Hugging Face hub, or of a local folder.

    Args:
        name: Name on the hub or local folder, with ",CONFIG" if the set has several.
        split: Name of the split, or a slice of it such as "train[:1000]".
        streaming: Read rows from the hub when they are needed, instead of storing the set first.

    Returns:
        The table.

    Raises:
        InputError: The set cannot be opened.
    """
    library = items.require("datasets")
    library.disable_progress_bars()
    place, _, config = name.partition(",")
    try:
        rows = library.load_dataset(place, config or None, split=split, streaming=streaming)
    except (ValueError, OSError, RuntimeError) as error:
        text = f"data hf:{name} has no split {split!r} here ({checks.first_line(error)})"
        raise checks.InputError(f"{text}; check the name and the connection") from error
    if rows.features is None:  # of a stream of CSV or JSON files
        raise checks.InputError(f"data hf:{name} streams without types; leave --streaming out")
    columns = {key: _huggingface_column(one) for key, one in rows.features.items()}
    for key, column in columns.items():
        if column.kind in ("image", "audio"):
            rows = rows.cast_column(key, type(rows.features[key])(decode=False))
    if streaming:
        known = (rows.info.splits or {}).get(split)
        count = known.num_examples if known else None
        return Table(f"hf:{name}", columns, functools.partial(_stream, rows), count)
    # The folder of the cache is named after the version of the files.
    version = {pathlib.Path(file["filename"]).parent.name for file in rows.cache_files}
    title = "@".join([f"hf:{name}:{split}", *sorted(version)])
    return Table(title, columns, functools.partial(_stored, rows, len(rows)), len(rows))


def _huggingface_column(feature: Any) -> Column:
    kind = type(feature).__name__
    if kind in ("Image", "Audio"):
        return Column(kind.lower())
    if kind == "ClassLabel":
        return Column("class", tuple(feature.names))
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    for one, name in ((feature, "text"), (inner, "texts")):
        if getattr(one, "dtype", None) in ("string", "large_string"):
            return Column(name)
    return Column("other")


def _stored(rows: Any, count: int, column: str) -> Iterator[Callable[[], Any]]:
    chosen = rows.select_columns([column])
    return (functools.partial(_cell, chosen, row, column) for row in range(count))


def _stream(rows: Any, column: str) -> Iterator[Callable[[], Any]]:
    return (functools.partial(dict.get, row, column) for row in rows.select_columns([column]))


def _cell(rows: Any, row: int, column: str) -> Any:
    return rows[row][column]


# --- TensorFlow Datasets ------------------------------------------------------------------------


def tfds(name: str, split: str, folder: pathlib.Path | None) -> Table:
    """Opens a split that TensorFlow Datasets prepared as array_record.

    Args:
        name: Name of the set.
        split: Name of the split, or a slice of it such as "train[:1000]".
        folder: Folder of the prepared sets. The default is that of the library.

    Returns:
        The table.

    Raises:
        InputError: The set is missing or has another format.
    """
    library = checks.require("tensorflow_datasets", extra="data")

    # `download=False`, because a typo should not download a large dataset.
    options = {"split": split, "data_dir": folder, "download": False}
    try:
        found = library.data_source(name, **options)
    except ImportError as error:
        text = f"data tfds:{name} has a feature that needs {error.name}"
        raise checks.InputError(f"{text}; install it with pip") from error
    except NotImplementedError as error:
        text = f"data tfds:{name} is stored in a format without random access"
        command = f"tfds build {name} --file_format=array_record"
        raise checks.InputError(f"{text}; prepare it anew: {command}") from error
    except (ValueError, AssertionError, OSError) as error:
        text = f"data tfds:{name} cannot be opened ({checks.first_line(error)})"
        remedy = "check the split, and pass the folder of the prepared sets as --root"
        raise checks.InputError(f"{text}; {remedy}") from error
    info = found.dataset_info
    columns = {key: tfds_column(feature) for key, feature in info.features.items()}
    # Pictures stay encoded: the reader decodes them in the background, and texts need none.
    coded = {name for name, column in columns.items() if column.kind == "image"}
    decoders = {name: library.decode.SkipDecoding() for name in coded}
    rows = library.data_source(name, **options, decoders=decoders)
    read = functools.partial(_stored_tfds, rows)
    return Table(f"tfds:{info.full_name}:{split}", columns, read, len(rows))


def tfds_column(feature: Any) -> Column:
    """Returns the type of a feature of TensorFlow Datasets."""
    kind = type(feature).__name__
    if kind == "Image":
        return Column("image")
    if kind == "Audio":
        return Column("audio", rate=feature.sample_rate)
    if kind == "ClassLabel":
        return Column("class", tuple(feature.names))
    inner = type(getattr(feature, "feature", None)).__name__
    names = {kind: "text", inner: "texts"}
    return Column(names.get("Text", "other"))


def _stored_tfds(rows: Any, column: str) -> Iterator[Callable[[], Any]]:
    return (functools.partial(_cell, rows, row, column) for row in range(len(rows)))
