"""From items to a folder of embeddings: in shards, so that a run that was killed goes on.

A finished folder holds

    embeddings.npy    [n, d], a row per item, for `--config.data.files.*` of experiments.main
    rows.jsonl        the id and group of every row
    skipped.jsonl     the id and reason of every item that has no row
    metadata.json     encoder, revision, pooling, dtype, count and checksums; written last

and until then `shards/`, one file per `shard_size` items. A shard is a function of its items and
the options alone, so an interrupted run ends in the same bytes as an uninterrupted one.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import pathlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from experiments import workdir
from experiments.datasets import Item
from sotalign_jax import checks, files

FORMAT = 1
EMBEDDINGS, ROWS, SKIPPED, METADATA = (
    "embeddings.npy",
    "rows.jsonl",
    "skipped.jsonl",
    "metadata.json",
)


class Encoder(Protocol):
    """A frozen network. `prepare` may run in several threads at once, `embed` in one."""

    modality: str
    batch_size: int

    def describe(self) -> dict[str, Any]:
        """What identifies the embeddings: name, revision, pooling, ... as JSON values."""

    def prepare(self, content: Any) -> Any:
        """What `embed` takes of one item; raises if the content cannot be used."""

    def embed(self, batch: Sequence[Any]) -> np.ndarray:
        """Embeddings [n, d] of n prepared items."""


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
    items: Callable[[], Iterator[Item]],
    encoder: Encoder,
    out: pathlib.Path,
    *,
    data: dict[str, Any],
    dtype: str = "float16",
    shard_size: int = 4096,
    workers: int = 4,
) -> dict[str, Any]:
    """Embeds items into the folder `out`, or goes on with what was begun there.

    Args:
        items: starts over the items, always in the same order.
        encoder: embeds them.
        out: the folder.
        data: what the items are, as JSON values, for the metadata.
        dtype: of the stored embeddings, "float16" or "float32".
        shard_size: items between two saves.
        workers: threads that read and prepare items.

    Returns:
        The metadata.

    Raises:
        InputError: there is nothing to embed, or the folder holds something else.
        OSError: the disk is full, ...; what is saved stays, and the next start goes on from it.
    """
    checks.choice("dtype", dtype, ("float16", "float32"))
    checks.whole(1, shard_size=shard_size)
    total, digest = fingerprint(items())
    if not total:
        raise checks.InputError(f"data: no {encoder.modality} found in {data}; check --root")
    config = {
        "encoder": encoder.describe(),
        "data": {**data, "items": total, "digest": digest},
        "dtype": dtype,
        "shard_size": shard_size,
    }
    workdir.open_run(out, config, flag="out")
    with workdir.only_process(out, flag="out"):
        if not (out / METADATA).exists():
            (out / "shards").mkdir(exist_ok=True)
            _write_shards(items(), total, encoder, out, dtype, shard_size, workers)
            _join_shards(out, config)
        shutil.rmtree(out / "shards", ignore_errors=True)
    metadata: dict[str, Any] = workdir.read_json(out / METADATA)
    return metadata


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
    with (folder / ROWS).open(encoding="utf-8") as file:
        origins = [Row(**json.loads(line)) for line in file]
    if list(rows.shape) != metadata["shape"] or len(origins) != len(rows):
        raise checks.InputError(
            f"{folder}: its files do not belong together (metadata.json says {metadata['shape']}, "
            f"embeddings.npy {list(rows.shape)}, rows.jsonl {len(origins)}); extract them again"
        )
    return Embeddings(rows, origins, metadata)


def first_items(
    items: Callable[[], Iterator[Item]], limit: int | None
) -> Callable[[], Iterator[Item]]:
    """Starts over the first `limit` items, over all when None."""
    return lambda: itertools.islice(items(), limit)


def fingerprint(items: Iterable[Item]) -> tuple[int, str]:
    """Number of the items and a digest of their ids and groups; nothing is loaded."""
    digest, count = hashlib.sha256(), 0
    for item in items:
        digest.update(json.dumps([item.id, item.group]).encode())
        count += 1
    return count, digest.hexdigest()


# --- shards -------------------------------------------------------------------------------------


def _write_shards(
    items: Iterator[Item],
    total: int,
    encoder: Encoder,
    out: pathlib.Path,
    dtype: str,
    shard_size: int,
    workers: int,
) -> None:
    places = [out / "shards" / f"{n:06d}.npz" for n in range(-(-total // shard_size))]
    sizes = [min(shard_size, total - n * shard_size) for n in range(len(places))]
    done = sum(size for size, path in zip(sizes, places, strict=True) if path.exists())
    unit = f"{encoder.modality} rows"
    with (
        workdir.Progress(total, "extract", initial=done, unit=unit, rate=True) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(done)

        for path in places:
            chunk = list(itertools.islice(items, shard_size))
            if not path.exists():
                shard = _embed_shard(chunk, encoder, dtype, pool, workers, advance)
                with workdir.replacing(path) as file:
                    np.savez(file, allow_pickle=False, **shard)


def _embed_shard(
    items: list[Item],
    encoder: Encoder,
    dtype: str,
    pool: concurrent.futures.ThreadPoolExecutor,
    workers: int,
    advance: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """The arrays of one shard; no more than two batches of prepared items exist at a time."""
    reasons: dict[int, str] = {}
    rows: dict[int, np.ndarray] = {}

    def prepare(index: int) -> tuple[int, Any, str]:
        try:
            content = items[index].load()
            if isinstance(content, str) and not content.strip():
                raise ValueError("is empty")
            return index, encoder.prepare(content), ""
        except (checks.InputError, MemoryError):  # no fault of the item
            raise
        except Exception as error:  # whatever is wrong with one item, the others go on
            return index, None, _first_line(error)

    ahead = 2 * max(encoder.batch_size, workers)
    prepared = _bounded_map(pool, prepare, range(len(items)), ahead)
    if encoder.modality == "text":  # short with short: less padding
        prepared = iter(sorted(prepared, key=lambda entry: len(entry[1] or "")))
    for batch in _batches(prepared, encoder.batch_size):
        reasons |= {index: reason for index, _, reason in batch if reason}
        good = [(index, content) for index, content, reason in batch if not reason]
        if good:
            embedded = np.asarray(encoder.embed([content for _, content in good]))
            stored = _cast(embedded, dtype)
            for (index, _), row in zip(good, stored, strict=True):
                if not np.isfinite(row).all():
                    reasons[index] = f"its embedding is not finite in {dtype}"
                elif not row.any():
                    reasons[index] = "its embedding is zero"
                else:
                    rows[index] = row
        advance(len(batch))
    kept, bad = sorted(rows), sorted(reasons)
    width = next(iter(rows.values())).shape if rows else (0,)
    return {
        "rows": np.stack([rows[i] for i in kept]) if kept else np.empty((0, *width), dtype),
        "ids": _pack([items[i].id for i in kept]),
        "groups": _pack([items[i].group for i in kept]),
        "bad_ids": _pack([items[i].id for i in bad]),
        "reasons": _pack([reasons[i] for i in bad]),
    }


def _bounded_map(
    pool: concurrent.futures.ThreadPoolExecutor,
    function: Callable[[int], Any],
    arguments: Iterable[int],
    ahead: int,
) -> Iterator[Any]:
    """Results in order, with at most `ahead` of them computed in advance."""
    waiting: deque[concurrent.futures.Future[Any]] = deque()
    for argument in arguments:
        waiting.append(pool.submit(function, argument))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _batches(entries: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _cast(rows: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # what becomes infinite is skipped, and listed
        return rows.astype(dtype)


def _pack(values: list[str]) -> np.ndarray:
    """Strings as JSON in an array of bytes: numpy's own are padded to the longest."""
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


