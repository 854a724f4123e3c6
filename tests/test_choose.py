"""Tests of the cross-validation of teachers against explicit loops."""

import numpy as np
import pytest

from sotalign_jax import teachers
from sotalign_jax.cca import choose, moments


def views(n, *, seed=0):
    rng, mix = np.random.default_rng(seed), np.random.default_rng(99)
    z = rng.normal(size=(n, 4))
    return [z @ mix.normal(size=(4, d)) + 0.5 * rng.normal(size=(n, d)) for d in (9, 7)]


@pytest.mark.parametrize("n", [6, 31, 400, 5000])
def test_folds_separate_fitted_and_held_out_pairs(n):
    made = choose.folds(np.arange(n))
    for fold in made:
        assert not set(fold.fit) & set(fold.held)
        assert len(fold.fit) <= 1000 and 2 <= len(fold.held) <= 500
    if n <= 1500:  # every pair is scored equally often
        assert len(set(np.bincount(np.concatenate([fold.held for fold in made])))) == 1


def test_order_depends_on_the_content_of_the_pairs():
    A, B = views(50)
    turned = np.random.default_rng(1).permutation(50)
    first, second = choose.order(A, B), choose.order(1e3 * A[turned], B[turned])
    np.testing.assert_array_equal(A[first], A[turned][second])
    assert (choose.order(A, B, seed=1) != first).any()


def test_reciprocal_ranks_match_a_loop_over_pairs():
    rng = np.random.default_rng(0)
    f, g = rng.normal(size=(20, 4)), rng.normal(size=(20, 4))
    cosines = moments.unit(f) @ moments.unit(g).T
    for i, score in enumerate(choose.reciprocal_ranks(f, g)):
        ranks = [sorted(-row).index(-row[i]) + 1 for row in (cosines[i], cosines[:, i])]
        assert score == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_reciprocal_ranks_of_ties_use_the_mean_rank():
    np.testing.assert_allclose(choose.reciprocal_ranks(np.ones((9, 3)), np.ones((9, 3))), 0.2)


@pytest.mark.parametrize("gamma", [None, 0.5])
def test_search_scores_match_a_fit_on_each_fold(gamma):
    A, B = views(60)
    options = choose.Options(0.3, 0.1, 1.5, gamma, gamma)
    search = choose.Search(A, B)
    expected = []
    for fold in search._folds:
        sides = []
        for rows, ridge in ((A, 0.3), (B, 0.1)):
            mean = moments.unit(rows[fold.fit]).mean(axis=0)
            z, new = (moments.unit(rows[part]) - mean for part in fold)
            if gamma is not None:
                z, new = moments.unit(z), moments.unit(new)
                z, new = (np.exp(-gamma * np.square(r[:, None] - z).sum(-1)) for r in (z, new))
                root = np.linalg.pinv(z - z.mean(axis=0) - z.mean(axis=1)[:, None] + z.mean())
                values, vectors = np.linalg.eigh(root)
                kept = values > 1e-6
                z, new = (r @ (vectors[:, kept] * np.sqrt(values[kept])) for r in (z, new))
            new, z = new - z.mean(axis=0), z - z.mean(axis=0)
            covariance = z.T @ z / (len(z) - 1)
            covariance += ridge * np.trace(covariance) / rows.shape[1] * np.eye(len(covariance))
            values, vectors = np.linalg.eigh(covariance)
            root = (vectors / np.sqrt(values)) @ vectors.T
            sides.append((z @ root, new @ root))
        (x, new_x), (y, new_y) = sides
        U, rho, Vt = np.linalg.svd(x.T @ y / (len(x) - 1), full_matrices=False)
        expected.append(choose.reciprocal_ranks(new_x @ U * rho**1.5, new_y @ Vt.T * rho**1.5))
    np.testing.assert_allclose(search.scores(options), np.concatenate(expected), atol=1e-9)


def test_search_for_all_pairs_shrinks_ridges():
    search = choose.Search(*views(4000))
    scaled = search.for_all_pairs(choose.Options(4.0, 8.0, 1.0))
    assert scaled[:3] == pytest.approx((1.0, 2.0, 1.0))


def test_choose_is_finite_with_equal_rows_in_a_fold():
    A, B = views(8)
    A[:6] = A[0]
    assert np.isfinite(choose.choose_each(A, B)[-1][:3]).all()


def test_folds_hold_out_whole_groups_and_score_one_pair_of_each():
    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(30, 4))
    x, y = np.repeat(pictures, 3, axis=0), rng.normal(size=(90, 5))
    group = choose.groups(x, y)
    assert len(set(group.tolist())) == 30
    for fit, held in choose.folds(choose.order(x, y), group):
        assert not set(group[fit]) & set(group[held])
        assert len(set(group[held])) == len(held)
    # One caption of most pictures cannot be held out as a whole.
    same = np.where(np.arange(90)[:, None] < 60, y[:1], y)
    assert len(set(choose.groups(rng.normal(size=(90, 4)), same).tolist())) == 90


@pytest.mark.parametrize("share", [0.72, 0.9])
def test_best_cca_survives_a_caption_of_most_pictures(share):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(80, 3))
    x, y = z @ rng.normal(size=(3, 6)), z @ rng.normal(size=(3, 5))
    y[: int(share * 80)] = y[0]
    assert np.isfinite(teachers.best_cca(x, y).x(x)).all()


def test_search_clearly_better_compares_the_gain_with_one_standard_error():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, 3))
    A, B = (z @ rng.normal(size=(3, 8)) + rng.normal(size=(50, 8)) for _ in range(2))
    search = choose.Search(A, B)
    held = np.concatenate([f.held for f in choose.folds(choose.order(A, B), np.arange(50))])
    simple, errors = choose.Options(100.0, 1.0, 0.5), []
    for ridge in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
        other = simple._replace(ridge_x=ridge)
        gain = search.scores(other) - search.scores(simple)
        of_pair = np.array([gain[held == row].mean() for row in range(50)])
        errors.append(of_pair.mean() / (of_pair.std() / np.sqrt(50)))
        assert search.clearly_better(other, simple) == (errors[-1] > 1), ridge
    # The cases tell one standard error from none and from two.
    assert any(0 < error < 1 for error in errors) and any(1 < error < 2 for error in errors)
