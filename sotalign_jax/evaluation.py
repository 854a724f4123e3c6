"""Embedding rows, retrieval recall and zero-shot accuracy, in row blocks on the device.

Scores are float32 cosines at full matmul precision. No more than `block_size` query rows are scored
at a time, so the full score matrix never exists; each function compiles once per shape.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from sotalign_jax import checks, data, neighbours
from sotalign_jax.calibration import Calibration
from sotalign_jax.heads import Rows
from sotalign_jax.ot import affinity, blocks

EMBED_CHUNK = 8192
"""Rows mapped at a time when embedding."""


def embed(head: Any, rows: Rows, *, unit: bool = True) -> Float[np.ndarray, "n d"]:
    """Unit features of any number of rows by an NNX head or a map, in blocks of one compiled shape.

    Without `unit`, features as the head returns them.

    >>> from sotalign_jax import heads
    >>> embed(heads.build_heads(4, 3, 2).x, np.ones((5, 4), np.float16)).shape
    (5, 2)
    """
    if isinstance(head, nnx.Module):
        head = nnx.split(head)
    block_size = min(EMBED_CHUNK, len(rows))
    out = []
    for start in range(0, len(rows), block_size):
        block = np.asarray(rows[start : start + block_size])
        padded = np.pad(block, [(0, block_size - len(block)), (0, 0)], constant_values=1)
        out.append(np.asarray(_apply(head, jnp.asarray(padded), unit))[: len(block)])
    return np.concatenate(out)


def evaluate(
    head_x: Any, head_y: Any, gallery: data.Gallery, calibration: Calibration | None = None
) -> dict[str, float]:
    """Retrieval metrics of two heads on a gallery; with a calibration, "calibrated/..." as well."""
    x, y = embed(head_x, gallery.x), embed(head_y, gallery.y)
    metrics = retrieval(x, y, gallery.x_of_y)
    if calibration is not None:
        bias_x, bias_y = calibration.x(x), calibration.y(y)
        calibrated = retrieval(x, y, gallery.x_of_y, bias_x=bias_x, bias_y=bias_y)
        metrics |= {f"calibrated/{name}": value for name, value in calibrated.items()}
    return metrics


def evaluate_zero_shot(head_x: Any, head_y: Any, task: data.ZeroShot) -> dict[str, float]:
    """Zero-shot classification metrics of two heads, in percent."""
    prompts = embed(head_y, task.prompts.reshape(-1, task.prompts.shape[-1]))
    prompts = prompts.reshape(*task.prompts.shape[:2], -1)
    return zero_shot(embed(head_x, task.x), prompts, task.labels)


@functools.partial(jax.jit, static_argnums=2)
def _apply(head: Any, rows: Array, unit: bool) -> Array:
    """Features of one block; `head` is a pytree of (graph, parameters) or an affine map."""
    mapped = nnx.merge(*head)(rows) if isinstance(head, tuple) else head(rows)
    return affinity.l2_normalize(mapped) if unit else mapped


def retrieval(
    x: ArrayLike,
    y: ArrayLike,
    x_of_y: ArrayLike | None = None,
    *,
    bias_x: ArrayLike | None = None,
    bias_y: ArrayLike | None = None,
    ks: Sequence[int] = (1, 5, 10),
    block_size: int = 4096,
) -> dict[str, float]:
    """Recall at k in both directions, in percent.

    A query is a hit at k when one of its matches is among the k keys of largest cosine, ties
    going to the lower index: rank = #{score greater} + #{score equal, index lower} < k. So
    features that have collapsed to a point score chance, k / (number of keys). The results are
    "x_to_y/R@k", "y_to_x/R@k" and their average "mean/R@k" for every k of `ks`.

    Args:
      x: [n, d] features, in any scale.
      y: [m, d] features.
      x_of_y: [m] the row of x each row of y belongs to; row i matches row i when None. With
        several y per x (captions of a picture) x_to_y asks for any one of them.
      bias_x: [n] added to the score of each row of x as a key, such as `Calibration.x(x)`.
      bias_y: [m] likewise for y.
      ks: the cut-offs.
      block_size: most query rows scored at once; memory is about block_size * max(n, m) floats.

    >>> retrieval(np.eye(3), np.eye(3)[[0, 2, 1]], ks=(1,))["mean/R@1"]
    33.33333333333333
    """
    x = checks.features("x", x).astype(jnp.float32)
    y = checks.features("y", y, width=x.shape[1]).astype(jnp.float32)
    if not ks or min(ks) < 1:
        raise checks.InputError(f"ks: {tuple(ks)} given; pass at least one cut-off, each 1 or more")
    owner = data.owners(len(x), len(y), x_of_y)
    checks.whole(1, block_size=block_size)
    biases = _bias("bias_x", bias_x, len(x)), _bias("bias_y", bias_y, len(y))
    ranks_x, ranks_y = jax.device_get(match_ranks(x, y, owner, *biases, block_size=block_size))
    recalls = {}
    for direction, ranks in (("x_to_y", ranks_x), ("y_to_x", ranks_y)):
        for k in ks:
            recalls[f"{direction}/R@{k}"] = 100.0 * float(np.mean(ranks < k))
    for k in ks:
        recalls[f"mean/R@{k}"] = (recalls[f"x_to_y/R@{k}"] + recalls[f"y_to_x/R@{k}"]) / 2
    return recalls


def zero_shot(
    x: ArrayLike, prompts: ArrayLike, labels: ArrayLike, *, block_size: int = 4096
) -> dict[str, float]:
    """Accuracy, in percent, of classifying x [n, d] by the nearest class of prompts [c, t, d].

    A class is the L2-normalised mean of its L2-normalised prompt features; "mean_per_class" is over
    the classes in `labels`; at most `block_size` rows are scored at once.

    >>> zero_shot(np.eye(2), np.eye(2)[:, None], [0, 0])
    {'zero_shot/top1': 50.0, 'zero_shot/mean_per_class': 50.0}
    """
    x = checks.features("x", x).astype(jnp.float32)
    prompts = checks.features("prompts", prompts, ndim=3, width=x.shape[1]).astype(jnp.float32)
    truth = data.row_labels("labels", labels, len(x), below=len(prompts))
    classes = affinity.l2_normalize(affinity.l2_normalize(prompts).mean(axis=1))
    predicted = np.asarray(neighbours.nearest(x, classes, 1, block_size=block_size).indices[:, 0])
    right = predicted == truth
    seen = np.bincount(truth)
    per_class = np.bincount(truth, weights=right)[seen > 0] / seen[seen > 0]
    return {
        "zero_shot/top1": 100.0 * float(right.mean()),
        "zero_shot/mean_per_class": 100.0 * float(per_class.mean()),
    }


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
    """Each row's rank of its best match in the other."""
    x, y = affinity.l2_normalize(x), affinity.l2_normalize(y)
    ids = jnp.arange(len(x), dtype=owner.dtype)
    ranks_x = _best_ranks(x, y, bias_y, ids, owner, block_size)
    return ranks_x, _best_ranks(y, x, bias_x, owner, ids, block_size)


