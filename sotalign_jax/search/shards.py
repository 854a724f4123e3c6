"""The growing files of an extraction, which several processes fill together.

A shard is a run of consecutive items. Process r of w embeds the shards r, r + w, r + 2 w and so on.
A shard that is next in the files is appended to them. Any other shard becomes a file in the folder
`parts`, until the shards before it are complete. Whichever process completes the last shard
finishes the files, so that no process waits for another one.
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sotalign_jax import checks, storage

EMBEDDINGS, ROWS = "embeddings.npy", "rows.jsonl"
SKIPPED, INPUTS = "skipped.jsonl", "inputs.jsonl"
GROWING = (EMBEDDINGS, ROWS, SKIPPED, INPUTS)
METADATA, PROGRESS, PARTS = "metadata.json", "progress.json", "parts"
NEXT = "next"
"""Folder of the files that will replace those of a finished extraction."""


Lock = Callable[[], contextlib.AbstractContextManager[Any]]


class Process(NamedTuple):
    """One of the processes that share an extraction."""

    rank: int = 0
    world: int = 1


def process(environment: Mapping[str, str]) -> tuple[Process, int]:
    """Returns this process among those started by torchrun or SLURM, and its number on the host.

    Args:
        environment: Environment variables. SLURM's are those of a step, because a batch script
            that does not call srun is one process whatever its number of tasks is.

    Returns:
        The process, and the number of its GPU.

    Raises:
        InputError: The variables are no numbers, or contradict each other.
    """
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        if names[0] in environment and names[1] in environment:
            texts = [environment.get(name, "0") for name in names]
            if not all(text.isdecimal() for text in texts) or int(texts[0]) >= int(texts[1]):
                told = ", ".join(f"{n}={t}" for n, t in zip(names, texts, strict=True))
                raise checks.InputError(f"environment has {told}; set {names[0]} below {names[1]}")
            rank, world, local = map(int, texts)
            return Process(rank, world), local
    return Process(), 0


class Record(NamedTuple):
    """An embedded item. It has a row, or a reason why it has none."""

    id: str
    group: str
    origin: dict[str, Any]  # fingerprint of the file, or digest of the text
    text: str | None
    row: np.ndarray | None
    reason: str


class Files:
    """The files of an extraction.

    Args:
        out: Folder of the extraction.
        dtype: Dtype of the rows.
        shard_size: Number of items in a shard.
        total: Number of items.
        lock: Waits until no other process appends.
    """

    def __init__(
        self, out: pathlib.Path, dtype: str, shard_size: int, total: int, lock: Lock
    ) -> None:
        self.out, self.dtype, self.shard_size, self.total = out, dtype, shard_size, total
        self._lock = lock
        self._ids: set[str] = set()
        self._read = 0  # bytes of rows.jsonl whose ids are in `_ids`

    def done(self) -> int:
        """Returns the number of items in the files."""
        return self._saved()["items"]

    def has(self, shard: int) -> bool:
        """Returns True if a shard is in the files or waits for the shards before it."""
        return shard * self.shard_size < self.done() or self._part(shard).exists()

    def add(self, shard: int, records: list[Record]) -> None:
        """Appends a shard, and all that waited for it, or stores it until its turn comes."""
        with self._lock():
            if shard * self.shard_size == self.done():
                self._append(records)
            elif shard * self.shard_size > self.done():
                self._store(shard, records)
            self._append_parts()

    def finish(self, complete: Callable[[list[int]], None]) -> None:
        """Calls `complete` with the shape of all rows, if they are complete.

        Raises:
            InputError: No item has an embedding.
        """
        with self._lock():
            self._append_parts()
            if self.done() < self.total:
                return
            if not (self.out / METADATA).exists():
                complete(self._finished_shape())
            (self.out / PROGRESS).unlink(missing_ok=True)
            shutil.rmtree(self.out / PARTS, ignore_errors=True)
            storage.remove_temporary(self.out)

    def _saved(self) -> dict[str, Any]:
        if (self.out / METADATA).exists():
            return {"items": self.total}
        if (self.out / PROGRESS).exists():
            saved: dict[str, Any] = storage.read_json(self.out / PROGRESS)
            return saved
        return {"items": 0, "bytes": dict.fromkeys(GROWING, 0)}

    def _part(self, shard: int) -> pathlib.Path:
        return self.out / PARTS / f"{shard:08d}.npz"

    def _store(self, shard: int, records: list[Record]) -> None:
        """Writes a shard to its own file."""
        told = [record._replace(row=None) for record in records]
        rows = [record.row for record in records if record.row is not None]
        kept = [n for n, record in enumerate(records) if record.row is not None]
        self._part(shard).parent.mkdir(exist_ok=True)
        with storage.replacing(self._part(shard)) as file:
            stored = np.array(rows, self.dtype)
            np.savez(file, told=np.array(json.dumps(told)), rows=stored, kept=np.array(kept))

    def _append_parts(self) -> None:
        """Appends the shards that are next."""
        while (part := self._part(self.done() // self.shard_size)).exists():
            with np.load(part) as stored:
                records = [Record(*one) for one in json.loads(str(stored["told"]))]
                for n, row in zip(stored["kept"], stored["rows"], strict=True):
                    records[n] = records[n]._replace(row=row)
            self._append(records)
            part.unlink()

    def _append(self, records: list[Record]) -> None:
        """Appends records to the files, and counts them once they are on the disk."""
        saved = self._saved()
        with contextlib.ExitStack() as stack:
            growing = {n: stack.enter_context((self.out / n).open("ab")) for n in GROWING}
            for name, file in growing.items():
                if file.tell() < saved["bytes"][name]:
                    raise checks.InputError(
                        f"workdir file {self.out / name} is cut short; "
                        f"remove {self.out} and start again"
                    )
                file.truncate(saved["bytes"][name])  # remove rows written after the last save
                file.seek(0, os.SEEK_END)
            self._learn_ids(saved["bytes"][ROWS])
            for record in records:
                self._append_one(record, growing)
            for file in growing.values():
                file.flush()
                os.fsync(file.fileno())
            sizes = {name: file.tell() for name, file in growing.items()}
        self._read = sizes[ROWS]
        items = saved["items"] + len(records)
        storage.write_json(self.out / PROGRESS, {"items": items, "bytes": sizes})

    def _append_one(self, record: Record, growing: Mapping[str, BinaryIO]) -> None:
        def line(name: str, **values: Any) -> None:
            growing[name].write(json.dumps(values).encode() + b"\n")

        line(INPUTS, id=record.id, group=record.group, origin=record.origin)
        if record.row is None or record.id in self._ids:
            reason = record.reason or "id is a duplicate; the first item is kept"
            line(SKIPPED, id=record.id, reason=reason)
            return
        if not self._ids:  # the width is known with the first embedding
            write_header(growing[EMBEDDINGS], self.dtype, (0, len(record.row)))
        self._ids.add(record.id)
        told = {} if record.text is None else {"text": record.text}
        line(ROWS, id=record.id, group=record.group, **told)
        growing[EMBEDDINGS].write(record.row.data)

    def _learn_ids(self, end: int) -> None:
        """Reads the ids of rows that other processes, or an earlier one, have appended."""
        with (self.out / ROWS).open("rb") as file:
            file.seek(self._read)
            for line in file.read(end - self._read).splitlines():
                self._ids.add(json.loads(line)["id"])

    def _finished_shape(self) -> list[int]:
        """Writes the final header, and returns the shape of the rows."""
        self._learn_ids(self._saved()["bytes"][ROWS])
        if not self._ids:
            reason = next(read_lines(self.out / SKIPPED))["reason"]
            text = "data has no item that could be embedded"
            raise checks.InputError(f"{text}; the first one: {reason}")
        # The number of rows is known now. NumPy pads headers, so the final one is as long.
        with (self.out / EMBEDDINGS).open("r+b") as array:
            np.lib.format.read_magic(array)
            (_, width), *_ = np.lib.format.read_array_header_1_0(array)
            array.seek(0)
            write_header(array, self.dtype, (len(self._ids), width))
        return [len(self._ids), width]


def lock(out: pathlib.Path, here: Process) -> Lock:
    """Returns the lock of a folder that several processes write to. One alone holds it already."""
    if here.world == 1:
        return contextlib.nullcontext
    return functools.partial(storage.lock, out / storage.LOCK)


def adopt(out: pathlib.Path) -> None:
    """Replaces the files of an extraction by those in its folder `next`, if they are finished.

    The caller holds the lock. A kill may interrupt this anywhere. The next call then replaces the
    rest, and until then the extraction counts as unfinished, since its metadata are removed first
    and replaced last.
    """
    newer = out / NEXT
    if not (newer / METADATA).exists():
        return
    (out / METADATA).unlink(missing_ok=True)
    for name in (*GROWING, METADATA):
        if (newer / name).exists():
            os.replace(newer / name, out / name)
    shutil.rmtree(newer)


def read_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def write_header(file: BinaryIO, dtype: Any, shape: tuple[int, ...]) -> None:
    """Writes the header of an .npy file.

    Args:
        file: File to write to, positioned at its start. The rows follow the header.
        dtype: Dtype of the array.
        shape: Shape of the array.
    """
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
