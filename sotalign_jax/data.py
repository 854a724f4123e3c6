"""Datasets: pairs, unpaired pools, galleries and class prompts, as numpy arrays.

Arrays stay memory-mapped and in their stored dtype, usually float16, until rows are selected. The
training loop copies rows to a device.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from sotalign_jax import checks, files, tables
from sotalign_jax.duplicates import first_duplicate, group_duplicates

POOLS = ("disjoint", "random", "aligned")
"""Choices of `pool`, see `split_rows`."""
SAMPLE = pathlib.Path(__file__).parent / "bundled" / "coco_sample.npz"
"""File of the sample that `photographs` loads."""
HELD_OUT = 0.1
"""Fraction of the pairs that `hold_out` moves to the validation gallery."""
HELD_OUT_FROM = 100
"""Fewest pairs to hold out from. A tenth of fewer is too small a gallery to compare models."""
VAL_AND_TEST = (0.1, 0.2)
"""Default fractions for validation and test of a table that comes without galleries."""


# --- evaluation data ---


class Gallery(NamedTuple):
    """Data for cross-modal retrieval, built by `gallery`.

    Attributes:
        x: Embeddings of the first modality.
        y: Embeddings of the second modality.
        x_of_y: Row of x for every row of y: `y[j]` belongs to `x[x_of_y[j]]`.
    """

    x: Float[np.ndarray, "n d_x"]
    y: Float[np.ndarray, "m d_y"]
    x_of_y: Int[np.ndarray, " m"]


class ZeroShot(NamedTuple):
    """Data for classification by class prompts, built by `zero_shot`.

    Attributes:
        x: Embeddings of the rows to classify.
        labels: Class of every row.
        prompts: Embeddings of t prompts for each class.
        class_names: Names of the classes.
    """

    x: Float[np.ndarray, "n d_x"]
    labels: Int[np.ndarray, " n"]
    prompts: Float[np.ndarray, "c t d_y"]
    class_names: tuple[str, ...]


def owners(n: int, m: int, x_of_y: ArrayLike | None) -> Int[np.ndarray, " m"]:
    """Checks the assignment of rows of y to rows of x.

    Args:
        n: Number of rows of x.
        m: Number of rows of y.
        x_of_y: The row of x for every row of y. None if row i belongs to row i.

    Returns:
        `x_of_y` as int32.

    Raises:
        InputError: An index is out of range, or a row of x has no row of y.

    Example:
        >>> owners(2, 2, None)
        array([0, 1], dtype=int32)
    """
    if x_of_y is None and n != m:
        raise checks.InputError(
            f"gallery y has {m} rows but gallery x has {n}; pass x_of_y, the row of x for each row "
            "of y"
        )
    index = row_labels("x_of_y", np.arange(n) if x_of_y is None else x_of_y, m, below=n)
    # A query without a match would count as a miss in every metric.
    orphans = np.flatnonzero(np.bincount(index, minlength=n) == 0)
    if orphans.size:
        raise checks.InputError(
            f"x_of_y names no row of y for row {orphans[0]} of x; remove such rows of x"
        )
    return index


def row_labels(name: str, values: ArrayLike, count: int, *, below: int) -> Int[np.ndarray, " n"]:
    """Checks integer labels, one per row.

    Args:
        name: Name of the argument for error messages.
        values: The labels.
        count: Required number of labels.
        below: Exclusive upper bound of the labels.

    Returns:
        The labels as int32.

    Raises:
        InputError: The number of labels is wrong, or one is not an integer in 0..below-1.

    Example:
        >>> row_labels("labels", [1, 0], 2, below=2)
        array([1, 0], dtype=int32)
    """
    index = np.asarray(values)
    if index.shape != (count,) or index.dtype.kind not in "iu":
        raise checks.InputError(
            f"{name} must hold {count} integers, one per row, got shape {index.shape} and dtype "
            f"{index.dtype}"
        )
    # numpy would count negative numbers from the end.
    if count and not (index.min() >= 0 and index.max() < below):
        raise checks.InputError(
            f"{name} must be in 0..{below - 1}, got values from {index.min()} to {index.max()}"
        )
    return index.astype(np.int32)


def gallery(x: ArrayLike, y: ArrayLike, x_of_y: ArrayLike | None = None) -> Gallery:
    """Builds a checked `Gallery`.

    Args:
        x: Embeddings [n, d_x].
        y: Embeddings [m, d_y].
        x_of_y: The row of x for every row of y. None if row i belongs to row i.

    Returns:
        The gallery.

    Raises:
        InputError: An array does not hold embeddings, or `x_of_y` does not fit.

    Example:
        >>> gallery(np.eye(2), np.eye(3), x_of_y=[0, 0, 1]).x_of_y
        array([0, 0, 1], dtype=int32)
    """
    x, y = tables.rows("gallery x", x), tables.rows("gallery y", y)
    return Gallery(x, y, owners(len(x), len(y), x_of_y))


def zero_shot(
    x: ArrayLike, labels: ArrayLike, prompts: ArrayLike, class_names: tuple[str, ...] | None = None
) -> ZeroShot:
    """Builds a checked `ZeroShot`.

    Args:
        x: Embeddings [n, d_x].
        labels: The class of every row of x, in 0..c-1.
        prompts: Embeddings [c, t, d_y] of t prompts for each of c classes.
        class_names: Names of the classes. By default their numbers.

    Returns:
        The classification task.

    Raises:
        InputError: An array does not hold embeddings, or they do not fit together.

    Example:
        >>> zero_shot(np.eye(2), [0, 1], np.ones((2, 3, 4))).class_names
        ('0', '1')
    """
    x, prompts = checks.rows("zero_shot x", x), checks.array("prompts", prompts)
    if prompts.ndim != 3:
        raise checks.InputError(
            f"prompts must have shape [classes, templates, width], got {prompts.shape}"
        )
    # Prompts of all classes are checked as the rows of one matrix.
    checks.embeddings("zero_shot prompts", prompts.reshape(-1, prompts.shape[-1]))
    names = tuple(map(str, range(len(prompts)))) if class_names is None else tuple(class_names)
    if len(names) != len(prompts):
        raise checks.InputError(
            f"class_names has {len(names)} names but there are {len(prompts)} prompted classes"
        )
    return ZeroShot(x, row_labels("labels", labels, len(x), below=len(prompts)), prompts, names)


# --- training data ---


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Arrays of a run, built by `dataset` or `semi_supervised`, which also check the values.

    Attributes:
        pairs_x: Paired embeddings of the first modality.
        pairs_y: Their partners. Row i belongs to row i of `pairs_x`.
        pool_x: Unpaired embeddings of the first modality.
        pool_y: Unpaired embeddings of the second modality.
        val: Validation gallery.
        test: Test gallery.
        zero_shot: Classification task.
        pair_rows: Rows of the table that the pairs come from, if they come from one.

    Raises:
        InputError: The widths of the arrays do not fit together.

    Example:
        >>> dataset((np.eye(8), np.ones((8, 2))), y=np.ones((5, 2)))
        Dataset
          pairs_x: 8 x 8
          pairs_y: 8 x 2
          pool_x: 0 x 8
          pool_y: 5 x 2
    """

    pairs_x: Float[np.ndarray, "p d_x"]
    pairs_y: Float[np.ndarray, "p d_y"]
    pool_x: Float[np.ndarray, "u d_x"] | files.MappedRows
    pool_y: Float[np.ndarray, "v d_y"] | files.MappedRows
    val: Gallery | None = None
    test: Gallery | None = None
    zero_shot: ZeroShot | None = None
    pair_rows: Int[np.ndarray, " p"] | None = None

    def __post_init__(self) -> None:
        widths = self.pairs_x.shape[1], self.pairs_y.shape[1]
        for name, shape in self.summary().items():
            # Prompts are of the second modality, like all parts whose names end in "_y".
            width, other = widths if name.endswith("_x") else widths[::-1]
            if shape is not None and shape[-1] != width:
                raise checks.wrong_width(name, tuple(shape), width, other)

    def __repr__(self) -> str:
        """Returns one line per part, with its shape."""
        shapes = {name: shape for name, shape in self.summary().items() if shape is not None}
        lines = (f"{name}: {' x '.join(map(str, shape))}" for name, shape in shapes.items())
        return "\n  ".join(["Dataset", *lines])

    def summary(self) -> dict[str, list[int] | None]:
        """Returns the shapes of all parts as JSON values, None for a missing part.

        Example:
            >>> dataset((np.eye(8), np.eye(8))).summary()["pairs_x"]
            [8, 8]
        """
        parts: dict[str, np.ndarray | files.MappedRows | None] = {
            "pairs_x": self.pairs_x,
            "pairs_y": self.pairs_y,
            "pool_x": self.pool_x,
            "pool_y": self.pool_y,
            "val_x": self.val and self.val.x,
            "val_y": self.val and self.val.y,
            "test_x": self.test and self.test.x,
            "test_y": self.test and self.test.y,
            "zero_shot_x": self.zero_shot and self.zero_shot.x,
            "zero_shot_prompts": self.zero_shot and self.zero_shot.prompts,
        }
        return {name: None if part is None else list(part.shape) for name, part in parts.items()}


