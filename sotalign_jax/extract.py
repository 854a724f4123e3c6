r"""Embeds the pictures, texts or sounds of a dataset with an encoder.

    python -m sotalign_jax.extract --encoder=efficientnet-lite2 --data=folder --root=pictures \
        --workdir=embeddings/image
    python -m sotalign_jax.extract --encoder=all-minilm-l6-v2 --data=folder --root=pictures \
        --captions=captions.csv --workdir=embeddings/text

Running an interrupted command again resumes it, and after items were added, changed or removed, it
embeds only new and changed ones. Several processes, started by torchrun or srun,
divide the items:

    torchrun --nproc_per_node=8 -m sotalign_jax.extract ...
"""

import os
from typing import Any

import jax

from sotalign_jax.search import cli, datasets, encoders, extraction, model_flags, shards
from sotalign_jax.search.cli import flags, path_flag

_ENCODER = flags.DEFINE_string("encoder", None, "Name of the encoder, see above.", required=True)
_LOADING = (
    flags.DEFINE_string("weights", None, "Folder with a copy of the encoder's repository."),
    flags.DEFINE_string("revision", None, "Revision of the encoder's hub repository."),
    flags.DEFINE_string(
        "pool",
        None,
        "Pooling: cls+patch, authors, cls or average of images, mean, last or latent of texts.",
    ),
    flags.DEFINE_string("instruction", None, "Text in front of every text."),
    flags.DEFINE_integer(
        "max_length", None, "Maximum number of tokens per text. Longer texts are cut off.", 1
    ),
    flags.DEFINE_integer("batch_size", None, "Number of items per batch.", 1),
    flags.DEFINE_integer("batch_tokens", None, "Number of tokens per batch of texts.", 1),
    flags.DEFINE_enum(
        "compute_dtype",
        None,
        ["auto", "float32", "bfloat16", "float16"],
        "Dtype of the weights. The default is that of the checkpoint.",
    ),
    flags.DEFINE_bool("compile", False, "Compile the model with torch.compile."),
    model_flags.DEVICE,
    model_flags.TRUST,
)
_DATA = flags.DEFINE_string("data", None, "Name of the dataset, see above.", required=True)
_ROOT = path_flag("root", None, "The dataset's folder, for tfds: that of all prepared ones.")
_SPLIT = flags.DEFINE_string(
    "split", None, "Split of the dataset. The default is the one that the paper uses."
)
_COLUMN = flags.DEFINE_string("column", None, "Column to embed (hf:, tfds:, webdataset).")
_STREAMING = flags.DEFINE_bool("streaming", False, "Read rows of hf: without storing them.")
_EXTRACTION = (
    flags.DEFINE_integer("limit", None, "Number of items. The default is all.", 1),
    flags.DEFINE_enum(
        "dtype", "float16", ["float16", "float32"], "Dtype of the stored embeddings."
    ),
    flags.DEFINE_integer("shard_size", 4096, "Number of items between two saves.", 1),
    flags.DEFINE_integer("workers", 4, "Number of threads that read files.", 1),
    flags.DEFINE_integer(
        "processes",
        0,
        "Number of processes that read pictures and sounds in place of the threads.",
        0,
    ),
)
for _name in ("workdir", "device", "trust_remote_code", "captions"):
    flags.declare_key_flag(_name)


def main() -> None:
    """Embeds a dataset and prints the path of the embeddings."""
    root, out, captions = _ROOT.value, cli.workdir(), model_flags.CAPTIONS.value
    source = datasets.open_dataset(
        _DATA.value,
        root,
        split=_SPLIT.value,
        captions=captions,
        column=_COLUMN.value,
        streaming=_STREAMING.value,
    )
    loading: dict[str, Any] = {flag.name: flag.value for flag in _LOADING}
    here, local = shards.process(os.environ)
    if here.world > 1 and loading["device"] in (None, "cuda"):
        loading["device"] = encoders.fastest(local)
    encoder = encoders.load(_ENCODER.value, **loading)
    # Stored in the metadata: a resumed extraction must describe the same data.
    data = {"name": _DATA.value, "root": None if root is None else str(root), "split": _SPLIT.value}
    data["captions"] = None if captions is None else str(captions)
    if _COLUMN.value is not None:
        data["column"] = _COLUMN.value
    options: dict[str, Any] = {flag.name: flag.value for flag in _EXTRACTION}
    metadata = extraction.extract(source, encoder, out, data=data, process=here, **options)
    if metadata is None:
        print(f"process {here.rank + 1} of {here.world} is done; others finish {out}")
        return
    count, width = metadata["shape"]
    print(f"{count} embeddings of width {width} are in {out / shards.EMBEDDINGS}")
    if metadata["skipped"]:
        print(f"{metadata['skipped']} items were skipped; see {out / shards.SKIPPED}")


if __name__ == "__main__":
    # JAX computes nothing here, and would reserve most of the GPU's memory, which torch needs.
    jax.config.update("jax_platforms", "cpu")
    cli.run(main, choices={"encoders": tuple(encoders.NAMES), "data": datasets.NAMES})
