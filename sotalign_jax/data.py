"""What a run reads: pairs, unpaired pools, galleries and class prompts. Host numpy throughout.

Arrays stay memory-mapped and in their stored dtype (usually float16) until rows are taken from
them; placing rows on a device is the training loop's job.
"""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from sotalign_jax import checks, files

POOLS = ("disjoint", "random", "aligned")
SAMPLE = pathlib.Path(__file__).parent / "bundled" / "coco_sample.npz"


# --- what is evaluated on ---


class Gallery(NamedTuple):
    """Cross-modal retrieval: `y[j]` belongs to `x[x_of_y[j]]`. Build it with `gallery`."""

    x: Float[np.ndarray, "n d_x"]
    y: Float[np.ndarray, "m d_y"]
    x_of_y: Int[np.ndarray, " m"]


class ZeroShot(NamedTuple):
    """Classification of `x` by class prompts. Build it with `zero_shot`."""

    x: Float[np.ndarray, "n d_x"]
    labels: Int[np.ndarray, " n"]
    prompts: Float[np.ndarray, "c t d_y"]
    class_names: tuple[str, ...]


def owners(n: int, m: int, x_of_y: ArrayLike | None) -> Int[np.ndarray, " m"]:
    """Checked `x_of_y`: the row of x (of n) that each of the m rows of y belongs to.

    >>> owners(2, 2, None)
    array([0, 1], dtype=int32)
    """
    if x_of_y is None and n != m:
        raise checks.InputError(
            f"gallery: x has {n} rows but y has {m}; pass x_of_y unless row i matches row i"
        )
    index = row_labels("x_of_y", np.arange(n) if x_of_y is None else x_of_y, m, below=n)
    orphans = np.flatnonzero(np.bincount(index, minlength=n) == 0)
    if orphans.size:
        raise checks.InputError(
            f"x_of_y: row {orphans[0]} of x has no row of y; remove such rows of x"
        )
    return index


def row_labels(name: str, values: ArrayLike, count: int, *, below: int) -> Int[np.ndarray, " n"]:
    """Checked labels of `count` rows, whole numbers in 0..below-1.

    >>> row_labels("labels", [1, 0], 2, below=2)
    array([1, 0], dtype=int32)
    """
    index = np.asarray(values)
    if index.shape != (count,) or index.dtype.kind not in "iu":
        raise checks.InputError(
            f"{name}: has shape {index.shape} and dtype {index.dtype}; "
            f"pass {count} integers, one per row"
        )
    if count and not (index.min() >= 0 and index.max() < below):
        raise checks.InputError(
            f"{name}: values run from {index.min()} to {index.max()}; "
            f"keep them within 0..{below - 1}"
        )
    return index.astype(np.int32)


def gallery(x: ArrayLike, y: ArrayLike, x_of_y: ArrayLike | None = None) -> Gallery:
    """A checked `Gallery`; without `x_of_y`, row i of x matches row i of y.

    >>> gallery(np.eye(2), np.eye(3), x_of_y=[0, 0, 1]).x_of_y
    array([0, 0, 1], dtype=int32)
    """
    x, y = checks.rows("gallery x", x), checks.rows("gallery y", y)
    return Gallery(x, y, owners(len(x), len(y), x_of_y))


def zero_shot(
    x: ArrayLike, labels: ArrayLike, prompts: ArrayLike, class_names: tuple[str, ...] | None = None
) -> ZeroShot:
    """A checked `ZeroShot`: labels [n] index the classes of prompts [c, t, d_y].

    >>> zero_shot(np.eye(2), [0, 1], np.ones((2, 3, 4))).class_names
    ('0', '1')
    """
    x, prompts = checks.rows("zero_shot x", x), checks.array("prompts", prompts)
    if prompts.ndim != 3:
        raise checks.InputError(
            f"prompts: has shape {prompts.shape}; pass [classes, templates, width]"
        )
    checks.embeddings("zero_shot prompts", prompts.reshape(-1, prompts.shape[-1]))
    names = tuple(map(str, range(len(prompts)))) if class_names is None else tuple(class_names)
    if len(names) != len(prompts):
        raise checks.InputError(
            f"class_names: {len(names)} names for {len(prompts)} prompted classes; pass one each"
        )
    return ZeroShot(x, row_labels("labels", labels, len(x), below=len(prompts)), prompts, names)


