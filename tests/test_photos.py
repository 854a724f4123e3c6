"""Tests of the photographs: files, features, splits and pools."""

import numpy as np
import pytest

from experiments import photos
from sotalign_jax import checks


def stored(name):
    with np.load(photos.FOLDER / f"{name}.npz", allow_pickle=False) as table:
        return dict(table)


def rows_in(part, whole):
    """Returns the index in `whole` of every row of `part`."""
    part, whole = (np.asarray(a) / np.linalg.norm(a, axis=1, keepdims=True) for a in (part, whole))
    scores = part @ whole.T
    np.testing.assert_allclose(scores.max(axis=1), 1.0, atol=1e-5)
    return scores.argmax(axis=1)


# --- files and features


def test_photos_files_match_checksums_and_size_limits():
    listed = photos.checksums()
    there = {path.name: path.stat().st_size for path in photos.FOLDER.iterdir()}
    assert set(there) == {*listed, "SHA256SUMS", "README.md"}
    assert max(there.values()) < 50e6 and sum(there.values()) <= 131e6
    assert all(len(photos.read(name)) == there[name] for name in listed)


def test_read_rejects_damaged_and_missing_files(tmp_path, monkeypatch):
    content = bytearray(photos.read("zs_intel6.npz"))
    content[1000] ^= 1
    (tmp_path / "zs_intel6.npz").write_bytes(content)
    sums = (photos.FOLDER / "SHA256SUMS").read_text()
    (tmp_path / "SHA256SUMS").write_text(sums)
    monkeypatch.setattr(photos, "FOLDER", tmp_path)
    with pytest.raises(checks.InputError, match=r"zs_intel6.npz.*checksum"):
        photos.read("zs_intel6.npz")
    with pytest.raises(checks.InputError, match=r"coco.npz.* missing.*clone"):
        photos.read("coco.npz")


