import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sotalign_jax import checks, evaluation


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


def test_retrieval_compiles_once_per_shape_and_whatever_the_cut_offs():
    before = evaluation._ranks._cache_size()
    for seed in range(3):
        evaluation.retrieval(_rows(31, 3, seed), _rows(31, 3, seed + 9), ks=(1 + seed,), chunk=8)
    assert evaluation._ranks._cache_size() == before + 1


def test_the_score_matrix_never_exists():
    n, m, d, chunk = 2048, 4096, 8, 128
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, d), (m, d))]
    owner = jax.ShapeDtypeStruct((m,), jnp.int32)
    compiled = evaluation._ranks.lower(*shapes, owner, chunk=chunk).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * m / 4


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (_rows(4, 3), _rows(4, 2), {}, "y: features have width 2 but x has 3"),
        (_rows(4, 3), _rows(5, 3), {}, "x has 4 rows but y has 5; pass x_of_y"),
        (_rows(4, 3)[0], _rows(4, 3), {}, "x: has shape .* 2-D"),
        (np.ones((4, 3), int), _rows(4, 3), {}, "x: has shape .* dtype int"),
        (_rows(4, 3), np.full((4, 3), np.nan), {}, "y: features contain NaN"),
        (np.full((4, 3), np.inf), _rows(4, 3), {}, "x: features contain NaN or inf"),
        (_rows(4, 3), _rows(4, 3), {"ks": (0, 1)}, "ks: "),
        (_rows(4, 3), _rows(4, 3), {"chunk": 0}, "chunk: is 0"),
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
        (np.ones((2, 1, 4)), [0, 1], "prompts: features have width 4 but x has 3"),
        (np.ones((2, 3)), [0, 1], "prompts: has shape .* 3-D"),
        (np.ones((2, 1, 3)), [0, 2], "labels: values run from 0 to 2"),
        (np.full((2, 1, 3), np.nan), [0, 1], "prompts: features contain NaN"),
    ],
)
def test_bad_zero_shot_input(prompts, labels, message):
    with pytest.raises(checks.InputError, match=message):
        evaluation.zero_shot(_rows(2, 3), prompts, labels)
