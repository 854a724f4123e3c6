"""Tests of models on raw data, and of the search command."""

import base64
import dataclasses
import shutil

import numpy as np
import PIL.Image
import pytest
import scipy.special
import small_runs
import toy_encoders

from sotalign_jax import aligner, checks, confidence, heads
from sotalign_jax.search import __main__ as search
from sotalign_jax.search import datasets, encoders, extraction, items, markup
from sotalign_jax.search import model as model_lib

NAMES = ("a.png", "c.webp", "d.png", "sub/b.jpg")


@pytest.fixture(scope="module")
def untrained():
    """Returns an untrained aligner with the widths of the toy encoders."""
    made = heads.build_heads(toy_encoders.WIDTH, toy_encoders.WIDTH, 8, seed=0)
    names = {"x": "efficientnet-lite2", "y": "all-minilm-l6-v2"}
    return aligner.Aligner(made, {"encoders": {side: {"name": n} for side, n in names.items()}})


@pytest.fixture(scope="module")
def calibrated(untrained):
    rows = np.random.default_rng(0).normal(size=(2, 30, toy_encoders.WIDTH)).astype(np.float32)
    return untrained.calibrated_by(*rows)


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(1)
    for name in NAMES:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(path)
    (tmp_path / "images" / "broken.png").write_bytes(b"\x89PNG")
    return tmp_path / "images"


def toys(**options):
    return {"x": toy_encoders.Toy("image", **options), "y": toy_encoders.Toy("text")}


@pytest.fixture
def model(untrained, tmp_path):
    return model_lib.Model(untrained, toys(), tmp_path)


def expected_features(aligned, images):
    """Returns features of the pictures, rounded to float16 as in an extraction."""
    encoder = toy_encoders.Toy("image")
    read = [encoder.prepare(items.picture(images / name)) for name in NAMES]
    return aligned.embed_x(encoder.embed(read).astype(np.float16))


# --- encoding -----------------------------------------------------------------------------------


def test_encode_maps_raw_data_to_the_shared_space(model, images):
    paths = [images / name for name in NAMES]
    features = model.encode_image(paths)
    np.testing.assert_allclose(features, expected_features(model.aligner, images), atol=2e-3)
    opened = model.encode_image([items.picture(path) for path in paths])
    np.testing.assert_array_equal(opened, features)
    # The encoder's batch size is 4, so the fifth text is in a second batch.
    texts = ["a car", "a house", "a tree", "a dog", "a bird"]
    assert model.encode_text(texts).shape == (5, 8)
    np.testing.assert_allclose(model.encode_text("a bird"), model.encode_text(texts)[4:], atol=1e-6)
    np.testing.assert_allclose(
        model.similarity(paths, texts), features @ model.encode_text(texts).T, atol=1e-5
    )


def test_encode_reads_sounds(untrained, tmp_path):
    class Loudness(toy_encoders.Toy):
        def prepare(self, content):
            return np.resize(content.wave, 48)

    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(480.0)), 16_000)
    speech = model_lib.Model(untrained, {**toys(), "x": Loudness("audio")}, tmp_path)
    wave = items.sound(tmp_path / "a.wav")
    from_file = speech.encode_audio(tmp_path / "a.wav")
    np.testing.assert_array_equal(from_file, speech.encode_audio([wave]))
    with pytest.raises(checks.InputError, match=r"image .* audio and text"):
        speech.encode_image(["a.png"])