def dataset(
    pairs: tuple[ArrayLike, ArrayLike],
    *,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    val: Gallery | None = None,
    test: Gallery | None = None,
    zero_shot: ZeroShot | None = None,
) -> Dataset:
    """Builds a checked `Dataset` of pairs and unpaired rows.

    Args:
        pairs: Embeddings (pairs_x, pairs_y) of shapes [p, d_x] and [p, d_y]. Row i of one belongs
            to row i of the other.
        x: Unpaired embeddings [u, d_x]. By default none.
        y: Unpaired embeddings [v, d_y]. By default none.
        val: Validation gallery.
        test: Test gallery.
        zero_shot: Classification task.

    Returns:
        The dataset.

    Raises:
        InputError: An array holds no embeddings, or the arrays do not fit together.

    Example:
        >>> dataset((np.eye(8), np.eye(8)), x=np.ones((5, 8))).pool_y.shape
        (0, 8)
    """
    if not isinstance(pairs, tuple | list) or len(pairs) != 2:
        raise checks.InputError(
            f"pairs must be (A, B), where A[i] belongs to B[i], got {type(pairs).__name__}"
        )
    pairs_x, pairs_y = checks.pairs(*pairs, min_rows=checks.MIN_PAIRS)
    # A missing pool is empty but has a width, so that all code downstream treats it alike.
    pool_x, pool_y = (
        files.pool(
            checks.rows(
                name,
                own[:0] if pool is None else pool,
                width=own.shape[1],
                min_rows=0,
                other_width=other.shape[1],
            )
        )
        for name, pool, own, other in (("x", x, pairs_x, pairs_y), ("y", y, pairs_y, pairs_x))
    )
    paired = checks.native(pairs_x), checks.native(pairs_y)
    return Dataset(*paired, pool_x, pool_y, val, test, zero_shot)


