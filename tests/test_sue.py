"""Tests of spectral networks, MMD and SUE, and of fitted methods in the launcher."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import small_runs
from flax import nnx
from jax.test_util import check_grads
from sklearn.cross_decomposition import CCA
from sklearn.neighbors import NearestNeighbors

from sotalign_jax import Aligner, align, checks, data, evaluation, heads, methods, training
from sotalign_jax.methods import sue

# --- spectral networks ---------------------------------------------------------------------------


def naive_adjacency(rows, neighbours, scale):
    """Computes Gaussian weights of scikit-learn's nearest neighbours, including self."""
    count = min(neighbours + 1, len(rows))
    distances, indices = NearestNeighbors(n_neighbors=count).fit(rows).kneighbors(rows)
    unit = np.median(distances[:, min(scale, count) - 1])
    weights = np.zeros((len(rows), len(rows)))
    for i, (row, near) in enumerate(zip(distances, indices, strict=True)):
        weights[i, near] = np.exp(-(row**2) / unit**2)
    return (weights + weights.T) / 2


@pytest.mark.parametrize(("n", "neighbours", "scale"), [(40, 7, 4), (41, 7, 8), (6, 30, 15)])
def test_adjacency_matches_scikit_learn(rng, n, neighbours, scale):
    rows = (rng.normal(size=(n, 3)) + 100.0).astype(
        np.float32
    )  # off centre, where distances lose precision
    ours = sue.adjacency(rows, neighbours=neighbours, scale_neighbour=scale)
    expected = naive_adjacency(rows.astype(np.float64), neighbours, scale)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert np.isfinite(sue.adjacency(np.ones((8, 2)), neighbours=30, scale_neighbour=15)).all()


def test_rayleigh_and_orthonormalizer_match_naive_and_differentiate(x64, rng):
    rows, y, others = (jnp.asarray(rng.normal(size=(12, d))) for d in (3, 4, 4))
    weights = sue.adjacency(rows, neighbours=4, scale_neighbour=2)
    pairs = [(i, j) for i in range(12) for j in range(12)]
    w, v = np.asarray(weights), np.asarray(y)
    naive = sum(w[i, j] * np.sum((v[i] - v[j]) ** 2) for i, j in pairs) / (2 * 12)
    np.testing.assert_allclose(jnp.trace(sue.rayleigh(y, weights)), naive)

    def loss(y, others):
        return jnp.trace(sue.rayleigh(y @ sue.orthonormalizer(others), weights))

    check_grads(jax.jit(loss), (y, others), order=1, modes="rev")
    z = others @ sue.orthonormalizer(others)
    np.testing.assert_allclose(z.T @ z / 12, np.eye(4), atol=1e-4)


@pytest.mark.parametrize("width", [1e-3, 1e-5])
def test_orthonormalizer_handles_nearly_dependent_outputs(rng, width):
    """Outputs early in training have one direction that dominates all others."""
    sides = [np.linalg.qr(rng.normal(size=(n, 30)))[0] for n in (1024, 30)]
    widths = np.full(30, width)
    widths[0] = 1.0
    y = ((sides[0] * widths) @ sides[1]).astype(np.float32)
    z = np.asarray(y @ sue.orthonormalizer(jnp.asarray(y)), np.float64)
    np.testing.assert_allclose(z.T @ z / len(z), np.eye(30), atol=0.03)
    gradient = jax.grad(lambda y: jnp.sum((y @ sue.orthonormalizer(y)) ** 3))(jnp.asarray(y))
    assert np.isfinite(gradient).all()


def clusters(rng):
    """Returns three unconnected groups. Their first eigenvectors are constant on each group."""
    centres = 6.0 * np.eye(3, 5)
    return np.repeat(centres, 70, axis=0) + 0.3 * rng.normal(size=(210, 5)), 3


def ring(rng):
    """Returns a circle. Its first eigenvectors are 1, cos, sin, cos 2, sin 2."""
    angles = 2 * np.pi * np.arange(210) / 210
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return circle @ rng.normal(size=(2, 5)), 5


