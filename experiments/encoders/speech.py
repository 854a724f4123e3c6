"""Speech through transformers: WavLM and its like."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.datasets import Sound
from experiments.encoders import base, pooling
from experiments.optional import require


class SpeechEncoder:
    """A transformers model of waveforms: mean over the frames of its last layer."""

    modality = "audio"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        self._model = base.load_model(options)
        with base.loading(options):
            self._extractor = require("transformers").AutoFeatureExtractor.from_pretrained(
                **options.repository()
            )

    def describe(self) -> dict[str, Any]:
        rate = self._extractor.sampling_rate
        return base.describe(self._options, self.modality, self._model, sampling_rate=rate)

    def prepare(self, content: Sound) -> np.ndarray:
        """The waveform at the model's rate."""
        rate = self._extractor.sampling_rate
        if content.rate == rate:
            return content.wave
        import scipy.signal

        resampled: np.ndarray = scipy.signal.resample_poly(content.wave, rate, content.rate)
        return resampled.astype(np.float32)

    def embed(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        torch = require("torch")
        inputs = self._extractor(
            list(batch),
            sampling_rate=self._extractor.sampling_rate,
            padding=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self._model.device)
        waves = inputs["input_values"].to(self._model.dtype)
        with torch.inference_mode():
            mask = inputs["attention_mask"]
            frames = self._model(waves, attention_mask=mask).last_hidden_state.float()
            # A frame covers many samples: the model knows which frames hold any of a waveform.
            kept = self._model._get_feature_vector_attention_mask(frames.shape[1], mask)
            embeddings: np.ndarray = pooling.mean(frames, kept).cpu().numpy()
        return embeddings
