"""Extracts embeddings into folders, and joins two of these folders into training files.

A finished extraction holds

    embeddings.npy    [n, d], one row per item, for `--config.data.files.*` of experiments.main
    rows.jsonl        id and group of every row, and its text
    skipped.jsonl     id of every item without a row, and the reason
    inputs.jsonl      id, group and fingerprint of every item, to detect changes
    metadata.json     encoder, revision, pooling, dtype and count; written last

The first four files grow by `shard_size` items at a time. `progress.json` stores how much of them
is complete. A killed extraction resumes from there and leaves the same bytes as any other, and so
do several processes that share it, see `shards`.
"""

import contextlib
import itertools
import json
import pathlib
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks, duplicates, files, storage
from sotalign_jax import data as data_lib
from sotalign_jax.progress import Progress
from sotalign_jax.search import shards
from sotalign_jax.search.encoders import Encoder
from sotalign_jax.search.items import Item, Source
from sotalign_jax.search.reading import Prepared, Reader, identify
from sotalign_jax.search.shards import Process, Record

AUDIO_WINDOW = 16
"""Number of batches of sounds that are sorted by length together. Texts are sorted by shard."""


class Row(NamedTuple):
    """Id, group and text of the item that a row of embeddings was computed from."""

    id: str
    group: str
    text: str = ""


class Embeddings(NamedTuple):
    """A finished extraction: memory-mapped rows, their origins, metadata, and folder."""

    rows: np.ndarray
    origins: list[Row]
    metadata: dict[str, Any]
    folder: pathlib.Path | None = None


def extract(
    source: Source,
    encoder: Encoder,
    out: pathlib.Path,
    *,
    data: dict[str, Any],
    limit: int | None = None,
    dtype: str = "float16",
    shard_size: int = 4096,
    workers: int = 4,
    processes: int = 0,
    process: Process | None = None,
    title: str = "",
) -> dict[str, Any] | None:
    """Embeds the items of a source, or resumes an unfinished extraction.

    If items were added, changed or removed since an extraction was finished, only new and changed
    ones are embedded. The former files remain until the new ones are complete.

    Args:
        source: Source of the items.
        encoder: The encoder. Only items of its modality are embedded.
        out: Folder of the extraction.
        data: Description of the items for the metadata.
        limit: Number of items, all by default.
        dtype: Dtype of the stored embeddings.
        shard_size: Number of items between two saves.
        workers: Number of threads that read and prepare items.
        processes: Number of processes that do so in place of the threads, or 0. Texts, which
            take less time than copies of them, are always read by threads.
        process: This process among those that share the extraction. The default is the only one.
        title: Name of the items in messages. The default is the folder of the extraction.

    Returns:
        The metadata, or None if other processes have not finished yet.

    Raises:
        InputError: `out` holds something else, or an item has changed since an unfinished
            extraction embedded it.
        OSError: The disk is full. Running again resumes from the last save.
    """
    items, total = _listed(source, encoder.modality, limit, data)
    data = {**data, "limit": limit}
    if source.classes is not None:
        data["classes"] = list(source.classes)
    metadata = {"format": 2, "encoder": encoder.describe(), "data": data, "dtype": dtype}
    here = process or Process()
    lock = shards.lock(out, here)
    storage.open_folder(out, {**metadata, "shard_size": shard_size})
    with storage.locked(out) if here.world == 1 else contextlib.nullcontext():
        with lock():
            old = _opened(items, out, here, title or str(out))
        growing = shards.Files(out / shards.NEXT if old else out, dtype, shard_size, total, lock)

        def complete(shape: list[int]) -> None:
            done = metadata | {"data": {**data, "items": total}, "shape": shape, "count": shape[0]}
            storage.write_json(growing.out / shards.METADATA, {**done, "skipped": total - shape[0]})

        if old or not (out / shards.METADATA).exists():
            count = 0 if encoder.modality == "text" else processes
            reader = Reader(encoder.modality, encoder.prepare, workers=workers, processes=count)
            with reader:
                _embed(items(), encoder, growing, here, reader, old)
        growing.finish(complete)
        with lock():
            shards.adopt(out)
    done = (out / shards.METADATA).exists() and not (out / shards.NEXT).exists()
    return storage.read_json(out / shards.METADATA) if done else None


