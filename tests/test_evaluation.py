"""Tests of retrieval, zero-shot accuracy and reports against sorted scores."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sotalign_jax import checks, data, evaluation, heads, teachers
from sotalign_jax.calibration import Calibration, calibrate
from sotalign_jax.ot import affinity

D_X, D_Y = 12, 10


def _rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _oracle(x, y, owner, ks):
    """Computes recall with a stable sort of the full score matrix."""
    scores = _unit(x.astype(np.float64)) @ _unit(y.astype(np.float64)).T
    by_x = np.argsort(-scores, axis=1, kind="stable")
    by_y = np.argsort(-scores.T, axis=1, kind="stable")
    out = {}
    for k in ks:
        hit_x = [(owner[by_x[i, :k]] == i).any() for i in range(len(x))]
        hit_y = [owner[j] in by_y[j, :k] for j in range(len(y))]
        out[f"x_to_y/R@{k}"] = 100 * np.mean(hit_x)
        out[f"y_to_x/R@{k}"] = 100 * np.mean(hit_y)
        out[f"mean/R@{k}"] = (out[f"x_to_y/R@{k}"] + out[f"y_to_x/R@{k}"]) / 2
    return out


@pytest.mark.parametrize("block_size", [1, 16, 4096])
def test_retrieval_matches_sorted_scores(block_size):
    x = _rows(37, 6)
    y = 3.0 * (x + _rows(37, 6, 1))
    got = evaluation.retrieval(x, y, block_size=block_size)
    assert got == pytest.approx(_oracle(x, y, np.arange(37), (1, 5, 10)))
    assert 0 < got["mean/R@1"] < got["mean/R@10"] < 100


@pytest.mark.parametrize("block_size", [10, 4096])
def test_retrieval_with_several_captions_matches_sorted_scores(block_size):
    rng = np.random.default_rng(2)
    owner = rng.permutation(np.concatenate([np.arange(23), rng.integers(0, 23, 60)]))
    x = _rows(23, 5)
    y = x[owner] + _rows(83, 5, 1)
    got = evaluation.retrieval(x, y, owner, ks=(1, 3), block_size=block_size)
    assert got == pytest.approx(_oracle(x, y, owner, (1, 3)))


def test_retrieval_breaks_ties_by_the_lower_index():
    # Unit rows with entries of +-1/2 have exact inner products, so that ties are exact.
    rng = np.random.default_rng(3)
    x = rng.choice([-0.5, 0.5], (40, 4)).astype(np.float32)
    y = rng.choice([-0.5, 0.5], (90, 4)).astype(np.float32)
    owner = rng.permutation(np.concatenate([np.arange(40), rng.integers(0, 40, 50)]))
    got = evaluation.retrieval(x, y, owner, ks=(1, 5, 10, 30), block_size=16)
    assert got == pytest.approx(_oracle(x, y, owner, (1, 5, 10, 30)))


def test_retrieval_of_collapsed_features_is_chance():
    constant = np.ones((50, 8), np.float32)
    got = evaluation.retrieval(constant, constant, block_size=16)
    assert got["mean/R@1"] == pytest.approx(2.0)
    assert got["x_to_y/R@10"] == got["y_to_x/R@10"] == pytest.approx(20.0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_retrieval_of_narrow_features_is_scored_in_float32(dtype):
    x, y = jnp.asarray(_rows(60, 4), dtype), jnp.asarray(_rows(60, 4, 1), dtype)
    got = evaluation.retrieval(x, y)
    assert got == pytest.approx(_oracle(np.asarray(x), np.asarray(y), np.arange(60), (1, 5, 10)))


def test_retrieval_compiles_once_per_shape_for_all_cut_offs(compilations):
    evaluation.retrieval(_rows(31, 3), _rows(31, 3, 9), block_size=8)
    with compilations() as compiled:
        for seed in range(3):
            evaluation.retrieval(_rows(31, 3, seed), _rows(31, 3), ks=(1 + seed,), block_size=8)
    assert not compiled


def test_match_ranks_never_stores_the_score_matrix():
    n, m, d, block_size = 2048, 4096, 8, 128
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, d), (m, d))]
    owner = jax.ShapeDtypeStruct((m,), jnp.int32)
    biases = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]
    compiled = evaluation.match_ranks.lower(
        *shapes, owner, *biases, block_size=block_size
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * m / 4


@pytest.mark.parametrize(
    ("x", "y", "options", "name"),
    [
        (_rows(4, 3), _rows(4, 2), {}, "y"),
        (_rows(4, 3), _rows(5, 3), {}, "x_of_y"),
        (_rows(4, 3)[0], _rows(4, 3), {}, "x"),
        (np.ones((4, 3), int), _rows(4, 3), {}, "x"),
        (_rows(4, 3), np.full((4, 3), np.nan), {}, "y"),
        (np.full((4, 3), np.inf), _rows(4, 3), {}, "x"),
        (_rows(4, 3), _rows(4, 3), {"ks": (0, 1)}, "ks"),
        (_rows(4, 3), _rows(4, 3), {"block_size": 0}, "block_size"),
        (_rows(4, 3), _rows(4, 3), {"bias_y": np.full(4, np.nan)}, "bias_y"),
    ],
)
def test_retrieval_rejects_bad_arguments(x, y, options, name):
    with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
        evaluation.retrieval(x, y, **options)


# --- chance and intervals ---


@pytest.mark.parametrize(("size", "k", "matches"), [(1000, 10, 1), (50, 5, 7), (6, 10, 2)])
def test_chance_is_the_hypergeometric_probability_of_a_hit(size, k, matches):
    expected = 100 * scipy.stats.hypergeom(size, matches, min(k, size)).sf(0)
    assert evaluation.chance(size, k, matches) == pytest.approx(expected)
    several = evaluation.chance(size, k, [matches, 1])
    assert several == pytest.approx((expected + evaluation.chance(size, k)) / 2)


def test_interval_matches_bootstrap_quantiles():
    hits, n = 120, 400  # the number of resampled hits is binomial
    values = np.zeros((n, 2))
    values[:hits] = 100.0
    low, high = evaluation.bootstrap_interval(values, resamples=4000)
    expected = scipy.stats.binom(n, hits / n).ppf([0.025, 0.975]) * 100 / n
    np.testing.assert_allclose([low[0], high[0]], expected, atol=0.51)  # two hits
    np.testing.assert_array_equal(low[0], low[1])
    np.testing.assert_array_equal(
        evaluation.bootstrap_interval(values), evaluation.bootstrap_interval(values)
    )


def _identity(width):
    return heads.AffineMap(jnp.eye(width), jnp.zeros(width))


def test_report_matches_evaluate():
    rng = np.random.default_rng(0)
    owner = np.concatenate([np.arange(60), rng.integers(0, 60, 90)])
    x = _rows(60, 6)
    gallery = data.gallery(x, x[owner] + 0.7 * _rows(150, 6, 1), owner)
    pool = calibrate(_rows(80, 6, 2), _rows(90, 6, 3))
    head = _identity(6)
    report = evaluation.report(head, head, gallery, pool)
    values = {name: recall.value for name, recall in report.recalls.items()}
    assert values == evaluation.evaluate(head, head, gallery, pool)
    assert all(r.low < r.value < r.high and r.low > r.chance for r in report.recalls.values())
    counts = np.bincount(owner)
    assert report.recalls["x_to_y/R@5"].chance == evaluation.chance(150, 5, counts)
    assert report.recalls["y_to_x/R@5"].chance == evaluation.chance(60, 5)
    assert json.loads(json.dumps(report.to_dict()))["rows_y"] == 150
    assert "60 rows of x and 150 rows of y" in str(report) and "calibrated mean" in str(report)


def test_report_remarks_on_shuffled_pairs():
    x, head = _rows(200, 6), _identity(6)
    matched = evaluation.report(head, head, data.gallery(x, x + _rows(200, 6, 1)))
    shuffled = evaluation.report(head, head, data.gallery(x, _rows(200, 6, 1)))
    assert matched.remarks == []
    assert [remark.split(":")[0] for remark in shuffled.remarks] == ["Not above chance"]
    assert str(shuffled).endswith(shuffled.remarks[0])


def test_report_remarks_on_a_calibration_that_hurts():
    x, head = _rows(200, 6), _identity(6)
    one_hub = Calibration(
        f=jnp.eye(6)[:1], g=jnp.eye(6)[:1], u=jnp.zeros(1), v=jnp.zeros(1), epsilon=jnp.array(1.0)
    )  # lowers scores by the first coordinate
    gallery = data.gallery(x, x + 0.3 * _rows(200, 6, 1))
    report = evaluation.report(head, head, gallery, one_hub, calibrated=True)
    assert report.gain is not None and report.gain[2] < 0
    (remark,) = report.remarks
    assert "calibrated=False" in remark
    plain = evaluation.report(head, head, gallery, one_hub)
    assert plain.gain == report.gain
    assert not any("calibrated=" in remark for remark in plain.remarks)


def test_report_rejects_gallery_of_other_widths():
    gallery = data.gallery(_rows(5, 3), _rows(5, 4))
    with pytest.raises(checks.InputError, match=r"\by\b"):
        evaluation.report(_identity(3), _identity(3), gallery)


# --- zero-shot classification ---


@pytest.mark.parametrize("block_size", [9, 4096])
def test_zero_shot_matches_numpy_formula(block_size):
    x, prompts = _rows(70, 5), _rows(28, 5, 1).reshape(7, 4, 5) * np.arange(1, 5)[:, None]
    labels = np.random.default_rng(4).integers(0, 6, 70)  # class 6 never occurs
    classes = _unit(_unit(prompts.astype(np.float64)).mean(axis=1))
    right = (_unit(x) @ classes.T).argmax(axis=1) == labels
    got = evaluation.zero_shot(x, prompts, labels, block_size=block_size)
    per_class = [right[labels == c].mean() for c in range(6)]
    assert got == pytest.approx(
        {"zero_shot/top1": 100 * right.mean(), "zero_shot/mean_per_class": 100 * np.mean(per_class)}
    )


def test_zero_shot_normalises_each_prompt():
    x = np.array([[1.0, 0.2], [0.2, 1.0]])
    prompts = np.array([[[1.0, 0.0], [1.0, 0.1]], [[0.0, 1.0], [100.0, 100.0]]])
    assert evaluation.zero_shot(x, prompts, [0, 1])["zero_shot/top1"] == 100.0


@pytest.mark.parametrize(
    ("prompts", "labels", "name"),
    [
        (np.ones((2, 1, 4)), [0, 1], "prompts"),
        (np.ones((2, 3)), [0, 1], "prompts"),
        (np.ones((2, 1, 3)), [0, 2], "labels"),
        (np.full((2, 1, 3), np.nan), [0, 1], "prompts"),
    ],
)
def test_zero_shot_rejects_bad_arguments(prompts, labels, name):
    with pytest.raises(checks.InputError, match=rf"\b{name}\b"):
        evaluation.zero_shot(_rows(2, 3), prompts, labels)


# --- heads ---


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_embed_in_blocks_matches_direct_call(monkeypatch, kind):
    head = heads.build_heads(D_X, D_Y, 4, kind=kind).x
    rows = np.random.default_rng(0).normal(size=(23, D_X)).astype(np.float32)
    direct = affinity.l2_normalize(head(rows))
    monkeypatch.setattr(evaluation, "EMBED_CHUNK", 5)
    blocks = evaluation.embed(head, rows)
    assert blocks.shape == (23, 4)
    np.testing.assert_allclose(blocks, direct, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(blocks, axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_embed_accepts_any_dtype_from_host_or_device(dtype, tmp_path):
    head = heads.build_heads(D_X, D_Y, 4).x
    rows = np.random.default_rng(0).normal(size=(7, D_X)).astype(dtype)
    expected = evaluation.embed(head, rows.astype(np.float32))
    assert expected.dtype == np.float32
    for given in (rows, jnp.asarray(rows)):
        np.testing.assert_allclose(evaluation.embed(head, given), expected, atol=1e-6)


def test_embed_of_mapped_rows_uses_the_memory_of_one_block(tmp_path):
    n, width = 100_000, 64
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float16, (n, width))
    rows[:] = 1.0
    head = heads.build_heads(width, width, 4).x
    tracemalloc.start()
    features = evaluation.embed(head, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    block = evaluation.EMBED_CHUNK * width * 4
    assert features.shape == (n, 4)
    assert (
        peak < features.nbytes + 2 * block < n * width * 2
    )  # less memory than the rows themselves


def test_embed_with_affine_map_matches_teacher():
    pairs_x, pairs_y = _rows(30, D_X), _rows(30, D_Y, 1)
    teacher = teachers.cca(pairs_x, pairs_y)
    np.testing.assert_allclose(
        evaluation.embed(teacher.map_x, pairs_x), teacher.x(pairs_x), atol=1e-6
    )


def test_evaluate_zero_shot_matches_numpy_formula():
    start = heads.build_heads(D_X, D_Y, 8, seed=1)
    rng = np.random.default_rng(0)
    task = data.zero_shot(
        rng.normal(size=(9, D_X)), rng.integers(0, 3, 9), rng.normal(size=(3, 2, D_Y))
    )
    scores = evaluation.evaluate_zero_shot(start.x, start.y, task)
    prompts = np.array(start.y(task.prompts.reshape(6, D_Y))).reshape(3, 2, -1)
    prompts /= np.linalg.norm(prompts, axis=-1, keepdims=True)
    classes = prompts.mean(1) / np.linalg.norm(prompts.mean(1), axis=-1, keepdims=True)
    predicted = np.argmax(np.asarray(start.x(task.x)) @ classes.T, axis=1)
    assert scores["zero_shot/top1"] == pytest.approx(100 * np.mean(predicted == task.labels))
