"""From items to a folder of embeddings, and from two folders to files for experiments.main.

A finished folder holds

    embeddings.npy    [n, d], a row per item, for `--config.data.files.*` of experiments.main
    rows.jsonl        the id and group of every row, and its text
    skipped.jsonl     the id and reason of every item that has no row
    inputs.jsonl      the id, group and fingerprint of every item, to notice a change
    metadata.json     encoder, revision, pooling, dtype and count; written last

The first four grow by `shard_size` items at a time, and `progress.json` says how far they are
complete: what a killed run wrote beyond is cut off. So they are a function of the items and the
options alone, and a run that was killed and started again ends in the same bytes as any other.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from experiments import workdir
from experiments.extract.encoders import Encoder
from experiments.extract.items import Item, Source
from sotalign_jax import checks
from sotalign_jax import data as data_lib

EMBEDDINGS, ROWS = "embeddings.npy", "rows.jsonl"
SKIPPED, INPUTS = "skipped.jsonl", "inputs.jsonl"
GROWING = (EMBEDDINGS, ROWS, SKIPPED, INPUTS)
METADATA, PROGRESS = "metadata.json", "progress.json"


class Row(NamedTuple):
    """Where a row of embeddings comes from."""

    id: str
    group: str
    text: str = ""


class Embeddings(NamedTuple):
    """A finished folder: memory-mapped rows, their origins and the metadata."""

    rows: np.ndarray
    origins: list[Row]
    metadata: dict[str, Any]


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
) -> dict[str, Any]:
    """Embeds what `encoder` can read of a source, or goes on with what was begun in `out`.

    `data` says what the items are, for the metadata, which is returned; `shard_size` items are
    embedded between two saves, and `workers` threads read and prepare them. A folder of something
    else, or an item that has changed since it was embedded, is an InputError. After an OSError,
    such as a full disk, the next start goes on from what is saved.
    """
    if encoder.modality not in source.items:
        text = f"encoder: needs {encoder.modality} but the dataset has {' and '.join(source.items)}"
        raise checks.InputError(f"{text}; choose another encoder")

    def items() -> Iterator[Item]:
        return itertools.islice(source.items[encoder.modality](), limit)

    total = sum(1 for _ in items())
    if not total:
        raise checks.InputError(f"data: no {encoder.modality} found in {data}; check --root")
    data = {**data, "limit": limit}
    if source.classes is not None:
        data["classes"] = list(source.classes)
    metadata = {"format": 2, "encoder": encoder.describe(), "data": data, "dtype": dtype}
    workdir.open_run(out, {**metadata, "shard_size": shard_size})
    with workdir.only_process(out):
        if change := difference(items(), out):
            text = f"workdir: {out} was made from other data: {change}"
            raise checks.InputError(f"{text}; choose another --workdir or remove it")
        if not (out / METADATA).exists():
            shape = _embed(items(), total, encoder, out, dtype, shard_size, workers)
            metadata |= {"data": {**data, "items": total}, "shape": shape, "count": shape[0]}
            workdir.write_json(out / METADATA, {**metadata, "skipped": total - shape[0]})
        (out / PROGRESS).unlink(missing_ok=True)
    found: dict[str, Any] = workdir.read_json(out / METADATA)
    return found


def load(folder: pathlib.Path) -> Embeddings:
    """Opens a finished folder; InputError if it is not finished, or damaged."""
    if not (folder / METADATA).exists():
        remedy = "check the path, or start its extraction again to finish it"
        raise checks.InputError(f"{folder}: holds no finished embeddings; {remedy}")
    metadata = workdir.read_json(folder / METADATA)
    rows = np.load(folder / EMBEDDINGS, mmap_mode="r")
    origins = [Row(**record) for record in _read_lines(folder / ROWS)]
    if list(rows.shape) != metadata["shape"] or len(origins) != len(rows):
        text = f"metadata.json says {metadata['shape']}, embeddings.npy {list(rows.shape)}"
        text = f"{folder}: its files do not belong together ({text}, rows.jsonl {len(origins)})"
        raise checks.InputError(f"{text}; extract them again")
    return Embeddings(rows, origins, metadata)


def _read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def difference(items: Iterator[Item], out: pathlib.Path) -> str | None:
    """How the first item differs from what a folder, finished or not, was made from, if any does.

    Content is read only of files that were written since.
    """
    finished, seen = (out / METADATA).exists(), None
    begun = not finished and (out / PROGRESS).exists()
    done = workdir.read_json(out / PROGRESS)["items"] if begun else None
    lines = _read_lines(out / INPUTS) if finished or begun else iter(())
    for item, old in itertools.zip_longest(items, itertools.islice(lines, done)):
        if old is None:
            return f"{item.id!r} is new" if finished else None
        if item is None:
            return f"{old['id']!r} is gone"
        if (item.id, item.group) != (old["id"], old["group"]):
            return f"{item.id!r} is in place of {old['id']!r}"
        if (item.origin, old["origin"]) == seen:  # a file may hold many items
            continue
        seen = item.origin, old["origin"]
        if isinstance(item.origin, pathlib.Path):
            if change := workdir.changed(old["origin"], item.origin):
                return change
        elif _identify(item.origin) != old["origin"]:
            return f"{item.id!r} has another text"
    return None


def _identify(origin: pathlib.Path | str) -> dict[str, Any]:
    """The fingerprint of a file, empty if it cannot be read, or the digest of a text."""
    if isinstance(origin, str):
        text = origin.encode("utf-8", "surrogatepass")
        return {"digest": hashlib.blake2b(text, digest_size=16).hexdigest()}
    try:
        return workdir.fingerprint(origin)
    except OSError:  # loading the item will say why
        return {}


def _embed(
    items: Iterator[Item],
    total: int,
    encoder: Encoder,
    out: pathlib.Path,
    dtype: str,
    shard_size: int,
    workers: int,
) -> list[int]:
    """Completes the growing files, leaving out rows whose id came before; their shape."""
    saved: dict[str, Any] = {"items": 0, "bytes": dict.fromkeys(GROWING, 0)}
    if (out / PROGRESS).exists():
        saved = workdir.read_json(out / PROGRESS)
    with contextlib.ExitStack() as stack:
        growing = {name: stack.enter_context((out / name).open("ab")) for name in GROWING}
        for name, file in growing.items():
            if file.tell() < saved["bytes"][name]:
                raise checks.InputError(f"workdir: {out / name} is cut short; remove {out}")
            file.truncate(saved["bytes"][name])
            file.seek(0, os.SEEK_END)
        ids = {row["id"] for row in _read_lines(out / ROWS)}
        done, unit = saved["items"], f"{encoder.modality} rows"
        progress = workdir.Progress(total, "extract", initial=done, unit=unit, rate=True)
        bar = stack.enter_context(progress)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(workers))
        rest = itertools.islice(items, done, None)

        def line(name: str, **record: Any) -> None:
            growing[name].write(json.dumps(record).encode() + b"\n")

        while shard := list(itertools.islice(rest, shard_size)):
            made = _embed_shard(shard, encoder, dtype, pool, workers, bar)
            for item, (origin, row, reason, text) in zip(shard, made, strict=True):
                line(INPUTS, id=item.id, group=item.group, origin=origin)
                if row is None or item.id in ids:
                    reason = reason or "duplicate id; the first one is kept"
                    line(SKIPPED, id=item.id, reason=reason)
                    continue
                if not ids:
                    write_header(growing[EMBEDDINGS], dtype, (0, len(row)))
                ids.add(item.id)
                told = {} if text is None else {"text": text}
                line(ROWS, id=item.id, group=item.group, **told)
                growing[EMBEDDINGS].write(row.data)
            for file in growing.values():
                file.flush()
                os.fsync(file.fileno())
            done += len(shard)
            sizes = {name: file.tell() for name, file in growing.items()}
            workdir.write_json(out / PROGRESS, {"items": done, "bytes": sizes})
    if not ids:
        reason = next(_read_lines(out / SKIPPED))["reason"]
        raise checks.InputError(f"data: no item could be embedded; the first: {reason}")
    with (out / EMBEDDINGS).open("r+b") as array:  # a header has room for any number of rows
        np.lib.format.read_magic(array)
        (_, width), *_ = np.lib.format.read_array_header_1_0(array)
        array.seek(0)
        write_header(array, dtype, (len(ids), width))
    return [len(ids), width]


def write_header(file: BinaryIO, dtype: Any, shape: tuple[int, ...]) -> None:
    """Begins an .npy file, whose rows are written after it."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _embed_shard(
    items: list[Item],
    encoder: Encoder,
    dtype: str,
    pool: concurrent.futures.Executor,
    workers: int,
    bar: workdir.Progress,
) -> Iterator[tuple[dict[str, Any], np.ndarray | None, str, str | None]]:
    """Of every item its fingerprint, its embedding or why there is none, and its text."""
    identify = functools.lru_cache(maxsize=64)(_identify)  # a file may hold many items
    origins: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    texts: dict[int, str] = {}
    rows: dict[int, np.ndarray] = {}

    def prepare(index: int) -> tuple[int, Any]:
        item = items[index]
        # First, so that what is written while it is read counts as a change later.
        origins[index] = identify(item.origin)
        try:
            content = item.load()
            if isinstance(content, str):
                if not content.strip():
                    raise ValueError("is empty")
                texts[index] = content
            return index, encoder.prepare(content)
        except (checks.InputError, MemoryError):  # no fault of the item
            raise
        except Exception as error:  # whatever is wrong with one item, the others go on
            reasons[index] = checks.first_line(error)
            return index, None

    def in_order(ahead: int) -> Iterator[tuple[int, Any]]:
        waiting: deque[concurrent.futures.Future[tuple[int, Any]]] = deque()
        for index in range(len(items)):
            waiting.append(pool.submit(prepare, index))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)

    prepared = in_order(2 * max(encoder.batch_size, workers))  # two batches exist at a time
    if encoder.modality == "text":  # short with short: less padding
        prepared = iter(sorted(prepared, key=lambda entry: len(entry[1] or "")))
    while batch := list(itertools.islice(prepared, encoder.batch_size)):
        good = [(index, content) for index, content in batch if index not in reasons]
        if good:
            embedded = np.asarray(encoder.embed([content for _, content in good]))
            with np.errstate(over="ignore"):  # what becomes infinite is skipped, and listed
                stored = embedded.astype(dtype)
            for (index, _), row in zip(good, stored, strict=True):
                if not np.isfinite(row).all():
                    reasons[index] = f"its embedding is not finite in {dtype}"
                elif not row.any():
                    reasons[index] = "its embedding is zero"
                else:
                    rows[index] = row
        bar.advance(len(batch))
    found = range(len(items))
    return ((origins[i], rows.get(i), reasons.get(i, ""), texts.get(i)) for i in found)


