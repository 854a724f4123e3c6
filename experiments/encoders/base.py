"""What the encoders share: options, weights and their identity, pictures on white."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.optional import require
from sotalign_jax import checks

POOLS = {
    "image": ("cls+patch", "authors", "cls", "average"),
    "text": ("mean", "last", "cls", "mean+l2", "encode"),
    "audio": ("mean",),
}


class Options(NamedTuple):
    """How an encoder is to be loaded.

    Attributes:
        name: what the user calls it.
        model: name on the Hugging Face hub, or a local folder.
        copy: a local copy of it to load from.
        pool: one of POOLS.
        revision: of the hub's repository; None takes the newest.
        max_length: tokens of a text that are read.
        batch_size: items embedded at once.
        device: "cpu", "cuda", ...; None takes what there is.
        remote_code: the model consists of code in its repository, which will be run.
    """

    name: str
    model: str
    copy: str | None
    pool: str
    revision: str | None = None
    max_length: int = 512
    batch_size: int = 32
    device: str | None = None
    remote_code: bool = False

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


def best_device(wanted: str | None) -> str:
    """The device asked for, or the fastest there is."""
    torch = require("torch")
    if wanted is not None:
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@contextlib.contextmanager
def loading(options: Options) -> Iterator[None]:
    """Says in one line why weights could not be loaded."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        line = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise checks.InputError(
            f"encoder: {options.name} cannot be loaded from {options.place!r} ({line}); "
            "pass --weights=FOLDER with a copy of it, or check the name and the connection"
        ) from error


def load_model(options: Options) -> Any:
    """A transformers model on its device, in the precision of its checkpoint, for inference."""
    transformers = require("transformers")
    transformers.utils.logging.disable_progress_bar()
    with loading(options):
        # The argument has had its short name since 4.56; NV-Embed's own code needs an older one.
        short = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
        precision = {"dtype" if short else "torch_dtype": "auto"}
        model = transformers.AutoModel.from_pretrained(**options.repository(), **precision)
    return model.to(best_device(options.device)).eval()


def describe(options: Options, modality: str, model: Any, **more: Any) -> dict[str, Any]:
    """What identifies the embeddings of a transformers model."""
    return {
        "name": options.name,
        "model": options.model,
        "revision": revision(options, getattr(model, "config", None)),
        "modality": modality,
        "pooling": options.pool,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        **more,
        "packages": versions("torch", "transformers"),
    }


def revision(options: Options, config: Any = None) -> str:
    """The hub's commit, or for a local folder the checksum of the weights."""
    folder = pathlib.Path(options.place)
    if folder.is_dir():
        return weights_checksum(
            *sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin"))
        )
    return getattr(config, "_commit_hash", None) or options.revision or "unknown"


@functools.cache  # they may have many gigabytes
def weights_checksum(*paths: str | os.PathLike[str]) -> str:
    """One checksum of several files of weights."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def on_white(image: Any) -> Any:
    """A picture in RGB; what is transparent becomes white, where PIL would show what is hidden."""
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = PIL.Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image)
        image = ground
    return image.convert("RGB")
