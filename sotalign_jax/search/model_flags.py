"""Flags shared by the commands that search with a trained model."""

import pathlib
from typing import Any

from sotalign_jax import checks
from sotalign_jax.search import encoders, model
from sotalign_jax.search.cli import flags, path_flag

_MODEL = path_flag("model", None, "Folder of a finished run or saved aligner.")
IMAGES = path_flag("images", None, "Folder of pictures to search.")
_INDEX = path_flag(
    "index",
    None,
    "Extraction of the items, or folder to store embeddings in. The default is MODEL/search.",
)
TOP = flags.DEFINE_integer("top", 10, "Number of results.", 1)
CALIBRATED = flags.DEFINE_bool(
    "calibrated", None, "Correct scores for hubness. The default is the model's own choice."
)
_ENCODERS = [
    flags.DEFINE_string(f"{side}_{name}", None, text)
    for side in "xy"
    for name, text in (
        ("encoder", f"Encoder of side {side}. The default is the one used in training."),
        ("weights", "Folder with a copy of its repository."),
    )
]
CAPTIONS = path_flag(
    "captions",
    None,
    "CSV or JSONL file of captions. The default for a folder is a .txt file beside each picture.",
)
DEVICE = flags.DEFINE_string(
    "device",
    None,
    "Torch device, such as cpu or cuda, or auto to split a model between GPUs. The default is the "
    "fastest device.",
)
TRUST = flags.DEFINE_bool("trust_remote_code", False, "Run code that comes with the weights.")
_SHARED = [_MODEL, IMAGES, _INDEX, TOP, CALIBRATED, *_ENCODERS, DEVICE, TRUST]
flags.disclaim_key_flags()  # commands that use these flags list them with `declare`

CHOICES = {"encoders": tuple(encoders.NAMES)}


def declare() -> None:
    """Lists the shared flags in the --help of the calling module."""
    for flag in _SHARED:
        flags.declare_key_flag(flag.name)


def load(of: pathlib.Path) -> model.Model:
    """Loads the model of --model and indexes items for search.

    Args:
        of: Folder of pictures, or file of texts.

    Returns:
        The model, ready to search.

    Raises:
        InputError: --model is not set, or the model or its encoders cannot be loaded.
    """
    if _MODEL.value is None:
        raise checks.InputError("model is not set; pass --model=FOLDER")
    named: dict[str, Any] = {flag.name: flag.value for flag in (*_ENCODERS, DEVICE, TRUST)}
    return model.Model.load(_MODEL.value, **named).index(of, _INDEX.value)
