"""Tests of galleries in FAISS files against the exact search of the aligner."""

import csv
import json

import numpy as np
import pytest

import sotalign_jax as sota
from benchmarks import index as benchmark
from sotalign_jax import checks, faiss_index, heads

D_X, D_Y = 12, 10


def rows(seed, n, width):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


@pytest.fixture(scope="module")
def aligner():
    made = sota.Aligner(heads.build_heads(D_X, D_Y, 8), {})
    return made.calibrated_by(rows(3, 50, D_X), rows(4, 60, D_Y))


@pytest.mark.parametrize("kind", faiss_index.KINDS)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
def test_index_returns_the_results_of_search(aligner, kind, calibrated, direction):
    widths = {"x_to_y": (D_X, D_Y), "y_to_x": (D_Y, D_X)}[direction]
    queries, gallery = rows(0, 7, widths[0]), rows(1, 300, widths[1])
    options = {"direction": direction, "calibrated": calibrated}
    index = faiss_index.build(aligner, gallery, kind=kind, clusters=4, **options)
    found = index.search(queries, 5, probed=16)
    exact = aligner.search(queries, gallery, 5, **options)
    if kind == "ivf":  # its rows are stored in half precision
        np.testing.assert_allclose(found.scores, exact.scores, atol=2e-3)
    else:
        np.testing.assert_allclose(found.scores, exact.scores, atol=1e-5)
        np.testing.assert_array_equal(found.indices, exact.indices)


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_changed_index_finds_what_a_new_one_finds(aligner, kind, tmp_path):
    gallery, ids = rows(1, 200, D_Y), np.arange(200) * 3 + 5
    index = faiss_index.build(aligner, gallery[:150], ids[:150], kind=kind, clusters=2)
    assert index.remove(ids[:20]) == 20
    index.add(gallery[150:], ids[150:], block_size=7)
    index.save(tmp_path / "gallery.faiss")
    loaded = faiss_index.load(tmp_path / "gallery.faiss", aligner)
    assert len(loaded) == 180
    assert sorted(loaded.ids()) == sorted(ids[20:])
    exact = aligner.search(rows(0, 9, D_X), gallery[20:], 3)
    found = loaded.search(rows(0, 9, D_X), 3, probed=2)
    np.testing.assert_allclose(found.scores, exact.scores, atol=2e-3)
    assert np.mean(found.indices == ids[20:][exact.indices]) > 0.9


def test_new_rows_get_the_ids_after_the_largest(aligner):
    index = faiss_index.build(aligner, rows(1, 4, D_Y), [1, 9, 4, 2])
    index.add(rows(2, 2, D_Y))
    assert sorted(index.ids()) == [1, 2, 4, 9, 10, 11]


def test_search_of_an_empty_index_says_so(aligner):
    index = faiss_index.build(aligner, rows(1, 2, D_Y))
    assert index.remove([0, 1]) == 2
    with pytest.raises(checks.InputError, match=r"^index"):
        index.search(rows(0, 1, D_X))


def test_index_on_disk_is_read_only(aligner, tmp_path):
    path = tmp_path / "gallery.faiss"
    faiss_index.build(aligner, rows(1, 200, D_Y), kind="ivf", clusters=2).save(path)
    index = faiss_index.load(path, aligner)
    with pytest.raises(checks.InputError, match=r"^mapped"):
        index.remove([1])
    with pytest.raises(checks.InputError, match=r"^mapped"):
        index.add(rows(2, 1, D_Y))
    changed = faiss_index.load(path, aligner, mapped=False)
    assert changed.remove([1]) == 1


def test_load_refuses_another_aligner(aligner, tmp_path):
    path = tmp_path / "gallery.faiss"
    faiss_index.build(aligner, rows(1, 20, D_Y)).save(path)
    other = sota.Aligner(heads.build_heads(D_X, D_Y, 8, seed=1), {})
    with pytest.raises(checks.InputError, match=r"^index"):
        faiss_index.load(path, other)


@pytest.mark.parametrize("note", ["null", "[]", "{}", "7", "{"])
def test_load_refuses_a_damaged_note(aligner, tmp_path, note):
    path = tmp_path / "gallery.faiss"
    faiss_index.build(aligner, rows(1, 20, D_Y)).save(path)
    path.with_name("gallery.faiss.json").write_text(note)
    with pytest.raises(checks.InputError, match=r"^index"):
        faiss_index.load(path, aligner)


def test_load_refuses_a_damaged_file(aligner, tmp_path):
    path = tmp_path / "gallery.faiss"
    faiss_index.build(aligner, rows(1, 20, D_Y)).save(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(checks.InputError, match=r"^index"):
        faiss_index.load(path, aligner)
    assert json.loads(path.with_name("gallery.faiss.json").read_text())["kind"] == "flat"


@pytest.mark.parametrize("ids", [[1, 1, 2], [1, 2], [0.5, 1.5, 2.5]])
def test_build_refuses_wrong_ids(aligner, ids):
    with pytest.raises(checks.InputError, match=r"^ids"):
        faiss_index.build(aligner, rows(1, 3, D_Y), ids)


def test_add_refuses_an_id_of_the_index(aligner):
    index = faiss_index.build(aligner, rows(1, 3, D_Y))
    with pytest.raises(checks.InputError, match=r"^ids"):
        index.add(rows(2, 1, D_Y), [2])


def test_more_clusters_find_more_neighbours(tmp_path):
    benchmark.main(["--quick", "--out", str(tmp_path)])
    with (tmp_path / "index.csv").open() as file:
        found = [float(row["found"]) for row in csv.DictReader(file)]
    assert found[0] == 1.0  # the exact index comes first
    assert found[1] < found[2] < found[3]