@pytest.mark.parametrize(("shape", "degrees"), [(clusters, 1), (ring, 15)])
def test_fit_spectral_finds_the_eigenvectors_of_the_graph(rng, shape, degrees):
    rows, count = shape(rng)
    rows = rng.permutation(rows).astype(np.float32)
    options = {"neighbours": 12, "scale_neighbour": 6, "batch": 256}
    weights = naive_adjacency(rows.astype(np.float64), 12, 6)
    values, vectors = np.linalg.eigh(np.diag(weights.sum(axis=1)) - weights)
    assert values[count] - values[count - 1] > 0.01  # otherwise the eigenspace is not unique
    losses = []
    network, basis = sue.fit_spectral(
        heads.TanhHead(5, count, hidden=32, rngs=nnx.Rngs(0)),
        rows,
        methods.SUE(epochs=150, learning_rate=1e-2, patience=40, **options),
        key=jax.random.key(0),
        report=lambda epoch, loss: losses.append(loss),
    )
    found = sue.outputs(network, rows) @ basis
    np.testing.assert_allclose(found.T @ found / len(rows), np.eye(count), atol=1e-6)
    assert scipy.linalg.subspace_angles(found, vectors[:, :count]).max() < np.deg2rad(degrees)
    assert (
        np.ptp(found[:, 0]) < 0.5 * np.ptp(found[:, -1]) or shape is clusters
    )  # the first is constant
    assert losses[-1] < losses[0] and len(losses) <= 150


def test_fit_spectral_rejects_few_rows_and_non_finite_losses(rng):
    network = heads.TanhHead(4, 6, hidden=8, rngs=nnx.Rngs(0))
    options = methods.SUE(epochs=3, batch=8, eigenvectors=8, learning_rate=1e38)
    key = jax.random.key(0)
    with pytest.raises(checks.InputError, match=r"eigenvectors.* 6"):
        sue.fit_spectral(network, np.ones((10, 4)), options, key=key)
    with pytest.raises(FloatingPointError, match=r"epoch .*learning_rate"):
        sue.fit_spectral(network, rng.normal(size=(40, 4)), options, key=key)


def test_fit_spectral_stops_early(rng):
    seen = []
    sue.fit_spectral(
        heads.TanhHead(4, 2, hidden=4, rngs=nnx.Rngs(0)),
        rng.normal(size=(30, 4)).astype(np.float32),
        methods.SUE(
            epochs=99,
            batch=9,
            learning_rate=1e-7,
            patience=0,
            neighbours=3,
            scale_neighbour=2,
            eigenvectors=9,
        ),
        key=jax.random.key(0),
        report=lambda epoch, loss: seen.append(epoch),
    )
    assert 1 < len(seen) < 99 and seen == list(range(1, len(seen) + 1))


# --- maximum mean discrepancy --------------------------------------------------------------------


def naive_mmd(x, y, scale=None):
    rows = np.concatenate([x, y])
    squares = np.array([[np.sum((a - b) ** 2) for b in rows] for a in rows])
    scale = squares.sum() / (len(rows) ** 2 - len(rows)) if scale is None else scale
    kernel = sum(np.exp(-squares / (c * scale)) for c in (0.5, 1.0, 2.0))
    n = len(x)
    return kernel[:n, :n].mean() - 2 * kernel[:n, n:].mean() + kernel[n:, n:].mean()


def test_mmd_matches_naive_transcription(x64, rng):
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(7, 3)) + 0.5
    mmd = jax.jit(sue.mmd)
    np.testing.assert_allclose(mmd(x, y), naive_mmd(x, y), rtol=1e-10)
    np.testing.assert_allclose(mmd(x, x[::-1]), 0.0, atol=1e-12)

    # The scale has no gradient, so finite differences must keep it fixed.
    rows = np.concatenate([x, y])
    scale = np.sum((rows[:, None] - rows) ** 2) / (16 * 15)
    gradient, step = jax.jit(jax.grad(sue.mmd))(jnp.asarray(x), jnp.asarray(y)), 1e-5
    for i, j in [(0, 0), (4, 2), (8, 1)]:
        shift = np.zeros_like(x)
        shift[i, j] = step
        difference = naive_mmd(x + shift, y, scale) - naive_mmd(x - shift, y, scale)
        np.testing.assert_allclose(gradient[i, j], difference / (2 * step), rtol=1e-6)


