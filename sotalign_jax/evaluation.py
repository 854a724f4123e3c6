"""Embedding of rows, retrieval recall and zero-shot accuracy.

Scores are cosines in float32 with products of full precision. Queries are scored in blocks of rows,
so the score matrix is never stored. Each function compiles once per shape.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from sotalign_jax import checks, data, neighbours
from sotalign_jax.calibration import Calibration
from sotalign_jax.heads import Rows
from sotalign_jax.ot import affinity, blocks

# Large enough to keep a device busy, and small enough that the hidden layers of a GLU head, eight
# times as wide as its input, take only hundreds of megabytes.
EMBED_CHUNK = 8192
"""Rows mapped at a time when embedding."""
KS = (1, 5, 10)
"""Cut-offs of R@k that are usually reported for image-text retrieval."""


def embed(head: Any, rows: Rows, *, unit: bool = True) -> Float[np.ndarray, "n d"]:
    """Maps any number of rows into the shared space.

    Rows are mapped in blocks of one compiled shape, so memory holds the result and one block.

    Args:
        head: An NNX head, or a map of a teacher.
        rows: Embeddings of the head's encoder, shape [n, d_in]. A memory-mapped array is read one
            block at a time.
        unit: True to L2-normalise the features.

    Returns:
        The features, shape [n, d].

    Example:
        >>> from sotalign_jax import heads
        >>> embed(heads.build_heads(4, 3, 2).x, np.ones((5, 4), np.float16)).shape
        (5, 2)
    """
    # Split, so that `_apply` compiles once for all heads of one structure.
    if isinstance(head, nnx.Module):
        head = nnx.split(head)
    block_size = max(1, min(EMBED_CHUNK, len(rows)))
    out = np.empty(0)
    # Zero rows make one padded block, whose result has the right width.
    for start in range(0, max(len(rows), 1), block_size):
        block = checks.native(np.asarray(rows[start : start + block_size]))
        # The last block is padded to the compiled shape. Ones have a norm, and zeros do not.
        padded = np.pad(block, [(0, block_size - len(block)), (0, 0)], constant_values=1)
        features = np.asarray(_apply(head, jnp.asarray(padded), unit))
        # The width of the result is known only after the first block.
        if start == 0:
            out = np.empty((len(rows), features.shape[1]), features.dtype)
        out[start : start + block_size] = features[: len(block)]
    return out


@functools.partial(jax.jit, static_argnums=2)
def _apply(head: Any, rows: Array, unit: bool) -> Array:
    """Maps one block. `head` is a pytree of (graph, parameters) or a map."""
    mapped = nnx.merge(*head)(rows) if isinstance(head, tuple) else head(rows)
    return affinity.l2_normalize(mapped) if unit else mapped


# --- retrieval -----------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Rank of the best match of every query, from 0, in both directions.

    Attributes:
        x: Ranks of the queries of the first modality.
        y: Ranks of the queries of the second modality.
    """

    x: Int[np.ndarray, " n"]
    y: Int[np.ndarray, " m"]


def evaluate(
    head_x: Any, head_y: Any, gallery: data.Gallery, calibration: Calibration | None = None
) -> dict[str, float]:
    """Computes the retrieval recall of two heads on a gallery.

    Args:
        head_x: Head or map of the first modality.
        head_y: Head or map of the second modality.
        gallery: Matching rows of both modalities.
        calibration: Adds the recalls of calibrated scores, as "calibrated/...".

    Returns:
        The recalls of `retrieval`, in percent.
    """
    ranked = _ranks_of_heads(head_x, head_y, gallery, calibration)
    return {
        prefix + name: value
        for prefix, both in ranked.items()
        for name, value in recalls(both).items()
    }


