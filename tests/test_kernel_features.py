"""Tests of kernel teachers and kernel features in heads, training, align and search."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sotalign_jax as sota
from sotalign_jax import checks, data, evaluation, heads, methods, recipe, teachers, training

OPTIONS = {"gamma_x": 1.0, "gamma_y": 2.0, "ridge": 0.003, "power": 0.5}


@pytest.fixture(scope="module")
def rows():
    """Returns 160 matching rows of two modalities that are related nonlinearly."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(160, 3))
    x, y = z @ rng.normal(size=(3, 6)), np.tanh(z) @ rng.normal(size=(3, 5))
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def dataset(rows):
    x, y = rows
    return data.dataset(
        (x[:60], y[:60]), x=x[60:100], y=y[60:110], val=data.gallery(x[110:], y[110:])
    )


@pytest.fixture(scope="module")
def teacher(dataset):
    return teachers.kernel_cca(dataset.pairs_x, dataset.pairs_y, **OPTIONS)


def test_build_heads_starts_at_the_kernel_teacher(dataset, teacher):
    start = heads.build_heads(6, 5, 7, teacher=teacher)
    f, g = evaluation.embed(start.x, dataset.val.x), evaluation.embed(start.y, dataset.val.y)
    x = evaluation.embed(teacher.map_x.leading(7), dataset.val.x)
    y = evaluation.embed(teacher.map_y.leading(7), dataset.val.y)
    np.testing.assert_allclose(f @ g.T, x @ y.T, atol=1e-4)


class Heard(training.Observer):
    def __init__(self):
        self.stages, self.klot = [], []

    def stage(self, text):
        self.stages.append(text)

    def metrics(self, step, values):
        self.klot.append(values["klot"])


def resolved(dataset, method, **options):
    options = {"learning_rate": 3e-3, "steps": 20, **options}
    return recipe.default(dataset, method=method, **options)


@pytest.mark.parametrize("start", ["teacher", "random"])
def test_train_on_kernel_features_follows_the_teacher(dataset, teacher, start):
    made = resolved(dataset, methods.SOTAlign(alpha=1.0), teacher=teacher, features="kernel")
    made = dataclasses.replace(made, start=start, dim=4)
    heard = Heard()
    prepared = recipe.prepare(made, dataset, observer=heard)
    recipe.train(made, prepared, observer=heard)
    assert heard.klot[-1] < (0.8 if start == "random" else 1.0) * heard.klot[0]
    said = " ".join(heard.stages)
    assert all(word in said for word in ("fitting", "mapping", "compiling"))


def test_train_on_mapped_rows_matches_training_behind_kernel_maps(dataset, teacher):
    unselected = dataclasses.replace(dataset, val=None)
    made = resolved(unselected, methods.SOTAlign(alpha=0.1, tolerance=1e-4), teacher=teacher)
    made = dataclasses.replace(made, average=0.0, train=dataclasses.replace(made.train, steps=3))
    model = recipe.train(made, recipe.prepare(made, unselected)).heads
    # Take the same steps with heads that contain the kernel maps, and update only the inner heads.
    rows, start = training.place(dataset), heads.build_heads(6, 5, teacher.dim, teacher=teacher)
    state = training.init_state(made.method, start, rows, made.train)
    step = training.make_step(made.method, start, made.train)
    fixed = nnx.state(start)
    for _ in range(made.train.steps):
        state, _ = step(state, rows, teacher, training.batch_key(made.train))
        inner = {side: state.params[side]["inner"] for side in "xy"}
        params = jax.tree.map(jnp.copy, fixed)
        for side in "xy":
            params[side]["inner"] = inner[side]
        params["log_scale"], params["bias"] = state.params["log_scale"], state.params["bias"]
        state = state._replace(params=params)
    stepped = nnx.merge(nnx.graphdef(start), state.params)
    x = dataset.pairs_x[:9]
    # Lion uses the sign of the update, and rounding may flip a few signs.
    assert np.isclose(model.x(x), stepped.x(x), rtol=1e-3, atol=1e-3).mean() > 0.95


