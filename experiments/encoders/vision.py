"""Pictures through transformers: DINOv2, DINOv3, ResNet-50, and any other by name."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.encoders import base, pooling


class VisionEncoder:
    """A transformers vision model with its own image processor."""

    modality = "image"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        self._model = base.load_model(options)
        with base.loading(options):
            self._processor = base.require("transformers").AutoImageProcessor.from_pretrained(
                **options.repository()
            )

    def describe(self) -> dict[str, Any]:
        size = {key: value for key, value in dict(self._processor.size).items() if value}
        return base.describe(self._options, self.modality, self._model, size=size)

    def prepare(self, content: Any) -> np.ndarray:
        """Pixels [3, h, w] as the model was trained on them."""
        batch = self._processor(images=base.on_white(content), return_tensors="np")
        pixels: np.ndarray = batch["pixel_values"][0]
        return pixels

    def embed(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        torch = base.require("torch")
        pixels = torch.from_numpy(np.stack(batch)).to(self._model.device, self._model.dtype)
        with torch.inference_mode():
            output = self._model(pixel_values=pixels)
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