def retrieval(
    x: ArrayLike,
    y: ArrayLike,
    x_of_y: ArrayLike | None = None,
    *,
    bias_x: ArrayLike | None = None,
    bias_y: ArrayLike | None = None,
    ks: Sequence[int] = KS,
    block_size: int = 4096,
) -> dict[str, float]:
    """Computes recall at k (R@k) in both directions, in percent.

    R@k is the share of queries with a match among the k keys of largest score. Ties go to the lower
    index, so features that have collapsed to a point score at chance, k / (number of keys).

    Args:
        x: Features of any length, shape [n, d].
        y: Features, shape [m, d].
        x_of_y: Row of x that each row of y belongs to, shape [m]. By default row i matches row i.
            If x has several matches (an image with five captions), any of them is a hit.
        bias_x: Added to the scores of each row of x as a key, shape [n], such as
            `Calibration.x(x)`.
        bias_y: Added to the scores of each row of y as a key, shape [m].
        ks: Cut-offs.
        block_size: Query rows scored at a time. Memory is about block_size * max(n, m) floats.

    Returns:
        "x_to_y/R@k", "y_to_x/R@k" and their average "mean/R@k", for every k.

    Raises:
        InputError: Shapes do not fit, values are not finite, or a cut-off is below 1.

    Example:
        >>> retrieval(np.eye(3), np.eye(3)[[0, 2, 1]], ks=(1,))["mean/R@1"]
        33.33333333333333
    """
    if not ks or min(ks) < 1:
        raise checks.InputError(f"ks must hold cut-offs >= 1, got {tuple(ks)}")
    return recalls(ranks(x, y, x_of_y, bias_x=bias_x, bias_y=bias_y, block_size=block_size), ks)


def ranks(
    x: ArrayLike,
    y: ArrayLike,
    x_of_y: ArrayLike | None = None,
    *,
    bias_x: ArrayLike | None = None,
    bias_y: ArrayLike | None = None,
    block_size: int = 4096,
) -> Ranks:
    """Computes the rank of every query's best match.

    The rank is the number of keys with a greater score, or with an equal score and a lower index.

    Args:
        x: Features of any length, shape [n, d].
        y: Features, shape [m, d].
        x_of_y: As in `retrieval`.
        bias_x: As in `retrieval`.
        bias_y: As in `retrieval`.
        block_size: As in `retrieval`.

    Returns:
        The `Ranks` in both directions.

    Example:
        >>> ranks(np.eye(3), np.eye(3)[[0, 2, 1]]).x
        array([0, 2, 2], dtype=int32)
    """
    x = checks.features("x", x).astype(jnp.float32)
    y = checks.features("y", y, width=x.shape[1]).astype(jnp.float32)
    owner = data.owners(len(x), len(y), x_of_y)
    checks.whole(1, block_size=block_size)
    # Zeros for a missing bias, so that plain and calibrated ranks share one compiled program.
    biases = _bias("bias_x", bias_x, len(x)), _bias("bias_y", bias_y, len(y))
    return Ranks(*jax.device_get(match_ranks(x, y, owner, *biases, block_size=block_size)))


def recalls(ranks: Ranks, ks: Sequence[int] = KS) -> dict[str, float]:
    """Computes R@k from ranks, in percent.

    Args:
        ranks: Ranks in both directions.
        ks: Cut-offs.

    Returns:
        The recalls of `retrieval`.

    Example:
        >>> recalls(Ranks(np.array([0, 2]), np.array([0, 0])), ks=(1,))
        {'x_to_y/R@1': 50.0, 'y_to_x/R@1': 100.0, 'mean/R@1': 75.0}
    """
    found = {}
    for direction, own in (("x_to_y", ranks.x), ("y_to_x", ranks.y)):
        for k in ks:
            found[f"{direction}/R@{k}"] = 100.0 * float(np.mean(own < k))
    for k in ks:
        found[f"mean/R@{k}"] = (found[f"x_to_y/R@{k}"] + found[f"y_to_x/R@{k}"]) / 2
    return found


def _ranks_of_heads(
    head_x: Any, head_y: Any, gallery: data.Gallery, calibration: Calibration | None
) -> dict[str, Ranks]:
    """Returns plain ranks under "", and calibrated ranks under "calibrated/"."""
    x, y = embed(head_x, gallery.x), embed(head_y, gallery.y)
    found = {"": ranks(x, y, gallery.x_of_y)}
    if calibration is not None:
        bias_x, bias_y = calibration.x(x), calibration.y(y)
        found["calibrated/"] = ranks(x, y, gallery.x_of_y, bias_x=bias_x, bias_y=bias_y)
    return found


