"""Tests of the scikit-learn estimator: its own checks, pipelines and searches."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import sotalign_jax as sota
from sotalign_jax import checks
from sotalign_jax.estimator import SotalignEstimator


@pytest.fixture(scope="module")
def views():
    """Returns 90 matching rows: two noisy linear views of one latent variable."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(90, 4))
    x, y = z @ rng.normal(size=(4, 9)), z @ rng.normal(size=(4, 7))
    return x + 0.1 * rng.normal(size=x.shape), y + 0.1 * rng.normal(size=y.shape)


QUICK = {"steps": 2, "dim": 4, "teacher": "procrustes", "random_state": 0}


def circle(y):
    """Returns labels as points on a circle, or what is not labels unchanged."""
    angles = None if y is None else np.asarray(y)
    if angles is None or angles.dtype.kind not in "biufO":
        return y
    angles = angles.astype(float).reshape(len(angles), -1)[:, :1]
    return np.hstack([np.cos(angles), np.sin(angles)])


class OfLabels(SotalignEstimator):
    """Takes the labels of scikit-learn's checks, which are no embeddings, as points on a circle."""

    def fit(self, X, y=None, **options):
        return super().fit(X, circle(y), **options)

    def score(self, X, y):
        return super().score(X, circle(y))


UNSUITABLE = {"check_estimators_dtypes": "its integers have a row of zeros, which has no direction"}
"""Checks that do not apply, with the reason."""


@pytest.mark.slow
@pytest.mark.optional  # the check of other array libraries is skipped without SCIPY_ARRAY_API
@parametrize_with_checks([OfLabels(**QUICK)], expected_failed_checks=lambda _: UNSUITABLE)
def test_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_fit_transform_and_score_match_align(views):
    x, y = views
    made = SotalignEstimator(steps=3, random_state=4)
    assert made.fit(x[:50], y[:50], unpaired_X=x[50:70], unpaired_y=y[50:70]) is made
    aligner = sota.align((x[:50], y[:50]), x[50:70], y[50:70], steps=3, seed=4, progress=False)
    f, g = made.transform(x[70:], y[70:])
    np.testing.assert_allclose(f, aligner.embed_x(x[70:]), atol=1e-6)
    np.testing.assert_allclose(g, aligner.embed_y(y[70:]), atol=1e-6)
    np.testing.assert_array_equal(made.transform(x[70:]), f)
    recalls = aligner.evaluate(x[70:], y[70:]).recalls
    kind = "calibrated/" if aligner.calibrated else ""
    wanted = np.mean([recalls[f"{kind}mean/R@{k}"].value for k in (1, 5, 10)]) / 100
    assert made.score(x[70:], y[70:]) == pytest.approx(wanted)
    assert len(made.get_feature_names_out()) == f.shape[1]
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.transform(x[70:]), f)
    assert clone(made).get_params() == made.get_params()


def test_estimator_in_a_pipeline_with_a_grid_search(views):
    x, y = views
    pipeline = Pipeline([("pca", PCA(6, random_state=0)), ("align", SotalignEstimator(**QUICK))])
    search = GridSearchCV(pipeline, {"align__teacher": ["procrustes", "cca"]}, cv=3)
    search.fit(x, y)
    assert search.best_params_["align__teacher"] in ("procrustes", "cca")
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all() and search.best_score_ == max(scores)
    chance = np.mean([1, 5, 10]) / 30
    assert search.best_score_ > 2 * chance
    assert search.transform(x[:3]).shape[0] == 3


def test_fit_rejects_targets(views):
    x, _ = views
    with pytest.raises(checks.InputError, match=r"^y\b"):
        SotalignEstimator(**QUICK).fit(x, np.arange(90))