# --- splits by unique row ---


def assign_groups(groups: Int[np.ndarray, " n"], sizes: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Assigns rows to parts of given sizes without dividing a group.

    Groups are assigned in the order of their first rows, each to the first part with room for it.

    Args:
        groups: The group of every row.
        sizes: Number of rows of every part.

    Returns:
        The part of every row, `len(sizes)` for a row in none of them.

    Example:
        >>> assign_groups(np.array([7, 7, 3, 5, 3]), [1, 2]).tolist()
        [1, 1, 2, 0, 2]
    """
    _, first, member, counts = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    # First-fit bin packing. Exact sizes would be a knapsack problem, and a few rows do not matter.
    parts, room = np.full(len(counts), len(sizes)), list(sizes)
    for group in np.argsort(first):
        part = next((part for part, left in enumerate(room) if counts[group] <= left), None)
        if part is not None:
            parts[group] = part
            room[part] -= counts[group]
        elif not any(room):
            break  # all parts are full
    return parts[member]


def _gallery_of_rows(x: np.ndarray, y: np.ndarray) -> Gallery | None:
    """Builds a gallery in which every x occurs once, with all rows of y that belong to it."""
    if not len(x):
        return None
    # A picture with five captions is one key. Otherwise it would compete with its own copies.
    unique, x_of_y = np.unique(first_duplicate(x), return_inverse=True)
    return gallery(x[unique], y, x_of_y)


def hold_out(dataset: Dataset, *, seed: int) -> Dataset:
    """Moves a tenth of the pairs to the validation gallery, if there are at least 100.

    Pairs that share a picture or a caption stay together, so that no row of the gallery is also in
    the training data.

    Args:
        dataset: A dataset without a validation gallery.
        seed: Seed of the random choice.

    Returns:
        The dataset with fewer pairs and a validation gallery, or the same dataset if it is small.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(100, 2))
        >>> hold_out(dataset((rows, rows)), seed=0).summary()["val_x"]
        [10, 2]
    """
    x, y = dataset.pairs_x, dataset.pairs_y
    size = int(HELD_OUT * len(x))
    if len(x) < HELD_OUT_FROM:
        return dataset
    # COCO has five captions per picture. Without groups, a random tenth of the pairs would share
    # pictures with the rest.
    groups = group_duplicates(first_duplicate(x), first_duplicate(y), largest=size)
    order = np.random.default_rng(seed).permutation(len(x))
    held = assign_groups(groups[order], [size]) == 0
    kept, val = order[~held], order[held]
    made = _gallery_of_rows(x[val], y[val])
    rows = None if dataset.pair_rows is None else dataset.pair_rows[kept]
    return dataclasses.replace(dataset, pairs_x=x[kept], pairs_y=y[kept], val=made, pair_rows=rows)


class Rows(NamedTuple):
    """Row numbers of a paired table.

    Attributes:
        pairs: Rows of the pairs.
        x: Rows of the first modality's pool.
        y: Rows of the second modality's pool.
    """

    pairs: Int[np.ndarray, " p"]
    x: Int[np.ndarray, " u"]
    y: Int[np.ndarray, " u"]


def split_rows(
    n_rows: int,
    *,
    n_pairs: int,
    pool: str = "disjoint",
    n_unpaired: int | None = None,
    seed: int = 0,
    groups: Int[np.ndarray, " n"] | None = None,
) -> Rows:
    """Chooses pairs at random and makes unpaired pools of the remaining rows.

    Splits of one seed are nested: fewer pairs are a subset of more pairs, and a smaller pool is a
    subset of a larger one.

    Args:
        n_rows: Number of rows of the table.
        n_pairs: Number of pairs.
        pool: "disjoint" uses one half of the rest for x and the other half for y, so that no true
            pair is hidden in the pools. "random" uses all of the rest for both, with y in another
            order. "aligned" uses all of the rest in the same order.
        n_unpaired: Size of each pool. By default all rows that remain.
        seed: Seed of the random choice.
        groups: Groups of rows that disjoint pools must not divide, see `group_duplicates`. By
            default every row is its own group.

    Returns:
        The chosen rows.

    Raises:
        InputError: There are not enough rows.

    Example:
        >>> split_rows(12, n_pairs=6, seed=0).x.shape
        (3,)
    """
    checks.choice("pool", pool, POOLS)
    checks.within(n_rows, "rows", least=checks.MIN_PAIRS, n_pairs=n_pairs)
    rng = np.random.default_rng(seed)
    # Prefixes of one permutation are nested.
    order = rng.permutation(n_rows)
    x = y = rest = order[n_pairs:]
    if pool == "disjoint":
        groups = np.arange(n_rows) if groups is None else groups
        half = assign_groups(groups[rest], [len(rest) // 2])
        x, y = rest[half == 0], rest[half == 1]
    available = min(len(x), len(y))
    size = available if n_unpaired is None else n_unpaired
    checks.within(available, f"rows left for a {pool} pool", least=0, n_unpaired=size)
    y = y[:size]
    return Rows(order[:n_pairs], x[:size], rng.permutation(y) if pool == "random" else y)


def semi_supervised(
    x: ArrayLike,
    y: ArrayLike,
    *,
    n_pairs: int,
    pool: str = "disjoint",
    n_unpaired: int | None = None,
    seed: int = 0,
    unpaired_x: ArrayLike | None = None,
    unpaired_y: ArrayLike | None = None,
    pool_noise: float = 0.0,
    val: Gallery | None = None,
    test: Gallery | None = None,
    zero_shot: ZeroShot | None = None,
    held_out: tuple[float, float] | None = None,
) -> Dataset:
    """Builds a semi-supervised `Dataset` from a paired table: few pairs, the rest unpaired.

    Args:
        x: Embeddings [n, d_x].
        y: Embeddings [n, d_y]. Row i belongs to row i of x.
        n_pairs: Number of pairs.
        pool: How the pools are chosen, see `split_rows`.
        n_unpaired: Size of each pool. By default all rows that remain.
        seed: Seed of the random choice of pairs and pools.
        unpaired_x: External pool of x, instead of rows of the table. If no rows of the table remain
            for the other pool, that pool consists of the paired rows.
        unpaired_y: External pool of y.
        pool_noise: Fraction of each pool that `replace_with_noise` replaces.
        val: Validation gallery.
        test: Test gallery.
        zero_shot: Classification task.
        held_out: Fractions of the table, such as `VAL_AND_TEST`, to use as `val` and `test`. They
            do not depend on `seed`, and share no rows with the pairs and pools. A pool for which no
            rows remain consists of the paired rows.

    Returns:
        The dataset.

    Raises:
        InputError: An array holds no embeddings, or there are not enough rows.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(12, 4))
        >>> semi_supervised(rows, rows, n_pairs=6).summary()["pool_y"]
        [3, 4]
    """
    checks.choice("pool", pool, POOLS)
    x, y = checks.pairs(x, y, names=("x", "y"))
    external = (unpaired_x is not None, unpaired_y is not None)
    # With an external pool no pair can be hidden in the pools, so the other pool uses all rows.
    pool = "random" if any(external) else pool
    rows = groups = np.arange(len(x))
    if held_out is not None:
        val, test, rows, groups = _held_out_galleries(x, y, held_out)
    elif pool == "disjoint":
        groups = group_duplicates(
            first_duplicate(x), first_duplicate(y), largest=max(len(x) - n_pairs, 0) // 2
        )
    chosen = split_rows(
        len(rows),
        n_pairs=n_pairs,
        pool=pool,
        n_unpaired=0 if all(external) else n_unpaired,
        seed=seed,
        groups=groups[rows],
    )
    pairs, (own_x, own_y) = rows[chosen.pairs], (rows[chosen.x], rows[chosen.y])
    # SOTAlign needs both pools. If no rows remain, the paired rows serve as unpaired ones.
    if (held_out is not None or any(external)) and n_unpaired is None:
        own_x, own_y = (own if len(own) else pairs for own in (own_x, own_y))
    pools: list[np.ndarray | files.MappedRows] = []
    sides = ("unpaired_x", unpaired_x, x, own_x), ("unpaired_y", unpaired_y, y, own_y)
    # The pools have different seeds, because equal seeds would choose the same row numbers in both.
    for own_seed, (name, given, table, own) in enumerate(sides, seed):
        made = (
            files.take(table, own)
            if given is None
            else _external_pool(name, given, table, n_unpaired, own_seed)
        )
        if pool_noise:
            made = replace_with_noise(made, fraction=pool_noise, seed=own_seed)
        pools.append(made)
    pool_x, pool_y = pools
    paired = checks.native(x[pairs]), checks.native(y[pairs])
    return Dataset(*paired, pool_x, pool_y, val, test, zero_shot, pairs)


def _held_out_galleries(
    x: np.ndarray, y: np.ndarray, fractions: Sequence[float]
) -> tuple[Gallery | None, Gallery | None, np.ndarray, np.ndarray]:
    """Returns the galleries for validation and test, the other rows, and the groups of all rows."""
    sizes = held_out_sizes(len(x), fractions)
    largest = min(filter(None, sizes), default=len(x))
    groups = group_duplicates(first_duplicate(x), first_duplicate(y), largest=largest)
    # A constant seed, so that runs of different seeds are compared on one test set.
    order = np.random.default_rng(0).permutation(len(x))
    parts = assign_groups(groups[order], sizes)
    in_val, in_test, rest = (np.sort(order[parts == part]) for part in range(3))
    val, test = (_gallery_of_rows(x[rows], y[rows]) for rows in (in_val, in_test))
    return val, test, rest, groups


def _external_pool(
    name: str, pool: ArrayLike, table: np.ndarray, n_unpaired: int | None, seed: int
) -> np.ndarray | files.MappedRows:
    """Checks an external pool and draws `n_unpaired` of its rows."""
    made = checks.rows(name, pool, width=table.shape[1])
    if n_unpaired is None:
        return files.pool(made)
    checks.within(len(made), f"rows in {name}", least=0, n_unpaired=n_unpaired)
    return files.take(made, np.random.default_rng(seed).permutation(len(made))[:n_unpaired])


def held_out_sizes(n_rows: int, fractions: Sequence[float]) -> list[int]:
    """Returns the number of rows of each held-out part.

    Args:
        n_rows: Number of rows of the table.
        fractions: Fraction of the rows in each part.

    Returns:
        Numbers of rows. Cumulative sums are rounded, so no row is lost between two parts.

    Raises:
        InputError: A fraction is negative, or they leave no rows.

    Example:
        >>> held_out_sizes(640, VAL_AND_TEST)
        [64, 128]
    """
    if min(fractions) < 0 or not sum(fractions) < 1:
        shown = " and ".join(map(str, fractions))
        raise checks.InputError(f"val and test must be >= 0 and sum to less than 1, got {shown}")
    return np.diff(np.rint(np.cumsum([0, *fractions]) * n_rows).astype(int)).tolist()


# --- robustness protocols ---


def mismatch_pairs(y: ArrayLike, *, fraction: float, seed: int = 0) -> np.ndarray:
    """Mismatches a fraction of the pairs by permuting rows of y. No chosen row keeps its place.

    Args:
        y: Array [n, d_y].
        fraction: Fraction of the rows, rounded down to whole rows.
        seed: Seed of the random choice.

    Returns:
        A copy of y with the rows moved.

    Raises:
        InputError: `fraction` is outside 0..1, or stands for one row only.

    Example:
        >>> mismatch_pairs(np.arange(4.0)[:, None], fraction=0.5, seed=0).ravel().tolist()
        [2.0, 1.0, 0.0, 3.0]
    """
    out = np.array(y)
    chosen = _choose_rows(len(out), fraction, seed)
    if len(chosen) == 1:
        raise checks.InputError(
            f"fraction must select no row or at least 2 of {len(out)}, got {fraction}; one row "
            "alone has none to trade places with"
        )
    # A cyclic permutation of the chosen rows has no fixed point.
    out[chosen] = out[np.roll(chosen, 1)]
    return out


def replace_with_noise(x: ArrayLike, *, fraction: float, seed: int = 0) -> np.ndarray:
    """Replaces a fraction of the rows by random directions of the same length.

    Args:
        x: Array [n, d].
        fraction: Fraction of the rows, rounded down to whole rows.
        seed: Seed of the random choice.

    Returns:
        A copy of x with the rows replaced.

    Raises:
        InputError: `fraction` is outside 0..1.

    Example:
        >>> replace_with_noise(np.ones((4, 2)), fraction=0.5).shape
        (4, 2)
    """
    out = np.array(checks.native(np.asarray(x)))
    chosen = _choose_rows(len(out), fraction, seed)
    # A different stream from `_choose_rows`, so that noise and choice are independent.
    noise = np.random.default_rng((seed, 1)).standard_normal((len(chosen), out.shape[1]))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    length = np.linalg.norm(out[chosen].astype(np.float64), axis=1, keepdims=True)
    out[chosen] = (noise * length).astype(out.dtype)
    return out


def _choose_rows(n: int, fraction: float, seed: int) -> np.ndarray:
    """Draws a fraction of n rows."""
    if not 0.0 <= fraction <= 1.0:
        raise checks.InputError(f"fraction must be in 0..1, got {fraction}")
    # The slack compensates for rounding such as 0.29 * 100 = 28.999999999999996.
    count = int(fraction * n + 1e-9)
    return np.random.default_rng(seed).permutation(n)[:count]


# --- sample data ---


class Photographs(NamedTuple):
    """Embeddings of photographs and of one caption each, see bundled/README.md.

    Attributes:
        image: Embeddings of the photographs.
        text: Embeddings of the captions.
        caption: The captions.
    """

    image: Float[np.ndarray, "n 512"]
    text: Float[np.ndarray, "n 384"]
    caption: tuple[str, ...]


def photographs() -> Photographs:
    """Loads embeddings of 640 COCO photographs with one caption each, as sample data.

    Images are 512 principal components of their encoder's 1,280 features, so models that the
    launchers trained on COCO do not accept them. The rows are among the pairs of those models.

    Returns:
        The embeddings and the captions.

    Example:
        >>> sample = photographs()
        >>> sample.image.shape, sample.text.shape, sample.caption[0]
        ((640, 512), (640, 384), 'A green truck is driving down the road')
        >>> semi_supervised(sample.image, sample.text, n_pairs=300).summary()["pool_x"]
        [170, 512]
    """
    with np.load(SAMPLE, allow_pickle=False) as table:
        # The file holds 8-bit codes with one scale per column.
        image = table["image"] * table["image_scale"] + table["image_mean"]
        text = table["text"] * table["text_scale"]
        # Rounding to 8 bits has changed the lengths of unit rows.
        text /= np.linalg.norm(text, axis=1, keepdims=True)
        return Photographs(image, text, tuple(table["caption"].tolist()))
