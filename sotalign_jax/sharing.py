"""Aligners on the Hugging Face Hub, with a model card.

`Aligner.push_to_hub` and `Aligner.from_pretrained` call this module. It needs huggingface_hub.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sotalign_jax import checks, evaluation

_LIBRARY = "sotalign-jax"


def card(
    repo_id: str,
    info: Mapping[str, Any],
    *,
    calibrated: bool,
    report: evaluation.Report | None = None,
    encoders: Sequence[str] = (),
    data: str | None = None,
    licence: str | None = None,
) -> str:
    """Writes the model card of an aligner, in Markdown with metadata in YAML.

    Args:
        repo_id: Name of the repository, such as "me/name".
        info: Options of the training run, see `Aligner.info`.
        calibrated: True if the aligner's scores are calibrated by default.
        report: Recall on rows that were not trained on. Without one the card says that none was
            measured.
        encoders: Names of the encoders of x and of y. By default those in `info`, if known.
        data: Description of the training data.
        licence: Licence of the heads, such as "apache-2.0".

    Returns:
        The text.

    Example:
        >>> text = card("me/name", {"data": {"pairs_x": [500, 512]}}, calibrated=False)
        >>> "500 pairs" in text and "No recall was measured" in text
        True
    """
    lines = ["---", f"library_name: {_LIBRARY}", "tags:", "- sotalign-jax", "- embeddings"]
    lines += [f"license: {licence}"] if licence else []
    lines += ["---", "", f"# {repo_id}", "", _described(info, encoders, data), ""]
    lines += ["```python", "import sotalign_jax as sota", ""]
    lines += [f'aligner = sota.Aligner.from_pretrained("{repo_id}")']
    lines += [
        "scores, rows = aligner.search(x, y, k=10)   # embeddings of these encoders",
        "```",
        "",
    ]
    scores = "calibrated scores, corrected for hubs" if calibrated else "plain cosines"
    lines += ["## Recall", "", f"Searches use {scores}.", ""]
    if report is None:
        lines += ["No recall was measured on rows that were not trained on.", ""]
    else:
        lines += _recalls(report)
    lines += ["## Licence", ""]
    named = f"The heads: {licence}." if licence else "The licence of the heads was not stated."
    lines += [f"{named} Those of the encoders and of the data apply as well.", ""]
    return "\n".join(lines)


def _described(info: Mapping[str, Any], encoders: Sequence[str], data: str | None) -> str:
    """Describes encoders, data and training in a paragraph."""
    shapes = info.get("data", {})
    # Models that were trained on extracted files know their encoders.
    known = info.get("encoders") or {}
    encoders = encoders or [known[side]["name"] for side in "xy" if "name" in known.get(side, {})]
    sentences = ["Heads that map the embeddings of two frozen encoders into one space."]
    if encoders:
        sentences.append(f"The encoders are {' and '.join(encoders)}.")
    else:
        sentences.append("The encoders were not stated.")
    if data:
        sentences.append(f"The data: {data.rstrip('.')}.")
    if shapes.get("pairs_x"):
        pools = [(shapes.get(f"pool_{side}") or [0])[0] for side in "xy"]
        text = f"Trained on {shapes['pairs_x'][0]:,} pairs"
        sentences.append(f"{text}, and {pools[0]:,} and {pools[1]:,} unpaired rows.")
    if info.get("method"):
        sentences.append(f"Method: {info['method']}, teacher: {info.get('teacher')}.")
    return " ".join(sentences)


def _recalls(report: evaluation.Report) -> list[str]:
    """Returns the lines of a table of recalls with intervals and chance."""
    lines = [
        f"Recall in percent between {report.rows_x:,} rows of x and {report.rows_y:,} rows of y "
        "that were not trained on.",
        "",
        "| | recall | 95 % interval | chance |",
        "|:--|--:|--:|--:|",
    ]
    for name, found in report.recalls.items():
        if name.startswith("calibrated/") == report.calibrated:
            label = name.removeprefix("calibrated/").replace("_to_", " to ").replace("/", ", ")
            interval = f"{found.low:.1f} to {found.high:.1f}"
            lines.append(f"| {label} | {found.value:.1f} | {interval} | {found.chance:.2f} |")
    return [*lines, ""]


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    text: str,
    *,
    private: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Uploads the folder of an aligner to the Hub.

    Args:
        folder: A folder that `Aligner.save` wrote. The card is added to it.
        repo_id: Name of the repository, which is created if necessary.
        text: The model card.
        private: True creates a private repository.
        token: Access token. By default that of `hf auth login`.
        endpoint: Address of the Hub.

    Returns:
        Address of the repository.

    Raises:
        InputError: The Hub refuses the upload, or cannot be reached.
    """
    library = checks.require("huggingface_hub", extra="hub")
    (pathlib.Path(folder) / "README.md").write_text(text, encoding="utf-8")
    api = library.HfApi(endpoint=endpoint, token=token, library_name=_LIBRARY)
    try:
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload an aligner of sotalign-jax"
        )
    # The library raises errors of several bases: of HTTP, of the network, and of bad names.
    except Exception as error:
        remedy = "check its name, your access token and the network"
        raise checks.InputError(
            f"repo_id {repo_id} cannot be written ({checks.first_line(error)}); {remedy}"
        ) from error
    return str(made)


def fetch(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
) -> pathlib.Path:
    """Downloads the files of an aligner from the Hub.

    Args:
        repo_id: Name of the repository.
        revision: Branch, tag or commit. By default "main".
        token: Access token. By default that of `hf auth login`.
        cache_dir: Folder of the downloads. By default that of huggingface_hub.
        endpoint: Address of the Hub.

    Returns:
        The folder.

    Raises:
        InputError: There is no such repository, or the Hub cannot be reached.
    """
    library = checks.require("huggingface_hub", extra="hub")
    try:
        found = library.snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            endpoint=endpoint,
            library_name=_LIBRARY,
            # Not everything that a repository may hold.
            allow_patterns=["*.json", "*.safetensors", "README.md"],
        )
    except Exception as error:
        remedy = "check its name, your access token and the network, or pass a folder"
        raise checks.InputError(
            f"repo_id {repo_id} cannot be read ({checks.first_line(error)}); {remedy}"
        ) from error
    return pathlib.Path(found)
