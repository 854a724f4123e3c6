"""From items to a folder of embeddings: in shards, so that a run that was killed goes on.

A finished folder holds

    embeddings.npy    [n, d], a row per item, for `--config.data.files.*` of experiments.main
    rows.jsonl        the id and group of every row
    skipped.jsonl     the id and reason of every item that has no row
    inputs.jsonl      the id, group and fingerprint of every item, to notice a change
    metadata.json     encoder, revision, pooling, dtype, count and checksums; written last

and until then `shards/`, one file per `shard_size` items. A shard is a function of its items and
the options alone, so an interrupted run ends in the same bytes as an uninterrupted one.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments import workdir
from experiments.extract.items import Encoder, Item, Source
from sotalign_jax import checks, files

FORMAT = 2
EMBEDDINGS, ROWS, SKIPPED, INPUTS, METADATA = (
    "embeddings.npy",
    "rows.jsonl",
    "skipped.jsonl",
    "inputs.jsonl",
    "metadata.json",
)


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

    Args:
        source: its items always come in the same order.
        encoder: embeds them.
        out: the folder.
        data: what the items are, as JSON values, for the metadata.
        limit: only the first so many items.
        dtype: of the stored embeddings, "float16" or "float32".
        shard_size: items between two saves.
        workers: threads that read and prepare items.

    Returns:
        The metadata.

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
        data = {**data, "classes": list(source.classes)}
    config = {
        "format": FORMAT,
        "encoder": encoder.describe(),
        "data": data,
        "dtype": dtype,
        "shard_size": shard_size,
    }
    workdir.open_run(out, config)
    with workdir.only_process(out):
        change = difference(items(), out)
        if change is not None:
            raise checks.InputError(
                f"workdir: {out} was made from other data: {change}; choose another --workdir or "
                "remove it"
            )
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
    origins = [Row(**record) for record in _read_lines(folder / ROWS)]
    if list(rows.shape) != metadata["shape"] or len(origins) != len(rows):
        raise checks.InputError(
            f"{folder}: its files do not belong together (metadata.json says {metadata['shape']}, "
            f"embeddings.npy {list(rows.shape)}, rows.jsonl {len(origins)}); extract them again"
        )
    return Embeddings(rows, origins, metadata)


# --- what was embedded --------------------------------------------------------------------------


def difference(items: Iterator[Item], out: pathlib.Path) -> str | None:
    """How items differ from what a folder, finished or not, was made from; None if they do not.

    Names the first that differs. Content is read only of files that were written since.
    """
    recorded: Iterator[dict[str, Any] | None]
    beyond: Iterator[dict[str, Any] | None]
    finished = (out / METADATA).exists()
    recorded, whole = (_read_lines(out / INPUTS), True) if finished else _saved_inputs(out)
    beyond = itertools.repeat({"id": None} if whole else None)
    seen = None
    for item, old in zip(items, itertools.chain(recorded, beyond), strict=False):
        if old is None:  # not embedded yet
            continue
        if old["id"] is None:
            return f"{item.id!r} is new"
        if (item.id, item.group) != (old["id"], old["group"]):
            return f"{item.id!r} is in place of {old['id']!r}"
        if (item.origin, old["origin"]) != seen:  # a file may hold many items
            seen = item.origin, old["origin"]
            change = _change(item, old["origin"])
            if change is not None:
                return change
    gone = next((old for old in recorded if old is not None), None)
    return None if gone is None else f"{gone['id']!r} is gone"


def _change(item: Item, recorded: dict[str, Any]) -> str | None:
    if isinstance(item.origin, pathlib.Path):
        return workdir.changed(recorded, item.origin)
    return None if _identify(item.origin) == recorded else f"{item.id!r} has another text"


def _identify(origin: pathlib.Path | str) -> dict[str, Any]:
    """The fingerprint of a file, empty if it cannot be read, or the digest of a text."""
    if isinstance(origin, str):
        text = origin.encode("utf-8", "surrogatepass")
        return {"digest": hashlib.blake2b(text, digest_size=16).hexdigest()}
    try:
        return workdir.fingerprint(origin)
    except OSError:  # loading the item will say why
        return {}


def _saved_inputs(out: pathlib.Path) -> tuple[Iterator[dict[str, Any] | None], bool]:
    """Records of the items in shards, None where one is missing; whether the last item is there.

    A shard of fewer than `shard_size` items is the last one.
    """
    saved = {int(path.stem): path for path in (out / "shards").glob("*.npz")}
    if not saved:
        return iter(()), False
    size = workdir.read_json(out / "config.json")["shard_size"]

    def read(number: int) -> list[Any]:
        present = number in saved
        return _unpack(_read_shard(saved[number], "inputs")) if present else [None] * size

    shards = map(read, range(max(saved) + 1))
    return itertools.chain.from_iterable(shards), len(read(max(saved))) < size


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
        for path in places:
            chunk = list(itertools.islice(items, shard_size))
            if not path.exists():
                shard = _embed_shard(chunk, encoder, dtype, pool, workers, bar.advance)
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
    identify = functools.lru_cache(maxsize=64)(_identify)  # a file may hold many items
    inputs: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    rows: dict[int, np.ndarray] = {}

    def prepare(index: int) -> tuple[int, Any, str]:
        item = items[index]
        # First, so that what is written while it is read counts as a change later.
        inputs[index] = {"id": item.id, "group": item.group, "origin": identify(item.origin)}
        try:
            content = item.load()
            if isinstance(content, str) and not content.strip():
                raise ValueError("is empty")
            return index, encoder.prepare(content), ""
        except (checks.InputError, MemoryError):  # no fault of the item
            raise
        except Exception as error:  # whatever is wrong with one item, the others go on
            return index, None, checks.first_line(error)

    ahead = 2 * max(encoder.batch_size, workers)
    prepared = _bounded_map(pool, prepare, range(len(items)), ahead)
    if encoder.modality == "text":  # short with short: less padding
        prepared = iter(sorted(prepared, key=lambda entry: len(entry[1] or "")))
    while batch := list(itertools.islice(prepared, encoder.batch_size)):
        reasons |= {index: reason for index, _, reason in batch if reason}
        good = [(index, content) for index, content, reason in batch if not reason]
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
    kept = sorted(rows)
    return {
        "rows": np.stack([rows[i] for i in kept]) if kept else np.empty((0, 0), dtype),
        "kept": np.array(kept, np.int64),
        "inputs": _pack([inputs[i] for i in range(len(items))]),
        "reasons": _pack([reasons.get(i) for i in range(len(items))]),
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


def _pack(values: list[Any]) -> np.ndarray:
    """JSON in an array of bytes: numpy's own strings are padded to the longest."""
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


