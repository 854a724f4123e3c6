"""What was tried for `align`'s recipe; `recipes.py --search` runs it on validation splits.

Features are functions (side, rows) -> unit rows, whatever made them; those of several are put side
by side where their similarities are added. Nothing here looks at a test split.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sotalign_jax as sota
from sotalign_jax import calibration, evaluation, teachers, training

EPSILON, POOL, DIRECTIONS = 0.1, 2048, 512  # of calibration; rows of each pool; of a teacher


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)


def together(*parts, shares=None):
    """Features whose similarity is the mean of the parts', weighted by their shares."""
    scales = np.sqrt([1 / len(parts)] * len(parts) if shares is None else shares)
    return lambda side, rows: np.hstack(
        [scale * part(side, rows) for scale, part in zip(scales, parts, strict=True)]
    )


def spread(rows, count):
    """Row numbers, each as far as possible from those before."""
    chosen, distance = [0], np.full(len(rows), np.inf)
    while len(chosen) < count:
        distance = np.minimum(distance, 2 - 2 * rows @ rows[chosen[-1]])
        chosen.append(int(distance.argmax()))
    return chosen


class Lab:
    """Pairs and a sample of the pools of one data set, and what makes features of them."""

    def __init__(self, dataset, classes=None):
        """`classes` of the pairs' images, if they are known."""
        self.val, self.classes = dataset.val, classes
        self.pairs = {"x": np.asarray(dataset.pairs_x), "y": np.asarray(dataset.pairs_y)}
        self.n = len(dataset.pairs_x)
        self.pools = {}
        rng = np.random.default_rng(0)
        for side, pool in (("x", dataset.pool_x), ("y", dataset.pool_y)):
            self.pools[side] = np.asarray(pool[np.sort(rng.permutation(len(pool))[:POOL])])
        for name in ("cca", "kernel_features", "kernel_cca", "student"):  # each is made once
            setattr(self, name, functools.cache(getattr(self, name)))

    def scores(self, features):
        """Validation recalls, plain and calibrated by the pools."""
        f, g = (features(side, getattr(self.val, side)).astype(np.float32) for side in "xy")
        pools = (features(side, self.pools[side]).astype(np.float32) for side in "xy")
        fitted = calibration.calibrate(*pools, epsilon=EPSILON, sample=POOL, tolerance=1e-3)
        biases = {"bias_x": fitted.x(f), "bias_y": fitted.y(g)}
        plain = evaluation.retrieval(f, g, self.val.x_of_y)
        calibrated = evaluation.retrieval(f, g, self.val.x_of_y, **biases)
        return {"R@10": plain["mean/R@10"], "calibrated R@10": calibrated["mean/R@10"]}

    # --- teachers -------------------------------------------------------------------------------

    def cca(self):
        teacher = teachers.cca(self.pairs["x"], self.pairs["y"])
        return lambda side, rows: np.asarray(getattr(teacher, side)(rows))

    def fitted(self, landmarks):
        """The library's own kernel teacher, as far as `align` takes it."""
        teacher = teachers.kernel_cca(self.pairs["x"], self.pairs["y"], landmarks=landmarks)
        maps = {"x": teacher.map_x.leading(DIRECTIONS), "y": teacher.map_y.leading(DIRECTIONS)}
        return lambda side, rows: evaluation.embed(maps[side], rows)

    def whitened(self, side, share):
        """Rows of one side, their pool's principal directions over its deviations ** share."""
        rows = unit(np.concatenate([self.pairs[side], self.pools[side]]).astype(np.float64))
        mean = rows.mean(axis=0)
        variances, directions = np.linalg.eigh(np.cov(unit(rows - mean).T))
        scaled = directions * (variances + 0.01 * variances[-1]) ** (-share / 2)
        return lambda rows: unit(unit(rows.astype(np.float64)) - mean) @ scaled

    def kernel_features(self, side, bandwidth, landmarks=("pool", 0), share=0.0, power=1.0):
        """Nystrom features of the pairs and the pool, both centred, and of any rows.

        The kernel is exp(-(gamma ||z - z'||^2)^power).
        """
        prepare = self.whitened(side, share) if share else lambda rows: rows.astype(np.float64)
        paired, pool = prepare(self.pairs[side]), prepare(self.pools[side])
        mean = unit(paired).mean(axis=0)
        kind, count = landmarks
        count = count if count >= 1 else int(count * self.n)
        if kind == "pool":
            landmarks = np.concatenate([paired, pool[:count]])
        elif kind == "random":
            landmarks = paired[np.random.default_rng(0).permutation(self.n)[:count]]
        else:
            landmarks = paired[spread(unit(unit(paired) - mean), count)]
        marks = unit(unit(landmarks) - mean)
        gamma = bandwidth / np.median(2 - 2 * (marks[:500] @ marks[:500].T))

        def kernel(rows):
            z = unit(unit(rows) - mean)
            return np.exp(-((gamma * np.maximum(2 - 2 * z @ marks.T, 0)) ** power))

        own = kernel(landmarks)
        own = own - own.mean(axis=0) - own.mean(axis=1, keepdims=True) + own.mean()
        values, vectors = np.linalg.eigh(own)
        kept = values > 1e-7 * values[-1]
        weights = vectors[:, kept] / np.sqrt(values[kept])
        of_pairs, of_pool = kernel(paired) @ weights, kernel(pool) @ weights
        centre, pool_centre = of_pairs.mean(axis=0), of_pool.mean(axis=0)
        features = lambda rows: kernel(prepare(rows)) @ weights - centre  # noqa: E731
        return of_pairs - centre, of_pool - pool_centre, features

    def kernel_cca(
        self, bandwidths=(2.0, 2.0), ridge=10.0, power=0.5, dim=DIRECTIONS, pool_covariance=0.0,
        landmarks=("pool", 0), duplicates=0.0, seen=None, whiten=(0.0, 0.0), planned=0.0, shape=1.0,
    ):  # fmt: skip
        """`teachers.kernel_cca` with more options, ridge and bandwidths relative as in its search.

        `duplicates` is the temperature at which captions of nearly the same words share their
        images; `seen` is (seed, share) of the pairs that are matched; `planned` is the share that
        the pools have in the cross-covariance, matched by the plan of the fit without them;
        `whiten` is each side's share of whitening, by its pool; `shape` the kernel's power.
        """
        made = [
            self.kernel_features(side, bandwidth, landmarks, share, shape)
            for side, bandwidth, share in zip("xy", bandwidths, whiten, strict=True)
        ]
        (x, *_), (y, *_) = made
        variance = (np.square(x).sum() + np.square(y).sum()) / 2 / self.n
        roots = []
        for paired, pool, _ in made:
            own, other = paired.T @ paired / self.n, pool.T @ pool / len(pool)
            covariance = (1 - pool_covariance) * own + pool_covariance * other
            covariance[np.diag_indices(len(covariance))] += ridge * variance / self.n
            roots.append(np.linalg.inv(np.linalg.cholesky(covariance)).T)
        matched = y
        if duplicates:
            texts = unit(self.pairs["y"])
            shared = np.exp((texts @ texts.T - 1) / duplicates)
            matched = shared @ y / shared.sum(axis=1, keepdims=True)
        if seen:
            seed, share = seen
            kept = np.random.default_rng(seed).permutation(self.n) < share * self.n
            matched = matched * kept[:, None] / share
        cross = x.T @ matched / self.n
        if planned:
            first = self.kernel_cca(bandwidths, ridge, whiten=whiten)
            f, g = (first(side, self.pools[side]).astype(np.float32) for side in "xy")
            plan = np.asarray(sota.sinkhorn(jnp.asarray(f @ g.T), epsilon=0.02).matrix())
            cross = (1 - planned) * cross + planned * made[0][1].T @ (plan @ made[1][1])
        left, rho, right = np.linalg.svd(roots[0].T @ cross @ roots[1], full_matrices=False)
        weight = rho[:dim] ** power
        weights = roots[0] @ left[:, :dim] * weight, roots[1] @ right[:dim].T * weight
        sides = {s: (m[2], w) for s, m, w in zip("xy", made, weights, strict=True)}
        return lambda side, rows: unit(sides[side][0](rows) @ sides[side][1])

    def known_classes(self, ridge=3.0):
        """Classes of the images by kernel ridge regression on both sides: an oracle's features."""
        names = sorted(set(self.classes))
        truth = np.array([[name == own for name in names] for own in self.classes], float)
        sides = {}
        for side in "xy":
            paired, _, of = self.kernel_features(side, 2.0)
            covariance = paired.T @ paired
            covariance[np.diag_indices(len(covariance))] += ridge * np.trace(covariance) / self.n
            sides[side] = of, np.linalg.solve(covariance, paired.T @ (truth - truth.mean(axis=0)))
        return lambda side, rows: unit(sides[side][0](rows) @ sides[side][1])

    def relative(self, nearest=100, power=3):
        """Similarities to the nearest pairs as features: what both sides' neighbours share."""
        mean = {side: unit(rows).mean(axis=0) for side, rows in self.pairs.items()}

        def features(side, rows):
            z, own = (unit(unit(r) - mean[side]) for r in (rows, self.pairs[side]))
            near = np.maximum(z @ own.T, 0)
            least = np.partition(near, -nearest, axis=1)[:, -nearest, None]
            return unit(np.where(near >= least, near, 0) ** power)

        return features

    def smoothed(self, nearest=5, share=0.5):
        """The teacher's features plus a share of the mean of their nearest ones in the pool."""
        features = self.kernel_cca()
        pools = {side: features(side, rows) for side, rows in self.pools.items()}

        def smooth(side, rows):
            own, pool = features(side, rows), pools[side]
            cosines = own @ pool.T
            cosines[cosines > 1 - 1e-6] = -1  # a row of the pool is no neighbour of itself
            near = np.argpartition(-cosines, nearest, axis=1)[:, :nearest]
            return unit(own + share * pool[near].mean(axis=1))

        return smooth

    # --- students -------------------------------------------------------------------------------

    def student(
        self, start, *, supervision=1.0, alpha=3.0, duplicates=1.0, epsilon_star=(0.005, 0.005),
        stay=0.0, steps=100, path=0.05, batch=1024,
    ):  # fmt: skip
        """Linear maps of a start's features, trained as SOTAlign's; (end, mean with the start).

        Captions of a cosine above `duplicates` are no negatives of each other; epsilon* goes from
        its first value to its second; `stay` weighs the squared distance to the start.
        """
        a, b = (jnp.asarray(start(side, self.pairs[side]), jnp.float32) for side in "xy")
        x, y = (jnp.asarray(start(side, self.pools[side]), jnp.float32) for side in "xy")
        texts, width = unit(self.pairs["y"]), a.shape[1]
        signs = 2 * jnp.eye(self.n) - 1
        counted = jnp.asarray((texts @ texts.T <= duplicates) | np.eye(self.n, dtype=bool))
        identity = {side: (jnp.eye(width), jnp.zeros(width)) for side in "xy"}
        identity["logits"] = jnp.log(20.0), jnp.array(-10.0)
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
                mapped = [head(params, side, rows) for side, rows in zip("xy", some, strict=True)]
                solver = {"epsilon_star": epsilon, "tolerance": 1e-3, "max_iterations": 300}
                loss += (alpha / self.n) * sota.klot_from_embeddings(*mapped, *some, **solver)
            moved = [jnp.sum((params[side][0] - identity[side][0]) ** 2) for side in "xy"]
            return loss + stay * sum(moved) / width

        @jax.jit
        def step(params, state, key, epsilon):
            gradient = jax.grad(objective)(params, key, epsilon)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        params, state, (first, last) = identity, optimizer.init(identity), epsilon_star
        for number in range(steps):
            key = jax.random.fold_in(jax.random.key(0), number)
            params, state = step(params, state, key, first * (last / first) ** (number / steps))

        def features(share, side, rows):
            now, then = params[side], identity[side]
            weight, bias = (
                np.asarray((1 - share) * p + share * q) for p, q in zip(now, then, strict=True)
            )
            return unit(start(side, rows) @ weight + bias)

        return functools.partial(features, 0.0), functools.partial(features, 0.5)


