"""Retrieval calibrated by unpaired rows: hubs, which are close to everything, lose their lead.

Sinkhorn between the embedded pools f_i, g_j gives the plan log P_ij = f_i.g_j / eps + u_i + v_j.
The column sums of a plan are equal: its potential v_j is low where g_j is close to many f. Either
potential extends to new rows through the other side's,

    u(f) = -eps log sum_j exp(f.g_j / eps + v_j),    v(g) = -eps log sum_i exp(f_i.g / eps + u_i),

and the calibrated score of two new rows is f.g + u(f) + v(g). On the pools it is eps log(n m P): 0
where the two are matched no more than by chance. Nothing here looks at the rows that are searched.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sotalign_jax import checks
from sotalign_jax.ot import affinity
from sotalign_jax.ot.sinkhorn import sinkhorn

_CHUNK = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Calibration:
    """Unit features f, g of a sample of both pools, in the shared space, with their plan.

    u and v are its row and column log-scalings at regularisation `epsilon`.
    """

    f: Float[Array, "n d"]
    g: Float[Array, "m d"]
    u: Float[Array, " n"]
    v: Float[Array, " m"]
    epsilon: Float[Array, ""]

    def x(self, f: ArrayLike) -> Float[np.ndarray, " q"]:
        """u(f): what to add to the scores of rows of the first modality, [q, d] -> [q]."""
        return self._potential(f, self.g, self.v)

    def y(self, g: ArrayLike) -> Float[np.ndarray, " q"]:
        """v(g): what to add to the scores of rows of the second modality, [q, d] -> [q]."""
        return self._potential(g, self.f, self.u)

    def scores(self, f: ArrayLike, g: ArrayLike) -> Float[np.ndarray, "q r"]:
        """f.g + u(f) + v(g) of every row of f with every row of g."""
        f, g = checks.features("f", f), checks.features("g", g)
        cosines = np.asarray(affinity.cosine(f, g))
        return cosines + self.x(f)[:, None] + self.y(g)

    def _potential(self, rows: ArrayLike, others: Array, scalings: Array) -> np.ndarray:
        rows = checks.features("rows", rows, width=others.shape[1])
        out = [
            _softmin(rows[start : start + _CHUNK], others, scalings, self.epsilon)
            for start in range(0, len(rows), _CHUNK)
        ]
        return np.concatenate(out)


def calibrate(
    f: ArrayLike,
    g: ArrayLike,
    *,
    epsilon: float = 0.05,
    sample: int = 2048,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> Calibration:
    """The calibration by two embedded pools; the two may differ in size and need not be paired.

    It helps retrieval, where a few hubs win too many queries, and costs points in classification,
    where some classes are more frequent than others: use the plain cosines there.

    Features f [n, d] and g [m, d] may have any scale. `epsilon` is in units of cosines: smaller
    corrects more, and trusts the pools more. `sample` rows are kept of each pool, at random; memory
    is about sample^2 floats. `tolerance` is the marginal error of the plan.

    >>> f, g = np.eye(3, dtype=np.float32), np.ones((5, 3), np.float32)
    >>> bool(np.abs(calibrate(f, g).scores(f, g)).max() < 1e-5)  # all match all as by chance
    True
    """
    checks.positive(epsilon=epsilon, tolerance=tolerance)
    checks.whole(1, sample=sample)
    f = checks.features("f", f)
    g = checks.features("g", g, width=f.shape[1])
    rng = np.random.default_rng(seed)
    f, g = (
        rows if len(rows) <= sample else rows[np.sort(rng.choice(len(rows), sample, replace=False))]
        for rows in (f, g)
    )
    f, g = affinity.l2_normalize(f), affinity.l2_normalize(g)
    plan = sinkhorn(affinity.dot(f, g.T), epsilon=epsilon, tolerance=tolerance)
    return Calibration(f, g, plan.u, plan.v, jnp.asarray(epsilon, f.dtype))


def with_bias(
    queries: Float[ArrayLike, "q d"], keys: Float[ArrayLike, "k d"], bias: Float[ArrayLike, " k"]
) -> tuple[np.ndarray, np.ndarray]:
    """[q, 1] and [k, bias], for any index of inner products: [q, 1] . [k, bias] = q.k + bias.

    A query's own potential moves all of its scores alike and is left out.

    >>> queries, keys = with_bias(np.eye(2), np.eye(2), np.array([0.5, 0.0]))
    >>> queries @ keys.T
    array([[1.5, 0. ],
           [0.5, 1. ]])
    """
    queries, keys, bias = np.asarray(queries), np.asarray(keys), np.asarray(bias)
    ones = np.ones((len(queries), 1), queries.dtype)
    return np.hstack([queries, ones]), np.hstack([keys, bias[:, None].astype(keys.dtype)])


@jax.jit
def _softmin(rows: Array, others: Array, scalings: Array, epsilon: Array) -> Array:
    logits = affinity.cosine(rows, others) / epsilon + scalings
    return -epsilon * jax.nn.logsumexp(logits, axis=1)
