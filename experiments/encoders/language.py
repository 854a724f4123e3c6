"""Texts through transformers (BERT, Qwen3, Nemotron, NV-Embed, MiniLM) or sentence-transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.encoders import base, pooling
from experiments.optional import require


class TextEncoder:
    """A transformers language model and its tokenizer; no instruction is put before a text."""

    modality = "text"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        self._model = base.load_model(options)
        with base.loading(options):
            self._tokenizer = require("transformers").AutoTokenizer.from_pretrained(
                **options.repository()
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    def describe(self) -> dict[str, Any]:
        length = self._options.max_length
        return base.describe(self._options, self.modality, self._model, max_length=length)

    def prepare(self, content: str) -> str:
        return content

    def embed(self, batch: Sequence[str]) -> np.ndarray:
        torch = require("torch")
        with torch.inference_mode():
            embeddings: np.ndarray = self._embed(list(batch)).float().cpu().numpy()
        return embeddings

    def _embed(self, texts: list[str]) -> Any:
        length, pool = self._options.max_length, self._options.pool
        if pool == "encode":  # the model's own, as NV-Embed's latent attention
            return self._model.encode(texts, instruction="", max_length=length)
        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self._model.device)
        tokens, mask = self._model(**inputs).last_hidden_state.float(), inputs["attention_mask"]
        if pool == "cls":
            return pooling.first(tokens)
        if pool == "last":
            return pooling.last(tokens, mask)
        rows = pooling.mean(tokens, mask)
        return rows / rows.norm(dim=1, keepdim=True) if pool == "mean+l2" else rows


class SentenceEncoder:
    """A sentence-transformers model, pooled as its own modules say."""

    modality = "text"

    def __init__(self, options: base.Options) -> None:
        self._options, self.batch_size = options, options.batch_size
        library = require("sentence_transformers")
        with base.loading(options):
            self._model = library.SentenceTransformer(
                options.place,
                revision=options.revision,
                trust_remote_code=options.remote_code,
                device=base.best_device(options.device),
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": self._options.name,
            "model": self._options.model,
            "revision": base.revision(self._options),
            "modality": self.modality,
            "pooling": [type(module).__name__ for module in self._model],
            "max_length": self._model.get_max_seq_length(),
            "packages": base.versions("torch", "transformers", "sentence-transformers"),
        }

    def prepare(self, content: str) -> str:
        return content

    def embed(self, batch: Sequence[str]) -> np.ndarray:
        embeddings: np.ndarray = self._model.encode(
            list(batch), batch_size=len(batch), convert_to_numpy=True, show_progress_bar=False
        )
        return embeddings
