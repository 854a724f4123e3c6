"""Tests of NNCLR: loss, neighbours and resumed training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from sotalign_jax import checks, data, heads, methods, sampling, training

D_X, D_Y, PAIRS = 7, 6, 8


def unit(rows):
    rows = np.asarray(rows, np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def siglip(student, f, g, normalization="mean"):
    """Computes sum_ij log(1 + exp(-y_ij (s cos_ij + b))), divided by n^2 or n."""
    total, scale, bias = 0.0, np.exp(float(student.log_scale[...])), float(student.bias[...])
    cosines = unit(f) @ unit(g).T
    for i in range(len(cosines)):
        for j in range(len(cosines)):
            sign = 1.0 if i == j else -1.0
            total += np.log1p(np.exp(-sign * (scale * cosines[i, j] + bias)))
    return total / (len(cosines) ** 2 if normalization == "mean" else len(cosines))


def random_batch(rng):
    """Returns a batch of random pairs and random neighbours."""
    a, near_a = (jnp.asarray(rng.normal(size=(PAIRS, D_X))) for _ in range(2))
    b, near_b = (jnp.asarray(rng.normal(size=(PAIRS, D_Y))) for _ in range(2))
    return sampling.Batch(a, b, a[:0], b[:0], near_a, near_b)


@pytest.mark.parametrize("norm", ["mean", "per_row"])
@pytest.mark.parametrize("weights", [(0.3, 2.0), (0.3, 0.0), (0.0, 2.0), (0.0, 0.0)])
def test_nnclr_loss_is_a_weighted_sum_of_siglips(x64, rng, weights, norm):
    student = heads.build_heads(D_X, D_Y, 4, seed=3, dtype=jnp.float64)
    batch = random_batch(rng)
    w_text, w_image = weights
    method = methods.NNCLR(weight_text=w_text, weight_image=w_image, siglip_norm=norm)
    given = batch._replace(  # neighbours of weight zero may be None
        near_a=batch.near_a if w_image else None, near_b=batch.near_b if w_text else None
    )
    loss, (metrics, memory) = method(student, given, None, {})
    f, g = student.x(batch.a), student.y(batch.b)
    expected = {
        "siglip": siglip(student, f, g, norm),
        "text_neighbours": siglip(student, f, student.y(batch.near_b), norm),
        "image_neighbours": siglip(student, student.x(batch.near_a), g, norm),
    }
    parts = {"siglip": 1.0, "text_neighbours": w_text, "image_neighbours": w_image}
    assert set(metrics) == {name for name, weight in parts.items() if weight}
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-12)
    total = sum(weight * expected[name] for name, weight in parts.items())
    np.testing.assert_allclose(loss, total, rtol=1e-12)
    assert memory == {}


def test_nnclr_gradient_matches_finite_differences(x64, rng):
    student = heads.build_heads(D_X, D_Y, 3, seed=3, dtype=jnp.float64)
    graphdef, params = nnx.split(student)
    batch, method = random_batch(rng), methods.NNCLR(weight_text=0.3, weight_image=2.0)

    @jax.jit
    def loss(params):
        return method(nnx.merge(graphdef, params), batch, None, {})[0]

    check_grads(loss, (params,), order=1, modes=["rev"])


# --- neighbours --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset():
    """Returns a dataset whose pools also contain every paired row, in another order."""
    rng = np.random.default_rng(0)
    z, to_x, to_y = rng.normal(size=(160, 5)), rng.normal(size=(5, D_X)), rng.normal(size=(5, D_Y))
    x = (z @ to_x + 0.3 * rng.normal(size=(160, D_X))).astype(np.float32)
    y = (z @ to_y + 0.3 * rng.normal(size=(160, D_Y))).astype(np.float32)
    return data.dataset(
        (x[:40], y[:40]),
        x=x[rng.permutation(100)],
        y=y[rng.permutation(90)],
        val=data.gallery(x[100:], y[100:]),
    )


@pytest.fixture(scope="module")
def prepared(dataset):
    return methods.NNCLR(k=3).prepare(training.place(dataset))


def test_nnclr_prepare_finds_nearest_other_rows_of_each_pool(dataset, prepared):
    for pairs, pool, table in (
        (dataset.pairs_x, dataset.pool_x, prepared.near_x),
        (dataset.pairs_y, dataset.pool_y, prepared.near_y),
    ):
        order = np.argsort(-unit(pairs) @ unit(pool).T, axis=1)
        np.testing.assert_array_equal(pool[order[:, 0]], pairs)  # the row itself is in the pool
        np.testing.assert_array_equal(table, order[:, 1:4])


def test_nnclr_prepare_searches_only_weighted_neighbours(dataset):
    placed = training.place(dataset)
    text, image = methods.NNCLR(k=2, weight_image=0.0), methods.NNCLR(k=2, weight_text=0.0)
    prepared = text.prepare(placed)
    assert prepared.near_x is None and prepared.near_y.shape == (40, 2)
    prepared = image.prepare(placed)
    assert prepared.near_y is None and prepared.near_x.shape == (40, 2)
    neither = methods.NNCLR(weight_text=0.0, weight_image=0.0)
    assert (text.pools, image.pools, neither.pools) == ("y", "x", "")
    assert neither.prepare(training.place(dataset, pools="")).near_x is None


@jax.jit
def draw(seed, step, prepared):
    return sampling.draw(jax.random.key(seed), step, prepared, pairs=16, unpaired=5)


def test_draw_takes_neighbours_by_seed_and_step(dataset, prepared):
    rank_of = {}
    for step in range(40):
        batch = draw(7, jnp.int32(step), prepared)
        for own, drawn, pairs, pool, table in (
            (batch.a, batch.near_a, dataset.pairs_x, dataset.pool_x, prepared.near_x),
            (batch.b, batch.near_b, dataset.pairs_y, dataset.pool_y, prepared.near_y),
        ):
            pair = (np.asarray(own)[:, None] == pairs[None]).all(axis=2).argmax(axis=1)
            choices = pool[np.asarray(table)[pair]]  # [16, k, d]
            hit = (choices == np.asarray(drawn)[:, None]).all(axis=2)
            np.testing.assert_array_equal(hit.sum(axis=1), 1)
            rank_of.setdefault(own.shape[1], []).append(hit.argmax(axis=1))
    for ranks in rank_of.values():  # ranks are uniform, and independent between modalities
        counts = np.bincount(np.concatenate(ranks), minlength=3)
        assert np.abs(counts - 640 / 3).max() < 5 * np.sqrt(640 * 2 / 9)
    x_ranks, y_ranks = map(np.concatenate, rank_of.values())
    assert abs(np.mean(x_ranks == y_ranks) - 1 / 3) < 0.1
    again = sampling.draw(jax.random.key(7), jnp.int32(2), prepared, pairs=16, unpaired=5)
    jax.tree.map(np.testing.assert_array_equal, again, draw(7, jnp.int32(2), prepared))
    other = draw(8, jnp.int32(2), prepared)
    assert not np.array_equal(other.near_a, draw(7, jnp.int32(2), prepared).near_a)


def test_draw_of_pairs_and_pools_ignores_neighbour_tables(dataset, prepared):
    without = draw(7, jnp.int32(3), training.place(dataset))
    with_tables = draw(7, jnp.int32(3), prepared)
    for name in ("a", "b", "x", "y"):
        np.testing.assert_array_equal(getattr(without, name), getattr(with_tables, name))


class Recorder(training.Observer):
    def __init__(self):
        self.snapshots, self.losses = {}, []

    def metrics(self, step, values):
        self.losses.append(float(values["loss"]))

    def snapshot(self, step, snapshot):
        self.snapshots[step] = jax.tree.map(np.array, snapshot)


def test_nnclr_resumed_fit_matches_uninterrupted(dataset):
    config = training.TrainConfig(
        steps=12, pair_batch=16, unpaired_batch=8, learning_rate=3e-3, eval_every=4, seed=5
    )
    start = heads.build_heads(D_X, D_Y, 8, seed=1)
    whole, rest = Recorder(), Recorder()
    method = methods.NNCLR(k=3)
    training.fit(method, start, dataset, config, observer=whole)
    middle = jax.tree.map(jnp.asarray, whole.snapshots[4])
    training.fit(method, start, dataset, config, observer=rest, resume=lambda _: middle)
    assert rest.losses == whole.losses[4:]
    jax.tree.map(np.testing.assert_array_equal, rest.snapshots[12], whole.snapshots[12])
    assert whole.losses[-1] < whole.losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"k.* 0"),
        ({"weight_text": -1.0}, r"weight_text.* -1.0"),
        ({"weight_image": float("nan")}, r"weight_image.* nan"),
        ({"siglip_norm": "sum"}, r"siglip_norm.* 'sum'"),
    ],
)
def test_nnclr_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        dataclasses.replace(methods.METHODS["nnclr"], **options)


def test_nnclr_prepare_rejects_more_neighbours_than_the_pool_has(dataset):
    with pytest.raises(checks.InputError, match=r"k.* 101"):
        methods.NNCLR(k=101).prepare(training.place(dataset))
    with pytest.raises(checks.InputError, match=r"k.* 100"):
        methods.NNCLR(k=100).prepare(training.place(dataset))


def test_nnclr_grid_is_the_papers():
    weights = (0.0, 0.1, 1.0, 10.0)
    grid = {"k": (1, 5, 10), "weight_text": weights, "weight_image": weights}
    assert grid == methods.NNCLR.grid
    dataclasses.replace(methods.NNCLR(), **{name: values[-1] for name, values in grid.items()})
