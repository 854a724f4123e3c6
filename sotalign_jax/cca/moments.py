"""Second moments of two modalities, the only statistics that a CCA needs.

Moments of pairs, of pools and of transport plans have the same form, so they can be mixed. All of
them are float64 arrays on the host.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sotalign_jax import checks


class Moments(NamedTuple):
    """Covariances of both modalities and their cross-covariance.

    Attributes:
        xx: Covariance of the first modality.
        yy: Covariance of the second modality.
        xy: Cross-covariance.
    """

    xx: Float[np.ndarray, "d d"]
    yy: Float[np.ndarray, "e e"]
    xy: Float[np.ndarray, "d e"]


def of_pairs(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Moments:
    """Computes the moments of centred pairs, which may be given a block of rows at a time.

    Args:
        blocks: Rows of the first modality, shape [n, d], with their partners, shape [n, e]. The
            mean over all blocks is zero.

    Returns:
        The moments with the divisor n - 1.

    Example:
        >>> of_pairs([(np.array([[-1.0], [1.0]]), np.array([[-2.0], [2.0]]))]).xy.tolist()
        [[4.0]]
    """
    count = 0
    totals: list[Any] = [0.0, 0.0, 0.0]
    for x, y in blocks:
        count += len(x)
        parts = x.T @ x, y.T @ y, x.T @ y
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    return Moments(*(total / max(count - 1, 1) for total in totals))


def mix(first: Moments, second: Moments, weight: float) -> Moments:
    """Computes the weighted mean of two moments.

    Args:
        first: Moments.
        second: Moments of rows in the same coordinates.
        weight: Weight of the second moments, between 0 and 1.

    Returns:
        The mean.

    Example:
        >>> one = Moments(np.eye(1), np.eye(1), np.eye(1))
        >>> mix(one, Moments(*(3 * part for part in one)), 0.5).xx.tolist()
        [[2.0]]
    """
    parts = zip(first, second, strict=True)
    return Moments(*((1.0 - weight) * a + weight * b for a, b in parts))


def unit(rows: np.ndarray) -> Float[np.ndarray, "n d"]:
    """Scales rows to unit length in float64. Zero rows stay zero.

    Args:
        rows: Rows of any float dtype, shape [n, d].

    Returns:
        The unit rows.

    Example:
        >>> unit(np.array([[3e-25, 4e-25], [0.0, 0.0]]))
        array([[0.6, 0.8],
               [0. , 0. ]])
    """
    rows = np.asarray(rows, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def centred(name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows without their mean, and the mean.

    Args:
        name: Name of the argument for error messages.
        rows: Rows, shape [n, d].

    Returns:
        The centred rows and the mean.

    Raises:
        InputError: All rows are equal.
    """
    mean = rows.mean(axis=0)
    without = rows - mean
    largest = np.linalg.norm(without, axis=1).max()
    if largest < 1e-6 * np.linalg.norm(mean):  # only the rounding of the inputs is left
        raise checks.InputError(
            f"{name} must have rows that differ from each other, got rows of one direction"
        )
    return without, mean