def _listed(
    source: Source, modality: str, limit: int | None, data: dict[str, Any]
) -> tuple[Callable[[], Iterator[Item]], int]:
    """Returns a function that lists the items of a modality, and their number."""
    if modality not in source.items:
        text = f"encoder embeds {modality} but the dataset has {' and '.join(source.items)}"
        raise checks.InputError(f"{text}; choose another encoder")

    def items() -> Iterator[Item]:
        return itertools.islice(source.items[modality](), limit)

    known = source.counts.get(modality)
    total = sum(1 for _ in items()) if known is None else min(known, limit or known)
    if not total:
        raise checks.InputError(f"data has no {modality} items, got {data}; check --root")
    return items, total


def _opened(
    items: Callable[[], Iterator[Item]], out: pathlib.Path, here: Process, title: str
) -> "Previous | None":
    """Compares an extraction with the current items. The caller holds the lock.

    Args:
        items: Lists the items.
        out: Folder of the extraction.
        here: This process.
        title: Name of the items.

    Returns:
        The finished extraction of other items, which is to be updated, or None.

    Raises:
        InputError: An unfinished extraction is of other items.
    """
    newer = out / shards.NEXT
    shards.adopt(out)
    finished = (out / shards.METADATA).exists()
    if not finished and here.rank > 0:  # the first process checks for all
        return None
    change = difference(items(), out)
    if change is None:
        shutil.rmtree(newer, ignore_errors=True)
        return None
    if not finished:
        text = f"workdir {out} was made from other data ({change}) and is unfinished"
        raise checks.InputError(f"{text}; choose another --workdir or remove it")
    if difference(items(), newer):  # an interrupted update of yet other items
        shutil.rmtree(newer)
    newer.mkdir(exist_ok=True)
    old = Previous(out)
    if here.rank == 0:
        print(f"{title} has changed ({change}): {old.compare(items())}", file=sys.stderr)
    return old


def load(folder: pathlib.Path) -> Embeddings:
    """Opens a finished extraction.

    Raises:
        InputError: The extraction is unfinished or damaged.
    """
    if not (folder / shards.METADATA).exists():
        remedy = "check the path, or run the extraction again to finish it"
        raise checks.InputError(f"{folder} holds no finished extraction; {remedy}")
    metadata = storage.read_json(folder / shards.METADATA)
    rows = np.load(folder / shards.EMBEDDINGS, mmap_mode="r")
    origins = [Row(**record) for record in shards.read_lines(folder / shards.ROWS)]
    if list(rows.shape) != metadata["shape"] or len(origins) != len(rows):
        text = f"metadata.json has shape {metadata['shape']}, embeddings.npy {list(rows.shape)}"
        text = f"{text} and rows.jsonl {len(origins)} rows"
        raise checks.InputError(f"{folder} is inconsistent ({text}); extract it again")
    return Embeddings(rows, origins, metadata, folder)


def difference(items: Iterator[Item], out: pathlib.Path) -> str | None:
    """Compares items with those that an extraction was computed from, finished or not.

    Only files with a new modification time are read.

    Args:
        items: The current items.
        out: Folder of the extraction.

    Returns:
        The first difference in a few words, or None.
    """
    finished, seen = (out / shards.METADATA).exists(), None
    begun = not finished and (out / shards.PROGRESS).exists()
    done = storage.read_json(out / shards.PROGRESS)["items"] if begun else None
    lines = shards.read_lines(out / shards.INPUTS) if finished or begun else iter(())
    for item, old in itertools.zip_longest(items, itertools.islice(lines, done)):
        if old is None:
            return f"{item.id!r} is new" if finished else None
        if item is None:
            return f"{old['id']!r} is gone"
        if (item.id, item.group) != (old["id"], old["group"]):
            return f"{item.id!r} is in place of {old['id']!r}"
        if (item.origin, old["origin"]) == seen:  # a tar holds many items
            continue
        seen = item.origin, old["origin"]
        if change := _changed(item, old["origin"]):
            return change
    return None


