"""Tests of kernel teachers in heads and align, and of calibrated search."""

import numpy as np
import pytest

import sotalign_jax as sota
from sotalign_jax import checks, data, evaluation, heads, teachers

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


def test_align_with_a_kernel_teacher_survives_save_and_load(rows, tmp_path):
    x, y = rows
    aligner = sota.align((x[:60], y[:60]), x[60:], y[60:], steps=3, progress=False)
    assert (aligner.heads.x.kind, aligner.heads.x.first.kind) == ("mixed", "kernel")
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
    wanted = np.take_along_axis(scores, found.indices, axis=1)
    np.testing.assert_allclose(found.scores, wanted, atol=1e-5)
    plain = aligner.search(queries, keys, k=5, direction=direction, calibrated=False)
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


def test_kernel_teachers_and_calibration_reject_invalid_input(rows, teacher):
    x, y = rows
    with pytest.raises(checks.InputError, match=r"^teacher\b.* widths"):
        heads.build_heads(9, 5, 4, teacher=teacher)
    with pytest.raises(checks.InputError, match=r"^calibrated\b"):
        sota.Aligner(heads.build_heads(6, 5, 4), {}).similarity(x, y, calibrated=True)