TEACHERS = {  # parts whose similarities are added: options of `Lab.kernel_cca`, or other methods
    "CCA": ["cca"],
    "kernel CCA: 512 directions, power 0.5": [{}],
    "64 directions": [{"dim": 64}],
    "256 directions": [{"dim": 256}],
    "power 0.0": [{"power": 0.0}],
    "power 1.0": [{"power": 1.0}],
    "a third of the ridge": [{"ridge": 3.0}],
    "three times the ridge": [{"ridge": 30.0}],
    "mean of these three ridges": [{"ridge": ridge} for ridge in (3.0, 10.0, 30.0)],
    "mean of three bandwidths": [{"bandwidths": (width, width)} for width in (0.5, 2.0, 6.0)],
    "exponential kernel on both sides": [{"bandwidths": (1.0, 1.0), "shape": 0.5}],
    "covariances: 30 % of the pools'": [{"pool_covariance": 0.3}],
    "covariances of the pools alone": [{"pool_covariance": 1.0}],
    "500 landmarks of the pools as well": [{"landmarks": ("pool", 500)}],
    "a quarter of the landmarks, random": [{"landmarks": ("random", 0.25)}],
    "a quarter of the landmarks, spread": [{"landmarks": ("spread", 0.25)}],
    "near-duplicate captions share their images": [{"duplicates": 0.05}],
    "mean of four, each of 60 % of the pairs": [{"seen": (seed, 0.6)} for seed in range(4)],
    "mean with CCA": [{}, "cca"],
    "mean with relative representations": [{}, "relative"],
    "texts half whitened by their pool": [{"whiten": (0.0, 0.5)}],
    "images half whitened by their pool": [{"whiten": (0.5, 0.0)}],
    "mean with 5 neighbours in the pools": ["smoothed"],
    "cross-covariance: half of the pools' plan": [{"planned": 0.5}],
}
STUDENTS = {
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


def tried(lab):
    """Every trial's name, and what makes its features."""
    if lab.n > POOL:  # then the kernel's landmarks are what costs
        for landmarks in (1000, 2000, 4000):
            yield f"kernel CCA, {landmarks:,} landmarks", functools.partial(lab.fitted, landmarks)
        return
    base = lab.kernel_cca

    def teacher(*parts):
        made = [getattr(lab, p)() if isinstance(p, str) else base(**p) for p in parts]
        return together(*made) if len(made) > 1 else made[0]

    def trained(**options):
        return lab.student(base(), **options)[1]

    for label, parts in TEACHERS.items():
        yield label, functools.partial(teacher, *parts)
    if lab.classes is not None:
        label = "an oracle: scenes of the pairs known, a fifth of the similarity"
        yield label, lambda: together(base(), lab.known_classes(), shares=(0.8, 0.2))
    yield "student", lambda: lab.student(base())[0]
    yield "student, mean of start and end (`align`)", trained
    added = "student's and teacher's similarities added"
    yield added, lambda: together(base(), lab.student(base())[0])
    yield "student of that mean, mean again", lambda: lab.student(trained())[1]
    for label, options in STUDENTS.items():
        yield f"{label}, mean", functools.partial(trained, **options)