# --- two extractions to files for experiments.main, rows matched by their group -------------------

PARTS = ("train", "val", "test", "split", "sue", "zero_shot")
ENCODERS, TEST = "encoders.json", "test_rows.json"
"""Notes beside the files: the encoders, so that a search can use a model trained on them; and what
the test rows are, ids below the dataset's root and texts, so that a report can show them."""
BLOCK = 65_536
"""Rows that are written at a time: they may be larger than memory."""


class Taken(NamedTuple):
    """Rows of an extraction."""

    of: Embeddings
    chosen: np.ndarray


Arrays = dict[str, Taken | np.ndarray]


def match(x: Embeddings, y: Embeddings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of x that have rows of y, those rows of y, and x_of_y: y[j] belongs to x[x_of_y[j]]."""
    row_of: dict[str, int] = {}
    for row, origin in enumerate(x.origins):
        if origin.group in row_of:
            both = f"{origin.id!r} and {x.origins[row_of[origin.group]].id!r}"
            remedy = "pass the side with one row a group as x (or --part=zero_shot)"
            raise checks.InputError(f"x: {both} share the group {origin.group!r}; {remedy}")
        row_of[origin.group] = row
    rows_y = [row for row, origin in enumerate(y.origins) if origin.group in row_of]
    if not rows_y:
        groups = (of.origins[0].group for of in (y, x))
        text = "y: none of its groups, such as {!r}, is in x, such as {!r}".format(*groups)
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
    n_pairs: int = 500,
    seed: int = 0,
) -> Arrays:
    """The files of one of PARTS by name.

    A training table has a row per caption, so a picture comes as often as its captions; rows
    without a partner are its pools. A gallery has a picture once, and all its captions. "split"
    has both: every group is in one of train, val and test, which get these fractions. "sue" takes
    one caption a picture, see `data.sue_rows`.
    """
    if part == "zero_shot":
        return _zero_shot(x, y)
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise checks.InputError(f"val, test: are {val} and {test}; pass fractions that leave some")
    rows_x, rows_y, x_of_y = match(x, y)
    if part == "sue":
        rows_y = rows_y[np.unique(x_of_y, return_index=True)[1]]
        tests, kept = data_lib.sue_rows(len(rows_x), n_pairs=n_pairs, seed=seed)
        chosen = {"": (kept.pairs,) * 2, "unpaired_": (kept.x, kept.y), "test_": (tests,) * 2}
        return {
            f"{name}{side}": Taken(of, rows[picked])
            for name, both in chosen.items()
            for side, of, rows, picked in zip("xy", (x, y), (rows_x, rows_y), both, strict=True)
        }
    parts = {part: np.arange(len(rows_x))}
    if part == "split":
        order = np.random.default_rng(seed).permutation(len(rows_x))
        ends = np.rint(np.cumsum([val, test]) * len(order)).astype(int)
        parts = dict(zip(("val", "test", "train"), np.split(order, ends), strict=True))
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


def _zero_shot(x: Embeddings, y: Embeddings) -> Arrays:
    """Pictures, labels and prompts [classes, templates, width] of a classification set."""
    classes = x.metadata["data"].get("classes")
    if classes is None or classes != y.metadata["data"].get("classes"):
        remedy = "extract both from food101, ..."
        raise checks.InputError(f"zero_shot: x and y are not of one classification set; {remedy}")
    labels, of_prompts = (np.array([int(o.group) for o in of.origins], np.int32) for of in (x, y))
    counts = np.bincount(of_prompts, minlength=len(classes))
    if counts.min() != counts.max():
        text = f"zero_shot: classes have {counts.min()} to {counts.max()} prompts"
        raise checks.InputError(f"{text}; extract the prompts again, without --limit")
    prompts = y.rows[np.argsort(of_prompts, kind="stable")]
    return {
        "zero_shot_x": np.asarray(x.rows),
        "zero_shot_labels": labels,
        "zero_shot_prompts": prompts.reshape(len(classes), -1, prompts.shape[1]),
    }


def write(out: pathlib.Path, arrays: Arrays, x: Embeddings, y: Embeddings) -> None:
    """Writes the files, which `files.py:from=OUT` reads; pools of an earlier table are removed."""
    out.mkdir(parents=True, exist_ok=True)
    encoders = {"x": x.metadata["encoder"], "y": y.metadata["encoder"]}
    if (out / ENCODERS).exists() and workdir.read_json(out / ENCODERS) != encoders:
        text = f"workdir: {out} has files of other encoders (see {ENCODERS})"
        raise checks.InputError(f"{text}; choose another --workdir")
    workdir.write_json(out / ENCODERS, encoders)
    for name in ("unpaired_x", "unpaired_y") if "x" in arrays else ():
        (out / f"{name}.npy").unlink(missing_ok=True)
    for name, array in arrays.items():
        with workdir.replacing(out / f"{name}.npy") as file:
            if isinstance(array, np.ndarray):
                np.save(file, array)
                continue
            rows, chosen = array.of.rows, array.chosen
            write_header(file, rows.dtype, (len(chosen), rows.shape[1]))
            for start in range(0, len(chosen), BLOCK):
                file.write(rows[chosen[start : start + BLOCK]].data)
    if "test_x" in arrays:
        tests = {side: arrays[f"test_{side}"] for side in "xy"}
        kept = {side: [of.origins[row] for row in chosen] for side, (of, chosen) in tests.items()}
        noted = {"x": [row.id for row in kept["x"]], "y": [row.text or row.id for row in kept["y"]]}
        root = pathlib.Path(x.metadata["data"].get("root", "")).absolute()
        workdir.write_json(out / TEST, {"root": str(root), **noted})
