"""Tests of the retrieved texts of test rows, in the terminal and on the page."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from experiments import report, retrieved, spec
from sotalign_jax import aligner, data, heads
from sotalign_jax.search import extraction


@pytest.fixture
def gallery():
    """Returns a gallery of nine pictures with two captions each."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, d)).astype(np.float32) for n, d in ((9, 5), (18, 4)))
    return data.gallery(x, y, np.repeat(np.arange(9), 2))


@pytest.fixture
def labels(tmp_path):
    PIL.Image.new("RGB", (30, 20), "red").save(tmp_path / "0.png")
    pictures = [tmp_path / f"{i}.png" for i in range(9)]  # only the first file exists
    texts, links = [f"text <{i}>" for i in range(18)], [path.as_uri() for path in pictures]
    names = [path.name for path in pictures]
    return retrieved.Labels(("images", "captions"), "shown", names, texts, links, pictures)


@pytest.fixture
def model(gallery):
    untrained = aligner.Aligner(heads.build_heads(5, 4, 3, seed=0), {})
    return untrained.calibrated_by(gallery.x, gallery.y)


@pytest.mark.parametrize("calibrated", [False, True])
def test_find_matches_sorted_scores(model, gallery, labels, calibrated):
    model = dataclasses.replace(model, calibrated=calibrated)
    found = retrieved.find(model, gallery, labels)
    assert sorted(one.query[1] for one in found) == list(labels.x)
    scores = model.similarity(gallery.x, gallery.y, calibrated=calibrated)
    for one in found:
        row = labels.x.index(one.query[1])
        order = np.argsort(-scores[row])
        assert [text for text, *_ in one.nearest] == [f"text <{i}>" for i in order[:3]]
        assert [right for *_, right in one.nearest] == [i // 2 == row for i in order[:3]]
        steps = np.diff([score for _, score, _ in one.nearest])
        assert steps == pytest.approx(np.diff(scores[row][order[:3]]), abs=1e-5)
        assert one.rank == 1 + min(np.flatnonzero(order // 2 == row)) and one.total == 18
        assert one.query[0] == f"text <{2 * row}>" and one.picture == labels.pictures[row]


def test_summary_and_cards_show_rank_and_scores(model, gallery, labels):
    found = retrieved.find(model, gallery, labels)
    near = sum(one.rank <= 10 for one in found)
    summary = retrieved.summary(found, labels)
    assert summary.startswith(f"For {near} of 9 test images one of their own captions is among")
    first, *nearest = found[0].text("heard").splitlines()
    own, name = found[0].query
    assert first.startswith(f"heard: {own} ({name}; ") and f"rank {found[0].rank} of 18" in first
    assert len(nearest) == 3 and all(line.startswith("found: ") for line in nearest)
    page = report.found_cards(found, each=9)
    assert f"among the first 10: {near} of 9" in page and f"further down: {9 - near} of 9" in page
    assert page.count("<figure") == 9 and page.count("<img alt='text &lt;0&gt;'") == 1
    assert page.count("<a href='file:///") == 2 * 9  # links of names and of pictures
    assert f"<i>{found[0].nearest[0][1]:.2f}</i>" in page and f"rank {found[0].rank} of 18" in page
    assert "text &lt;0&gt;" in page and "text <" not in page


def test_find_counts_captions_of_equal_words_as_right(model, gallery, labels):
    said = [f"text {i // 6}" for i in range(18)]  # three pictures share one text
    for one in retrieved.find(model, gallery, labels._replace(y=said)):
        for text, _, right in one.nearest:
            assert right == (text == one.query[0])


def test_labels_of_reads_the_labels_written_by_pair(tmp_path):
    names = ("x", "y", "test_x", "test_y")
    files = {name: str(tmp_path / f"{name}.npy") for name in names}
    run = spec.Run().change({"data": {"name": "files", "files": files}})
    assert retrieved.labels_of(run) == retrieved.Labels()
    metadata = {"encoder": {}, "data": {"root": str(tmp_path)}}
    rows_x = [extraction.Row(name, name) for name in ("a.png", "b.png")]
    rows_y = [extraction.Row("a.png#0", "a.png", "One."), extraction.Row("b.png#0", "b.png")]
    x, y = (extraction.Embeddings(np.ones((2, 3)), rows, metadata) for rows in (rows_x, rows_y))
    extraction.write(tmp_path, extraction.join("test", x, y), x, y)
    found = retrieved.labels_of(run)
    assert found.nouns == ("images", "captions") and found.given == "shown"
    assert found.x == ["a.png", "b.png"] and found.y == ["One.", "b.png#0"]
    assert found.pictures == [tmp_path / "a.png", tmp_path / "b.png"]
    assert found.links == [f"file://{tmp_path}/a.png", f"file://{tmp_path}/b.png"]


def test_labels_of_sounds_have_no_pictures(tmp_path):
    tests = {f"test_{side}": str(tmp_path / f"test_{side}.npy") for side in "xy"}
    files = {"x": "x.npy", "y": "y.npy", **tests}
    run = spec.Run().change({"data": {"name": "files", "files": files}})
    noted = '{"root": "/sounds", "ids": ["a.wav"], "texts": ["One."]}'
    for side in "xy":
        (tmp_path / f"test_{side}.ids.json").write_text(noted)
    found = retrieved.labels_of(run)
    assert found.pictures == () and found.links == ["file:///sounds/a.wav"]


def test_reliability_counts_the_first_ten_results_of_test_rows():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4)).astype(np.float32)
    gallery = data.gallery(rows, rows + 0.3 * rng.normal(size=rows.shape).astype(np.float32))
    same_map = heads.AffineMap(jnp.eye(4), jnp.zeros(4))
    teacher = heads.Teacher(same_map, same_map, jnp.ones(4))
    same = heads.build_heads(4, 4, 4, teacher=teacher)
    assert retrieved.reliability(aligner.Aligner(same, {}), gallery) == []
    model = aligner.Aligner(same, {"confidence": {"y_to_x": {"plain": [10.0, 0.0]}}})
    bins = retrieved.reliability(model, gallery)
    assert sum(one.size for one in bins) == 10 * len(gallery.y)
    hits = sum(one.right * one.size for one in bins)
    ranks = model.search(gallery.y, gallery.x, k=10, direction="y_to_x").indices
    assert hits == pytest.approx((ranks == np.arange(60)[:, None]).sum())
