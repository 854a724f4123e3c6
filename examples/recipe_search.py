"""What was tried for `align`'s recipe: R@10 on the validation split, plain and calibrated.

python examples/recipe_search.py rsicd 1000    # from a clone; also coco, flickr8k; ten minutes

Features are functions (side, rows) -> unit rows, whatever made them; those of several are put side
by side where their similarities are added. The test split is never read.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import photos
from sotalign_jax import calibration, evaluation, klot_from_embeddings, teachers, training

EPSILON, POOL, DIRECTIONS = 0.1, 2048, 512  # of calibration; rows of each pool; of a teacher

name, pairs = sys.argv[1], int(sys.argv[2])
data = photos.dataset(name, n_pairs=pairs, test=False)
rng = np.random.default_rng(0)
PAIRS = {"x": np.asarray(data.pairs_x), "y": np.asarray(data.pairs_y)}
UNPAIRED = {}
for side, pool in (("x", data.pool_x), ("y", data.pool_y)):
    UNPAIRED[side] = np.asarray(pool[np.sort(rng.permutation(len(pool))[:POOL])])


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)


def report(label, features):
    f, g = (features(*given).astype(np.float32) for given in (("x", data.val.x), ("y", data.val.y)))
    pools = (features(side, UNPAIRED[side]).astype(np.float32) for side in "xy")
    fitted = calibration.calibrate(*pools, epsilon=EPSILON, sample=POOL, tolerance=1e-3)
    plain = evaluation.retrieval(f, g, data.val.x_of_y)["mean/R@10"]
    biases = {"bias_x": fitted.x(f), "bias_y": fitted.y(g)}
    calibrated = evaluation.retrieval(f, g, data.val.x_of_y, **biases)["mean/R@10"]
    print(f"| {label} | {plain:.1f} / {calibrated:.1f} |", flush=True)


def together(*parts):
    """Their mean similarity."""
    scale = len(parts) ** -0.5
    return lambda side, rows: scale * np.hstack([part(side, rows) for part in parts])


# --- teachers -----------------------------------------------------------------------------------


def linear(side, rows):
    return np.asarray(getattr(cca, side)(rows))


@functools.cache
def kernel_features(side, bandwidth, pool_landmarks):
    """Centred Nystrom features of the pairs, of the pool, and of any rows."""
    paired, unpaired = PAIRS[side].astype(np.float64), UNPAIRED[side]
    mean = unit(paired).mean(axis=0)
    marks = unit(unit(np.concatenate([paired, unpaired[:pool_landmarks]])) - mean)
    gamma = bandwidth / np.median(2 - 2 * (marks[:500] @ marks[:500].T))

    def kernel(rows):
        z = unit(unit(rows.astype(np.float64)) - mean)
        return np.exp(-gamma * np.maximum(2 - 2 * z @ marks.T, 0))

    own = kernel(np.concatenate([paired, unpaired[:pool_landmarks]]))
    own = own - own.mean(axis=0) - own.mean(axis=1, keepdims=True) + own.mean()
    values, vectors = np.linalg.eigh(own)
    kept = values > 1e-7 * values[-1]
    whiten = vectors[:, kept] / np.sqrt(values[kept])
    of_pairs, of_pool = kernel(paired) @ whiten, kernel(unpaired) @ whiten
    centre = of_pairs.mean(axis=0)
    features = functools.lru_cache(8)(lambda key: kernel(STORE[key]) @ whiten - centre)
    return of_pairs - centre, of_pool - of_pool.mean(axis=0), features


STORE = {}  # rows by their id, so that their features are made once


def kernel_cca(
    bandwidths=(2.0, 2.0),
    ridge=10.0,
    power=0.5,
    dim=DIRECTIONS,
    pool_covariance=0.0,
    pool_landmarks=0,
    matches=None,
):
    """`teachers.kernel_cca` with more options; ridge and bandwidths relative as in its search."""
    x, pool_x, features_x = kernel_features("x", bandwidths[0], pool_landmarks)
    y, pool_y, features_y = kernel_features("y", bandwidths[1], pool_landmarks)
    variance = (np.square(x).sum() + np.square(y).sum()) / 2 / len(x)
    roots = []
    for paired, pool in ((x, pool_x), (y, pool_y)):
        share = pool_covariance
        own, other = paired.T @ paired / len(paired), pool.T @ pool / len(pool)
        covariance = (1 - share) * own + share * other
        covariance[np.diag_indices(len(covariance))] += ridge * variance / len(x)
        roots.append(np.linalg.inv(np.linalg.cholesky(covariance)).T)
    cross = x.T @ (y if matches is None else matches @ y) / len(x)
    left, rho, right = np.linalg.svd(roots[0].T @ cross @ roots[1], full_matrices=False)
    weight = rho[:dim] ** power
    weights = {"x": roots[0] @ left[:, :dim] * weight, "y": roots[1] @ right[:dim].T * weight}

    def features(side, rows):
        STORE[id(rows)] = rows
        return unit({"x": features_x, "y": features_y}[side](id(rows)) @ weights[side])

    return features


def resampled(parts=6, share=0.6):
    """The mean of teachers that each see a part of the pairs."""
    made = []
    for part in range(parts):
        seen = np.random.default_rng(part).permutation(pairs)[: int(share * pairs)]
        chosen = np.zeros((pairs, pairs))
        chosen[seen, seen] = 1 / share
        made.append(kernel_cca(ridge=3.0, dim=256, matches=chosen))
    return together(*made)


def relative(nearest=100, power=3):
    """Similarities to the nearest pairs as features: what both sides' neighbours share."""
    mean = {side: unit(rows).mean(axis=0) for side, rows in PAIRS.items()}

    def features(side, rows):
        z, own = (unit(unit(r) - mean[side]) for r in (rows, PAIRS[side]))
        near = np.maximum(z @ own.T, 0)
        least = np.partition(near, -nearest, axis=1)[:, -nearest, None]
        return unit(np.where(near >= least, near, 0) ** power)

    return features