def _best_ranks(
    queries: Array, keys: Array, bias: Array, query_id: Array, key_id: Array, block_size: int
) -> Array:
    """Rank of the first key, in a stable descending sort, that has the query's id."""
    n, index = len(queries), jnp.arange(len(keys))

    def ranks(block: blocks.Block, out: Array) -> Array:
        scores = affinity.dot(block.of(queries), keys.T) + bias
        matches = jnp.where(block.of(query_id)[:, None] == key_id[None, :], scores, -jnp.inf)
        best = matches.max(axis=1, keepdims=True)
        at = matches.argmax(axis=1, keepdims=True)  # the lowest index among equal maxima
        ahead = (scores > best) | ((scores == best) & (index[None, :] < at))
        return block.put(out, ahead.sum(axis=1, dtype=jnp.int32))

    # Equal blocks: one of `block_size` rows and one that reaches back into it would double the work
    # at n = block_size + 1.
    return blocks.over_rows(n, -(-n // -(-n // block_size)), ranks, jnp.zeros(n, jnp.int32))


def _bias(name: str, given: ArrayLike | None, size: int) -> Array:
    if given is None:
        return jnp.zeros(size, jnp.float32)
    bias = jnp.asarray(given, jnp.float32)
    if bias.shape != (size,) or not bool(jnp.isfinite(bias).all()):
        raise checks.InputError(
            f"{name}: has shape {bias.shape} or values that are not finite; pass {size} numbers"
        )
    return bias
