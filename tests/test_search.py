"""Search with an aligned model, and the page to look at."""

import base64

import numpy as np
import PIL.Image
import pytest
import small_runs
import toy_encoders

from experiments import report, search
from experiments.extract import datasets, extraction, items
from sotalign_jax import aligner, checks, heads


@pytest.fixture(scope="module")
def model():
    """An aligner of the toy encoders' widths that has learned nothing."""
    untrained = heads.build_heads(toy_encoders.WIDTH, toy_encoders.WIDTH, 8, seed=0)
    return aligner.Aligner(untrained, {})


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("a.png", "sub/b.jpg", "c.webp", "d.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(path)
    (tmp_path / "images" / "broken.png").write_bytes(b"\x89PNG")
    return tmp_path / "images"


@pytest.fixture
def searcher(model, tmp_path):
    encoders = toy_encoders.Toy("image"), toy_encoders.Toy("text")
    return search.Searcher(model, *encoders, tmp_path / "index")


def test_pictures_come_by_their_cosine_in_the_shared_space(searcher, images, tmp_path):
    results, shown = searcher.pictures("a red car", images, top=3)
    encoder, model = toy_encoders.Toy("image"), searcher.model
    text = model.embed_y(toy_encoders.Toy("text").embed(["a red car"]).astype(np.float32))[0]
    expected = {}
    for name in ("a.png", "c.webp", "d.png", "sub/b.jpg"):
        row = encoder.embed([encoder.prepare(items.picture(images / name))])
        expected[name] = float(model.embed_x(row.astype(np.float16))[0] @ text)
    best = sorted(expected, key=expected.get, reverse=True)[:3]
    assert [name for name, _ in results] == best
    np.testing.assert_allclose([score for _, score in results], [expected[n] for n in best],
                               atol=1e-3)  # fmt: skip
    assert shown.count("data:image/jpeg;base64,") == 3 and "a red car</h1>" in shown
    assert [shown.index(name) for name in best] == sorted(shown.index(name) for name in best)


def test_a_folder_is_embedded_once_and_again_when_it_changes(searcher, images, tmp_path, capsys):
    searcher.pictures("a", images, top=1)
    before = small_runs.contents(tmp_path / "index")
    seen = searcher.image_encoder.embedded
    searcher.pictures("b", images, top=1)
    assert searcher.image_encoder.embedded == seen
    assert small_runs.contents(tmp_path / "index") == before
    (images / "d.png").rename(images / "e.png")
    searcher.pictures("b", images, top=1)
    assert searcher.image_encoder.embedded == 2 * seen
    assert "'e.png'" in capsys.readouterr().err


def test_a_replaced_picture_is_embedded_again(searcher, images, tmp_path, capsys):
    before = dict(searcher.pictures("a", images, top=4).results)
    PIL.Image.new("RGB", (5, 5), "red").save(images / "a.png")
    after = dict(searcher.pictures("a", images, top=4).results)
    assert [name for name in before if after[name] != before[name]] == ["a.png"]
    told = [line for line in capsys.readouterr().err.splitlines() if "a.png" in line]
    assert len(told) == 1 and str(images) in told[0]
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_an_extraction_of_the_folder_is_its_index(searcher, images, tmp_path, capsys):
    source, encoder = datasets.open_dataset("folder", images), toy_encoders.Toy("image")
    extraction.extract(source, encoder, tmp_path / "emb", data={"name": "folder"})
    expected = searcher.pictures("a red car", images, top=3)
    capsys.readouterr()
    ready = searcher._replace(place=tmp_path / "emb")
    assert ready.pictures("a red car", images, top=3) == expected
    assert "image rows" not in capsys.readouterr().err  # nothing was embedded
    before = small_runs.contents(tmp_path / "emb")
    with pytest.raises(checks.InputError, match=r"index: .*emb is not .*: it has another encoder"):
        ready._replace(image_encoder=toy_encoders.Toy("image", name="other")).pictures(
            "", images, top=3
        )
    (images / "d.png").unlink()
    with pytest.raises(checks.InputError, match=r"index: .*emb is not .* in place of 'd.png'"):
        ready.pictures("a red car", images, top=3)
    assert small_runs.contents(tmp_path / "emb") == before


def test_texts_for_a_picture(searcher, images, tmp_path):
    (tmp_path / "texts.txt").write_text("a car\na house\n\na car\na tree\n")
    texts = search.read_texts(tmp_path / "texts.txt")
    assert texts == ["a car", "a house", "a tree"]
    file = tmp_path / "texts.txt"
    results, shown = searcher.texts(images / "a.png", file, top=2)
    model, encoder = searcher.model, toy_encoders.Toy("image")
    picture = encoder.embed([encoder.prepare(items.picture(images / "a.png"))])
    keys = model.embed_y(toy_encoders.Toy("text").embed(texts).astype(np.float16))
    scores = keys @ model.embed_x(picture.astype(np.float32))[0]
    assert [text for text, _ in results] == [texts[n] for n in np.argsort(-scores)[:2]]
    assert shown.count("data:image/jpeg;base64,") == 1 and shown.count("<li>") == 2
    with pytest.raises(checks.InputError, match=r"query_image: .*broken.png"):
        searcher.texts(images / "broken.png", file, top=2)
    file.write_text("a car\na mouse\na tree\n")
    results, _ = searcher.texts(images / "a.png", file, top=3)
    assert {text for text, _ in results} == {"a car", "a mouse", "a tree"}


def test_calibrated_search(searcher, images, tmp_path):
    calibrated = searcher._replace(calibrated=True)
    with pytest.raises(checks.InputError, match=r"calibrated: .* has no calibration"):
        calibrated.pictures("a red car", images, top=3)
    rows = np.random.default_rng(0).normal(size=(2, 30, toy_encoders.WIDTH)).astype(np.float32)
    model = searcher.model.calibrated_by(*rows)
    plain = searcher.pictures("a red car", images, top=4).results
    results, shown = calibrated._replace(model=model).pictures("a red car", images, top=4)
    found = extraction.load(next((tmp_path / "index").iterdir()))
    bias = model.calibration.x(model.embed_x(found.rows))
    added = {origin.id: float(b) for origin, b in zip(found.origins, bias, strict=True)}
    expected = sorted(((n, s + added[n]) for n, s in plain), key=lambda found: -found[1])
    assert [name for name, _ in results] == [name for name, _ in expected]
    np.testing.assert_allclose([s for _, s in results], [s for _, s in expected], atol=1e-5)
    assert "with its calibrated score." in shown


def test_captions_files_are_texts(tmp_path):
    (tmp_path / "c.csv").write_text("file,caption\na.png,One.\nb.png,Two.\na.png,One.\n")
    assert search.read_texts(tmp_path / "c.csv") == ["One.", "Two."]
    with pytest.raises(checks.InputError, match=r"texts: .*gone.txt"):
        search.read_texts(tmp_path / "gone.txt")


def test_nothing_to_search(searcher, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(checks.InputError, match="data: no image"):
        searcher.pictures("a", tmp_path / "empty", top=1)


# --- which encoders -----------------------------------------------------------------------------


def trained_on(model, **settings):
    return aligner.Aligner(model.heads, {"settings": {"data": settings}})


def test_a_model_of_the_photographs_knows_its_encoders(model):
    known = search.trained_with(trained_on(model, name="coco"))
    assert known == {"x": {"name": "efficientnet-lite2"}, "y": {"name": "all-minilm-l6-v2"}}


def test_a_model_of_paired_files_knows_its_encoders(model, tmp_path):
    row = [extraction.Row("a", "a")]
    x, y = (
        extraction.Embeddings(np.ones((1, 3)), row, {"encoder": {"name": name}})
        for name in ("dinov3-vitl16", "bert")
    )
    extraction.write(tmp_path, {}, x, y)
    files = {"x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}
    known = search.trained_with(trained_on(model, name="files", files=files))
    assert known["x"]["name"] == "dinov3-vitl16" and known["y"]["name"] == "bert"


def test_a_model_of_unknown_origin_asks_for_encoders(model, tmp_path):
    for unknown in (model, trained_on(model, name="files", files={"x": f"{tmp_path}/x.npy"})):
        assert search.trained_with(unknown) is None
        with pytest.raises(checks.InputError, match="text_encoder: "):
            search.load_encoder(unknown, "y", None, None)


def test_transparent_pictures_are_shown_on_white():
    shown = report.thumbnail(PIL.Image.new("RGBA", (900, 5), (255, 0, 0, 0)), "a <b>")
    assert "alt='a &lt;b&gt;'" in shown
    content = base64.b64decode(shown.partition("base64,")[2].removesuffix("'>"))
    picture = items.picture(content)
    assert picture.size == (360, 2) and picture.getpixel((9, 0)) == (255,) * 3
