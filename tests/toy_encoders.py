"""Toy encoders, and a program that extracts with one and kills itself."""

import os
import pathlib

import numpy as np

from sotalign_jax.search import encoders

WIDTH = 64


class Toy:
    """Encodes tiny pictures or letters with a random matrix. Counts prepared and embedded items."""

    def __init__(self, modality="image", *, name="toy", scale=1.0, batch_size=4):
        self.modality, self.batch_size = modality, batch_size
        self._name, self._scale = name, scale
        self._weights = np.random.default_rng(0).normal(size=(48, WIDTH))
        self.prepared, self.embedded, self.most_waiting = 0, 0, 0

    def describe(self):
        return {"name": self._name, "revision": "1", "modality": self.modality, "pooling": "none"}

    def prepare(self, content):
        self.prepared += 1
        self.most_waiting = max(self.most_waiting, self.prepared - self.embedded)
        return content if self.modality == "text" else np.asarray(_small(content), float).ravel()

    def unknown(self, text):
        letters = [letter for letter in text if letter.isalpha()]
        return sum(not letter.isascii() for letter in letters) / max(len(letters), 1)

    def split(self, contents):
        lengths = list(map(len, contents)) if self.modality == "text" else None
        return encoders.split(len(contents), lengths, self.batch_size, None)

    def start(self, batch):
        rows = self.embed(batch)
        return lambda: rows

    def embed(self, batch):
        self.embedded += len(batch)
        if self.modality == "text":
            batch = [np.bincount([ord(c) % 48 for c in text], minlength=48) for text in batch]
        features = np.stack(batch) @ self._weights
        return self._scale * features / np.linalg.norm(features, axis=1, keepdims=True)


class Doomed(Toy):
    """Sends a signal to its own process at item number `at`, counted from 1."""

    def __init__(self, sign, at):
        super().__init__(batch_size=1)
        self._sign, self._at = sign, at

    def embed(self, batch):
        if self.embedded + 1 == self._at:
            os.kill(os.getpid(), self._sign)
        return super().embed(batch)


def _small(image):
    return image.convert("RGB").resize((4, 4))


def _run():
    from sotalign_jax.search import datasets, extraction, shards

    extraction.extract(
        datasets.open_dataset("folder", pathlib.Path(_ROOT.value)),
        Doomed(_SIGN.value, _AT.value),
        pathlib.Path(_OUT.value),
        data={"root": "pictures"},
        shard_size=6,
        workers=2,
        process=shards.process(os.environ)[0],
    )


if __name__ == "__main__":
    from absl import flags

    from sotalign_jax.search import cli

    _ROOT = flags.DEFINE_string("root", None, "Folder of pictures.")
    _OUT = flags.DEFINE_string("out", None, "Folder for embeddings.")
    _SIGN = flags.DEFINE_integer("sign", 0, "Signal to send to itself.")
    _AT = flags.DEFINE_integer("at", 0, "At which item.")
    cli.run(_run)