# --- what is trained on ---


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Everything a run reads. `dataset` and `semi_supervised` check the values as well.

    >>> dataset((np.eye(3), np.ones((3, 2))), y=np.ones((5, 2)))
    Dataset
      pairs_x: 3 x 3
      pairs_y: 3 x 2
      pool_x: 0 x 3
      pool_y: 5 x 2
    """

    pairs_x: Float[np.ndarray, "p d_x"]
    pairs_y: Float[np.ndarray, "p d_y"]
    pool_x: Float[np.ndarray, "u d_x"] | files.MappedRows
    pool_y: Float[np.ndarray, "v d_y"] | files.MappedRows
    val: Gallery | None = None
    test: Gallery | None = None
    zero_shot: ZeroShot | None = None

    def __post_init__(self) -> None:
        for name, shape in self.summary().items():
            width = (self.pairs_x if name.endswith("_x") else self.pairs_y).shape[1]
            if shape is not None and shape[-1] != width:
                raise checks.InputError(
                    f"{name}: width {shape[-1]} differs from the pairs' {width}; "
                    "embed both with the same encoder"
                )

    def __repr__(self) -> str:
        """A line for each part, with its shape."""
        shapes = {name: shape for name, shape in self.summary().items() if shape is not None}
        lines = (f"{name}: {' x '.join(map(str, shape))}" for name, shape in shapes.items())
        return "\n  ".join(["Dataset", *lines])

    def summary(self) -> dict[str, list[int] | None]:
        """Shapes of the parts, ready for a JSON file.

        >>> dataset((np.eye(2), np.eye(2))).summary()["pairs_x"]
        [2, 2]
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
    """A checked `Dataset` of pairs (pairs_x, pairs_y), unpaired x and y; a missing pool is empty.

    >>> dataset((np.eye(3), np.eye(3)), x=np.ones((5, 3))).pool_y.shape
    (0, 3)
    """
    if not isinstance(pairs, tuple | list) or len(pairs) != 2:
        raise checks.InputError(
            f"pairs: got {type(pairs).__name__}; pass pairs=(A, B), where A[i] matches B[i]"
        )
    pairs_x, pairs_y = checks.pairs(*pairs)
    pool_x, pool_y = (
        checks.rows(name, own[:0] if pool is None else pool, width=own.shape[1], min_rows=0)
        for name, pool, own in (("x", x, pairs_x), ("y", y, pairs_y))
    )
    return Dataset(pairs_x, pairs_y, pool_x, pool_y, val, test, zero_shot)


class Rows(NamedTuple):
    """Row numbers of a paired table: the pairs, and each modality's unpaired pool."""

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
) -> Rows:
    """Chooses pairs at random and makes unpaired pools of the remaining rows.

    `pool`: "disjoint" gives x one half of the rest and y the other, so no hidden true pair is
    left; "random" gives both all of the rest, y in another order; "aligned" in the same order.
    Each pool has `n_unpaired` rows, or all that remain. Sweeps are nested: with one seed, fewer
    pairs are a subset of more pairs, and a smaller pool of a larger one.

    >>> split_rows(6, n_pairs=2, seed=0).x.shape
    (2,)
    """
    checks.choice("pool", pool, POOLS)
    checks.within(n_rows, "rows", n_pairs=n_pairs)
    rng = np.random.default_rng(seed)
    order = rng.permutation(n_rows)
    rest = order[n_pairs:]
    available = len(rest) // 2 if pool == "disjoint" else len(rest)
    size = available if n_unpaired is None else n_unpaired
    checks.within(available, f"rows left for a {pool} pool", least=0, n_unpaired=size)
    y = (rest[available:] if pool == "disjoint" else rest)[:size]
    return Rows(order[:n_pairs], rest[:size], rng.permutation(y) if pool == "random" else y)


SUE_TEST = 400
"""Test rows of SUE's protocol."""


