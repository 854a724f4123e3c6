"""Pictures through transformers: DINOv2, DINOv3, ResNet-50, and any other by name."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.encoders import base, pixels, pooling
from experiments.optional import require


class VisionEncoder:
    """A transformers vision model, with the preparation that its repository asks for."""

    modality = "image"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        self._model = base.load_model(options)
        auto = require("transformers.models.auto.image_processing_auto")
        with base.loading(options):
            config = auto.get_image_processor_config(options.place, revision=options.revision)
            self._preparation = pixels.preparation(config)

    def describe(self) -> dict[str, Any]:
        steps = self._preparation._asdict()
        return base.describe(self._options, self.modality, self._model, preparation=steps)

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, h, w] as the model was trained on them."""
        return self._preparation(content)

    def embed(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        torch = require("torch")
        inputs = torch.from_numpy(np.stack(batch)).to(self._model.device, self._model.dtype)
        with torch.inference_mode():
            output = self._model(pixel_values=inputs)
        embeddings: np.ndarray = self._pool(output).float().cpu().numpy()
        return embeddings

    def _pool(self, output: Any) -> Any:
        if self._options.pool == "average":  # of a convolutional network's last feature map
            return output.last_hidden_state.float().mean((2, 3))
        tokens = output.last_hidden_state.float()
        registers = getattr(self._model.config, "num_register_tokens", 0)
        if self._options.pool == "cls":
            return pooling.first(tokens)
        pool = pooling.authors if self._options.pool == "authors" else pooling.cls_patch
        return pool(tokens, registers)