def test_prepare_places_the_mapped_pool_once(dataset, teacher):
    made = resolved(dataset, methods.SOTAlign(), teacher=teacher)
    prepared = recipe.prepare(made, dataset)
    assert prepared.teacher.map_x is None and prepared.dataset.pool_x.shape == (40, teacher.dim)
    batches = training.with_features(training.place(prepared.dataset), prepared.teacher)
    assert batches.star_x is None and batches.star_y is None


@pytest.mark.parametrize(
    "options",
    [
        {"teacher": "kernel_cca"},
        {"features": "kernel", "method": "sail", "start": "random"},
        {"features": "kernel", "method": "csa"},
    ],
)
def test_align_with_kernel_heads_survives_save_and_load(rows, tmp_path, options):
    x, y = rows
    aligner = sota.align((x[:60], y[:60]), x[60:], y[60:], steps=3, progress=False, **options)
    assert aligner.heads.x.kind == "kernel"
    aligner.save(tmp_path / "a")
    loaded = sota.Aligner.load(tmp_path / "a")
    for calibrated in (False, True):
        np.testing.assert_array_equal(
            loaded.similarity(x[:5], y[:4], calibrated=calibrated),
            aligner.similarity(x[:5], y[:4], calibrated=calibrated),
        )


@pytest.mark.parametrize(("side", "other"), [("x", "y"), ("y", "x")])
def test_align_uses_pairs_in_place_of_a_missing_pool(rows, side, other):
    x, y = rows
    pool = {"x": x[60:]} if side == "x" else {"y": y[60:]}
    aligner = sota.align((x[:60], y[:60]), **pool, steps=3, progress=False)
    own = {"x": x[:60], "y": y[:60]}[other]
    both = sota.align((x[:60], y[:60]), **pool, **{other: own}, steps=3, progress=False)
    assert aligner.info["method"] == "SOTAlign"
    np.testing.assert_array_equal(aligner.embed_x(x), both.embed_x(x))


@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
def test_calibrated_search_ranks_like_calibrated_similarity(rows, direction):
    x, y = rows
    aligner = sota.Aligner(heads.build_heads(6, 5, 4), {}).calibrated_by(x[:50], y[50:90])
    queries, keys = (x[:9], y[:20]) if direction == "x_to_y" else (y[:9], x[:20])
    found = aligner.search(queries, keys, k=5, direction=direction, calibrated=True)
    scores = aligner.similarity(x[:9], y[:20], calibrated=True)
    if direction == "y_to_x":
        scores = aligner.similarity(x[:20], y[:9], calibrated=True).T
    np.testing.assert_array_equal(found.indices, np.argsort(-scores, axis=1)[:, :5])
    plain = aligner.search(queries, keys, k=5, direction=direction)
    assert (plain.indices != found.indices).any()


def test_evaluate_reports_plain_and_calibrated_recall(rows):
    x, y = rows
    aligner = sota.Aligner(heads.build_heads(6, 5, 4), {}).calibrated_by(x[:50], y[50:90])
    gallery = data.gallery(x[:30], y[:30])
    scores = aligner.similarity(gallery.x, gallery.y, calibrated=True)
    best = 100 * np.mean(scores.argmax(axis=1) == np.arange(30))
    metrics = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery, aligner.calibration)
    plain = evaluation.evaluate(aligner.heads.x, aligner.heads.y, gallery)
    np.testing.assert_allclose(metrics["calibrated/x_to_y/R@1"], best)
    assert plain.items() <= metrics.items()


def test_kernel_features_reject_invalid_combinations(rows, dataset, teacher):
    x, y = rows
    linear = teachers.cca(dataset.pairs_x, dataset.pairs_y)
    with pytest.raises(checks.InputError, match=r"^features\b"):
        heads.prepend(linear, heads.build_heads(6, 5, 4))
    with pytest.raises(checks.InputError, match=r"^teacher\b"):
        heads.build_heads(9, 5, 4, teacher=teacher)
    with pytest.raises(checks.InputError, match=r"^teacher\b"):
        sota.align((x, y), features="kernel", teacher=linear, start="teacher", progress=False)
    with pytest.raises(checks.InputError, match=r"^calibrated\b"):
        sota.Aligner(heads.build_heads(6, 5, 4), {}).similarity(x, y, calibrated=True)
