import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks, data, evaluation, heads, teachers
from sotalign_jax.ot import affinity

D_X, D_Y = 12, 10


def _rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _oracle(x, y, owner, ks):
    """Recall by a full stable sort of the full score matrix."""
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


@pytest.mark.parametrize("chunk", [1, 16, 4096])
def test_one_to_one_retrieval_equals_sorting(chunk):
    x = _rows(37, 6)
    y = 3.0 * (x + _rows(37, 6, 1))
    got = evaluation.retrieval(x, y, chunk=chunk)
    assert got == pytest.approx(_oracle(x, y, np.arange(37), (1, 5, 10)))
    assert 0 < got["mean/R@1"] < got["mean/R@10"] < 100


@pytest.mark.parametrize("chunk", [10, 4096])
def test_several_captions_each_equals_sorting(chunk):
    rng = np.random.default_rng(2)
    owner = rng.permutation(np.concatenate([np.arange(23), rng.integers(0, 23, 60)]))
    x = _rows(23, 5)
    y = x[owner] + _rows(83, 5, 1)
    got = evaluation.retrieval(x, y, owner, ks=(1, 3), chunk=chunk)
    assert got == pytest.approx(_oracle(x, y, owner, (1, 3)))


def test_ties_go_to_the_lower_index():
    # Entries of +-1/2 make unit rows whose products are exact, so equal scores are truly equal.
    rng = np.random.default_rng(3)
    x = rng.choice([-0.5, 0.5], (40, 4)).astype(np.float32)
    y = rng.choice([-0.5, 0.5], (90, 4)).astype(np.float32)
    owner = rng.permutation(np.concatenate([np.arange(40), rng.integers(0, 40, 50)]))
    got = evaluation.retrieval(x, y, owner, ks=(1, 5, 10, 30), chunk=16)
    assert got == pytest.approx(_oracle(x, y, owner, (1, 5, 10, 30)))


def test_collapsed_features_score_chance():
    constant = np.ones((50, 8), np.float32)
    got = evaluation.retrieval(constant, constant, chunk=16)
    assert got["mean/R@1"] == pytest.approx(2.0)
    assert got["x_to_y/R@10"] == got["y_to_x/R@10"] == pytest.approx(20.0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_features_are_scored_in_float32(dtype):
    x, y = jnp.asarray(_rows(60, 4), dtype), jnp.asarray(_rows(60, 4, 1), dtype)
    got = evaluation.retrieval(x, y)
    assert got == pytest.approx(_oracle(np.asarray(x), np.asarray(y), np.arange(60), (1, 5, 10)))


def test_retrieval_compiles_once_per_shape_and_whatever_the_cut_offs(compilations):
    evaluation.retrieval(_rows(31, 3), _rows(31, 3, 9), chunk=8)
    with compilations() as compiled:
        for seed in range(3):
            evaluation.retrieval(_rows(31, 3, seed), _rows(31, 3), ks=(1 + seed,), chunk=8)
    assert not compiled


def test_the_score_matrix_never_exists():
    n, m, d, chunk = 2048, 4096, 8, 128
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, d), (m, d))]
    owner = jax.ShapeDtypeStruct((m,), jnp.int32)
    biases = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]
    compiled = evaluation.match_ranks.lower(*shapes, owner, *biases, chunk=chunk).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * m / 4


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (_rows(4, 3), _rows(4, 2), {}, r"y.* width 2"),
        (_rows(4, 3), _rows(5, 3), {}, r"y has 5 rows but .*x has 4; pass x_of_y"),
        (_rows(4, 3)[0], _rows(4, 3), {}, r"x:? has shape .* 2-D"),
        (np.ones((4, 3), int), _rows(4, 3), {}, r"x:? has shape .* dtype int"),
        (_rows(4, 3), np.full((4, 3), np.nan), {}, r"y.* NaN"),
        (np.full((4, 3), np.inf), _rows(4, 3), {}, r"x.* NaN or inf"),
        (_rows(4, 3), _rows(4, 3), {"ks": (0, 1)}, "ks: "),
        (_rows(4, 3), _rows(4, 3), {"chunk": 0}, r"chunk.* 0"),
    ],
)
def test_bad_retrieval_input(x, y, options, message):
    with pytest.raises(checks.InputError, match=message):
        evaluation.retrieval(x, y, **options)


@pytest.mark.parametrize("chunk", [9, 4096])
def test_zero_shot_equals_the_formula(chunk):
    x, prompts = _rows(70, 5), _rows(28, 5, 1).reshape(7, 4, 5) * np.arange(1, 5)[:, None]
    labels = np.random.default_rng(4).integers(0, 6, 70)  # class 6 never occurs
    classes = _unit(_unit(prompts.astype(np.float64)).mean(axis=1))
    right = (_unit(x) @ classes.T).argmax(axis=1) == labels
    got = evaluation.zero_shot(x, prompts, labels, chunk=chunk)
    per_class = [right[labels == c].mean() for c in range(6)]
    assert got == pytest.approx(
        {"zero_shot/top1": 100 * right.mean(), "zero_shot/mean_per_class": 100 * np.mean(per_class)}
    )


def test_each_prompt_weighs_the_same_whatever_its_length():
    x = np.array([[1.0, 0.2], [0.2, 1.0]])
    prompts = np.array([[[1.0, 0.0], [1.0, 0.1]], [[0.0, 1.0], [100.0, 100.0]]])
    assert evaluation.zero_shot(x, prompts, [0, 1])["zero_shot/top1"] == 100.0


@pytest.mark.parametrize(
    ("prompts", "labels", "message"),
    [
        (np.ones((2, 1, 4)), [0, 1], r"prompts.* width 4"),
        (np.ones((2, 3)), [0, 1], r"prompts:? has shape .* 3-D"),
        (np.ones((2, 1, 3)), [0, 2], r"labels.* from 0 to 2"),
        (np.full((2, 1, 3), np.nan), [0, 1], r"prompts.* NaN"),
    ],
)
def test_bad_zero_shot_input(prompts, labels, message):
    with pytest.raises(checks.InputError, match=message):
        evaluation.zero_shot(_rows(2, 3), prompts, labels)


# --- heads ---


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_embedding_in_blocks_is_embedding_at_once(monkeypatch, kind):
    head = heads.build_heads(D_X, D_Y, 4, kind=kind).x
    rows = np.random.default_rng(0).normal(size=(23, D_X)).astype(np.float32)
    direct = affinity.l2_normalize(head(rows))
    monkeypatch.setattr(evaluation, "EMBED_CHUNK", 5)
    blocks = evaluation.embed(head, rows)
    assert blocks.shape == (23, 4)
    np.testing.assert_allclose(blocks, direct, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(blocks, axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_embedding_of_any_dtype_from_host_or_device(dtype, tmp_path):
    head = heads.build_heads(D_X, D_Y, 4).x
    rows = np.random.default_rng(0).normal(size=(7, D_X)).astype(dtype)
    expected = evaluation.embed(head, rows.astype(np.float32))
    assert expected.dtype == np.float32
    for given in (rows, jnp.asarray(rows)):
        np.testing.assert_allclose(evaluation.embed(head, given), expected, atol=1e-6)


def test_embedding_through_an_affine_map():
    pairs_x, pairs_y = _rows(30, D_X), _rows(30, D_Y, 1)
    teacher = teachers.cca(pairs_x, pairs_y)
    np.testing.assert_allclose(
        evaluation.embed(teacher.map_x, pairs_x), teacher.x(pairs_x), atol=1e-6
    )


def test_zero_shot_of_heads():
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
