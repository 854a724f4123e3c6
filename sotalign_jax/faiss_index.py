"""Galleries in FAISS files, which are searched from disk and changed row by row.

The inner products of an index are the scores of `Aligner.search`. A note beside the file,
`NAME.json`, says which aligner and which options queries must be embedded with.
"""

import math
import os
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from sotalign_jax import checks, export, storage
from sotalign_jax.aligner import Aligner
from sotalign_jax.neighbours import Neighbours

KINDS = ("flat", "ivf")
"""Kinds of an index. "flat" compares a query with all rows. "ivf" compares it with the rows of the
nearest clusters, which are stored in half precision."""
EXACT_ROWS = 1_000_000
"""Largest gallery that is searched exactly by default. A query then reads 2 GB for 512 features."""
BLOCK_ROWS = 65_536
"""Rows that are embedded at a time."""
# FAISS recommends 16 to 64 edges a node, and trains k-means on at least 39 rows a cluster.
_EDGES = 32
_ROWS_PER_CLUSTER = 39


class FaissIndex:
    """Gallery of an aligner in a FAISS index.

    Attributes:
        aligner: Embeds queries and rows.
        faiss: The index, whose ids are those of the rows.
        kind: One of `KINDS`.
        direction: "x_to_y", or "y_to_x" if the queries are of the second modality.
        calibrated: True if the scores are corrected for hubs.
        read_only: True if the rows stay on disk, so that none can be added or removed.

    Example:
        >>> from sotalign_jax.heads import build_heads
        >>> gallery = build(Aligner(build_heads(4, 3, 2), {}), np.eye(3), ids=[7, 8, 9])
        >>> gallery.remove([8])
        1
        >>> gallery.search(np.eye(4), k=2).indices.shape
        (4, 2)
    """

    def __init__(
        self,
        aligner: Aligner,
        faiss: Any,
        *,
        kind: str,
        direction: str,
        calibrated: bool,
        read_only: bool = False,
    ) -> None:
        self.aligner = aligner
        self.faiss = faiss
        self.kind = kind
        self.direction = direction
        self.calibrated = calibrated
        self.read_only = read_only

    def __len__(self) -> int:
        return int(self.faiss.ntotal)

    def search(self, queries: ArrayLike, k: int = 10, *, probed: int = 16) -> Neighbours:
        """Finds the rows of the gallery with the highest scores.

        Args:
            queries: Embeddings of the queries, shape [n, d_x].
            k: Number of results per query. All rows are returned if there are fewer.
            probed: Clusters of "ivf" that a query is compared with. More of them find more of the
                true neighbours and take longer.

        Returns:
            Scores and ids, both of shape [n, k], best first. If the clusters have fewer rows than
            k, the last ids are -1.

        Raises:
            InputError: The queries have another width, k or probed is not positive, or the index
                has no rows.
        """
        checks.whole(1, k=k, probed=probed)
        if not len(self):
            raise checks.InputError("index must have at least 1 row to search, got 0; add rows")
        if self.kind == "ivf":
            self.faiss.nprobe = probed
        vectors = self._embedder(np.empty((0, self._width), np.float32)).queries(queries)
        return Neighbours(*self.faiss.search(vectors, min(k, len(self))))

    def add(
        self, rows: ArrayLike, ids: ArrayLike | None = None, *, block_size: int = BLOCK_ROWS
    ) -> None:
        """Embeds rows, block by block, and adds them.

        Args:
            rows: Embeddings, shape [n, d_y]. They may be memory-mapped.
            ids: Whole numbers that identify the rows, shape [n]. By default the numbers that
                follow the largest id.
            block_size: Rows that are embedded at a time.

        Raises:
            InputError: An id is in the index already, or the index is read only.
        """
        self._check_writable()
        checks.whole(1, block_size=block_size)
        rows = checks.array("rows", rows)
        present = self.ids()
        if ids is None:
            first = int(present.max(initial=-1)) + 1
            ids = np.arange(first, first + len(rows))
        ids = _checked_ids(ids, len(rows))
        if len(taken := np.intersect1d(ids, present)):
            raise checks.InputError(
                f"ids must be new, got {taken[0]}, which the index has; remove it first"
            )
        for start in range(0, len(rows), block_size):
            part = slice(start, start + block_size)
            self.faiss.add_with_ids(self._keys(rows[part]), ids[part])

    def remove(self, ids: ArrayLike) -> int:
        """Removes rows. The ids of the other rows stay.

        Args:
            ids: Ids of the rows. Those that the index does not have are ignored.

        Returns:
            The number of rows that were removed.

        Raises:
            InputError: The index is read only.
        """
        self._check_writable()
        return int(self.faiss.remove_ids(_checked_ids(ids, np.size(ids))))

    def ids(self) -> Int[np.ndarray, " m"]:
        """Returns the ids of all rows, in no particular order."""
        library = checks.require("faiss", extra="faiss")
        if self.kind == "flat":
            return library.vector_to_array(self.faiss.id_map)
        lists = self.faiss.invlists
        sizes = [lists.list_size(number) for number in range(lists.nlist)]
        parts = [
            library.rev_swig_ptr(lists.get_ids(number), size).copy()
            for number, size in enumerate(sizes)
            if size
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index and its note. An earlier index is replaced only by a complete one.

        Args:
            path: The file. The note is written to the same name with ".json" appended.

        Raises:
            OSError: A file cannot be written.
        """
        library = checks.require("faiss", extra="faiss")
        note = {
            "kind": self.kind,
            "direction": self.direction,
            "calibrated": self.calibrated,
            "probe": self._probe(),
        }
        storage.write_json(_note_of(path), note)
        with storage.replacing(path) as file:
            library.write_index(self.faiss, library.PyCallbackIOWriter(file.write))

    @property
    def _width(self) -> int:
        """Width of the gallery's embeddings."""
        heads = self.aligner.heads
        return heads.y.d_in if self.direction == "x_to_y" else heads.x.d_in

    def _embedder(self, rows: ArrayLike) -> export.Index:
        """Embeds rows of the gallery."""
        return self.aligner.index(rows, direction=self.direction, calibrated=self.calibrated)

    def _keys(self, rows: ArrayLike) -> Float[np.ndarray, "n k"]:
        """Returns the vectors of rows of the gallery."""
        return np.ascontiguousarray(self._embedder(rows).keys, np.float32)

    def _probe(self) -> list[float]:
        """Returns the vector of a fixed row, by which another aligner is recognised."""
        row = np.random.default_rng(0).normal(size=(1, self._width))
        # Without the correction for hubs, which another aligner may lack.
        keys = self.aligner.index(row, direction=self.direction, calibrated=False).keys
        return [round(float(value), 6) for value in keys[0, :8]]

    def _check_writable(self) -> None:
        """Raises InputError if the rows stay on disk, where FAISS cannot change them."""
        if self.read_only:
            raise checks.InputError(
                "mapped must be False to change an index, got True; load it with mapped=False"
            )


def build(
    aligner: Aligner,
    gallery: ArrayLike,
    ids: ArrayLike | None = None,
    *,
    kind: str | None = None,
    direction: str = "x_to_y",
    calibrated: bool | None = None,
    clusters: int | None = None,
    block_size: int = BLOCK_ROWS,
    seed: int = 0,
) -> FaissIndex:
    """Embeds a gallery into a FAISS index, block by block.

    Args:
        aligner: Embeds the gallery.
        gallery: Embeddings to search, shape [m, d_y]. They may be memory-mapped.
        ids: Whole numbers that identify the rows, shape [m]. By default the row numbers.
        kind: One of `KINDS`. By default "flat" up to `EXACT_ROWS` rows, and "ivf" above.
        direction: "x_to_y", or "y_to_x" if the gallery is of the first modality.
        calibrated: True corrects scores for hubs. By default the aligner's own choice.
        clusters: Number of clusters of "ivf". By default about sqrt(m).
        block_size: Rows that are embedded at a time.
        seed: Seed of the rows that the clusters are computed from.

    Returns:
        The index.

    Raises:
        InputError: FAISS is not installed, an id is repeated, or an argument is out of range.

    Example:
        >>> from sotalign_jax.heads import build_heads
        >>> len(build(Aligner(build_heads(4, 3, 2), {}), np.eye(3)))
        3

    References:
        M. Douze et al., "The Faiss library", 2024.
    """
    library = checks.require("faiss", extra="faiss")
    rows = checks.array("gallery", gallery)
    calibrated = aligner.calibrated if calibrated is None else calibrated
    kind = kind or ("flat" if len(rows) <= EXACT_ROWS else "ivf")
    checks.choice("kind", kind, KINDS)
    if clusters is None:
        # More clusters make a query faster, and take longer to compute by their square.
        clusters = max(1, min(round(math.sqrt(len(rows))), len(rows) // _ROWS_PER_CLUSTER))
    checks.whole(1, clusters=clusters)
    width = aligner.index(rows[:1], direction=direction, calibrated=calibrated).keys.shape[1]
    if kind == "flat":
        empty = library.IndexIDMap2(library.IndexFlatIP(width))
    else:
        # A graph over the centres finds the nearest ones without comparing a row with all.
        text = f"IVF{clusters}_HNSW{_EDGES},SQfp16"
        empty = library.index_factory(width, text, library.METRIC_INNER_PRODUCT)
    made = FaissIndex(aligner, empty, kind=kind, direction=direction, calibrated=calibrated)
    if kind == "ivf":
        sample = np.random.default_rng(seed).permutation(len(rows))
        sample = np.sort(sample[: _ROWS_PER_CLUSTER * clusters])
        empty.train(made._keys(rows[sample]))
    made.add(rows, ids, block_size=block_size)
    return made


def load(path: str | os.PathLike[str], aligner: Aligner, *, mapped: bool = True) -> FaissIndex:
    """Opens an index that `FaissIndex.save` wrote.

    Args:
        path: The file.
        aligner: The aligner that the index was built with.
        mapped: True leaves the rows on disk and reads only those that a query needs. False reads
            all of them into memory, so that rows can be added and removed.

    Returns:
        The index.

    Raises:
        InputError: A file is missing or damaged, or was built with another aligner.
    """
    library = checks.require("faiss", extra="faiss")
    place = pathlib.Path(path).expanduser()
    try:
        note = storage.read_json(_note_of(place))
        options = {name: note[name] for name in ("kind", "direction", "calibrated")}
        probe = note["probe"]
        flags = library.IO_FLAG_MMAP_IFC if mapped else 0
        index = library.read_index(str(place), flags)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = checks.first_line(error)
        raise checks.InputError(
            f"index {place} cannot be read ({reason}); build and save it again"
        ) from error
    found = FaissIndex(aligner, index, read_only=mapped, **options)
    if not _same(found._probe(), probe):
        raise checks.InputError(
            f"index {place} was built with another aligner; load that one, or build the index again"
        )
    return found


def _note_of(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of the note beside an index."""
    place = pathlib.Path(path).expanduser()
    return place.with_name(f"{place.name}.json")


def _checked_ids(ids: ArrayLike, count: int) -> Int[np.ndarray, " n"]:
    """Returns ids as distinct 64-bit integers. Raises InputError if they cannot be."""
    numbers = np.asarray(ids)
    if numbers.shape != (count,) or (count and not np.issubdtype(numbers.dtype, np.integer)):
        raise checks.InputError(
            f"ids must be {count} whole numbers, got {numbers.dtype} of shape {numbers.shape}"
        )
    numbers = numbers.astype(np.int64)
    if len(np.unique(numbers)) != count:
        raise checks.InputError("ids must differ from each other, got one twice; number the rows")
    return numbers


def _same(vector: list[float], other: list[float]) -> bool:
    """Returns True if two probes agree up to the rounding of different devices."""
    return len(vector) == len(other) and bool(np.allclose(vector, other, atol=1e-3))
