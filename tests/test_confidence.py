"""Tests of the confidence of results, on scores whose true probabilities are known."""

import numpy as np
import pytest
from scipy import optimize, special

import sotalign_jax
from sotalign_jax import calibration, checks, confidence, data, recipe, training


def drawn(n, m, *, slope=3.0, seed=0):
    """Draws scores whose right column has the odds exp(slope * score) against each wrong one."""
    right = np.arange(n)[:, None] % m == np.arange(m)
    # With equal variances the log-odds of two normal densities are linear in the score.
    return np.random.default_rng(seed).normal(size=(n, m)) + slope * right, right


@pytest.mark.parametrize("slope", [2.0, 4.0])
def test_fit_finds_the_slope_up_to_its_standard_error(slope):
    scores, right = drawn(400, 400, slope=slope)
    found = confidence.fit(scores, right).slope
    assert 0.8 * slope < found < slope


def test_fit_maximises_the_likelihood_that_scipy_maximises():
    scores, _ = drawn(60, 60, slope=2.0)
    n, m = scores.shape
    centre, scale = scores.mean(), scores.std()
    units = (scores - centre) / scale

    def loss(theta):
        logits, absent = theta[0] * units, theta[1] + np.log(m)
        total = np.logaddexp(special.logsumexp(logits, axis=1), absent)
        wrong = np.where(np.eye(n, dtype=bool), -np.inf, logits)
        without = np.logaddexp(special.logsumexp(wrong, axis=1), absent)
        answered = (total - np.diag(logits)).sum() + (total - logits.mean(axis=1)).mean()
        return answered + confidence.ABSENT * (without - theta[1]).sum()

    best = optimize.minimize(loss, np.ones(2), method="BFGS", options={"gtol": 1e-7}).x
    steps = 1e-3 * np.eye(2)
    hessian = [
        [
            (loss(best + i + j) - loss(best + i - j) - loss(best - i + j) + loss(best - i - j))
            / 4e-6
            for j in steps
        ]
        for i in steps
    ]
    slope = best[0] - np.sqrt(np.linalg.inv(hessian)[0, 0])
    fitted = confidence.fit(scores, np.eye(n, dtype=bool))
    np.testing.assert_allclose(fitted.slope * scale, slope, rtol=1e-3)


@pytest.mark.parametrize("size", [50, 400, 3000])
def test_strong_results_are_right_in_galleries_of_other_sizes(size):
    scores, right = drawn(200, 200, slope=5.0)
    fitted = confidence.fit(scores, right)
    scores, right = drawn(400, size, slope=5.0, seed=1)
    strong = fitted.probabilities(scores) >= confidence.STRONG
    assert strong.sum() >= 40
    assert right[strong].mean() >= 0.8


def test_few_held_out_pairs_give_low_probabilities():
    scores, right = drawn(200, 200, slope=5.0)
    many = confidence.fit(scores, right)
    few = confidence.fit(scores[:10, :10], right[:10, :10])
    fresh, _ = drawn(100, 1000, slope=5.0, seed=2)
    assert (
        few.probabilities(fresh).max(axis=1).mean() < many.probabilities(fresh).max(axis=1).mean()
    )
    assert (few.probabilities(fresh) < confidence.STRONG).all()


def test_fit_is_none_without_pairs_and_for_scores_that_tell_nothing():
    same = np.eye(50, dtype=bool)
    assert confidence.fit(np.zeros((0, 0)), np.zeros((0, 0), bool)) is None
    assert confidence.fit(*drawn(9, 9)) is None
    assert confidence.fit(np.zeros((50, 50)), same) is None
    assert confidence.fit(-drawn(50, 50)[0], same) is None
    assert confidence.fit(np.zeros((50, 1)), np.ones((50, 1), bool)) is None


def test_fit_does_not_depend_on_the_unit_and_the_origin_of_scores():
    scores, right = drawn(100, 100)
    one = confidence.fit(scores, right)
    other = confidence.fit(0.01 * scores - 7.0, right)
    np.testing.assert_allclose(
        one.probabilities(scores), other.probabilities(0.01 * scores - 7.0), rtol=1e-6
    )


def test_several_rows_of_a_query_count_as_one_answer():
    scores, right = drawn(100, 100)
    once = confidence.fit(scores, right)
    twice = confidence.fit(np.tile(scores, 2), np.tile(right, 2))
    # Each wrong row occurs twice as well, so only the number of rows differs.
    np.testing.assert_allclose(once.slope, twice.slope, rtol=0.1)


def test_probabilities_increase_with_scores_and_sum_to_less_than_one():
    fitted = confidence.Confidence(slope=4.0, floor=-1.0)
    scores = np.sort(np.random.default_rng(0).normal(size=(5, 30)))
    found = fitted.probabilities(scores)
    assert (np.diff(found) > 0).all()
    assert (found.sum(axis=1) < 1).all()
    rivals = np.concatenate([scores[0], scores[0]])
    assert (fitted.probabilities(rivals)[:30] < found[0]).all()


def test_probabilities_are_finite_for_extreme_scores():
    fitted = confidence.Confidence(slope=1e3, floor=0.0)
    np.testing.assert_array_equal(fitted.probabilities([1e6, -1e6]), [1.0, 0.0])