# --- students -----------------------------------------------------------------------------------


def student(
    start,
    *,
    supervision=1.0,
    alpha=3.0,
    duplicates=1.0,
    epsilon_star=(0.005, 0.005),
    stay=0.0,
    steps=100,
    path=0.05,
    batch=1024,
):
    """Linear maps of a start's features, trained as SOTAlign's; returns (end, mean with start).

    Captions of a cosine above `duplicates` are no negatives of each other; epsilon* goes from its
    first value to its second; `stay` weighs the squared distance to the start.
    """
    a, b = (jnp.asarray(start(side, PAIRS[side]), jnp.float32) for side in "xy")
    x, y = (jnp.asarray(start(side, UNPAIRED[side]), jnp.float32) for side in "xy")
    texts, width = unit(PAIRS["y"]), a.shape[1]
    signs = 2 * jnp.eye(pairs) - 1
    counted = jnp.asarray((texts @ texts.T <= duplicates) | np.eye(pairs, dtype=bool))
    params = {
        "x": (jnp.eye(width), jnp.zeros(width)),
        "y": (jnp.eye(width), jnp.zeros(width)),
        "logits": (jnp.log(20.0), jnp.array(-10.0)),
    }
    identity = params
    optimizer = training.optimizer(path / steps, steps)

    def head(params, side, rows):
        out = rows @ params[side][0] + params[side][1]
        return out / jnp.linalg.norm(out, axis=1, keepdims=True)

    def objective(params, key, epsilon):
        log_scale, bias = params["logits"]
        logits = jnp.exp(log_scale) * head(params, "x", a) @ head(params, "y", b).T + bias
        loss = -supervision * jnp.mean(counted * jax.nn.log_sigmoid(signs * logits))
        if alpha:
            some = [
                jax.random.choice(k, rows, (min(batch, len(rows)),), replace=False)
                for k, rows in zip(jax.random.split(key), (x, y), strict=True)
            ]
            loss += (alpha / pairs) * klot_from_embeddings(
                head(params, "x", some[0]),
                head(params, "y", some[1]),
                *some,
                epsilon_star=epsilon,
                tolerance=1e-3,
                max_iterations=300,
            )
        moved = [jnp.sum((params[side][0] - identity[side][0]) ** 2) for side in "xy"]
        return loss + stay * sum(moved) / width

    @jax.jit
    def step(params, state, key, epsilon):
        updates, state = optimizer.update(jax.grad(objective)(params, key, epsilon), state, params)
        return optax.apply_updates(params, updates), state

    state, (first, last) = optimizer.init(params), epsilon_star
    for number in range(steps):
        key = jax.random.fold_in(jax.random.key(0), number)
        params, state = step(params, state, key, first * (last / first) ** (number / steps))

    def features(share, side, rows):
        weight, bias = jax.tree.map(
            lambda now, then: np.asarray((1 - share) * now + share * then),
            params[side],
            identity[side],
        )
        return unit(start(side, rows) @ weight + bias)

    return functools.partial(features, 0.0), functools.partial(features, 0.5)