def sue_rows(
    n_rows: int, *, n_pairs: int, seed: int = 0, shuffle: bool = False
) -> tuple[Int[np.ndarray, " t"], Rows]:
    """SUE's split of a table: test rows, pairs, and pools that each lose their own tenth.

    The table's order decides, as published: the first 400 rows are the test, the last the pairs.
    With `shuffle` every seed draws its own, so that a spread over seeds is one over data.

    >>> test, rows = sue_rows(600, n_pairs=100)
    >>> len(test), rows.pairs[:3].tolist(), len(rows.x), len(rows.y)
    (400, [500, 501, 502], 90, 90)
    """
    if n_rows - SUE_TEST - n_pairs < 2:
        raise checks.InputError(
            f"n_pairs: {n_pairs} and {SUE_TEST} tests leave {n_rows - SUE_TEST - n_pairs} of "
            f"{n_rows} rows unpaired; ask for fewer"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    test, rest, pairs = np.split(order, [SUE_TEST, n_rows - n_pairs])
    x, y = (rng.permutation(rest)[len(rest) // 10 :] for _ in range(2))
    return test, Rows(pairs, np.sort(x), y)


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
) -> Dataset:
    """A semi-supervised `Dataset` from a paired table: few pairs kept, the rest unpaired.

    Row i of x [n, d_x] matches row i of y [n, d_y]; `split_rows` explains `pool` and `n_unpaired`.
    `unpaired_x` and `unpaired_y` are other sources of the pools than the table's own rows, and
    `replace_with_noise` replaces the fraction `pool_noise` of each pool.

    >>> semi_supervised(np.ones((9, 4)), np.ones((9, 3)), n_pairs=5).summary()["pool_y"]
    [2, 3]
    """
    checks.choice("pool", pool, POOLS)
    x, y = checks.pairs(x, y, names=("x", "y"))
    outside = (unpaired_x is not None, unpaired_y is not None)
    rows = split_rows(
        len(x),
        n_pairs=n_pairs,
        # An outside pool on one side rules out hidden pairs, so the other takes all of the rest.
        pool="random" if any(outside) else pool,
        n_unpaired=0 if all(outside) else n_unpaired,
        seed=seed,
    )
    pools: list[np.ndarray | files.MappedRows] = []
    sides = ("unpaired_x", unpaired_x, x, rows.x), ("unpaired_y", unpaired_y, y, rows.y)
    for own_seed, (name, given, table, chosen) in enumerate(sides, seed):
        if given is None:
            made = files.take(table, chosen)
        else:
            made = checks.rows(name, given, width=table.shape[1])
            if n_unpaired is not None:
                checks.within(len(made), f"rows in {name}", least=0, n_unpaired=n_unpaired)
                order = np.random.default_rng(own_seed).permutation(len(made))
                made = files.take(made, order[:n_unpaired])
        if pool_noise:
            made = replace_with_noise(made, fraction=pool_noise, seed=own_seed)
        pools.append(made)
    pool_x, pool_y = pools
    return Dataset(x[rows.pairs], y[rows.pairs], pool_x, pool_y, val, test, zero_shot)


# --- robustness protocols ---


def mismatch_pairs(y: ArrayLike, *, fraction: float, seed: int = 0) -> np.ndarray:
    """Teacher noise: floor(fraction * n) rows of y trade places, none keeping its own.

    >>> mismatch_pairs(np.arange(4.0)[:, None], fraction=0.5, seed=0).ravel().tolist()
    [2.0, 1.0, 0.0, 3.0]
    """
    out = np.array(y)
    chosen = _choose_rows(len(out), fraction, seed)
    if len(chosen) == 1:
        raise checks.InputError(
            f"fraction: {fraction} of {len(out)} rows picks one row, which has none to trade "
            "places with; raise it"
        )
    # One cycle through the chosen rows moves every one of them.
    out[chosen] = out[np.roll(chosen, 1)]
    return out


def replace_with_noise(x: ArrayLike, *, fraction: float, seed: int = 0) -> np.ndarray:
    """Out-of-distribution rows: floor(fraction * n) rows become random directions of their length.

    >>> replace_with_noise(np.ones((4, 2)), fraction=0.5).shape
    (4, 2)
    """
    out = np.array(x)
    chosen = _choose_rows(len(out), fraction, seed)
    noise = np.random.default_rng((seed, 1)).standard_normal((len(chosen), out.shape[1]))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    length = np.linalg.norm(out[chosen].astype(np.float64), axis=1, keepdims=True)
    out[chosen] = (noise * length).astype(out.dtype)
    return out


def _choose_rows(n: int, fraction: float, seed: int) -> np.ndarray:
    if not 0.0 <= fraction <= 1.0:
        raise checks.InputError(f"fraction: {fraction} is outside 0..1; pass a share of the rows")
    # The slack undoes rounding such as 0.29 * 100 = 28.999999999999996.
    count = int(fraction * n + 1e-9)
    return np.random.default_rng(seed).permutation(n)[:count]


# --- a sample of photographs ---


class Photographs(NamedTuple):
    """Photographs and one caption of each; see bundled/README.md."""

    image: Float[np.ndarray, "n 512"]
    text: Float[np.ndarray, "n 384"]
    caption: tuple[str, ...]


def photographs() -> Photographs:
    """Embeddings of 640 COCO photographs with a caption each: real data to try things on.

    Images are 512 principal components of their encoder's 1,280 features, so that models which the
    launchers trained on COCO do not take them; the rows are among the pairs of those models.

    >>> sample = photographs()
    >>> sample.image.shape, sample.text.shape, sample.caption[0]
    ((640, 512), (640, 384), 'A green truck is driving down the road')
    >>> semi_supervised(sample.image, sample.text, n_pairs=300).summary()["pool_x"]
    [170, 512]
    """
    with np.load(SAMPLE, allow_pickle=False) as table:
        image = table["image"] * table["image_scale"] + table["image_mean"]
        text = table["text"] * table["text_scale"]
        text /= np.linalg.norm(text, axis=1, keepdims=True)
        return Photographs(image, text, tuple(table["caption"].tolist()))
