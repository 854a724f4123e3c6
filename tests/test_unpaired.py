"""Test of the command that measures recall against the number of unpaired rows."""

import re

import numpy as np
import pytest
import small_runs

from experiments import photos, recipes, unpaired
from sotalign_jax import data


@pytest.fixture
def small(monkeypatch):
    """Replaces a data set of the repository by 60 pairs with informative pools of 80 rows."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(300, 4)).astype(np.float32)
    x, y = z @ rng.normal(size=(4, 9)), z @ rng.normal(size=(4, 7))
    galleries = {
        "val": data.gallery(x[220:260], y[220:260]),
        "test": data.gallery(x[260:], y[260:]),
    }
    rows = data.Dataset(x[:60], y[:60], x[60:140], y[140:220], **galleries)
    monkeypatch.setattr(recipes, "load", lambda *arguments: rows)
    monkeypatch.setattr(photos, "fingerprints", lambda name: {"toy": "0"})
    monkeypatch.setattr(unpaired, "ROWS", (0, "all"))


def test_unpaired_prints_a_row_per_size_and_draws_it(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--names=code", "--paired=60", "--times=1", "--figure=curve.png"]
    out, error = small_runs.start(unpaired, options, capsys)
    assert error is None
    assert re.findall(r"^\| *(\d+) *\|", out, re.MULTILINE) == ["0", "80"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    kept = (tmp_path / "runs" / "unpaired.jsonl").read_bytes()
    assert small_runs.start(unpaired, options, capsys) == (out, None)
    assert (tmp_path / "runs" / "unpaired.jsonl").read_bytes() == kept