def test_refine_reduces_mmd(rng):
    x, y = rng.normal(size=(400, 3)) * 0.5 + 1.0, rng.normal(size=(300, 3))
    start = sue.Residual(3, 16, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(start))
    options, key = methods.SUE(mmd_epochs=20), jax.random.key(0)
    network = sue.refine(start, x, y, options, key=key)
    moved = np.asarray(network(jnp.asarray(x, jnp.float32)))
    assert naive_mmd(moved[:150], y[:150]) < 0.2 * naive_mmd(x[:150], y[:150])
    assert jax.tree.all(
        jax.tree.map(np.array_equal, nnx.state(start), before)
    )  # refine does not modify its start
    again = sue.refine(start, x, y, options, key=key)
    np.testing.assert_array_equal(again(jnp.asarray(x, jnp.float32)), moved)
    with pytest.raises(FloatingPointError, match=r"residual network .*epoch 1"):
        sue.refine(start, x, y, methods.SUE(mmd_learning_rate=1e38), key=key)


# --- SUE -----------------------------------------------------------------------------------------

SMALL = {
    "dim": 3,
    "eigenvectors": 6,
    "hidden": 32,
    "neighbours": 10,
    "scale_neighbour": 5,
    "epochs": 40,
    "batch": 256,
    "learning_rate": 3e-3,
    "mmd_epochs": 10,
}


@pytest.fixture(scope="module")
def table():
    """Returns 500 rows of two views of a curved surface."""
    rng = np.random.default_rng(0)
    z = rng.uniform(-1, 1, size=(500, 2))
    lifted = np.concatenate([z, np.cos(2 * z), np.sin(2 * z)], axis=1)
    return [
        (lifted @ rng.normal(size=(6, d)) + 0.02 * rng.normal(size=(500, d))).astype(np.float32)
        for d in (9, 7)
    ]


@pytest.fixture(scope="module")
def dataset(table):
    X, Y = table
    test = data.gallery(X[400:], Y[400:])
    return data.dataset((X[:40], Y[:40]), x=X[40:220], y=Y[220:400], test=test)


@pytest.fixture(scope="module")
def fitted(dataset):
    return methods.SUE(**SMALL).fit(dataset, seed=0)


def test_sue_retrieves_unseen_matches(fitted, dataset):
    scores = evaluation.evaluate(fitted.x, fitted.y, dataset.test)
    assert scores["mean/R@10"] > 30  # chance is 10


def test_sue_without_refinement_gives_canonical_variates(dataset):
    method = methods.SUE(**SMALL | {"mmd_epochs": 0, "centred": True})
    fitted = method.fit(dataset, seed=0)
    assert fitted.x.residual is None
    z_x = np.asarray(fitted.x(dataset.pairs_x), np.float64)
    z_y = np.asarray(fitted.y(dataset.pairs_y), np.float64)
    for z in (z_x, z_y):  # canonical variates are centred and orthonormal over the pairs
        np.testing.assert_allclose(z.mean(axis=0), 0.0, atol=1e-5)
        np.testing.assert_allclose(z.T @ z / len(z), np.eye(3), atol=1e-5)
    cross = z_x.T @ z_y / len(z_x)
    assert np.all(np.diag(cross) > 0.8)
    np.testing.assert_allclose(cross - np.diag(np.diag(cross)), 0.0, atol=1e-5)


def test_variates_match_scikit_learn_rotations(rng):
    x, y = rng.normal(size=(500, 5)), rng.normal(size=(500, 6))
    y[:, :4] += 2.0 * x[:, :4] * [1.0, 0.8, 0.6, 0.4]
    solver = CCA(3, max_iter=5000, tol=1e-16).fit(x, y)
    found = methods.SUE(**SMALL | {"dim": 3}).variates(x, y)
    for ours, theirs in zip(found, (solver.x_rotations_, solver.y_rotations_), strict=True):
        np.testing.assert_allclose(np.abs(ours[0]), np.abs(theirs), atol=1e-6)
        np.testing.assert_array_equal(ours[1], 0.0)


def test_sue_fit_is_a_function_of_the_seed(fitted, dataset):
    again = methods.SUE(**SMALL).fit(dataset, seed=0)
    equal = jax.tree.map(np.array_equal, nnx.state(again), nnx.state(fitted))
    assert jax.tree.all(equal)
    other = methods.SUE(**SMALL | {"epochs": 1, "mmd_epochs": 1}).fit(dataset, seed=1)
    assert not np.allclose(other.x(dataset.pairs_x), fitted.x(dataset.pairs_x))


