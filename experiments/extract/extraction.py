"""From items to a folder of embeddings; a run that was killed goes on where it stopped.

A finished folder holds

    embeddings.npy    [n, d], a row per item, for `--config.data.files.*` of experiments.main
    rows.jsonl        the id and group of every row
    skipped.jsonl     the id and reason of every item that has no row
    inputs.jsonl      the id, group and fingerprint of every item, to notice a change
    metadata.json     encoder, revision, pooling, dtype, count and checksums; written last

The first four grow by `shard_size` items at a time, and `progress.json` says how far they are
complete: what a killed run wrote beyond is cut off. So they are a function of the items and the
options alone, and an interrupted run ends in the same bytes as an uninterrupted one.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from experiments import workdir
from experiments.extract.encoders import Encoder
from experiments.extract.items import Item, Source
from sotalign_jax import checks

FORMAT = 2
EMBEDDINGS, ROWS, SKIPPED, INPUTS = GROWING = (
    "embeddings.npy",
    "rows.jsonl",
    "skipped.jsonl",
    "inputs.jsonl",
)
METADATA, PROGRESS = "metadata.json", "progress.json"
Pool = concurrent.futures.ThreadPoolExecutor


class Row(NamedTuple):
    """Where a row of embeddings comes from."""

    id: str
    group: str


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

    `data` says what the items are, for the metadata; `shard_size` items are embedded between two
    saves, and `workers` threads read and prepare them. Returns the metadata.

    Raises:
        InputError: there is nothing to embed, the folder holds something else, or an item has
            changed since it was embedded.
        OSError: the disk is full, ...; what is saved stays, and the next start goes on from it.
    """
    checks.choice("dtype", dtype, ("float16", "float32"))
    checks.whole(1, shard_size=shard_size)
    if encoder.modality not in source.items:
        raise checks.InputError(
            f"encoder: {encoder.describe()['name']} needs {encoder.modality} but the dataset has "
            f"{' and '.join(source.items)}; choose another encoder"
        )

    def items() -> Iterator[Item]:
        return itertools.islice(source.items[encoder.modality](), limit)

    total = sum(1 for _ in items())
    if not total:
        raise checks.InputError(f"data: no {encoder.modality} found in {data}; check --root")
    data = {**data, "limit": limit}
    if source.classes is not None:
        data["classes"] = list(source.classes)
    metadata = {"format": FORMAT, "encoder": encoder.describe(), "data": data, "dtype": dtype}
    workdir.open_run(out, {**metadata, "shard_size": shard_size})
    with workdir.only_process(out):
        if change := difference(items(), out):
            raise checks.InputError(
                f"workdir: {out} was made from other data: {change}; choose another --workdir or "
                "remove it"
            )
        if not (out / METADATA).exists():
            shape = _embed(items(), total, encoder, out, dtype, shard_size, workers)
            metadata |= {"data": {**data, "items": total}, "shape": shape, "count": shape[0]}
            files = {}
            for name in GROWING:
                with (out / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    files[name] = {"bytes": file.tell(), "sha256": digest}
            metadata |= {"skipped": total - shape[0], "files": files}
            workdir.write_json(out / METADATA, metadata)
        (out / PROGRESS).unlink(missing_ok=True)
    found: dict[str, Any] = workdir.read_json(out / METADATA)
    return found


def load(folder: pathlib.Path) -> Embeddings:
    """Opens a finished folder.

    Raises:
        InputError: the run that writes it has not ended, or its files are damaged.
    """
    if not (folder / METADATA).exists():
        begun = (folder / "config.json").exists()
        remedy = "start that extraction again to finish it" if begun else "check the path"
        raise checks.InputError(f"{folder}: holds no finished embeddings; {remedy}")
    metadata = workdir.read_json(folder / METADATA)
    rows = np.load(folder / EMBEDDINGS, mmap_mode="r")
    origins = [Row(**record) for record in _read_lines(folder / ROWS)]
    if list(rows.shape) != metadata["shape"] or len(origins) != len(rows):
        raise checks.InputError(
            f"{folder}: its files do not belong together (metadata.json says {metadata['shape']}, "
            f"embeddings.npy {list(rows.shape)}, rows.jsonl {len(origins)}); extract them again"
        )
    return Embeddings(rows, origins, metadata)


def _read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


# --- what was embedded --------------------------------------------------------------------------


def difference(items: Iterator[Item], out: pathlib.Path) -> str | None:
    """How items differ from what a folder, finished or not, was made from; None if they do not.

    Names the first that differs. Content is read only of files that were written since.
    """
    finished = (out / METADATA).exists()
    recorded = _read_lines(out / INPUTS) if finished else iter(())
    if not finished and (out / PROGRESS).exists():
        done = workdir.read_json(out / PROGRESS)["items"]
        recorded = itertools.islice(_read_lines(out / INPUTS), done)
    seen = None
    for item, old in itertools.zip_longest(items, recorded):
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


# --- embedding ----------------------------------------------------------------------------------


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
        bar, pool = stack.enter_context(progress), stack.enter_context(Pool(workers))
        rest = itertools.islice(items, done, None)

        def line(name: str, **record: Any) -> None:
            growing[name].write(json.dumps(record).encode() + b"\n")

        while shard := list(itertools.islice(rest, shard_size)):
            made = _embed_shard(shard, encoder, dtype, pool, workers, bar.advance)
            for item, (origin, row, reason) in zip(shard, made, strict=True):
                line(INPUTS, id=item.id, group=item.group, origin=origin)
                if row is None or item.id in ids:
                    told = reason or "duplicate id; the first one is kept"
                    line(SKIPPED, id=item.id, reason=told)
                    continue
                if not ids:
                    write_header(growing[EMBEDDINGS], dtype, (0, len(row)))
                ids.add(item.id)
                line(ROWS, id=item.id, group=item.group)
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
    pool: Pool,
    workers: int,
    advance: Callable[[int], None],
) -> list[tuple[dict[str, Any], np.ndarray | None, str]]:
    """Of every item its fingerprint, and its embedding or why there is none.

    No more than two batches of prepared items exist at a time.
    """
    identify = functools.lru_cache(maxsize=64)(_identify)  # a file may hold many items
    origins: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    rows: dict[int, np.ndarray] = {}

    def prepare(index: int) -> tuple[int, Any]:
        item = items[index]
        # First, so that what is written while it is read counts as a change later.
        origins[index] = identify(item.origin)
        try:
            content = item.load()
            if isinstance(content, str) and not content.strip():
                raise ValueError("is empty")
            return index, encoder.prepare(content)
        except (checks.InputError, MemoryError):  # no fault of the item
            raise
        except Exception as error:  # whatever is wrong with one item, the others go on
            reasons[index] = checks.first_line(error)
            return index, None

    ahead = 2 * max(encoder.batch_size, workers)
    prepared = _bounded_map(pool, prepare, range(len(items)), ahead)
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
        advance(len(batch))
    return [(origins[i], rows.get(i), reasons.get(i, "")) for i in range(len(items))]


def _bounded_map(
    pool: Pool, function: Callable[[int], Any], arguments: Iterable[int], ahead: int
) -> Iterator[Any]:
    """Results in order, with at most `ahead` of them computed in advance."""
    waiting: deque[concurrent.futures.Future[Any]] = deque()
    for argument in arguments:
        waiting.append(pool.submit(function, argument))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