def _changed(item: Item, origin: dict[str, Any]) -> str | None:
    """Compares an item with its recorded origin. Returns the change in a few words, or None."""
    if isinstance(item.origin, pathlib.Path):
        return storage.changed(origin, item.origin)
    return None if identify(item.origin) == origin else f"{item.id!r} has another text"


class Previous:
    """A finished extraction whose rows are used again for items that have not changed.

    Args:
        out: Folder of the extraction.
    """

    def __init__(self, out: pathlib.Path) -> None:
        found = load(out)
        self._rows = found.rows
        self._row_of = {origin.id: n for n, origin in enumerate(found.origins)}
        self._texts = {origin.id: origin.text for origin in found.origins if origin.text}
        lost = shards.read_lines(out / shards.SKIPPED)
        self._reasons = {record["id"]: record["reason"] for record in lost}
        self.origins: dict[str, dict[str, Any]] = {}
        for record in shards.read_lines(out / shards.INPUTS):
            self.origins.setdefault(record["id"], record["origin"])  # the first of equal ids
        self._seen: tuple[Any, Any] | None = None  # last file that has not changed

    def record(self, item: Item) -> Record | None:
        """Returns the record of an item, or None if it is new or has changed."""
        origin = self.origins.get(item.id)
        if origin is None:
            return None
        if (item.origin, origin) != self._seen:  # a tar holds many items
            if _changed(item, origin):
                return None
            self._seen = item.origin, origin
        if item.id in self._row_of:
            row, text = self._rows[self._row_of[item.id]], self._texts.get(item.id)
            return Record(item.id, item.group, origin, text, np.array(row), "")
        return Record(item.id, item.group, origin, None, None, self._reasons[item.id])

    def compare(self, items: Iterator[Item]) -> str:
        """Returns the numbers of added, changed, removed and kept items."""
        added = changed = kept = 0
        left = set(self.origins)
        for item in items:
            left.discard(item.id)
            if item.id not in self.origins:
                added += 1
            elif self.record(item) is None:
                changed += 1
            else:
                kept += 1
        return f"{added} added, {changed} changed, {len(left)} removed, {kept} kept"


