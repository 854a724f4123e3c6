"""Tests of data sets of the packages `datasets` and `tensorflow_datasets`, on small local sets."""

import io
import os
import pickle
import types

import numpy as np
import PIL.Image
import pytest
import toy_encoders

from sotalign_jax import checks
from sotalign_jax.search import datasets, extraction, hub

os.environ["HF_HUB_OFFLINE"] = "1"  # tests never download data

# Third-party libraries emit DeprecationWarnings.
pytestmark = pytest.mark.filterwarnings("default")


def png(n):
    file = io.BytesIO()
    PIL.Image.new("RGB", (6, 5), (50 * n, 0, 200)).save(file, "PNG")
    return file.getvalue()


def red(image):
    return image.convert("RGB").getpixel((0, 0))[0]


def sine(n):
    return np.sin(np.arange(80) * (n + 1) / 9).astype(np.float32) / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a set with pictures, sounds, texts and classes as parquet files."""
    library = pytest.importorskip("datasets")
    soundfile = pytest.importorskip("soundfile")
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    made = tmp_path_factory.mktemp("hub")
    waves = [io.BytesIO() for _ in range(4)]
    for n, file in enumerate(waves):
        soundfile.write(file, sine(n), 16_000, format="WAV")
    rows = {
        "image": [{"bytes": png(n), "path": None} for n in range(4)],
        "audio": [{"bytes": file.getvalue(), "path": None} for file in waves],
        "caption": [f"picture {n}" for n in range(4)],
        "captions": [[f"{n} a", f"{n} b"] for n in range(4)],
        "label": [0, 1, 1, 0],
    }
    kinds = {
        "image": library.Image(),
        "audio": library.Audio(),
        "caption": library.Value("string"),
        "captions": library.Sequence(library.Value("string")),
        "label": library.ClassLabel(names=["red", "dark_red"]),
    }
    for name, columns in {"media": list(kinds)[:4], "classes": ["image", "label"]}.items():
        schema = library.Features({key: kinds[key] for key in columns}).arrow_schema
        table = pyarrow.Table.from_pydict({key: rows[key] for key in columns}, schema=schema)
        (made / name).mkdir()
        split = "train" if name == "media" else "test"
        parquet.write_table(table, made / name / f"{split}.parquet")
    library.config.HF_DATASETS_CACHE = made / "cache"
    return made


@pytest.mark.parametrize("streaming", [False, True])
def test_huggingface_reads_columns_by_type(folder, streaming):
    name = f"hf:{folder / 'media'}:train"
    source = datasets.open_dataset(name, None, streaming=streaming)
    pictures = list(source.items["image"]())
    assert [item.id for item in pictures] == [item.group for item in pictures] == list("0123")
    assert [red(item.load()) for item in pictures] == [0, 50, 100, 150]
    sounds = [item.load() for item in source.items["audio"]()]
    np.testing.assert_allclose(sounds[2].wave, sine(2), atol=1e-4)
    assert sounds[2].rate == 16_000 and source.counts["image"] == 4
    assert [item.load() for item in source.items["text"]()][1] == "picture 1"
    several = datasets.open_dataset(name, None, column="captions", streaming=streaming)
    texts = list(several.items["text"]())
    assert [(t.id, t.group, t.load()) for t in texts[:3]] == [
        ("0#0", "0", "0 a"), ("0#1", "0", "0 b"), ("1#0", "1", "1 a"),
    ]  # fmt: skip


def test_huggingface_reads_a_classification_set(folder):
    source = datasets.open_dataset(f"hf:{folder / 'classes'}", None, split="test")
    assert source.classes == ("red", "dark red")
    assert [item.group for item in source.items["image"]()] == ["0", "1", "1", "0"]
    assert next(source.items["text"]()).group == "0"


def test_huggingface_rows_can_be_extracted_in_processes(folder, tmp_path):
    source = datasets.open_dataset(f"hf:{folder / 'media'}", None)
    item = list(source.items["image"]())[3]
    assert red(pickle.loads(pickle.dumps(item)).load()) == 150
    encoder = toy_encoders.Toy()
    metadata = extraction.extract(source, encoder, tmp_path / "out", data={}, limit=3)
    assert metadata["count"] == 3 and encoder.embedded == 3


def test_huggingface_errors_name_the_remedy(folder):
    cases = {
        (f"hf:{folder / 'media'}:dev", None): r"data hf:.*'dev'",
        (f"hf:{folder / 'media'}", "sound"): r"column 'sound' .*image, audio, caption",
        ("hf:", None): "data ",
    }
    for (name, column), told in cases.items():
        with pytest.raises(checks.InputError, match=told):
            datasets.open_dataset(name, None, column=column)
    with pytest.raises(checks.InputError, match=r"streaming .*--streaming"):
        datasets.open_dataset("coco", folder, streaming=True)
    with pytest.raises(checks.InputError, match=r"column .*--column"):
        datasets.open_dataset("coco", folder, column="caption")
    with pytest.raises(checks.InputError, match=r"root .*--root"):
        datasets.open_dataset("coco", None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares a TFDS set with pictures, texts and classes."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyMedia(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(),
                "text": tfds.features.Text(),
                "captions": tfds.features.Sequence(tfds.features.Text()),
                "label": tfds.features.ClassLabel(names=["x", "y"]),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for n in range(4):
                texts = {"text": f"number {n}", "captions": [f"{n} a", f"{n} b"]}
                yield n, {"image": io.BytesIO(png(n)), "label": n % 2, **texts}

    folder = tmp_path_factory.mktemp("tfds")
    TinyMedia(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_tfds_reads_columns_by_type(prepared):
    source = datasets.open_dataset("tfds:tiny_media", prepared)
    pictures, texts = (list(source.items[name]()) for name in ("image", "text"))
    found = [red(item.load()) // 50 for item in pictures]
    assert sorted(found) == [0, 1, 2, 3]
    numbers = [item.load() for item in source.items["text"]()]
    assert numbers == [f"number {n}" for n in found]  # the same rows
    assert [t.group for t in texts] == [p.group for p in pictures] == list("0123")
    several = datasets.open_dataset("tfds:tiny_media:train[:2]", prepared, column="captions")
    assert [t.load() for t in several.items["text"]()][:2] == [f"{found[0]} a", f"{found[0]} b"]


def test_tfds_errors_name_the_remedy(prepared, tmp_path, monkeypatch):
    import tensorflow_datasets

    with pytest.raises(checks.InputError, match=r"data tfds:tiny_media .*--root"):
        datasets.open_dataset("tfds:tiny_media:dev", prepared)
    with pytest.raises(checks.InputError, match=r"data tfds:tiny_media .*array_record"):
        datasets.open_dataset("tfds:tiny_media", tmp_path)  # nothing is prepared there

    def refuse(*args, **options):
        raise NotImplementedError("Random access data source for tfrecord is not supported")

    monkeypatch.setattr(tensorflow_datasets, "data_source", refuse)
    with pytest.raises(checks.InputError, match=r"data .*--file_format=array_record"):
        datasets.open_dataset("tfds:tiny_media", prepared)


def test_tfds_sounds_are_waves_of_16_bit_integers():
    # TFDS cannot make its feature of sounds without TensorFlow.
    feature = type("Audio", (), {"sample_rate": 8_000})()
    column = hub.tfds_column(feature)
    samples = (sine(1) * 32768).astype(np.int64)
    read = lambda name: iter([lambda: samples])  # noqa: E731
    table = hub.Table("tfds:spoken", {"speech": column}, read, 1)
    source = hub.source(table, None, types.SimpleNamespace)
    sound = next(source.items["audio"]()).load()
    assert sound.rate == 8_000
    np.testing.assert_allclose(sound.wave, sine(1), atol=1e-4)
