"""Tests of the head of a report, of differences over seeds, and of scores over a setting."""

import doctest
import re

import numpy as np
import pytest
import scipy.stats

from experiments import report, spec, summary


def test_summary_doctests_pass():
    assert doctest.testmod(summary).failed == 0


@pytest.mark.parametrize("calibrated", [False, True])
def test_head_shows_the_scores_that_the_model_uses(tmp_path, calibrated):
    one = {f"test/mean/R@{k}": 10.0 + k for k in (1, 5, 10)}
    one |= {f"test/calibrated/mean/R@{k}": 60.0 + k for k in (1, 5, 10)}
    one |= {"test/chance/mean/R@10": 0.26, "test/rows_x": 3931, "test/rows_y": 19657}
    shown = summary.head({**one, "calibrated": calibrated}, tmp_path, ("images", "captions"))
    assert re.findall(r"<b>(\d+) %</b>", shown) == (
        ["61", "65", "70"] if calibrated else ["11", "15", "20"]
    )
    told = summary.verdict({**one, "calibrated": calibrated}, ("images", "captions"))
    assert (
        ("70 %" if calibrated else "20 %") in told and "0.26 %" in told and "3,931 images" in told
    )
    assert summary.head({}, tmp_path, ("images", "captions")) == ""


def test_differences_have_the_interval_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    scores = {label: rng.normal(50, 3, size=5) for label in ("a", "b")}
    results = {
        label: {seed: {"s": float(value)} for seed, value in enumerate(own)}
        for label, own in scores.items()
    }
    results["b"][9] = {"s": 0.0}  # a seed that only one of them has
    results["lone"] = {0: {"s": 1.0}}
    ((name, seeds, cell),) = summary.differences(results, "a", {"R@1": "s"})
    assert (name, seeds) == ("a - b", 5)
    wanted = scipy.stats.ttest_rel(scores["a"], scores["b"]).confidence_interval(0.95)
    mean = np.mean(scores["a"] - scores["b"])
    found = [float(number) for number in re.findall(r"[+-][\d.]+", cell)]
    assert found == pytest.approx([mean, *wanted], abs=0.051)


def test_swept_finds_settings_of_otherwise_equal_runs():
    listed = {
        f"{method}-{pairs}pairs": {"method": method, "data.n_pairs": pairs}
        for method in ("cca", "sail")
        for pairs in (100, 400)
    }
    runs = spec.expand(spec.Spec().change({"runs": listed, "seeds": (0, 1)}))
    scores = {name: float(number) for number, name in enumerate(runs)}
    found = summary.swept(runs, scores)
    assert found == {
        "data.n_pairs": {
            "cca": [(100.0, 0.0), (100.0, 1.0), (400.0, 2.0), (400.0, 3.0)],
            "sail": [(100.0, 4.0), (100.0, 5.0), (400.0, 6.0), (400.0, 7.0)],
        }
    }
    results = {name: {"test/mean/R@10": score} for name, score in scores.items()}
    (plot,) = report.sweep_plots(runs, results).values()
    assert plot.startswith(b"\x89PNG")
    paired = report.paired_table(runs, results, "sail-400pairs")
    assert paired.headers == ["methods", "seeds", "R@10"] and len(paired.rows) == 3
    single = {name: run for name, run in runs.items() if run.seed == 0}
    assert summary.swept({"one": next(iter(single.values()))}, {"one": 1.0}) == {}
