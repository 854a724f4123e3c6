"""Tests of the recipes command: tables, stored results and published results."""

import re

import numpy as np
import pytest
import small_runs

from experiments import recipes, store

PUBLISHED = small_runs.ROOT / "docs" / "results" / "recipes.jsonl"


@pytest.fixture
def launch(tmp_path, capsys, monkeypatch):
    """Returns a function that runs the command on a small file of 160 rows."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(160, 3))
    x, y = z @ rng.normal(size=(3, 6)), np.tanh(z) @ rng.normal(size=(3, 5))
    split = np.repeat(["train", "val", "test"], [120, 20, 20])
    label = np.where(np.arange(160) % 2, np.arange(160) % 3, -1)
    arrays = {"image": x, "text": y, "split": split, "label": label, "prompts": y[:3, None]}
    np.savez(tmp_path / "toy.npz", **arrays)
    monkeypatch.chdir(tmp_path)

    def start(*options):
        given = ["--sets=toy.npz", "--pairs=60", "--repeats=2", *options]
        return small_runs.start(recipes, given, capsys)

    return start


def test_recipes_print_a_table_per_score_and_resume(launch, tmp_path, monkeypatch):
    out, error = launch("--recipes=CCA,tuned CCA,align")
    assert error is None
    assert re.findall(r"^toy, disjoint pools: (.*)$", out, re.MULTILINE) == [
        *(f"{score} in percent" for score in (*recipes.SCORES, "zero-shot")),
        "seconds of one core",
    ]
    assert len(re.findall(r"^\| tuned CCA +\| +.*\d ± \d", out, re.MULTILINE)) == 6
    kept = (tmp_path / "runs" / "recipes.jsonl").read_bytes()
    assert kept.count(b"\n") == 6  # three recipes, two seeds
    monkeypatch.setattr(recipes, "fit", None)  # stored results must not be recomputed
    assert launch("--recipes=CCA,tuned CCA,align") == (out, None)
    shown, error = launch("--show")
    assert error is None and "| tuned CCA" in shown and "SAIL" not in shown


def test_recipes_show_excludes_results_of_other_options(launch, tmp_path, monkeypatch):
    assert launch("--recipes=CCA")[1] is None
    monkeypatch.setitem(recipes.RECIPES, "CCA", {**recipes.RECIPES["CCA"], "teacher": "other"})
    assert launch("--recipes=CCA", "--show") == ("", None)


@pytest.mark.parametrize("option", ["--show", "--noshow"])
def test_recipes_name_a_damaged_line(launch, tmp_path, option):
    (tmp_path / "kept.jsonl").write_text("damaged\n")
    _, error = launch("--store=kept.jsonl", option, "--recipes=CCA")
    assert small_runs.is_one_line(error) and "kept.jsonl: line 1 is damaged" in error


def test_published_recipes_match_the_code():
    kept = store.Store(PUBLISHED).entries().values()
    for spec, *_ in kept:
        name, pairs, pool, seed, label = (spec[key] for key in recipes.NAMES)
        pool = "disjoint" if pool == "none" else pool
        if name == "pictures":  # its file is not in the repository
            assert spec["options"] == recipes.RECIPES[label]
        else:
            assert spec == recipes.describe(name, pairs, pool, seed, label)
