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

from experiments import cli, datasets, encoders, extraction
from experiments.datasets import Source
from experiments.extraction import Encoder
from sotalign_jax import checks


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


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    known = f"{', '.join(encoders.ENCODERS)}; or hf-image:NAME, hf-text:NAME, hf-audio:NAME (with"
    add("--encoder", required=True, help=f"{known} --pool), st:NAME for any model of the hub")
    add("--weights", help="folder with a copy of the encoder's repository")
    add("--revision", help="revision of the encoder's hub repository")
    add("--pool", help="pooling, such as cls+patch, authors, mean, last")
    add("--max_length", type=cli.positive, help="tokens of a text that are read")
    add("--batch_size", type=cli.positive, help="items embedded at once")
    add("--device", help="cpu, cuda, ...; the fastest there is by default")
    add("--trust_remote_code", action="store_true", help="run code that comes with the weights")
    add("--data", required=True, help=f"{', '.join(datasets.DATASETS)}, or tfds:NAME")
    add("--root", required=True, type=cli.path, help="the dataset's folder")
    add("--split", help="its split; by default the one that is evaluated on")
    add("--captions", type=cli.path, help="CSV or JSONL file of captions")
    add("--limit", type=cli.positive, help="only the first so many items")
    add("--out", required=True, type=cli.path, help="folder for the embeddings")
    add("--dtype", default="float16", help="stored dtype, float16 or float32")
    add("--shard_size", default=4096, type=cli.positive, help="items between two saves")
    add("--workers", default=4, type=cli.positive, help="threads that read files")
    return parser


def _main() -> None:
    flags = _parser().parse_args()
    source = datasets.open_dataset(
        flags.data, flags.root, split=flags.split, captions=flags.captions
    )
    encoder = encoders.load(
        flags.encoder,
        weights=flags.weights,
        pool=flags.pool,
        revision=flags.revision,
        max_length=flags.max_length,
        batch_size=flags.batch_size,
        device=flags.device,
        trust_remote_code=flags.trust_remote_code,
    )
    data = {
        "name": flags.data,
        "root": str(flags.root),
        "split": flags.split,
        "captions": None if flags.captions is None else str(flags.captions),
        "limit": flags.limit,
    }
    options = {name: getattr(flags, name) for name in ("limit", "dtype", "shard_size", "workers")}
    metadata = run(source, encoder, flags.out, data=data, **options)
    count, width = metadata["shape"]
    print(f"{count} embeddings of width {width} are in {flags.out / extraction.EMBEDDINGS}")
    if metadata["skipped"]:
        print(f"{metadata['skipped']} items were skipped: see {flags.out / extraction.SKIPPED}")


if __name__ == "__main__":
    cli.guarded(_main, resume="--out")