if __name__ == "__main__":
    print(f"{name}, {pairs} pairs, validation\n| tried | R@10 / calibrated |\n|---|---:|")
    cca = teachers.cca(data.pairs_x, data.pairs_y)
    report("CCA", linear)
    base = kernel_cca()
    report("kernel CCA, 512 directions, power 0.5", base)
    for dim in (64, 128, 256):
        report(f"{dim} directions", kernel_cca(dim=dim))
    for power in (0.0, 0.25, 1.0):
        report(f"power {power}", kernel_cca(power=power))
    ridges = [kernel_cca(ridge=ridge) for ridge in (3.0, 10.0, 30.0)]
    report("a third of the ridge", ridges[0])
    report("three times the ridge", ridges[2])
    report("mean of these three ridges", together(*ridges))
    widths = [kernel_cca(bandwidths=(width, width)) for width in (0.5, 2.0, 6.0)]
    report("mean of three bandwidths", together(*widths))
    report("covariances: 30 % of the pools", kernel_cca(pool_covariance=0.3))
    report("covariances of the pools alone", kernel_cca(pool_covariance=1.0))
    report("500 more landmarks of the pools", kernel_cca(pool_landmarks=500))
    similar = unit(PAIRS["y"]) @ unit(PAIRS["y"]).T
    soft = np.exp((similar - 1) / 0.05)
    soft /= soft.sum(axis=1, keepdims=True)
    report("pairs that share near-duplicate captions", kernel_cca(matches=soft))
    report("mean of six, each of 60 % of the pairs", resampled())
    report("mean with CCA", together(base, linear))
    report("mean with relative representations", together(base, relative()))
    end, mean = student(base)
    report("student", end)
    report("student, mean of start and end (`align`)", mean)
    report("student's and teacher's similarities added", together(base, end))
    report("student of that mean, mean again", student(mean)[1])
    tried = {
        "SigLIP alone": {"alpha": 0.0},
        "KLOT alone": {"supervision": 0.0},
        "a third of alpha": {"alpha": 1.0},
        "three times alpha": {"alpha": 9.0},
        "near-duplicate captions are no negatives": {"duplicates": 0.7},
        "epsilon* 0.02": {"epsilon_star": (0.02, 0.02)},
        "epsilon* from 0.05 to 0.005": {"epsilon_star": (0.05, 0.005)},
        "L2 to the start": {"stay": 0.1},
        "a third of the learning rate": {"path": 0.05 / 3},
    }
    for label, options in tried.items():
        report(f"{label}, mean", student(base, **options)[1])
