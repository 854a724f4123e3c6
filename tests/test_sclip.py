"""Tests of S-CLIP: pseudo-labels and loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ot
import pytest
from flax import nnx
from jax.test_util import check_grads

from sotalign_jax import checks, heads, losses, methods, sampling
from sotalign_jax.methods import sclip
from sotalign_jax.ot.sinkhorn import reference, sinkhorn

D_X, D_Y, PAIRS, N, M = 7, 6, 5, 9, 8


def cosines(f, g):
    f, g = np.asarray(f, np.float64), np.asarray(g, np.float64)
    lengths = np.linalg.norm(f, axis=1)[:, None] * np.linalg.norm(g, axis=1)
    return f @ g.T / lengths


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)


def labels_by_hand(queries, keys, kind, scale, iterations=10):
    k = cosines(queries, keys)
    if kind == "hard":
        return np.eye(len(keys))[k.argmax(axis=1)]
    if kind == "softmax":
        return softmax(scale * k)
    kernel, rows = np.exp(-(1 - k) * scale), np.ones(len(k))
    for _ in range(iterations):
        columns = 1 / len(keys) / (rows @ kernel)
        rows = 1 / len(k) / (kernel @ columns)
    plan = rows[:, None] * kernel * columns
    return plan / plan.sum(axis=1, keepdims=True)


def cross_entropy_by_hand(logits, labels):
    return np.mean(-np.sum(labels * np.log(softmax(logits)), axis=1))


@pytest.fixture
def batch(rng, x64):
    shapes = (PAIRS, D_X), (PAIRS, D_Y), (N, D_X), (M, D_Y)
    return sampling.Batch(*(jnp.asarray(rng.normal(size=shape)) for shape in shapes))


@pytest.fixture
def student(x64):
    return heads.build_heads(D_X, D_Y, 4, seed=3, dtype=jnp.float64)


# --- labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sclip.LABELS)
def test_pseudo_labels_match_numpy(batch, kind):
    found = sclip.pseudo_labels(batch.x, batch.a, scale=20.0, kind=kind)
    np.testing.assert_allclose(found, labels_by_hand(batch.x, batch.a, kind, 20.0), atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log"])
@pytest.mark.parametrize("iterations", [1, 10])
def test_pseudo_labels_by_transport_match_pot(batch, method, iterations):
    plan = ot.bregman.sinkhorn(
        np.full(N, 1 / N),
        np.full(PAIRS, 1 / PAIRS),
        1 - cosines(batch.x, batch.a),
        reg=1 / 20.0,
        method=method,
        numItermax=iterations,
        stopThr=0,
        warn=False,
    )
    found = sclip.pseudo_labels(batch.x, batch.a, scale=20.0, iterations=iterations)
    expected = plan / plan.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_pseudo_labels_by_transport_match_sinkhorn(batch):
    affinities = jnp.asarray(cosines(batch.x, batch.a))
    plan = reference(affinities.T, epsilon=0.05, iterations=10, symmetric=False)
    found = sclip.pseudo_labels(batch.x, batch.a, scale=20.0)
    np.testing.assert_allclose(found, N * plan.matrix().T, atol=1e-10)  # rows are exact
    many = sclip.pseudo_labels(batch.x, batch.a, scale=20.0, iterations=3000)
    solved = sinkhorn(affinities, epsilon=0.05, tolerance=1e-12, max_iterations=20_000)
    assert solved.converged
    np.testing.assert_allclose(many, N * solved.matrix(), atol=1e-10)


def test_pseudo_labels_by_transport_use_all_keys_equally(rng):
    keys = rng.normal(size=(4, 3))
    queries = keys[0] + 0.3 * rng.normal(size=(12, 3))  # all near the first key
    used = [
        np.asarray(sclip.pseudo_labels(queries, keys, scale=20.0, kind=kind, iterations=500)).sum(0)
        for kind in ("ot", "softmax")
    ]
    np.testing.assert_allclose(used[0], 3.0, atol=1e-3)
    assert used[1][0] > 9


def test_pseudo_labels_gradient_memory_is_independent_of_iterations():
    def temporaries(iterations, n=128):
        @jax.jit
        def loss(queries, keys, scale):
            labels = sclip.pseudo_labels(queries, keys, scale=scale, iterations=iterations)
            return jnp.sum(labels**2)

        rows = jnp.ones((n, 4))
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(rows, rows, 20.0).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (n * n * 4)

    assert (
        temporaries(40) - temporaries(10) < 2
    )  # plain unrolling stores matrices for each of 30 iterations


# --- the loss ----------------------------------------------------------------------------------


def test_soft_cross_entropy_matches_optax_and_infonce(rng):
    f, g = (jnp.asarray(rng.normal(size=(n, 3)), jnp.float32) for n in (5, 4))
    labels = jnp.asarray(rng.dirichlet(np.ones(4), size=5), jnp.float32)
    expected = optax.losses.softmax_cross_entropy(7.0 * cosines(f, g), labels).mean()
    value = losses.soft_cross_entropy(f, g, labels, log_scale=np.log(7.0))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    one_hot = jnp.eye(5, 4)[:4]  # hard labels on the diagonal give one direction of InfoNCE
    both = losses.soft_cross_entropy(f[:4], g, one_hot) + losses.soft_cross_entropy(
        g, f[:4], one_hot
    )
    np.testing.assert_allclose(both / 2, losses.infonce(f[:4], g), rtol=1e-5)


@pytest.mark.parametrize("space", sclip.SPACES)
@pytest.mark.parametrize("kind", sclip.LABELS)
def test_sclip_loss_matches_numpy(student, batch, kind, space):
    expected = loss_by_hand(student, batch, kind, space, 0.3, 2.0)
    method = methods.SCLIP(weight_text=0.3, weight_image=2.0, labels=kind, space=space)
    loss, (metrics, memory) = method(student, batch, None, {})
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-12)
    total = expected["infonce"] + 0.3 * expected["text_labels"] + 2.0 * expected["image_labels"]
    np.testing.assert_allclose(loss, total, rtol=1e-12)
    assert memory == {}


def loss_by_hand(student, batch, kind, space, w_text, w_image):
    """Computes the loss terms of non-zero weight."""
    scale = np.exp(float(student.log_scale[...]))
    f, g, x, y = student.x(batch.a), student.y(batch.b), student.x(batch.x), student.y(batch.y)
    to_texts = np.concatenate([g, y]) if w_text else g
    to_images = np.concatenate([f, x]) if w_image else f
    infonce = 0.0
    for anchors, others in ((f, to_texts), (g, to_images)):
        probabilities = softmax(scale * cosines(anchors, others))
        infonce -= np.mean(np.log(np.diagonal(probabilities))) / 2
    parts = {"infonce": infonce}
    if w_text:
        rows = (batch.y, batch.b) if space == "unimodal" else (y, g)
        labels = labels_by_hand(*rows, kind, scale)
        parts["text_labels"] = cross_entropy_by_hand(scale * cosines(y, f), labels)
    if w_image:
        rows = (batch.x, batch.a) if space == "unimodal" else (x, f)
        labels = labels_by_hand(*rows, kind, scale)
        parts["image_labels"] = cross_entropy_by_hand(scale * cosines(x, g), labels)
    return parts


@pytest.mark.parametrize("weights", [(0.3, 0.0), (0.0, 2.0), (0.0, 0.0)])
def test_sclip_omits_modalities_of_weight_zero(student, batch, weights):
    w_text, w_image = weights
    method = methods.SCLIP(weight_text=w_text, weight_image=w_image)
    assert method.pools == "x" * bool(w_image) + "y" * bool(w_text)
    expected = loss_by_hand(student, batch, "ot", "unimodal", w_text, w_image)
    given = batch._replace(
        x=batch.x if w_image else batch.x[:0], y=batch.y if w_text else batch.y[:0]
    )
    loss, (metrics, _) = method(student, given, None, {})
    assert set(metrics) == set(expected)
    parts = {"infonce": 1.0, "text_labels": w_text, "image_labels": w_image}
    total = sum(parts[name] * value for name, value in expected.items())
    np.testing.assert_allclose(loss, total, rtol=1e-12)


@pytest.mark.parametrize("space", sclip.SPACES)
def test_sclip_gradient_flows_through_labels_unless_detached(student, batch, space):
    graphdef, params = nnx.split(student)
    method = methods.SCLIP(weight_text=0.0, weight_image=2.0, space=space)
    detached = dataclasses.replace(method, detach_labels=True)
    rows = (batch.x, batch.a) if space == "unimodal" else (student.x(batch.x), student.x(batch.a))
    constant = sclip.pseudo_labels(*rows, scale=jnp.exp(student.log_scale[...]))

    @jax.jit
    def loss(params):
        return method(nnx.merge(graphdef, params), batch, None, {})[0]

    def surrogate(params):
        both = nnx.merge(graphdef, params)
        f, g, x = both.x(batch.a), both.y(batch.b), both.x(batch.x)
        scale = {"log_scale": both.log_scale[...]}
        infonce = losses.infonce(f, g, negatives_f=x, **scale)
        return infonce + 2.0 * losses.soft_cross_entropy(x, g, constant, **scale)

    check_grads(loss, (params,), order=1, modes=["rev"])
    through = jax.grad(loss)(params)
    without = jax.jit(jax.grad(lambda p: detached(nnx.merge(graphdef, p), batch, None, {})[0]))
    without = without(params)
    expected = jax.jit(jax.grad(surrogate))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), without, expected)
    assert abs(through["log_scale"][...] - without["log_scale"][...]) > 1e-3
    # Labels of raw rows depend only on the scale, not on the heads.
    pairs = zip(*(jax.tree.leaves(gradient["x"]) for gradient in (through, without)), strict=True)
    assert all(np.allclose(a, b, rtol=1e-9) == (space == "unimodal") for a, b in pairs)
    assert float(through["bias"][...]) == 0.0


def test_pseudo_labels_compare_half_precision_in_float32(rng):
    raw = (rng.normal(size=(n, 6)).astype(np.float16) for n in (9, 5))
    queries, keys = map(jnp.asarray, raw)
    found = sclip.pseudo_labels(queries, keys, scale=20.0)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, labels_by_hand(queries, keys, "ot", 20.0), atol=1e-5)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "soft"}, r"labels.* 'soft'"),
        ({"space": "joint"}, r"space.* 'joint'"),
        ({"weight_text": -1.0}, r"weight_text.* -1.0"),
        ({"weight_image": float("inf")}, r"weight_image.* inf"),
        ({"iterations": 0}, r"iterations.* 0"),
    ],
)
def test_sclip_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        dataclasses.replace(methods.METHODS["sclip"], **options)


def test_pseudo_labels_and_soft_cross_entropy_reject_bad_arguments():
    with pytest.raises(checks.InputError, match=r"kind.* 'soft'"):
        sclip.pseudo_labels(jnp.ones((3, 2)), jnp.ones((4, 2)), scale=1.0, kind="soft")
    message = r"labels .*\(3, 4\).*\(4, 3\)"
    with pytest.raises(checks.InputError, match=message):
        losses.soft_cross_entropy(jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.ones((4, 3)))


def test_sclip_grid_is_the_papers():
    weights = (0.0, 0.1, 1.0, 10.0)
    assert {"weight_text": weights, "weight_image": weights} == methods.SCLIP.grid