def test_of_gallery_fits_both_directions_and_both_kinds_of_scores():
    rng = np.random.default_rng(0)
    f = rng.normal(size=(40, 6))
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    owner = np.repeat(np.arange(40), 2)
    g = f[owner] + 0.1 * rng.normal(size=(80, 6))
    g /= np.linalg.norm(g, axis=1, keepdims=True)
    found = confidence.of_gallery(f, g, owner, calibration.calibrate(f, g))
    assert sorted(found) == ["x_to_y", "y_to_x"]
    assert sorted(found["x_to_y"]) == ["calibrated", "plain"]
    direct = confidence.fit(g @ f.T, owner[:, None] == np.arange(40))
    np.testing.assert_allclose(found["y_to_x"]["plain"], direct, rtol=1e-6)
    assert confidence.of_gallery(f[:4], g[:8], owner[:8]) == {}


def test_of_gallery_keeps_the_answers_of_a_large_gallery():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2 * confidence.QUERIES, 6))
    f = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    order = rng.permutation(len(f))
    found = confidence.of_gallery(f, f[order], order)
    direct = confidence.fit(f[::2] @ f[::2].T, np.eye(confidence.QUERIES, dtype=bool))
    np.testing.assert_allclose(found["x_to_y"]["plain"], direct, rtol=1e-6)


def test_words_of_plausible_sets_have_at_most_ten_results():
    assert confidence.words([]) == []
    assert confidence.words([0.04] * 9) == ["plausible"] * 9
    assert confidence.words([0.03] * 20) == ["weak"] * 20
    assert confidence.words([0.8, 0.1]) == ["strong", "weak"]


def test_reliability_counts_every_result_once():
    rng = np.random.default_rng(0)
    claimed = rng.uniform(size=20_000)
    bins = confidence.reliability(claimed, rng.uniform(size=claimed.size) < claimed)
    assert sum(one.size for one in bins) == claimed.size
    for one in bins:
        assert one.low <= one.claimed <= one.high
        assert abs(one.claimed - one.right) < 0.05


def test_reliability_includes_certain_results():
    assert confidence.reliability([0.0, 1.0], [False, True])[-1].right == 1.0


def test_fit_and_reliability_reject_other_shapes():
    with pytest.raises(checks.InputError, match="right"):
        confidence.fit(np.zeros((20, 20)), np.zeros((20, 19), bool))
    with pytest.raises(checks.InputError, match="right"):
        confidence.reliability([0.5, 0.5], [True])


@pytest.fixture(scope="module")
def aligned():
    """An aligner with a CCA of 300 pairs and 150 held-out ones, and fresh rows."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(900, 8))
    x = shared @ rng.normal(size=(8, 12)) + 0.3 * rng.normal(size=(900, 12))
    y = shared @ rng.normal(size=(8, 10)) + 0.3 * rng.normal(size=(900, 10))
    x, y = x.astype(np.float32), y.astype(np.float32)
    val = data.gallery(x[300:450], y[300:450])
    dataset = data.dataset((x[:300], y[:300]), val=val)
    chosen = recipe.Recipe(None, training.TrainConfig(), start="teacher")
    return recipe.train(chosen, recipe.prepare(chosen, dataset)), x[450:], y[450:]


@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_aligner_confidence_of_strong_results_is_at_most_their_share_of_right_ones(
    aligned, direction, calibrated
):
    made, *rows = aligned
    queries, gallery = rows if direction == "x_to_y" else rows[::-1]
    options = {"direction": direction, "calibrated": calibrated}
    found = made.search(queries, gallery, k=3, **options)
    probabilities = made.confidence(queries, gallery, found.indices, block_size=150, **options)
    assert (np.diff(probabilities, axis=1) <= 1e-12).all()
    right = found.indices == np.arange(len(queries))[:, None]
    likely = probabilities > 0.5
    assert likely.sum() >= 20
    assert right[likely].mean() >= probabilities[likely].mean() - 0.1


def test_aligner_confidence_is_stored(aligned, tmp_path):
    made, x, y = aligned
    made.save(tmp_path / "model")
    again = sotalign_jax.Aligner.load(tmp_path / "model")
    indices = made.search(x[:5], y, k=2).indices
    np.testing.assert_array_equal(
        again.confidence(x[:5], y, indices), made.confidence(x[:5], y, indices)
    )


@pytest.mark.parametrize(
    "indices", [np.zeros((5, 1)), np.zeros(5, int), np.full((5, 1), -1), np.full((5, 1), 10_000)]
)
def test_aligner_confidence_refuses_other_indices(aligned, indices):
    made, x, y = aligned
    with pytest.raises(checks.InputError, match=r"^indices"):
        made.confidence(x[:5], y, indices)


def test_aligner_without_confidence_says_so(aligned):
    made, x, y = aligned
    info = {key: value for key, value in made.info.items() if key != "confidence"}
    with pytest.raises(checks.InputError, match="confidence"):
        sotalign_jax.Aligner(made.heads, info).confidence(x, y, np.zeros((len(x), 1), int))


def test_words_call_results_weak_that_are_far_less_probable_than_the_best():
    words = confidence.words([0.2, 0.1, 0.02, 0.02, 0.01])
    assert words == ["plausible", "plausible", "weak", "weak", "weak"]
