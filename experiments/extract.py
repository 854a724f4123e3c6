r"""Embeds a dataset: python -m experiments.extract --encoder=NAME --data=NAME --root=DIR --out=DIR.

    python -m experiments.extract --encoder=efficientnet-lite2 --data=folder --root=pictures \
        --out=embeddings/image
    python -m experiments.extract --encoder=all-minilm-l6-v2 --data=folder --root=pictures \
        --captions=captions.csv --out=embeddings/text

The encoder decides whether a dataset's pictures, texts or sounds are embedded. A run that was
interrupted goes on where it stopped when it is started again with the same options.
"""

import pathlib
from typing import Any

from absl import app, flags

from experiments import cli, datasets, encoders, extraction
from experiments.datasets import Source
from experiments.extraction import Encoder
from sotalign_jax import checks

_ENCODER = flags.DEFINE_string(
    "encoder",
    None,
    f"One of {', '.join(encoders.ENCODERS)}; or hf-image:NAME, hf-text:NAME, hf-audio:NAME (with "
    "--pool), st:NAME for any model of the Hugging Face hub or a local folder.",
)
_WEIGHTS = flags.DEFINE_string("weights", None, "Folder with a copy of the encoder's repository.")
_REVISION = flags.DEFINE_string("revision", None, "Revision of the encoder's hub repository.")
_POOL = flags.DEFINE_string("pool", None, "Pooling, such as cls+patch, authors, mean, last.")
_MAX_LENGTH = flags.DEFINE_integer("max_length", None, "Tokens of a text that are read.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Items embedded at once.", lower_bound=1)
_DEVICE = flags.DEFINE_string("device", None, "cpu, cuda, ...; the fastest there is by default.")
_TRUST = flags.DEFINE_bool("trust_remote_code", False, "Run code that comes with the weights.")
_DATA = flags.DEFINE_string(
    "data", None, f"One of {', '.join(datasets.DATASETS)}, or tfds:NAME (--root is its data_dir)."
)
_ROOT = flags.DEFINE_string("root", None, "The dataset's folder.")
_SPLIT = flags.DEFINE_string("split", None, "Its split; by default the one that is evaluated on.")
_CAPTIONS = flags.DEFINE_string("captions", None, "CSV or JSONL file of captions.")
_LIMIT = flags.DEFINE_integer("limit", None, "Only the first so many items.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Folder for the embeddings.")
_DTYPE = flags.DEFINE_string("dtype", "float16", "Stored dtype, float16 or float32.")
_SHARD_SIZE = flags.DEFINE_integer("shard_size", 4096, "Items between two saves.")
_WORKERS = flags.DEFINE_integer("workers", 4, "Threads that read files.", lower_bound=1)


def run(
    source: Source,
    encoder: Encoder,
    out: pathlib.Path,
    *,
    data: dict[str, Any],
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Embeds what `encoder` can read of `source`; returns the metadata."""
    if encoder.modality not in source.items:
        raise checks.InputError(
            f"encoder: {encoder.describe()['name']} needs {encoder.modality} but the dataset has "
            f"{' and '.join(source.items)}; choose another encoder"
        )
    items = extraction.first_items(source.items[encoder.modality], limit)
    if source.classes is not None:
        data = {**data, "classes": list(source.classes)}
    return extraction.extract(items, encoder, out, data=data, **options)


def _main(argv: list[str]) -> None:
    del argv
    root = cli.folder("root", _ROOT.value)
    name, out = cli.required("data", _DATA.value), cli.folder("out", _OUT.value)
    captions = None if _CAPTIONS.value is None else cli.folder("captions", _CAPTIONS.value)
    source = datasets.open_dataset(name, root, split=_SPLIT.value, captions=captions)
    encoder = encoders.load(
        cli.required("encoder", _ENCODER.value),
        weights=_WEIGHTS.value,
        pool=_POOL.value,
        revision=_REVISION.value,
        max_length=_MAX_LENGTH.value,
        batch_size=_BATCH_SIZE.value,
        device=_DEVICE.value,
        trust_remote_code=_TRUST.value,
    )
    metadata = run(
        source,
        encoder,
        out,
        data={
            "name": name,
            "root": str(root),
            "split": _SPLIT.value,
            "captions": _CAPTIONS.value,
            "limit": _LIMIT.value,
        },
        limit=_LIMIT.value,
        dtype=_DTYPE.value,
        shard_size=_SHARD_SIZE.value,
        workers=_WORKERS.value,
    )
    count, width = metadata["shape"]
    print(f"{count} embeddings of width {width} are in {out / extraction.EMBEDDINGS}")
    if metadata["skipped"]:
        print(f"{metadata['skipped']} items were skipped: see {out / extraction.SKIPPED}")


if __name__ == "__main__":
    app.run(cli.guarded(_main, resume="--out"), flags_parser=cli.parse)