def test_sue_survives_save_and_load(fitted, dataset, tmp_path):
    aligner = Aligner(fitted, {})
    aligner.save(tmp_path / "saved")
    loaded = Aligner.load(tmp_path / "saved")
    assert nnx.graphdef(loaded.heads) == nnx.graphdef(fitted)
    rows = dataset.test.x, dataset.test.y
    np.testing.assert_array_equal(loaded.similarity(*rows), aligner.similarity(*rows))
    assert loaded.heads.x.residual is not None and loaded.heads.y.residual is None


def test_align_with_sue_prints_progress_on_request(dataset, capsys):
    pairs = dataset.pairs_x, dataset.pairs_y
    method = methods.SUE(**SMALL | {"epochs": 1, "mmd_epochs": 1})
    align(pairs, dataset.pool_x, dataset.pool_y, method=method, progress=True)
    assert "3/3" in capsys.readouterr().err
    align(pairs, dataset.pool_x, dataset.pool_y, method=method, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, r"dim.* 0"),
        ({"eigenvectors": 7}, r"dim.* 8"),
        ({"batch": 1}, r"batch.* 1"),
        ({"learning_rate": 0.0}, r"learning_rate.* 0.0"),
        ({"mmd_epochs": -1}, r"mmd_epochs.* -1"),
    ],
)
def test_sue_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        methods.SUE(**options)


def test_sue_rejects_insufficient_data(dataset):
    few = data.dataset((dataset.pairs_x[:6], dataset.pairs_y[:6]), x=dataset.pool_x)
    with pytest.raises(checks.InputError, match=r"eigenvectors.* 6"):
        methods.SUE(**SMALL).fit(few, seed=0)
    with pytest.raises(checks.InputError, match="pool_y"):
        training.check_pool(methods.SUE(), few)


# --- the contrastive row -------------------------------------------------------------------------


def test_contrastive_trains_tanh_heads_with_both_losses(table):
    X, Y = (side.copy() for side in table)
    assert methods.Contrastive.head == "tanh"
    for loss in ("siglip", "infonce"):
        aligner = align(
            (X[:90], Y[:90]),
            val=(X[400:], Y[400:]),
            dim=8,
            steps=30,
            learning_rate=1e-3,
            method=methods.Contrastive(loss=loss),
            progress=False,
        )
        assert aligner.heads.x.kind == "tanh"
        assert aligner.info["candidates"]["trained"] > 10  # chance is 5.3
    with pytest.raises(checks.InputError, match=r"loss.* 'clip'"):
        methods.Contrastive(loss="clip")


# --- from the command line -----------------------------------------------------------------------


def test_main_restarts_killed_fits_and_keeps_finished_runs(tmp_path):
    """A killed fit starts over, and finished runs are kept. Fits write no checkpoints."""
    files = tmp_path / "files"
    files.mkdir()
    config = small_runs.write_config(small_runs.write_files(files))
    run = tmp_path / "run"
    options = [
        f"--config={config}",
        f"--workdir={run}",
        f"--config.runs={ {name: {'method': name} for name in ('csa', 'sue', 'contrastive_mlp')} }",
        "--config.csa.ridge=0.1",
        "--config.hidden=16",
        *(f"--config.sue.{name}={value}" for name, value in SMALL.items()),
    ]

    def start(*more):
        return small_runs.popen("main", [*options, *more], compiled=tmp_path / "compiled")

    process = start("--config.sue.batch=0")
    assert "sue.batch " in process.communicate()[1]
    assert process.returncode == 1 and not run.exists()

    process = start()
    while "SUE: " not in (line := process.stderr.readline()):
        assert line or process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = small_runs.contents(run / "csa-seed0")
    assert "results.json" in finished and not (run / "sue-seed0" / "results.json").exists()

    process = start()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "SUE: 90/90" in err and "contrastive_mlp" in out
    assert small_runs.contents(run / "csa-seed0") == finished
    assert sorted(path.name for path in (run / "sue-seed0").iterdir()) == [
        ".lock",
        "aligner",
        "config.json",
        "environment.json",
        "inputs.json",
        "protocol.json",
        "results.json",
    ]
    assert (run / "contrastive_mlp-seed0" / "metrics.jsonl").exists()
    results = json.loads((run / "results.json").read_text())
    assert results["csa-seed0"]["test/mean/R@1"] > 50
    assert Aligner.load(run / "sue-seed0").heads.x.kind == "sue"