def test_images_and_texts_restore_quantised_features():
    basis, table = stored("efficientnet_lite2_pca512"), stored("flickr8k")
    rows = np.array([5, 6999, 5, 17])
    codes = table["image"][rows].astype(np.float64)
    expected = basis["mean"] + (codes * basis["scale"]) @ basis["components"].T.astype(np.float64)
    images = photos.images("flickr8k", rows)
    assert images.shape == (4, 1280) and images.dtype == np.float32
    np.testing.assert_allclose(np.asarray(images), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(images[1:3], expected[1:3], rtol=1e-4, atol=1e-5)
    expected = table["text"][rows] * basis["text_scale"].astype(np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(photos.texts("flickr8k", rows)[:], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("encoder", photos.TEXT_ENCODERS[1:])
def test_dataset_with_other_text_encoders_embeds_the_captions(encoder):
    if encoder == "WordLlama":
        pytest.importorskip("wordllama")
    made = photos.dataset(n_pairs=50, n_unpaired=60, text_encoder=encoder, test=False)
    assert made.pairs_y.shape == (50, 256) and made.pool_y.shape == (60, 256)
    usual = photos.dataset(n_pairs=50, n_unpaired=60, test=False)
    np.testing.assert_array_equal(usual.pairs_x, made.pairs_x)
    said = [photos.captions()[row] for row in photos.choose("coco", n_pairs=50).texts]
    np.testing.assert_allclose(made.pairs_y, photos.encode_words(said, encoder), atol=1e-6)
    same, word, other = photos.encode_words(["a dog", "a dog", "the sea"], encoder)
    assert (same == word).all() and same @ word > same @ other
    assert photos.zero_shot("cifar10", encoder).prompts.shape[-1] == 256
    with pytest.raises(checks.InputError, match="coco"):
        photos.texts("rsicd", encoder=encoder)


# --- evaluation data


@pytest.mark.parametrize(
    ("name", "images", "captions"),
    [
        ("coco", (31361, 802, 3931), (63987, 4013, 19657)),
        ("flickr8k", (5500, 500, 1000), (27500, 2500, 5000)),
        ("rsicd", (8234, 500, 1093), None),
    ],
)
def test_rows_of_split_have_documented_sizes_and_share_no_image(name, images, captions):
    parts = [photos.rows_of_split(name, split) for split in ("train", "val", "test")]
    assert tuple(map(len, parts)) == images
    assert len(np.unique(np.concatenate(parts))) == sum(images)
    owner = stored(name)["image_of_text"]
    if captions is not None:
        assert tuple(int(np.isin(owner, part).sum()) for part in parts) == captions


def test_gallery_has_every_caption_with_its_image():
    gallery, table = photos.gallery("rsicd", "test"), stored("rsicd")
    image_rows = rows_in(gallery.x, photos.images("rsicd"))
    np.testing.assert_array_equal(image_rows, np.flatnonzero(table["split"] == 2))
    text_rows = np.flatnonzero(table["split"][table["image_of_text"]] == 2)
    np.testing.assert_array_equal(gallery.y, photos.texts("rsicd", text_rows))
    np.testing.assert_array_equal(image_rows[gallery.x_of_y], table["image_of_text"][text_rows])


@pytest.mark.parametrize("name", photos.ZERO_SHOT)
def test_zero_shot_has_prompts_for_every_class(name):
    task = photos.zero_shot(name)
    assert len(task.prompts) == len(task.class_names) == task.labels.max() + 1
    assert task.x.shape == (len(task.labels), 1280) and task.prompts.shape[2] == 384
    np.testing.assert_allclose(np.linalg.norm(task.prompts, axis=2), 1.0, rtol=1e-5)


# --- training data


@pytest.mark.parametrize("pool", photos.POOLS)
def test_choose_pools_share_no_image_unless_random(pool):
    chosen = photos.choose("flickr8k", n_pairs=100, pool=pool, seed=3)
    owner = stored("flickr8k")["image_of_text"]
    np.testing.assert_array_equal(owner[chosen.texts], chosen.images)
    assert len(set(chosen.texts % 5)) == 5  # all five caption positions occur
    pairs, x, y = map(set, (chosen.images, chosen.pool_images, owner[chosen.pool_texts]))
    assert len(chosen.pool_texts) == 5 * len(y)
    assert not pairs & (x | y) and not x & y if pool == "disjoint" else x == y
    assert pairs | x | y == set(photos.rows_of_split("flickr8k", "train"))
    assert len(x) == len(y) == (2700 if pool == "disjoint" else 5400)


def test_dataset_holds_the_chosen_rows():
    made = photos.dataset("flickr8k", n_pairs=20, seed=3, test=False)
    chosen = photos.choose("flickr8k", n_pairs=20, seed=3)
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(made.pairs_x, photos.images("flickr8k", chosen.images), **close)
    np.testing.assert_allclose(made.pairs_y, photos.texts("flickr8k", chosen.texts), **close)
    for pool, rows in (
        (made.pool_x, photos.images("flickr8k", chosen.pool_images)),
        (made.pool_y, photos.texts("flickr8k", chosen.pool_texts)),
    ):
        order, expected = (np.sort(np.asarray(a)[:, 0]) for a in (pool, rows))
        np.testing.assert_allclose(order, expected, **close)
    assert made.test is None and len(made.val.x) == 500


def test_coco_dataset_pools_share_no_photograph():
    made = photos.dataset("coco", n_pairs=50, seed=1, test=False)
    others = photos.choose("coco", n_pairs=50, pool="random", seed=1)
    assert made.pool_x.shape == (26_000, 1280)
    assert made.pool_y.shape == (len(others.pool_texts), 384)
    rows_in(made.pool_y[:9], photos.texts("coco", others.pool_texts))
    captioned = set(map(bytes, stored("coco")["image"]))
    assert not captioned & set(map(bytes, stored("coco_unpaired_images")["image"]))


def test_datasets_of_growing_sizes_are_nested():
    def make(n_pairs, n_unpaired):
        return photos.dataset("rsicd", n_pairs=n_pairs, n_unpaired=n_unpaired, seed=2, test=False)

    small, large, other = make(10, 20), make(40, 30), make(10, 30)
    for part, whole in (
        (small.pairs_x, large.pairs_x[:10]),
        (small.pairs_y, large.pairs_y[:10]),
        (small.pool_x, other.pool_x[:20]),
        (small.pool_y, other.pool_y[:20]),
    ):
        np.testing.assert_allclose(np.asarray(part), whole, rtol=1e-4, atol=1e-5)


def test_dataset_accepts_pools_of_other_sources():
    made = photos.dataset(
        "flickr8k",
        n_pairs=5,
        n_unpaired=7,
        unpaired_images="cifar10",
        unpaired_texts="flickr30k",
        evaluate_on="rsicd",
        zero_shot_on="intel",
    )
    rows_in(made.pool_x, photos.images("cifar10"))
    rows_in(made.pool_y, photos.texts("flickr30k"))
    assert len(made.val.x) == 500 and len(made.test.x) == 1093 and len(made.zero_shot.x) == 3000
    noise = photos.dataset(
        "flickr8k", n_pairs=5, n_unpaired=7, unpaired_images="noise", unpaired_texts="noise"
    )
    directions = noise.pool_x / np.linalg.norm(noise.pool_x, axis=1, keepdims=True)
    assert (
        np.abs(directions @ directions.T - np.eye(7)).max() < 0.2
    )  # about 0.5 between photographs
    assert noise.pool_y.shape == (7, 384)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cc3m"}, "name"),
        ({"pool": "aligned"}, "pool"),
        ({"n_pairs": 9000}, "n_pairs"),
        ({"n_unpaired": 9000}, "n_unpaired"),
        ({"unpaired_images": "flickr30k"}, "unpaired_images"),
        ({"unpaired_texts": "cifar10"}, "unpaired_texts"),
        ({"evaluate_on": "imagenet"}, "evaluate_on"),
        ({"zero_shot_on": "mnist"}, "zero_shot"),
    ],
)
def test_dataset_rejects_bad_arguments(options, message):
    with pytest.raises(checks.InputError, match=message):
        photos.dataset(**{"name": "rsicd", "n_pairs": 10, **options})


def test_speech_dataset_restores_features_and_shares_no_speaker():
    table = stored("speech")
    made = photos.dataset("speech", n_pairs=30, n_unpaired=40, seed=2)
    spoken, said = table["speech"] * table["speech_scale"], table["text"] * table["text_scale"]
    pairs = rows_in(made.pairs_x, spoken)
    np.testing.assert_array_equal(pairs, rows_in(made.pairs_y, said))
    x, y = rows_in(made.pool_x, spoken), rows_in(made.pool_y, said)
    assert not set(pairs) & {*x, *y} and not set(x) & set(y)
    splits = [photos.rows_of_split("speech", split) for split in ("train", "val", "test")]
    splits.append(photos.rows_of_split("librispeech", "test"))
    assert tuple(map(len, splits)) == (11480, 611, 2002, 1515)
    speakers = [set(table["speaker"][rows]) for rows in splits]
    assert sum(map(len, speakers)) == len(set.union(*speakers))


def test_code_dataset_restores_features_and_shares_no_package():
    table = stored("code")
    made = photos.dataset("code", n_pairs=30, n_unpaired=40, seed=2)
    functions = table["code"] * table["code_scale"]
    said = table["text"] * table["text_scale"]
    pairs = rows_in(made.pairs_x, functions)
    np.testing.assert_array_equal(pairs, rows_in(made.pairs_y, said))
    x, y = rows_in(made.pool_x, functions), rows_in(made.pool_y, said)
    assert not set(pairs) & {*x, *y} and not set(x) & set(y)
    splits = [photos.rows_of_split("code", split) for split in ("train", "val", "test")]
    assert tuple(map(len, splits)) == (8000, 330, 1200)
    packages = [set(table["package"][rows].tolist()) for rows in splits]
    assert sum(map(len, packages)) == len(set.union(*packages)) == len(table["packages"])


def test_speech_dataset_evaluates_on_librispeech():
    made = photos.dataset("speech", n_pairs=5, evaluate_on="librispeech", unpaired_texts="coco")
    numbers, said = photos.test_labels("librispeech")
    assert (len(made.val.x), len(made.test.x)) == (611, len(said))
    spoken = stored("speech")
    row = numbers[7]
    np.testing.assert_allclose(made.test.x[7], spoken["speech"][row] * spoken["speech_scale"])
    assert said[7] == photos.captions("speech")[row]
    with pytest.raises(checks.InputError, match="width"):
        photos.dataset("speech", n_pairs=5, unpaired_images="coco")


def test_test_labels_match_the_gallery():
    image_ids, captions = photos.test_labels()
    gallery, table = photos.gallery("coco"), stored("coco")
    assert (len(image_ids), len(captions)) == (len(gallery.x), len(gallery.y))
    for row in (0, 99, len(captions) - 1):
        own = np.flatnonzero(table["image_id"] == image_ids[gallery.x_of_y[row]])
        texts = np.flatnonzero(np.isin(table["image_of_text"], own))
        assert captions[row] in [photos.captions()[text] for text in texts]
