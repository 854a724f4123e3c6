"""Tests of gallery sizes, chance and the 1,000-item protocol."""

import doctest

import numpy as np
import pytest

from experiments import protocol
from sotalign_jax import aligner, data, evaluation, heads


def test_protocol_doctests_pass():
    assert doctest.testmod(protocol).failed == 0


def test_chance_matches_mean_of_random_rankings():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), rng.integers(1, 6, size=12))
    drawn = []
    for _ in range(300):
        scores = rng.random((12, len(owner)))
        own = np.where(owner == np.arange(12)[:, None], scores, -1).max(axis=1, keepdims=True)
        rank_x = (scores > own).sum(axis=1)
        rank_y = (scores > scores[owner, np.arange(len(owner))]).sum(axis=0)
        drawn.append([50 * ((rank_x < k).mean() + (rank_y < k).mean()) for k in (1, 5, 10)])
    expected = protocol.chance(12, owner)
    assert np.mean(drawn, axis=0) == pytest.approx(list(expected.values()), abs=1.5)


def test_chance_is_100_if_all_keys_are_retrieved():
    assert protocol.chance(3, np.arange(3))["chance/mean/R@10"] == 100.0


@pytest.fixture
def model():
    return aligner.Aligner(heads.build_heads(6, 5, 4, seed=0), {})


@pytest.fixture
def gallery():
    """Returns 2,300 rows of x with one or two rows of y each, in random order."""
    rng = np.random.default_rng(0)
    owner = rng.permutation(np.concatenate([np.arange(2300), np.arange(0, 2300, 2)]))
    x = rng.normal(size=(2300, 6)).astype(np.float32)
    y = x[owner, :5] + rng.normal(size=(len(owner), 5))
    return data.gallery(x, y.astype(np.float32), owner)


def test_scores_1k_are_means_over_disjoint_galleries(model, gallery):
    model = model.calibrated_by(gallery.x[:100], gallery.y[:100])
    scores = protocol.scores(protocol.embed(model, gallery))
    assert scores["rows_x"] == 2300 and scores["rows_y"] == 3450 and scores["1k/folds"] == 2
    seen, found = [], []
    for rows_x, rows_y, owner in protocol.folds(2300, gallery.x_of_y):
        seen += [*rows_x]
        assert np.array_equal(rows_x[owner], gallery.x_of_y[rows_y])
        assert len(rows_y) == np.isin(gallery.x_of_y, rows_x).sum()
        part = data.gallery(gallery.x[rows_x], gallery.y[rows_y], owner)
        found.append(evaluation.evaluate(model.heads.x, model.heads.y, part, model.calibration))
    assert len(set(seen)) == len(seen) == 2000
    for name in found[0]:
        mean = np.mean([one[name] for one in found])
        assert scores[f"1k/{name}"] == pytest.approx(mean, abs=0.1), (
            name
        )  # rounding may change ties


def test_scores_of_a_small_gallery_have_no_1k_protocol(model, gallery):
    small = data.gallery(gallery.x[:1000], np.tile(gallery.y[:1], (1000, 1)))
    scores = protocol.scores(protocol.embed(model, small))
    assert not any(key.startswith("1k") for key in scores)
    assert scores["chance/mean/R@1"] == pytest.approx(0.1)


def test_at_chance_is_true_only_for_scores_at_known_chance():
    perfect = {f"val/mean/R@{k}": 100.0 for k in (1, 5, 10)}
    chance = {f"val/{key}": value for key, value in protocol.chance(8, np.arange(8)).items()}
    assert not protocol.at_chance(perfect)
    assert not protocol.at_chance({"val/rows_x": 8, **perfect, **chance})
    assert protocol.at_chance(
        {
            "val/rows_x": 8,
            **chance,
            "val/mean/R@1": 25.0,
            "val/mean/R@5": 75.0,
            "val/mean/R@10": 100.0,
        }
    )