@functools.partial(jax.jit, static_argnames="block_size")
def match_ranks(
    x: Float[Array, "n d"],
    y: Float[Array, "m d"],
    owner: Int[Array, " m"],
    bias_x: Float[Array, " n"],
    bias_y: Float[Array, " m"],
    *,
    block_size: int,
) -> tuple[Int[Array, " n"], Int[Array, " m"]]:
    """Computes ranks in both directions, the compiled part of `ranks`.

    Args:
        x: Features of the first modality, shape [n, d].
        y: Features of the second modality, shape [m, d].
        owner: Row of x that each row of y belongs to, shape [m].
        bias_x: Added to the scores of each row of x as a key, shape [n].
        bias_y: Added to the scores of each row of y as a key, shape [m].
        block_size: Query rows scored at a time.

    Returns:
        Ranks of the queries of either modality.
    """
    x, y = affinity.l2_normalize(x), affinity.l2_normalize(y)
    ids = jnp.arange(len(x), dtype=owner.dtype)
    ranks_x = _best_ranks(x, y, bias_y, ids, owner, block_size)
    return ranks_x, _best_ranks(y, x, bias_x, owner, ids, block_size)


def _best_ranks(
    queries: Array, keys: Array, bias: Array, query_id: Array, key_id: Array, block_size: int
) -> Array:
    """Returns the rank of each query's best key among those with the query's id."""
    n = len(queries)

    def ranks(block: blocks.Block, out: Array) -> Array:
        scores = affinity.dot(block.of(queries), keys.T) + bias
        matches = block.of(query_id)[:, None] == key_id[None, :]
        return block.put(out, neighbours.best_ranks(scores, matches))

    # Blocks overlap if their size does not divide n. Sizes are equalised, because two blocks of
    # `block_size` rows for n = block_size + 1 would take almost twice the work.
    count = -(-n // block_size)
    return blocks.over_rows(n, -(-n // count), ranks, jnp.zeros(n, jnp.int32))


def _bias(name: str, given: ArrayLike | None, size: int) -> Array:
    """Returns a checked bias, or zeros."""
    bias = jnp.zeros(size, jnp.float32) if given is None else jnp.asarray(given, jnp.float32)
    if bias.shape != (size,) or not checks.finite(bias):
        raise checks.InputError(f"{name} must hold {size} finite numbers, got shape {bias.shape}")
    return bias


# --- chance and uncertainty ----------------------------------------------------------------------


def chance(size: int, k: int, matches: ArrayLike = 1) -> float:
    """Computes the R@k of a random order of the keys, in percent.

    Args:
        size: Number of keys.
        k: Cut-off.
        matches: Number of keys that match each query, one number or one per query.

    Returns:
        100 (1 - C(size - matches, k) / C(size, k)), averaged over the queries.

    Example:
        >>> chance(1000, 10)
        1.0
        >>> round(chance(5000, 10, matches=5), 3)  # an image with five captions
        0.996
    """
    # The ratio of binomials is a product of k factors. Factorials would overflow.
    drawn = np.arange(min(k, size))
    missed = (size - np.asarray(matches)[..., None] - drawn) / (size - drawn)
    return 100.0 * float(np.mean(1.0 - np.maximum(missed, 0.0).prod(axis=-1)))


def bootstrap_interval(
    values: Float[np.ndarray, "n ..."], *, resamples: int = 1000, seed: int = 0
) -> Float[np.ndarray, "2 ..."]:
    """Computes 95 % percentile bootstrap intervals of means.

    Args:
        values: One row per query, and any number of metrics. `100.0 * (ranks < k)` gives R@k.
        resamples: Number of bootstrap samples.
        seed: Seed of the draws.

    Returns:
        The lower and the upper end of the interval of each metric's mean.

    Example:
        >>> hits = np.arange(1000) < 300  # 300 of 1,000 queries
        >>> bootstrap_interval(100.0 * hits)
        array([27.2, 32.8])

    References:
        B. Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7 (1979).
    """
    rng, n = np.random.default_rng(seed), len(values)
    means = []
    for _ in range(resamples):
        # With counts of rows instead of the rows, one product gives the means of all metrics.
        counts = np.bincount(rng.integers(n, size=n), minlength=n)
        means.append(counts @ values / n)
    return np.percentile(means, [2.5, 97.5], axis=0)


class Recall(NamedTuple):
    """R@k in percent.

    Attributes:
        value: R@k.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        chance: R@k of a random order.
    """

    value: float
    low: float
    high: float
    chance: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Retrieval recalls with intervals and chance levels. `print` shows a table.

    Attributes:
        rows_x: Number of rows of the first modality.
        rows_y: Number of rows of the second modality.
        recalls: Recalls by the names of `evaluate`.
        gain: Calibrated minus plain mean R@k at the first cut-off, as (value, low, high). None
            without a calibration.
        calibrated: True if `Aligner.search` uses calibrated scores.
    """

    rows_x: int
    rows_y: int
    recalls: dict[str, Recall]
    gain: tuple[float, float, float] | None = None
    calibrated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as JSON values."""
        named = {name: recall._asdict() for name, recall in self.recalls.items()}
        sizes = {"rows_x": self.rows_x, "rows_y": self.rows_y}
        return {**sizes, "calibrated": self.calibrated, **named}

    @property
    def remarks(self) -> list[str]:
        """The scores of `search`, and warnings about them and about recall at chance level."""
        found = []
        means = {name: r for name, r in self.recalls.items() if name.startswith("mean/")}
        if self.gain is not None:
            found.append(self._choice(next(iter(means)).removeprefix("mean/"), *self.gain))
        # A cut-off at the number of keys finds every match, so its recall says nothing.
        informative = [r for r in means.values() if r.chance < 100]
        if informative and all(r.low <= r.chance for r in informative):
            found.append("Not above chance: check that x and y are in the same order.")
        return found

    def _choice(self, cut: str, value: float, low: float, high: float) -> str:
        """Names the scores of `search`, and the change by calibration if it speaks against them."""
        uses = "calibrated scores" if self.calibrated else "plain cosines"
        text = f"`search` uses {uses}."
        if (self.calibrated and value < 0) or (not self.calibrated and low > 0):
            change = f"{value:+.1f} [{low:.1f}, {high:.1f}]"
            text += f" On these rows, calibration changes mean {cut} by {change}; "
            text += f"calibrated={not self.calibrated} overrides the choice."
        return text

    def __str__(self) -> str:
        """Returns a table with one line per direction and one column per cut-off."""
        cuts = [name.removeprefix("mean/") for name in self.recalls if name.startswith("mean/")]
        lines = [("", cuts)]
        for group in dict.fromkeys(name.rpartition("/")[0] for name in self.recalls):
            shown = [self.recalls[f"{group}/{cut}"] for cut in cuts]
            cells = [f"{r.value:.1f} [{r.low:.1f}, {r.high:.1f}]" for r in shown]
            lines.append((group.replace("_to_", " to ").replace("/", " "), cells))
        lines.append(("chance", [f"{self.recalls[f'mean/{cut}'].chance:.2f}" for cut in cuts]))
        table = [f"{label:<18}" + "".join(f"{c:>21}" for c in cells) for label, cells in lines]
        sizes = f"{self.rows_x:,} rows of x and {self.rows_y:,} rows of y"
        title = f"Retrieval between {sizes}, in percent [95 % interval]"
        return "\n".join([title, *table, *self.remarks])


def report(
    head_x: Any,
    head_y: Any,
    gallery: data.Gallery,
    calibration: Calibration | None = None,
    *,
    ks: Sequence[int] = KS,
    seed: int = 0,
    calibrated: bool = False,
) -> Report:
    """Computes retrieval recalls with bootstrap intervals and chance levels.

    Rows of x are resampled together with all of their rows of y, because captions of one image are
    not independent queries.

    Args:
        head_x: Head or map of the first modality.
        head_y: Head or map of the second modality.
        gallery: Matching rows of both modalities.
        calibration: Adds the recalls of calibrated scores.
        ks: Cut-offs.
        seed: Seed of the bootstrap.
        calibrated: True if searches use calibrated scores, which the report states.

    Returns:
        A `Report`, whose values are those of `evaluate`.

    Raises:
        InputError: The gallery's rows do not have the widths of the heads.

    Example:
        >>> from sotalign_jax import heads
        >>> same = heads.AffineMap(jnp.eye(8), jnp.zeros(8))
        >>> print(report(same, same, data.gallery(np.eye(8), np.eye(8)), ks=(1,)))
        Retrieval between 8 rows of x and 8 rows of y, in percent [95 % interval]
                                            R@1
        x to y             100.0 [100.0, 100.0]
        y to x             100.0 [100.0, 100.0]
        mean               100.0 [100.0, 100.0]
        chance                            12.50

    References:
        M. Radovanovic et al., "Hubs in space", JMLR 11 (2010), for the hubs that calibration
        corrects.
    """
    # Checks the widths on one row. `data.gallery` has checked the values.
    checks.embeddings("x", gallery.x[:1], width=head_x.d_in)
    checks.embeddings("y", gallery.y[:1], width=head_y.d_in)
    n, m, owner = len(gallery.x), len(gallery.y), gallery.x_of_y
    matches = np.bincount(owner, minlength=n)
    found: dict[str, float] = {}
    rows: dict[str, np.ndarray] = {}
    levels: dict[str, float] = {}
    for prefix, both in _ranks_of_heads(head_x, head_y, gallery, calibration).items():
        found |= {prefix + name: value for name, value in recalls(both, ks).items()}
        for k in ks:
            x = 100.0 * (both.x < k)
            # One value per row of x: the hits of its rows of y, scaled so that the mean over x is
            # the recall of y.
            y = np.bincount(owner, weights=100.0 * (both.y < k), minlength=n) * n / m
            by_x, by_y = chance(m, k, matches), chance(n, k)
            for direction, hits, level in (
                ("x_to_y", x, by_x),
                ("y_to_x", y, by_y),
                ("mean", (x + y) / 2, (by_x + by_y) / 2),
            ):
                name = f"{prefix}{direction}/R@{k}"
                rows[name], levels[name] = hits, level
    # All recalls share one set of bootstrap samples.
    values = np.stack([rows[name] for name in found], axis=1)
    lows, highs = bootstrap_interval(values, seed=seed).tolist()
    measured = {
        name: Recall(value, low, high, levels[name])
        for (name, value), low, high in zip(found.items(), lows, highs, strict=True)
    }
    gain, first = None, f"mean/R@{ks[0]}"
    if calibration is not None:
        # A paired bootstrap: differences per query vary less than the recalls themselves.
        ends = bootstrap_interval(rows[f"calibrated/{first}"] - rows[first], seed=seed).tolist()
        gain = (found[f"calibrated/{first}"] - found[first], *ends)
    return Report(n, m, measured, gain, calibrated)


# --- zero-shot classification --------------------------------------------------------------------


def evaluate_zero_shot(head_x: Any, head_y: Any, task: data.ZeroShot) -> dict[str, float]:
    """Computes the zero-shot accuracy of two heads, see `zero_shot`.

    Args:
        head_x: Head or map of the rows that are classified.
        head_y: Head or map of the prompts.
        task: Rows, labels and prompts.

    Returns:
        The accuracies of `zero_shot`, in percent.
    """
    prompts = embed(head_y, task.prompts.reshape(-1, task.prompts.shape[-1]))
    prompts = prompts.reshape(*task.prompts.shape[:2], -1)
    return zero_shot(embed(head_x, task.x), prompts, task.labels)


def zero_shot(
    x: ArrayLike, prompts: ArrayLike, labels: ArrayLike, *, block_size: int = 4096
) -> dict[str, float]:
    """Computes the accuracy of classification by the nearest class, in percent.

    A class is the L2-normalised mean of its L2-normalised prompt features.

    Args:
        x: Features, shape [n, d].
        prompts: Features of t prompts per class, shape [c, t, d].
        labels: Class of each row of x, shape [n].
        block_size: Rows scored at a time.

    Returns:
        "zero_shot/top1", and "zero_shot/mean_per_class", the mean over the classes in `labels`.

    Raises:
        InputError: Shapes do not fit, values are not finite, or a label has no prompts.

    Example:
        >>> zero_shot(np.eye(2), np.eye(2)[:, None], [0, 0])
        {'zero_shot/top1': 50.0, 'zero_shot/mean_per_class': 50.0}

    References:
        A. Radford et al., "Learning transferable visual models from natural language supervision",
        ICML 2021, for the averaged prompts.
    """
    x = checks.features("x", x).astype(jnp.float32)
    prompts = checks.features("prompts", prompts, ndim=3, width=x.shape[1]).astype(jnp.float32)
    truth = data.row_labels("labels", labels, len(x), below=len(prompts))
    # Normalised twice, so that every prompt has the same weight in its class.
    classes = affinity.l2_normalize(affinity.l2_normalize(prompts).mean(axis=1))
    predicted = np.asarray(neighbours.nearest(x, classes, 1, block_size=block_size).indices[:, 0])
    right = predicted == truth
    # Classes without rows have no accuracy and are not part of the mean.
    seen = np.bincount(truth)
    per_class = np.bincount(truth, weights=right)[seen > 0] / seen[seen > 0]
    return {
        "zero_shot/top1": 100.0 * float(right.mean()),
        "zero_shot/mean_per_class": 100.0 * float(per_class.mean()),
    }
