"""What a model finds, in words and on a page."""

import numpy as np
import PIL.Image
import pytest

from experiments import config as config_lib
from experiments import report, workdir
from experiments.extract import pair
from sotalign_jax import aligner, data, heads


@pytest.fixture
def gallery():
    """Nine pictures with two captions each."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, d)).astype(np.float32) for n, d in ((9, 5), (18, 4)))
    return data.gallery(x, y, np.repeat(np.arange(9), 2))


@pytest.fixture
def labels(tmp_path):
    PIL.Image.new("RGB", (30, 20), "red").save(tmp_path / "0.png")
    pictures = [tmp_path / f"{i}.png" for i in range(9)]  # the first alone is at hand
    return report.Labels([p.name for p in pictures], [f"text <{i}>" for i in range(18)], pictures)


def test_the_nearest_captions_are_marked_right_or_wrong(gallery, labels):
    model = aligner.Aligner(heads.build_heads(5, 4, 3, seed=0), {})
    found = report.find(model, gallery, labels)
    assert sorted(one.name for one in found) == list(labels.x)
    scores = model.similarity(gallery.x, gallery.y)
    for one in found:
        row = labels.x.index(one.name)
        best = np.argsort(-scores[row])[:3]
        assert one.retrieved == tuple((f"text <{i}>", i // 2 == row) for i in best)
        assert one.caption == f"text <{2 * row}>" and one.picture == labels.pictures[row]
    text = found[0].text()
    assert text.count("\n") == 3 and text.startswith(f"{found[0].name}: {found[0].caption}")
    right = sum(one.retrieved[0][1] for one in found)
    page = report.cards(found, each=9)
    assert f"Right at first: {right} of 9" in page and f"Wrong at first: {9 - right} of 9" in page
    assert page.count("<figure") == 9 and page.count("data:image/jpeg") == 1
    assert "text &lt;0&gt;" in page and "text <" not in page


def test_labels_of_files_are_found_by_what_pair_noted(tmp_path):
    (tmp_path / "captions.csv").write_text("file,caption\na.png,One.\nb.png,Two.\na.png,Three.\n")
    source = {"name": "folder", "root": str(tmp_path), "split": None}
    config = config_lib.default()
    config.data.name = "files"
    for name in ("x", "y", "test_x", "test_y"):
        config.data.files[name] = str(tmp_path / f"{name}.npy")
    (run,) = config_lib.runs(config).values()
    assert report.labels_of(run) is None
    noted = {"x": ["a.png", "b.png"], "y": ["a.png#0", "a.png#1", "b.png#0"]}
    for captions in (str(tmp_path / "captions.csv"), None):
        noted["data"] = {**source, "captions": captions}
        workdir.write_json(tmp_path / pair.TEST, noted)
        found = report.labels_of(run)
        assert found.x == noted["x"] and found.pictures == [tmp_path / "a.png", tmp_path / "b.png"]
        assert found.y == (["One.", "Three.", "Two."] if captions else noted["y"])
    noted["data"]["root"] = str(tmp_path / "gone")
    workdir.write_json(tmp_path / pair.TEST, noted)
    assert report.labels_of(run) is None