def _unpack(packed: np.ndarray) -> list[str]:
    values: list[str] = json.loads(packed.tobytes())
    return values


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# --- the finished files -------------------------------------------------------------------------


class _Summing:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum, self.size = file, hashlib.sha256(), 0

    def write(self, content: Any) -> None:
        self.sum.update(content)
        self.size += memoryview(content).nbytes
        self._file.write(content)

    def summary(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.sum.hexdigest()}


def _join_shards(out: pathlib.Path, config: dict[str, Any]) -> None:
    """Joins the shards, one at a time, leaving out rows whose id came before."""
    paths = sorted((out / "shards").glob("*.npz"))
    first = _first_rows(paths)
    count = int(first.sum())
    if not count:
        raise checks.InputError(
            f"data: none of {config['data']['items']} items could be embedded; "
            f"the first: {_unpack(_read_shard(paths[0], 'reasons'))[0]}"
        )
    width = next(rows.shape[1] for rows in (_read_shard(p, "rows") for p in paths) if len(rows))
    with contextlib.ExitStack() as stack:
        embeddings, rows, skipped = (
            _Summing(stack.enter_context(workdir.replacing(out / name)))
            for name in (EMBEDDINGS, ROWS, SKIPPED)
        )
        header = {"descr": np.dtype(config["dtype"]).str, "fortran_order": False}
        np.lib.format.write_array_header_1_0(embeddings, {**header, "shape": (count, width)})
        start, bad = 0, 0
        for path in paths:
            ids, groups = (_unpack(_read_shard(path, name)) for name in ("ids", "groups"))
            keep = first[start : start + len(ids)]
            start += len(ids)
            if keep.any():
                embeddings.write(np.ascontiguousarray(_read_shard(path, "rows")[keep]).data)
            bad_ids, reasons = (_unpack(_read_shard(path, n)) for n in ("bad_ids", "reasons"))
            lost = list(zip(bad_ids, reasons, strict=True))
            for name, group, kept in zip(ids, groups, keep, strict=True):
                if kept:
                    rows.write(_line(id=name, group=group))
                else:
                    lost.append((name, "duplicate id; the first one is kept"))
            for name, reason in lost:
                skipped.write(_line(id=name, reason=reason))
            bad += len(lost)
        sums = {EMBEDDINGS: embeddings.summary(), ROWS: rows.summary(), SKIPPED: skipped.summary()}
    metadata = {
        "format": FORMAT,
        "encoder": config["encoder"],
        "data": config["data"],
        "dtype": config["dtype"],
        "shape": [count, width],
        "count": count,
        "skipped": bad,
        "files": sums,
    }
    workdir.write_json(out / METADATA, metadata)


def _first_rows(paths: list[pathlib.Path]) -> np.ndarray:
    """For every row of the shards, whether no earlier one has its id."""
    digests = bytearray()  # eight bytes a row: the ids of millions need not be held
    for path in paths:
        for name in _unpack(_read_shard(path, "ids")):
            digests += hashlib.blake2b(json.dumps(name).encode(), digest_size=8).digest()
    keys = np.frombuffer(digests, np.uint64)
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def _read_shard(path: pathlib.Path, name: str) -> np.ndarray:
    try:
        return files.load_array(path, key=name)
    except checks.InputError as error:
        raise checks.InputError(f"out: {error}: delete it and start again") from error


def _line(**record: str) -> bytes:
    return json.dumps(record).encode() + b"\n"