def test_encode_and_search_reject_bad_items_in_one_line(model, images):
    cases = {
        "image .*broken.png": lambda: model.encode_image(images / "broken.png"),
        "image .*gone.png": lambda: model.encode_image([images / "gone.png"]),
        "image .* got 0": lambda: model.encode_image([]),
        "text .*' '": lambda: model.encode_text(["a", " "]),
        "index": lambda: model.search("a"),
        "k.* 0": lambda: model.search("a", k=0),
    }
    for message, call in cases.items():
        with pytest.raises(checks.InputError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


# --- searching ----------------------------------------------------------------------------------


def test_search_ranks_pictures_by_cosine(model, images):
    hits = model.index(images).search("a red car", k=3)
    text = model.aligner.embed_y(toy_encoders.Toy("text").embed(["a red car"]).astype(np.float32))
    cosines = expected_features(model.aligner, images) @ text[0]
    best = np.argsort(-cosines)[:3]
    assert [hit.id for hit in hits] == [NAMES[n] for n in best]
    np.testing.assert_allclose([hit.score for hit in hits], cosines[best], atol=1e-3)
    assert [hit.row for hit in hits] == best.tolist()


def test_search_by_picture_finds_pictures_and_texts(model, images, tmp_path):
    pictures = model.index(images)
    hit = pictures.search(images / "d.png", k=1)[0]
    assert hit.id == "d.png" and hit.score == pytest.approx(1, abs=1e-3)
    with pytest.raises(checks.InputError, match=r"calibrated.*image"):
        pictures.search(images / "d.png", calibrated=True)
    file = tmp_path / "texts.txt"
    file.write_text("a car\na house\n\na car\na tree\n")
    found = model.index(file).search(images / "a.png", k=9)
    texts = ["a car", "a house", "a tree"]
    scores = model.encode_text(texts) @ model.encode_image(images / "a.png")[0]
    assert [hit.id for hit in found] == [texts[n] for n in np.argsort(-scores)]
    file.write_text("a car\na mouse\na tree\n")
    found = model.index(file).search(images / "a.png", k=3)
    assert {hit.id for hit in found} == {"a car", "a mouse", "a tree"}


def test_similar_ranks_the_other_items_without_reading_files(model, images):
    pictures = model.index(images)
    read = pictures.encoders["x"].prepared
    hits = pictures.similar(2, k=9)
    cosines = expected_features(model.aligner, images) @ expected_features(model.aligner, images)[2]
    best = [row for row in np.argsort(-cosines) if row != 2]
    assert [hit.row for hit in hits] == best and pictures.encoders["x"].prepared == read
    np.testing.assert_allclose([hit.score for hit in hits], cosines[best], atol=1e-3)
    assert pictures.similar(2, k=1) == hits[:1]
    for row in (-1, 4):
        with pytest.raises(checks.InputError, match=f"row .* got {row}"):
            pictures.similar(row)


def test_index_embeds_a_folder_once_and_then_new_pictures_only(model, images, tmp_path, capsys):
    seen = model.index(images) and model.encoders["x"].embedded
    before = small_runs.contents(tmp_path / "search")
    model.index(images)
    assert model.encoders["x"].embedded == seen
    assert small_runs.contents(tmp_path / "search") == before
    (images / "d.png").rename(images / "e.png")
    model.index(images)
    assert model.encoders["x"].embedded == seen + 1
    assert "'e.png'" in capsys.readouterr().err


def test_index_embeds_a_replaced_picture_again(model, images, tmp_path, capsys):
    before = {hit.id: hit.score for hit in model.index(images).search("a")}
    PIL.Image.new("RGB", (5, 5), "red").save(images / "a.png")
    after = {hit.id: hit.score for hit in model.index(images).search("a")}
    assert [name for name in before if after[name] != before[name]] == ["a.png"]
    told = [line for line in capsys.readouterr().err.splitlines() if "a.png" in line]
    assert len(told) == 1 and str(images) in told[0]
    assert len(list((tmp_path / "search").iterdir())) == 1


def test_index_accepts_an_extraction_of_the_same_encoder(model, images, tmp_path, capsys):
    source, place = datasets.open_dataset("folder", images), tmp_path / "emb"
    extraction.extract(source, toy_encoders.Toy("image"), place, data={"name": "folder"})
    expected = model.index(images).search("a red car")
    capsys.readouterr()
    assert model.index(images, place).search("a red car") == expected
    assert model.index(place).search("a red car") == expected
    assert "image rows" not in capsys.readouterr().err  # nothing was embedded again
    before = small_runs.contents(place)
    other = model_lib.Model(model.aligner, toys(name="other"), tmp_path)
    for of in (images, place):
        with pytest.raises(checks.InputError, match=r"index .*emb is .*encoder"):
            other.index(of, place)
    (images / "d.png").unlink()
    with pytest.raises(checks.InputError, match=r"index .*emb is not .* in place of 'd.png'"):
        model.index(images, place)
    assert small_runs.contents(place) == before


def test_index_rejects_empty_folder(model, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(checks.InputError, match="no image"):
        model.index(tmp_path / "empty")


def test_search_calibrated_adds_the_potentials(model, calibrated, images, tmp_path):
    with pytest.raises(checks.InputError, match=r"calibrated.* has no calibration"):
        model.index(images).search("a red car", calibrated=True)
    pictures = model_lib.Model(calibrated, toys(), tmp_path).index(images)
    kept, features = calibrated.calibration, pictures.searched.features
    logits = features @ np.asarray(kept.g).T / kept.epsilon + kept.v
    bias = -float(kept.epsilon) * scipy.special.logsumexp(logits, axis=1)
    feature = pictures.encode_text("a red car")[0]
    logits = np.asarray(kept.f) @ feature / kept.epsilon + kept.u
    bias = bias - float(kept.epsilon) * scipy.special.logsumexp(logits)
    cosines = pictures.search("a red car", calibrated=False)
    plain = {hit.id: hit.score + bias[hit.row] for hit in cosines}
    hits = pictures.search("a red car", calibrated=True)
    assert pictures.search("a red car") == hits  # the aligner's own choice
    rows = pictures.similarity([images / hit.id for hit in hits], ["a red car"])
    scores = [hit.score for hit in hits]  # of embeddings that are stored in half precision
    np.testing.assert_allclose(scores, rows[:, 0], atol=1e-3)
    assert [hit.id for hit in hits] == sorted(plain, key=plain.get, reverse=True)
    np.testing.assert_allclose([hit.score for hit in hits], [plain[h.id] for h in hits], atol=1e-5)


@pytest.fixture
def confident(calibrated):
    known = {"y_to_x": {"plain": [30.0, -40.0], "calibrated": [40.0, -40.0]}}
    return dataclasses.replace(calibrated, info={**calibrated.info, "confidence": known})


@pytest.mark.parametrize("kind", ["plain", "calibrated"])
def test_search_returns_probabilities_over_the_whole_index(confident, images, tmp_path, kind):
    pictures = model_lib.Model(confident, toys(), tmp_path).index(images)
    options = {"calibrated": kind == "calibrated"}
    every = pictures.search("a red car", k=100, **options)
    slope, floor = confident.info["confidence"]["y_to_x"][kind]
    weights = np.exp(slope * np.array([hit.score for hit in every]))
    expected = weights / (weights.sum() + len(every) * np.exp(floor))
    np.testing.assert_allclose([hit.confidence for hit in every], expected, rtol=1e-4)
    assert [hit.word for hit in every] == confidence.words(expected)
    assert pictures.search("a red car", k=1, **options) == every[:1]


def test_search_has_no_confidence_without_held_out_pairs_or_words(
    calibrated, confident, images, tmp_path
):
    plain = model_lib.Model(calibrated, toys(), tmp_path).index(images)
    assert {(hit.confidence, hit.word) for hit in plain.search("a red car")} == {(None, "")}
    pictures = model_lib.Model(confident, toys(), tmp_path).index(images)
    # A picture finds pictures by cosines, which say nothing about texts.
    for hits in (pictures.search(images / NAMES[0]), pictures.similar(0)):
        assert {(hit.confidence, hit.word) for hit in hits} == {(None, "")}


def test_search_does_not_trust_results_of_an_unknown_script(confident, images, tmp_path):
    pictures = model_lib.Model(confident, toys(), tmp_path).index(images)
    assert pictures.warning("a red car") == pictures.warning(images / NAMES[0]) == ""
    assert pictures.warning("\u8eca") == model_lib.UNKNOWN_SCRIPT
    assert {(hit.confidence, hit.word) for hit in pictures.search("\u8eca")} == {(None, "weak")}


def test_read_texts_drops_duplicates_and_names_missing_file(tmp_path):
    (tmp_path / "c.csv").write_text("file,caption\na.png,One.\nb.png,Two.\na.png,One.\n")
    assert model_lib.read_texts(tmp_path / "c.csv") == ["One.", "Two."]
    with pytest.raises(checks.InputError, match=r"texts .*gone.txt"):
        model_lib.read_texts(tmp_path / "gone.txt")


# --- loading ------------------------------------------------------------------------------------


def toy_load(name, **_):
    return toy_encoders.Toy("text" if "minilm" in name else "image", name=name)


def test_load_finds_the_only_run_and_lists_several(untrained, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "load", toy_load)
    untrained.save(tmp_path / "run" / "align-seed0" / "aligner")
    for path in (tmp_path / "run", tmp_path / "run" / "align-seed0"):
        loaded = model_lib.Model.load(path)
        assert loaded.folder == tmp_path / "run" / "align-seed0"
        assert [loaded.encoders[side].modality for side in "xy"] == ["image", "text"]
    untrained.save(tmp_path / "run" / "sail-seed0" / "aligner")
    with pytest.raises(checks.InputError, match=r"align-seed0.*sail-seed0"):
        model_lib.Model.load(tmp_path / "run")


def test_load_encoder_asks_for_an_unknown_encoder(untrained):
    unknown = aligner.Aligner(untrained.heads, {"settings": {"data": {"name": "files"}}})
    with pytest.raises(checks.InputError, match=r"y_encoder .*--y_encoder=NAME"):
        model_lib.load_encoder(unknown, "y", None, None)


def test_saved_model_searches_without_its_pictures(untrained, images, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "load", toy_load)
    untrained.save(tmp_path / "run" / "aligner")
    searched = model_lib.Model.load(tmp_path / "run").index(images)
    searched.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    shutil.rmtree(images)
    shutil.rmtree(tmp_path / "run")
    again = model_lib.Model.load(tmp_path / "moved")
    assert again.search("a red car") == searched.search("a red car")
    with pytest.raises(checks.InputError, match=r"path .*moved"):
        again.save(tmp_path / "moved")
    again.save(tmp_path / "moved", overwrite=True)
    assert model_lib.Model.load(tmp_path / "moved").similar(0) == searched.similar(0)


def test_saving_a_model_without_an_index_forgets_an_earlier_one(
    untrained, images, tmp_path, monkeypatch
):
    monkeypatch.setattr(encoders, "load", toy_load)
    untrained.save(tmp_path / "run" / "aligner")
    loaded = model_lib.Model.load(tmp_path / "run")
    loaded.index(images).save(tmp_path / "saved")
    loaded.save(tmp_path / "saved", overwrite=True)
    with pytest.raises(checks.InputError, match="indexed"):
        model_lib.Model.load(tmp_path / "saved").search("a red car")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def options(untrained, images, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "load", toy_load)
    untrained.save(tmp_path / "run" / "aligner")
    return [f"--model={tmp_path / 'run'}", f"--page={tmp_path / 'page.html'}"]


def test_search_answers_every_query(options, images, tmp_path, capsys):
    (tmp_path / "more.txt").write_text("a house\na tree\n")
    asked = ["--query=a red car", "--query=a bird", f"--queries={tmp_path / 'more.txt'}"]
    asked += [f"--query_image={images / 'd.png'}", f"--images={images}", "--top=2"]
    out, error = small_runs.start(search, [*options, *asked], capsys)
    assert error is None
    titles = ["a red car", "a bird", "a house", "a tree", "d.png"]
    assert [line for line in out.splitlines() if line in titles] == titles
    loaded = model_lib.Model.load(tmp_path / "run").index(images)
    for title, part in zip(titles[:4], out.split("rank")[1:], strict=False):
        for hit in loaded.search(title, k=2):
            assert f"{hit.score:.3f}  {hit.id}" in part
    page = (tmp_path / "page.html").read_text()
    assert page.count("<section>") == 5 and page.count("data:image/jpeg;base64,") == 11


def test_search_of_one_query_writes_page_with_its_title(options, images, tmp_path, capsys):
    asked = [*options, "--query=a red car", f"--images={images}"]
    out, error = small_runs.start(search, asked, capsys)
    assert error is None and out.startswith("  rank")
    page = (tmp_path / "page.html").read_text()
    assert "a red car</h1>" in page and "each with its score." in page
    names = [line.split()[-1] for line in out.splitlines()[2:6]]
    assert [page.index(name) for name in names] == sorted(page.index(name) for name in names)


def test_search_lists_texts_and_rejects_bad_options(options, images, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("a car\na house\na tree\n")
    asked = [f"--texts={tmp_path / 'texts.txt'}", f"--query_image={images / 'a.png'}", "--top=2"]
    assert small_runs.start(search, [*options, *asked], capsys)[1] is None
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 1 and page.count("<li>") == 2
    both = [*options, *asked, f"--images={images}"]
    assert small_runs.is_one_line(small_runs.start(search, both, capsys)[1])
    wrong = [*options, "--query=", f"--images={images}"]
    assert small_runs.is_one_line(small_runs.start(search, wrong, capsys)[1])


def test_thumbnail_shows_transparent_pictures_on_white():
    shown = markup.thumbnail(PIL.Image.new("RGBA", (900, 5), (255, 0, 0, 0)), "a <b>")
    assert "alt='a &lt;b&gt;'" in shown
    content = base64.b64decode(shown.partition("base64,")[2].removesuffix("'>"))
    picture = items.picture(content)
    assert picture.size == (360, 2) and picture.getpixel((9, 0)) == (255,) * 3
