r"""Measures where an extraction spends its time, and what its batches gain.

    python -m benchmarks.extract --encoder=all-minilm-l6-v2
    python -m benchmarks.extract --encoder=efficientnet-lite2 --data=folder \
        --root=pictures

Texts are embedded in batches of 32 in their own order, in batches of 32 by their number of
characters, and by their tokens as `extract` does. The arms take turns, so that a busy
machine slows all of them down. Without --data, the texts are captions of photographs, one to eight
of them each.
"""

import contextlib
import pathlib
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tabulate
from absl import flags

from sotalign_jax import checks, data
from sotalign_jax.search import cli, datasets, encoders, reading, shards
from sotalign_jax.search.items import Item

ROUNDS = 2
"""Number of times that every arm is measured, after a first batch that is not."""


class Timed(NamedTuple):
    """Seconds of an arm, and the share of its tokens that are padding."""

    seconds: float
    padding: float


def mixed_captions(count: int) -> list[str]:
    """Returns texts of one to eight captions of photographs."""
    rng, captions = random.Random(0), list(data.photographs().caption)
    lengths = rng.choices([1, 1, 1, 2, 3, 5, 8], k=count)
    return [" ".join(rng.choices(captions, k=length)) for length in lengths]


def batches(encoder: Any, contents: Sequence[Any], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the batches of every arm, as numbers of items."""
    if not texts:
        return {"by number": encoder.split(contents)}
    characters = [len(text) for text in texts]
    return {
        "by number": encoders.split(len(texts), None, 32, None),
        "by characters": encoders.split(len(texts), characters, 32, None),
        "by tokens": encoder.split(contents),
    }


def measure(encoder: Any, contents: Sequence[Any], arms: dict[str, list[Any]]) -> dict[str, Timed]:
    """Embeds all items in the batches of every arm, in turn.

    Args:
        encoder: The encoder.
        contents: Prepared items.
        arms: Batches by arm.

    Returns:
        Fastest time and padding of every arm.
    """
    encoder.embed(list(contents[:2]))
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, groups in arms.items():
            begin = time.perf_counter()
            for group in groups:
                encoder.embed([contents[n] for n in group])
            found[name].append(time.perf_counter() - begin)
    lengths = [1 if encoder.length is None else encoder.length(one) for one in contents]
    padded = {
        name: sum(len(group) * max(lengths[n] for n in group) for group in groups)
        for name, groups in arms.items()
    }
    return {name: Timed(min(t), 1 - sum(lengths) / padded[name]) for name, t in found.items()}


def store(encoder: Any, read: Sequence[reading.Prepared]) -> float:
    """Returns the seconds that a shard of all items takes to reach the disk."""
    row = encoder.embed([read[0].content])[0].astype(np.float16)
    records = [
        shards.Record(str(n), "", one.origin, one.text, row, "") for n, one in enumerate(read)
    ]
    with tempfile.TemporaryDirectory() as folder:
        size = len(records)
        growing = shards.Files(pathlib.Path(folder), "float16", size, size, contextlib.nullcontext)
        begin = time.perf_counter()
        growing.add(0, records)
        return time.perf_counter() - begin


def main() -> None:
    """Prints items per second, padding, and the times of reading and embedding."""
    options: dict[str, Any] = {"device": _DEVICE.value, "compute_dtype": _DTYPE.value}
    encoder = encoders.load(_ENCODER.value, weights=_WEIGHTS.value, **options)
    if _DATA.value:
        source = datasets.open_dataset(_DATA.value, pathlib.Path(_ROOT.value or "."))
        listed = list(source.items[encoder.modality]())[: _ITEMS.value]
    elif encoder.modality == "text":
        listed = [Item(str(n), "", text) for n, text in enumerate(mixed_captions(_ITEMS.value))]
    else:
        raise checks.InputError(f"data is not set and {encoder.spec.name} embeds no texts; set it")
    begin = time.perf_counter()
    processes = 0 if encoder.modality == "text" else _PROCESSES.value
    workers = {"workers": _WORKERS.value, "processes": processes}
    with reading.Reader(encoder.modality, encoder.prepare, **workers) as reader:
        read = [one for one in reader.read(listed, encoder.batch_size) if not one.reason]
    reading_time = time.perf_counter() - begin
    contents = [one.content for one in read]
    texts = [one.text for one in read if one.text is not None]
    timed = measure(encoder, contents, batches(encoder, contents, texts))
    first = next(iter(timed.values()))
    table = [
        (name, len(read) / t.seconds, first.seconds / t.seconds, f"{100 * t.padding:.0f} %")
        for name, t in timed.items()
    ]
    times = {
        "reading and preparing, beside the encoder": reading_time,
        "embedding": min(t.seconds for t in timed.values()),
        "storing": store(encoder, read),
    }
    print(f"{len(read)} items of {encoder.spec.name} on {encoder.spec.device}")
    print(tabulate.tabulate([(k, t, len(read) / t) for k, t in times.items()],
                            ("step", "seconds", "items/s"), floatfmt=".3g"))  # fmt: skip
    if encoder.length is not None:
        mean = np.mean([encoder.length(one) for one in contents])
        print(f"mean length: {mean:.1f}")
    headers = ("batches", "items/s", "ratio", "padding")
    print(tabulate.tabulate(table, headers, floatfmt=".3g"))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leaves the GPU's memory to torch
    _ENCODER = flags.DEFINE_string("encoder", None, "Name of the encoder.", required=True)
    _WEIGHTS = flags.DEFINE_string("weights", None, "Folder with the encoder's repository.")
    _DEVICE = flags.DEFINE_string("device", None, "Torch device. The default is the fastest.")
    _DTYPE = flags.DEFINE_string("compute_dtype", None, "Dtype of the weights.")
    _DATA = flags.DEFINE_string("data", None, "Name of the dataset. The default is captions.")
    _ROOT = flags.DEFINE_string("root", None, "The dataset's folder.")
    _ITEMS = flags.DEFINE_integer("items", 1024, "Number of items.", 1)
    _WORKERS = flags.DEFINE_integer("workers", 4, "Number of threads that read files.", 1)
    _PROCESSES = flags.DEFINE_integer("processes", 0, "Processes in place of the threads.", 0)
    cli.run(main)