def _embed(
    items: Iterator[Item],
    encoder: Encoder,
    growing: shards.Files,
    here: Process,
    reader: Reader,
    old: Previous | None,
) -> None:
    """Embeds those shards of this process that are not stored yet."""
    size = growing.shard_size
    count = -(-growing.total // size)
    own = [n for n in range(here.rank, count, here.world) if not growing.has(n)]
    total = sum(min(size, growing.total - n * size) for n in range(here.rank, count, here.world))
    left = sum(min(size, growing.total - n * size) for n in own)
    title = "extract" if here.world == 1 else f"extract (process {here.rank + 1} of {here.world})"
    unit = f"{encoder.modality} rows"
    wanted, number = set(own), 0
    with Progress(total, title, initial=total - left, unit=unit, rate=True) as bar:
        while shard := list(itertools.islice(items, size)):
            if number in wanted:
                kept = {n: old.record(item) for n, item in enumerate(shard)} if old else {}
                rest = [item for n, item in enumerate(shard) if kept.get(n) is None]
                bar.advance(len(shard) - len(rest), skipped=len(shard) - len(rest))
                new = iter(_embed_shard(rest, encoder, growing.dtype, reader, bar))
                growing.add(number, [kept.get(n) or next(new) for n in range(len(shard))])
            number += 1


def _embed_shard(
    items: list[Item], encoder: Encoder, dtype: str, reader: Reader, bar: Progress
) -> list[Record]:
    """Embeds the items of a shard."""
    sizes = {"text": len(items) or 1, "audio": AUDIO_WINDOW * encoder.batch_size}
    window = sizes.get(encoder.modality, encoder.batch_size)
    prepared = reader.read(items, encoder.batch_size)
    results: list[Prepared] = []
    # A GPU computes one batch while the next one is collected.
    started: deque[tuple[list[Prepared], Callable[[], np.ndarray]]] = deque()
    while part := list(itertools.islice(prepared, window)):
        results += part
        good = [one for one in part if not one.reason]
        bar.advance(len(part) - len(good), skipped=len(part) - len(good))
        for chosen in encoder.split([one.content for one in good]):
            batch = [good[n] for n in chosen]
            started.append((batch, encoder.start([one.content for one in batch])))
            for one in batch:
                one.content = None
            if len(started) > 1:
                _take_rows(*started.popleft(), dtype, bar)
    while started:
        _take_rows(*started.popleft(), dtype, bar)
    return [
        Record(item.id, item.group, one.origin, one.text, one.row, one.reason)
        for item, one in zip(items, results, strict=True)
    ]


def _take_rows(
    batch: list[Prepared], finish: Callable[[], np.ndarray], dtype: str, bar: Progress
) -> None:
    """Waits for the embeddings of a batch, and stores them or the reason to skip them."""
    with np.errstate(over="ignore"):  # rows that overflow are skipped below
        stored = np.asarray(finish()).astype(dtype)
    for one, row in zip(batch, stored, strict=True):
        if not np.isfinite(row).all():
            one.reason = f"embedding is not finite in {dtype}"
        elif not row.any():
            one.reason = "embedding is zero"
        else:
            one.row = row
    bar.advance(len(batch), skipped=0)


# --- joining two extractions into files for experiments.main --------------------------------------

PARTS = ("train", "val", "test", "split", "zero_shot")
ENCODERS = "encoders.json"
"""File with the descriptions of both encoders, beside the training files."""
BLOCK = 65_536
"""Number of rows that are written at a time, because arrays may be larger than memory."""


class Taken(NamedTuple):
    """Selected rows of an extraction."""

    of: Embeddings
    chosen: np.ndarray


Arrays = dict[str, Taken | np.ndarray]


def match(x: Embeddings, y: Embeddings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matches rows of two extractions by their groups.

    Args:
        x: Extraction with one row per group.
        y: Extraction with any number of rows per group.

    Returns:
        Rows of x that have a match, rows of y that have a match, and `x_of_y`: the j-th matched row
        of y belongs to the `x_of_y[j]`-th matched row of x.

    Raises:
        InputError: Rows of x share a group, or no groups match.
    """
    row_of: dict[str, int] = {}
    for row, origin in enumerate(x.origins):
        if origin.group in row_of:
            both = f"{origin.id!r} and {x.origins[row_of[origin.group]].id!r}"
            remedy = "pass the side with one row per group as x, or pass --part=zero_shot"
            raise checks.InputError(f"x has two rows of group {origin.group!r}, {both}; {remedy}")
        row_of[origin.group] = row
    rows_y = [row for row, origin in enumerate(y.origins) if origin.group in row_of]
    if not rows_y:
        groups = (of.origins[0].group for of in (y, x))
        text = "y has no group of x: y has groups such as {!r}, x such as {!r}".format(*groups)
        raise checks.InputError(f"{text}; extract both from one dataset")
    owners = np.array([row_of[y.origins[row].group] for row in rows_y])
    rows_x, x_of_y = np.unique(owners, return_inverse=True)
    return rows_x, np.array(rows_y), x_of_y


def join(
    part: str,
    x: Embeddings,
    y: Embeddings,
    *,
    val: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
) -> Arrays:
    """Selects the rows of all files of a part.

    The training files have one pair per caption. Rows without a partner are the pools. A gallery
    has every picture once, with all its captions.

    Args:
        part: One of `PARTS`. "split" makes train, val and test. Pictures that are equal or share a
            caption are never separated.
        x: Extraction of the pictures.
        y: Extraction of the texts.
        val: Fraction of the pictures for validation ("split" only).
        test: Fraction of the pictures for the test ("split" only).
        seed: Seed of the random split ("split" only).

    Returns:
        Arrays by file name.

    Raises:
        InputError: No rows match, or `val` and `test` leave no pictures.
    """
    if part == "zero_shot":
        return _zero_shot(x, y)
    rows_x, rows_y, x_of_y = match(x, y)
    parts = {part: np.arange(len(rows_x))}
    if part == "split":
        sizes = data_lib.held_out_sizes(len(rows_x), (val, test))
        equal_x = duplicates.first_duplicate(files.take(x.rows, rows_x))
        equal_y = duplicates.first_duplicate(files.take(y.rows, rows_y))
        # Groups of tied pictures must fit into the smallest part, or it could not be filled.
        smallest = min((size for size in sizes if size), default=len(rows_x))
        captions_each = -(-len(rows_y) // len(rows_x))
        tied = duplicates.group_duplicates(
            equal_x[x_of_y], equal_y, largest=smallest * captions_each
        )
        groups = tied[np.unique(x_of_y, return_index=True)[1]]
        order = np.random.default_rng(seed).permutation(len(rows_x))
        number = data_lib.assign_groups(groups[order], sizes)
        parts = {name: order[number == n] for n, name in enumerate(("val", "test", "train"))}
    arrays: Arrays = {}
    for name, pictures in parts.items():
        if not len(pictures):
            continue
        pictures = np.sort(pictures)
        captions = np.flatnonzero(np.isin(x_of_y, pictures))
        owner = np.searchsorted(pictures, x_of_y[captions])
        own_x, own_y = rows_x[pictures], rows_y[captions]
        if name == "train":
            arrays |= {"x": Taken(x, own_x[owner]), "y": Taken(y, own_y)}
        else:
            arrays |= {f"{name}_x": Taken(x, own_x), f"{name}_y": Taken(y, own_y)}
            arrays[f"{name}_x_of_y"] = owner
    for side, of, paired in (("x", x, rows_x), ("y", y, rows_y)) if "train" in parts else ():
        alone = np.setdiff1d(np.arange(len(of.rows)), paired)
        if len(alone):
            arrays[f"unpaired_{side}"] = Taken(of, alone)
    return arrays


def check_pairs(arrays: Arrays) -> None:
    """Raises InputError if there are too few training pairs."""
    pairs = arrays.get("x")
    if isinstance(pairs, Taken) and len(pairs.chosen) < checks.MIN_PAIRS:
        text = f"x and y have {len(pairs.chosen)} training pairs"
        raise checks.InputError(f"{text} but training needs {checks.MIN_PAIRS}; add captions")


def ids_of(arrays: Arrays) -> dict[str, list[str]]:
    """Returns the ids of training pairs and test rows, as in `Aligner.rows`."""
    parts = {"pairs_x": "x", "pairs_y": "y", "test_x": "test_x", "test_y": "test_y"}
    found: dict[str, list[str]] = {}
    for part, name in parts.items():
        rows = arrays.get(name)
        if isinstance(rows, Taken):
            origins = [rows.of.origins[row] for row in rows.chosen]
            found[part] = [origin.id for origin in origins]
            found |= {"test_texts": [o.text for o in origins]} if part == "test_y" else {}
    return found


def _zero_shot(x: Embeddings, y: Embeddings) -> Arrays:
    """Returns pictures, labels and prompts of a classification set."""
    classes = x.metadata["data"].get("classes")
    if classes is None or classes != y.metadata["data"].get("classes"):
        text = "zero_shot needs x and y of the same classification set"
        raise checks.InputError(f"{text}; extract both with the same --data, such as food101")
    labels, of_prompts = (np.array([int(o.group) for o in of.origins], np.int32) for of in (x, y))
    counts = np.bincount(of_prompts, minlength=len(classes))
    if counts.min() != counts.max():
        text = (
            f"zero_shot needs equally many prompts per class, got {counts.min()} to {counts.max()}"
        )
        raise checks.InputError(f"{text}; extract the prompts again, without --limit")
    # A stable sort keeps the templates of a class in order.
    prompts = y.rows[np.argsort(of_prompts, kind="stable")]
    return {
        "zero_shot_x": np.asarray(x.rows),
        "zero_shot_labels": labels,
        "zero_shot_prompts": prompts.reshape(len(classes), -1, prompts.shape[1]),
    }


def write(out: pathlib.Path, arrays: Arrays, x: Embeddings, y: Embeddings) -> None:
    """Writes training files for `files.py:from=OUT`.

    New pairs replace earlier ones, and the pools of the earlier pairs are removed.

    Args:
        out: Folder of the files.
        arrays: Arrays by file name.
        x: Extraction of the pictures.
        y: Extraction of the texts.

    Raises:
        InputError: The folder has files of other encoders.
    """
    out.mkdir(parents=True, exist_ok=True)
    encoders = {"x": x.metadata["encoder"], "y": y.metadata["encoder"]}
    if (out / ENCODERS).exists() and storage.read_json(out / ENCODERS) != encoders:
        text = f"workdir {out} has files of other encoders (see {ENCODERS})"
        raise checks.InputError(f"{text}; choose another --workdir")
    names = [f"{name}.npy" for name in ("unpaired_x", "unpaired_y", *arrays)]
    if not (out / ENCODERS).exists() and (own := [n for n in names if (out / n).exists()]):
        text = f"workdir {out} holds {own[0]}, which another command wrote"
        raise checks.InputError(f"{text}; choose another --workdir")
    storage.write_json(out / ENCODERS, encoders)
    # An earlier pool may contain rows that are pairs now.
    for name in ("unpaired_x", "unpaired_y") if "x" in arrays else ():
        for former in (out / f"{name}.npy", ids_file(out / f"{name}.npy")):
            former.unlink(missing_ok=True)
    for name, array in arrays.items():
        with storage.replacing(out / f"{name}.npy") as file:
            if isinstance(array, np.ndarray):
                np.save(file, array)
                continue
            rows, chosen = array.of.rows, array.chosen
            shards.write_header(file, rows.dtype, (len(chosen), rows.shape[1]))
            for start in range(0, len(chosen), BLOCK):
                file.write(rows[chosen[start : start + BLOCK]].data)
        _write_ids(out / f"{name}.npy", array)


def _write_ids(path: pathlib.Path, rows: Taken) -> None:
    """Writes the ids of an array's rows beside it, and the texts of a gallery."""
    origins = [rows.of.origins[row] for row in rows.chosen]
    root = pathlib.Path(rows.of.metadata.get("data", {}).get("root") or "").absolute()
    noted: dict[str, Any] = {"root": str(root), "ids": [origin.id for origin in origins]}
    if path.name.startswith(("val_", "test_")):
        noted["texts"] = [origin.text for origin in origins]
    with storage.replacing(ids_file(path)) as file:
        file.write(json.dumps(noted).encode())


def ids_file(path: pathlib.Path) -> pathlib.Path:
    """Returns the file with the ids of an array's rows, such as x.ids.json beside x.npy."""
    return path.with_suffix(".ids.json")


class Ids(NamedTuple):
    """Ids of an array's rows.

    Attributes:
        ids: Ids in the extraction, such as paths of pictures.
        root: Folder that the paths are relative to.
        texts: Texts of the rows of a gallery. They are empty if the rows are no texts.
    """

    ids: Sequence[str]
    root: str
    texts: Sequence[str] = ()


def read_ids(path: str | None) -> Ids | None:
    """Reads the ids of the rows of an array.

    Args:
        path: File of the array, or None if there is none.

    Returns:
        The ids, or None if `write` has not written the array.

    Raises:
        InputError: The file of the ids is damaged.
    """
    if not path:
        return None
    file = ids_file(pathlib.Path(files.split_key(path)[0]).expanduser())
    return Ids(**storage.read_json(file)) if file.exists() else None
