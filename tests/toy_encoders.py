"""Encoders of a few lines, and a program that extracts with one, to be killed."""

import pathlib
import sys

import numpy as np

WIDTH = 64


class Toy:
    """Random features of tiny pictures or of letters; remembers how much was prepared ahead."""

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

    def embed(self, batch):
        self.embedded += len(batch)
        if self.modality == "text":
            batch = [np.bincount([ord(c) % 48 for c in text], minlength=48) for text in batch]
        features = np.stack(batch) @ self._weights
        return self._scale * features / np.linalg.norm(features, axis=1, keepdims=True)


class Slow(Toy):
    """One item at a time, some milliseconds each: time to be killed in."""

    def __init__(self):
        super().__init__(batch_size=1)
        self._work = np.random.default_rng(1).normal(size=(400, 400))

    def embed(self, batch):
        np.linalg.svd(self._work, compute_uv=False)
        return super().embed(batch)


def _small(image):
    return image.convert("RGB").resize((4, 4))


def main():
    """Extracts the first folder into the second, in shards of so many."""
    from experiments import datasets, extract

    root, out, shard_size = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    source = datasets.open_dataset("folder", root)
    extract.run(source, Slow(), out, data={"root": "pictures"}, shard_size=shard_size, workers=2)


if __name__ == "__main__":
    from experiments import cli

    cli.guarded(main, resume="--out")
