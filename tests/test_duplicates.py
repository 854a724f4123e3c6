"""Tests of rows of one direction, and of the groups that they connect."""

import numpy as np
import pytest

from sotalign_jax import checks, duplicates
from sotalign_jax.cca import choose


def test_first_duplicate_reads_memory_mapped_rows_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 3)
    table = (
        np.random.default_rng(0).normal(size=(5, 4))[[0, 1, 0, 2, 1, 3, 4, 4]].astype(np.float16)
    )
    np.save(tmp_path / "x.npy", table)
    assert duplicates.first_duplicate(np.load(tmp_path / "x.npy", mmap_mode="r")).tolist() == [
        *(0, 1, 0, 3, 1, 5, 6, 6)
    ]


def test_group_duplicates_connects_through_pictures_and_captions():
    first_x, first_y = np.array([0, 0, 2, 3, 4, 5]), np.array([0, 1, 1, 3, 4, 4])
    groups = duplicates.group_duplicates(first_x, first_y, largest=3)
    assert [len(set(groups[list(rows)])) for rows in ((0, 1, 2), (4, 5), (0, 3, 4))] == [1, 1, 3]
    divided = duplicates.group_duplicates(
        first_x, first_y, largest=2
    )  # larger groups are split at common captions
    assert divided[0] == divided[1] != divided[2] and divided[4] == divided[5]
    assert len(set(duplicates.group_duplicates(np.zeros(4, int), np.zeros(4, int), largest=2))) == 4


@pytest.mark.parametrize("width", [2, 20, 400])
def test_first_duplicate_ignores_lengths_and_rounding(width):
    rng = np.random.default_rng(width)
    table = rng.normal(size=(300, width))
    copies = np.repeat(np.arange(300), 5)
    noise = 1e-6 * rng.normal(size=(1500, width)) / np.sqrt(width)
    noise *= np.linalg.norm(table[copies], axis=1, keepdims=True)
    scaled = table[copies] * rng.uniform(0.5, 2.0, size=(1500, 1))
    for copied in (table[copies], scaled, table[copies] + noise, scaled.astype(np.float32)):
        found = duplicates.first_duplicate(copied)
        np.testing.assert_array_equal(found, 5 * copies)


def test_groups_hold_out_captions_of_scaled_and_noisy_pictures_together():
    rng = np.random.default_rng(0)
    pictures = np.repeat(rng.normal(size=(40, 30)), 5, axis=0)
    captions = np.repeat(rng.normal(size=(40, 20)), 5, axis=0) + 0.05 * rng.normal(size=(200, 20))
    scaled = pictures * rng.uniform(0.5, 2.0, size=(200, 1))
    noisy = pictures + 1e-6 * rng.normal(size=pictures.shape)
    options = []
    for copies in (pictures, scaled, noisy):
        assert len(set(choose.groups(copies, captions).tolist())) == 40
        search = choose.Search(copies, captions)
        options.append(search.linear())
        # Pictures and captions are independent, so nothing can be learned.
        assert search.scores(options[-1]).mean() < 0.4
    assert options[0] == options[1] == options[2]


def test_first_duplicate_distinguishes_rows_of_a_narrow_cone():
    rows = 1.0 + 1e-4 * np.random.default_rng(0).normal(size=(2000, 384))
    np.testing.assert_array_equal(duplicates.first_duplicate(rows), np.arange(2000))
