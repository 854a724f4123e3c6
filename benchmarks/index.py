"""Measures the search in FAISS files: size, time of a query, and neighbours found.

    python -m benchmarks.index
    python -m benchmarks.index --rows 10000000 --width 128

Rows are random: a centre, of which there are a thousand, and noise of the same length. The aligner
has linear heads with random weights, so that only the search is measured.
"""

import os
import pathlib
import resource
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import common
from sotalign_jax import Aligner, faiss_index, heads

CENTRES = 1000
NEIGHBOURS = 10
QUERIES = 100
PROBED = (4, 16, 64)
"""Clusters that a query is compared with."""


def table_of(count: int, width: int, folder: pathlib.Path) -> np.ndarray:
    """Writes random rows to a file, block by block, and maps it."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CENTRES, width)).astype(np.float32)
    path = folder / f"rows{count}.npy"
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (count, width))
    for start in range(0, count, faiss_index.BLOCK_ROWS):
        part = rows[start : start + faiss_index.BLOCK_ROWS]
        noise = rng.standard_normal(size=part.shape, dtype=np.float32)
        part[:] = centres[rng.integers(CENTRES, size=len(part))] + noise
    rows.flush()
    return np.load(path, mmap_mode="r")


def timed_search(
    gallery: faiss_index.FaissIndex, queries: np.ndarray, probed: int
) -> tuple[float, np.ndarray]:
    """Searches one query at a time. Returns the median milliseconds, and all ids."""
    gallery.search(queries[:1], NEIGHBOURS, probed=probed)  # compiles the head
    milliseconds, found = [], []
    for query in queries:
        start = time.perf_counter()
        hits = gallery.search(query[None], NEIGHBOURS, probed=probed)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        found.append(hits.indices[0])
    return float(np.median(milliseconds)), np.stack(found)


def measure(count: int, width: int, folder: pathlib.Path) -> list[list[object]]:
    """Builds both kinds of one size, and returns their rows of the table."""
    aligner = Aligner(heads.build_heads(width, width, width), {})
    gallery = table_of(count, width, folder)
    queries = np.asarray(gallery[:: max(1, count // QUERIES)][:QUERIES])
    exact: np.ndarray | None = None
    measured: list[list[object]] = []
    for kind in faiss_index.KINDS:
        path = folder / f"{kind}{count}.faiss"
        start = time.perf_counter()
        faiss_index.build(aligner, gallery, kind=kind).save(path)
        seconds = time.perf_counter() - start
        opened = faiss_index.load(path, aligner)
        for probed in PROBED if kind == "ivf" else (0,):
            milliseconds, found = timed_search(opened, queries, max(1, probed))
            exact = found if exact is None else exact
            shared = [len(np.intersect1d(a, b)) for a, b in zip(found, exact, strict=True)]
            recall = np.mean(shared) / NEIGHBOURS
            size = os.path.getsize(path) / 2**20
            measured.append([count, kind, probed or "all", size, seconds, milliseconds, recall])
        path.unlink()
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all sizes and prints a table."""
    args = common.options(__doc__, argv, rows=[100_000, 1_000_000], width=256)
    if args.quick:
        args.rows, args.width = [4000], 16
    measured = []
    with tempfile.TemporaryDirectory(dir=args.out if args.out.exists() else None) as folder:
        for count in args.rows:
            measured += measure(count, args.width, pathlib.Path(folder))
    headers = ["rows", "kind", "probed", "file MiB", "build s", "ms a query", "found"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    title = f"Search for {NEIGHBOURS} neighbours, width {args.width}, peak memory {peak:,.0f} MiB"
    common.publish(title, common.Table(headers, measured, digits=3), args.out / "index")


if __name__ == "__main__":
    common.run(main)