def _unpack(packed: np.ndarray) -> list[Any]:
    values: list[Any] = json.loads(packed.tobytes())
    return values


# --- the finished files -------------------------------------------------------------------------


def _join_shards(out: pathlib.Path, config: dict[str, Any]) -> None:
    """Joins the shards, one at a time, leaving out rows whose id came before."""
    paths = sorted((out / "shards").glob("*.npz"))
    first = _first_rows(paths)
    count, total, start = int(first.sum()), 0, 0
    if not count:
        reasons = _unpack(_read_shard(paths[0], "reasons"))
        raise checks.InputError(f"data: no item could be embedded; the first: {reasons[0]}")
    width = next(rows.shape[1] for rows in (_read_shard(p, "rows") for p in paths) if len(rows))
    with contextlib.ExitStack() as stack:
        written = {
            name: stack.enter_context(workdir.replacing(out / name))
            for name in (EMBEDDINGS, ROWS, SKIPPED, INPUTS)
        }

        def line(name: str, **record: Any) -> None:
            written[name].write(json.dumps(record).encode() + b"\n")

        header = {"descr": np.dtype(config["dtype"]).str, "fortran_order": False}
        np.lib.format.write_array_header_1_0(
            written[EMBEDDINGS], {**header, "shape": (count, width)}
        )
        for path in paths:
            inputs, reasons = (_unpack(_read_shard(path, name)) for name in ("inputs", "reasons"))
            kept = _read_shard(path, "kept")
            new = first[start : start + len(kept)]
            start += len(kept)
            total += len(inputs)
            if new.any():
                rows = np.ascontiguousarray(_read_shard(path, "rows")[new])
                written[EMBEDDINGS].write(rows.data)
            chosen = set(kept[new].tolist())
            for index, (item, reason) in enumerate(zip(inputs, reasons, strict=True)):
                line(INPUTS, **item)
                if index in chosen:
                    line(ROWS, id=item["id"], group=item["group"])
                else:
                    told = reason or "duplicate id; the first one is kept"
                    line(SKIPPED, id=item["id"], reason=told)
    metadata = {
        "format": FORMAT,
        "encoder": config["encoder"],
        "data": {**config["data"], "items": total},
        "dtype": config["dtype"],
        "shape": [count, width],
        "count": count,
        "skipped": total - count,
        "files": {name: _summary(out / name) for name in written},
    }
    workdir.write_json(out / METADATA, metadata)


def _summary(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _first_rows(paths: list[pathlib.Path]) -> np.ndarray:
    """For every row of the shards, whether no earlier one has its id."""
    digests = bytearray()  # eight bytes a row: the ids of millions need not be held
    for path in paths:
        inputs = _unpack(_read_shard(path, "inputs"))
        for index in _read_shard(path, "kept"):
            name = json.dumps(inputs[index]["id"]).encode()
            digests += hashlib.blake2b(name, digest_size=8).digest()
    keys = np.frombuffer(digests, np.uint64)
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def _read_shard(path: pathlib.Path, name: str) -> np.ndarray:
    try:
        return files.load_array(path, key=name)
    except checks.InputError as error:
        raise checks.InputError(f"workdir: {error}: delete it and start again") from error


def _read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
