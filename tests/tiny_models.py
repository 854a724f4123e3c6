"""Saves tiny, randomly initialised models of the classes that the published configs name."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'extract'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'extract'")
import tokenizers  # noqa: E402

WORDS = ["a", "photo", "of", "the", "red", "car", "bird", "on", "two", "three", "four", "five",
         "six"]  # fmt: skip


def save(folder, kind, config):
    """Saves a model of the transformers class `kind` with random weights."""
    torch.manual_seed(0)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)


def save_tokenizer(folder, *, side="right", end=False):
    """Saves a word tokenizer. With `end`, it appends [END], like Qwen3-Embedding's."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[END]": 2} | {w: n for n, w in enumerate(WORDS, 3)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if end:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A [END]", special_tokens=[("[END]", 2)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]",
        padding_side=side, model_max_length=64,
    )  # fmt: skip
    fast.save_pretrained(folder)


def save_processor(folder, **config):
    pathlib.Path(folder, "preprocessor_config.json").write_text(json.dumps(config))


DINO = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 40},
    "do_center_crop": True,
    "crop_size": {"height": 28, "width": 28},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


def dinov2(folder):
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7
    )
    save(folder, "Dinov2Model", config)
    save_processor(folder, **DINO)


def dinov3(folder):
    config = transformers.DINOv3ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=28, patch_size=7, num_register_tokens=4,
    )  # fmt: skip
    save(folder, "DINOv3ViTModel", config)
    fixed = {
        "image_processor_type": "DINOv3ViTImageProcessorFast",
        "resample": 2,
        "size": {"height": 28, "width": 28},
        "do_center_crop": None,
        "crop_size": None,
    }
    save_processor(folder, **{**DINO, **fixed})


def resnet(folder):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"
    )
    save(folder, "ResNetForImageClassification", config)
    kind = {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875,
            "size": {"shortest_edge": 32}, "do_center_crop": None}  # fmt: skip
    save_processor(folder, **{**DINO, **kind})


def bert(folder):
    config = transformers.BertConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    save(folder, "BertForMaskedLM", config)
    save_tokenizer(folder)


def decoder(**more):
    return {
        "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64, **more,
    }  # fmt: skip


def qwen3(folder):
    config = transformers.Qwen3Config(**decoder(head_dim=8))
    save(folder, "Qwen3ForCausalLM", config)
    save_tokenizer(folder, side="left", end=True)


def wavlm(folder):
    config = transformers.WavLMConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_kernel=(10, 8), conv_stride=(5, 4), feat_extract_norm="layer",
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, do_stable_layer_norm=True,
    )  # fmt: skip
    save(folder, "WavLMModel", config)
    transformers.Wav2Vec2FeatureExtractor(
        do_normalize=True, return_attention_mask=True
    ).save_pretrained(folder)


def sentence(folder):
    """Saves BERT with sentence-transformers files that pool by the maximum over tokens."""
    folder = pathlib.Path(folder)
    bert(folder)
    library = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{library}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{library}.Pooling"},
    ]
    pooling = {
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": True,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
