"""Datasets by name, each read from its own on-disk format."""

import csv
import functools
import itertools
import json
import pathlib
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import workdir
from experiments.extract import classification, items
from experiments.extract.items import Item, Source
from sotalign_jax import checks, files

# --- files with captions: folders, COCO, Flickr30k, LibriSpeech, SkyScript -----------------------

CAPTIONS = 5
"""Captions per picture that COCO's and Flickr30k's protocols score."""
FILE_COLUMNS = ("file", "file_name", "filename", "filepath", "image", "path")
CAPTION_COLUMNS = ("caption", "text", "title", "sentence")


class Captioned(NamedTuple):
    """A file, whose id is the group, and its captions with their ids."""

    id: str
    file: pathlib.Path
    captions: Sequence[tuple[str, str]]


def _captioned(
    captioned: Iterable[Captioned],
    modality: str = "image",
    read: Callable[[pathlib.Path], Any] = items.picture,
) -> Source:
    rows = list(captioned)

    def texts() -> Iterator[Item]:
        for row in rows:
            for identity, caption in row.captions:
                yield items.text_item(identity, caption, row.id)
            if not row.captions:
                yield items.bad_item(f"{row.id}#0", "has no caption", row.id)

    def contents() -> Iterator[Item]:
        return (items.file_item(row.id, row.file, row.id, read) for row in rows)

    return Source({modality: contents, "text": texts})


def folder(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """Pictures at any depth; a caption's group is its picture's path.

    With a captions file (columns `file` and `caption`, or other usual names; a row per caption)
    captions come from there, of the rows whose `split` column is the one asked for, if one is.
    Without it, a picture's caption is the first line of the .txt file beside it.
    """
    if captions is None:

        def sidecars() -> Iterator[Item]:
            for name in items.pictures_below(root):
                text = (root / name).with_suffix(".txt")
                yield items.file_item(f"{name}#0", text, name, _first_line)

        def pictures() -> Iterator[Item]:
            for name in items.pictures_below(root):
                yield items.file_item(name, root / name, name, items.oriented)

        return Source({"image": pictures, "text": sidecars})
    said: dict[str, list[str]] = {}
    for name, caption in read_captions(captions, split):
        said.setdefault(name, []).append(caption)
    if not split:  # which names its own pictures; otherwise all are embedded
        for name in items.pictures_below(root):
            said.setdefault(name, [])
    rows = (
        Captioned(name, root / name, [(f"{name}#{n}", text) for n, text in enumerate(texts)])
        for name, texts in said.items()
    )
    return _captioned(rows, read=items.oriented)


def _first_line(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()


def read_captions(
    path: pathlib.Path,
    split: str = "",
    columns: Sequence[Sequence[str]] = (FILE_COLUMNS, CAPTION_COLUMNS),
) -> list[tuple[str, str]]:
    """Files and captions of a CSV or JSONL file, in the first of the columns that it has.

    Raises:
        InputError: the file is missing, of another format, or lacks a column.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise checks.InputError(f"captions: {path} is neither .csv nor .jsonl; convert it")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            parsed = map(json.loads, filter(str.strip, file))
            records = iter(csv.DictReader(file)) if path.suffix == ".csv" else parsed
            first: dict[str, Any] | None = next(records, None)
            if first is None:
                raise checks.InputError(f"captions: {path} has no rows; write one per caption")
            if split and "split" not in first:
                raise checks.InputError(f"split: {split!r} asked but {path} has no column 'split'")
            name, caption = (_column(path, first, names) for names in columns)
            return [
                (str(record.get(name) or ""), str(record.get(caption) or ""))
                for record in itertools.chain([first], records)
                if not split or record.get("split") == split
            ]
    except checks.InputError:
        raise
    except (OSError, ValueError) as error:
        raise checks.InputError(f"captions: {path} cannot be read ({error})") from error


def _column(path: pathlib.Path, record: dict[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in record:
            return name
    has = ", ".join(map(str, record))
    raise checks.InputError(f"captions: {path} has the columns {has}; name one {names[0]!r}")


def coco(root: pathlib.Path, split: str) -> Source:
    """COCO captions: split val2017, train2017 or karpathy-train, -val, -test; five captions each.

    The 2017 splits need `annotations/captions_SPLIT.json` and the pictures in `SPLIT/`, the
    others `dataset_coco.json` and the pictures in `train2014/` and `val2014/`.
    """
    if split.startswith("karpathy-"):
        return _karpathy(
            items.find(root, "dataset_coco.json"),
            split.removeprefix("karpathy-"),
            lambda record: (str(record["cocoid"]), root / record["filepath"] / record["filename"]),
        )
    name = f"captions_{split}.json"
    table = workdir.read_json(items.find(root, f"annotations/{name}", name))
    texts: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for entry in table["annotations"]:
        texts[entry["image_id"]].append((str(entry["id"]), entry["caption"]))
    return _captioned(
        Captioned(str(one["id"]), root / split / one["file_name"], texts[one["id"]][:CAPTIONS])
        for one in sorted(table["images"], key=lambda one: one["id"])
    )


def flickr30k(root: pathlib.Path, split: str) -> Source:
    """Flickr30k in Karpathy's splits: `dataset_flickr30k.json` beside the folder of pictures."""
    table = items.find(root, "dataset_flickr30k.json")
    pictures = items.find(root, "flickr30k-images", "flickr30k_images", "images", "Images")
    return _karpathy(table, split, lambda r: (r["filename"], pictures / r["filename"]))


def _karpathy(
    table: pathlib.Path, split: str, place: Callable[[dict[str, Any]], tuple[str, pathlib.Path]]
) -> Source:
    checks.choice("split", split, ("train", "val", "test"))
    wanted = ("train", "restval") if split == "train" else (split,)  # what was left over, too
    return _captioned(
        Captioned(*place(r), [(str(s["sentid"]), s["raw"]) for s in r["sentences"][:CAPTIONS]])
        for r in workdir.read_json(table)["images"]
        if r["split"] in wanted
    )


def librispeech(root: pathlib.Path, split: str) -> Source:
    """LibriSpeech: SPLIT/SPEAKER/CHAPTER/ID.flac with transcripts in *.trans.txt."""
    place = items.find(root, split, f"LibriSpeech/{split}")

    def utterances() -> Iterator[Captioned]:
        for path in sorted(place.glob("*/*/*.trans.txt")):
            for line in items.lines(path):
                name, _, text = line.partition(" ")
                yield Captioned(name, path.with_name(f"{name}.flac"), [(name, text)])

    return _captioned(utterances(), "audio", items.sound)


SKYSCRIPT = {
    "train": "SkyScript_train_top30pct_filtered_by_CLIP_openai.csv",
    "train50": "SkyScript_train_top50pct_filtered_by_CLIP_openai.csv",
    "val": "SkyScript_val_5K_filtered_by_CLIP_openai.csv",
    "test": "SkyScript_test_30K_filtered_by_CLIP_openai.csv",
}


def skyscript(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """SkyScript: a CSV per split (or one given as captions) and pictures in images2/, ..."""
    if captions is None:
        checks.choice("split", split, tuple(SKYSCRIPT))
        captions = items.find(root, SKYSCRIPT[split], f"dataframe/{SKYSCRIPT[split]}")
    rows = read_captions(captions, columns=(("filepath",), ("title_multi_objects",)))
    return _captioned(Captioned(name, root / name, [(name, title)]) for name, title in rows)


# --- tar shards in the webdataset layout, as CC3M and CC12M are distributed -----------------------


class Member(NamedTuple):
    """A file inside a tar, which is read without touching the rest of the tar."""

    key: str
    suffix: str
    read: Callable[[], bytes]


def webdataset(root: pathlib.Path, split: str) -> Source:
    """Uncompressed .tar files; consecutive members `KEY.jpg`, `KEY.txt`, `KEY.json` are a sample.

    The caption is the .txt, or the "caption" of the .json. A split selects the tars that have it
    in their name. Ids are TAR/KEY, for keys often start anew in every tar.
    """
    tars = sorted(root.glob("*.tar")) if root.is_dir() else [root]
    tars = [tar for tar in tars if split in tar.name]
    if not tars:
        raise checks.InputError(f"root: {root} holds no .tar with {split!r} in its name")

    def samples(pick: Callable[[list[Member]], Any]) -> Iterator[Item]:
        for tar in tars:
            for key, members in itertools.groupby(_members(tar), key=lambda member: member.key):
                load = functools.partial(pick, list(members))
                yield Item(f"{tar.stem}/{key}", load, f"{tar.stem}/{key}", tar)
            with tar.open("rb") as file:
                file.seek(max(tar.stat().st_size - 1024, 0))
                if file.read() != bytes(1024):  # the two empty blocks that end a tar
                    reason = f"{tar.name} is cut short; fetch it again"
                    yield items.bad_item(f"{tar.stem}/", reason, "")

    return Source({"image": lambda: samples(_picture), "text": lambda: samples(_caption)})


def _members(tar: pathlib.Path) -> Iterator[Member]:
    """Members in order; only headers are read, as far as they can be."""
    try:
        with tarfile.open(tar, "r:") as archive:
            for entry in archive:
                archive.members = []  # type: ignore[attr-defined]  # or every header is kept
                if entry.isfile():
                    parent, slash, name = entry.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    read = functools.partial(_read, tar, entry.offset_data, entry.size)
                    yield Member(f"{parent}{slash}{key}", f".{suffix.lower()}", read)
    except tarfile.ReadError:
        return


def _read(tar: pathlib.Path, offset: int, size: int) -> bytes:
    with tar.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise EOFError(f"{tar.name} is cut short")
    return content


def _picture(members: list[Member]) -> Any:
    for member in members:
        if member.suffix.endswith(items.IMAGE_SUFFIXES):
            return items.picture(member.read())
    raise ValueError("has no picture")


def _caption(members: list[Member]) -> str:
    by_suffix = {member.suffix: member for member in members}
    if ".txt" in by_suffix:
        return by_suffix[".txt"].read().decode("utf-8")
    if ".json" in by_suffix and (caption := json.loads(by_suffix[".json"].read()).get("caption")):
        return str(caption)
    raise ValueError("has no caption")


# --- WikiText, Polyvore, TensorFlow Datasets ------------------------------------------------------


def wikitext(root: pathlib.Path, split: str) -> Source:
    """WikiText-103 or -2: a text per paragraph of wiki.SPLIT.raw (or .tokens), no headings."""
    split = {"val": "valid"}.get(split, split)
    path = items.find(root, f"wiki.{split}.raw", f"wiki.{split}.tokens")

    def paragraphs() -> Iterator[Item]:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(map(str.strip, file), 1):
                if text and not (text.startswith("= ") and text.endswith(" =")):
                    yield items.text_item(str(number), text, str(number))

    return Source({"text": paragraphs})


def polyvore(root: pathlib.Path, split: str) -> Source:
    """Polyvore items as parquet files with the columns image (bytes), text and item_ID."""
    tables = sorted([*root.glob("*.parquet"), *root.glob("data/*.parquet")])
    if not tables:
        raise checks.InputError(f"root: {root} holds no .parquet, nor does its data/")
    lock = threading.Lock()  # for one thread reads a row group, which is large

    def load(file: pathlib.Path, group: int, column: str, row: int) -> Any:
        with lock:
            value = _cells(file, group, column)[row].as_py()
        if value is None:
            raise ValueError("is empty")
        return items.picture(value["bytes"]) if column == "image" else str(value)

    def rows(column: str) -> Iterator[Item]:
        for file in tables:
            with items.require("pyarrow.parquet").ParquetFile(file) as table:
                for group in range(table.num_row_groups):
                    names = table.read_row_group(group, columns=["item_ID"])["item_ID"]
                    for row, name in enumerate(map(str, names.to_pylist())):
                        cell = functools.partial(load, file, group, column, row)
                        yield Item(name, cell, name, file)

    return Source({column: functools.partial(rows, column) for column in ("image", "text")})


@functools.lru_cache(maxsize=2)
def _cells(file: pathlib.Path, group: int, column: str) -> Any:
    with items.require("pyarrow.parquet").ParquetFile(file) as table:
        return table.read_row_group(group, columns=[column])[column]


def tfds(root: pathlib.Path, split: str, *, name: str) -> Source:
    """The first Image and Text feature of NAME; row n of one belongs to row n of the other.

    Datasets are read through random access, without TensorFlow. A ClassLabel `label` and known
    prompts make one a classification set.
    """
    records = files.open_tfds(name, split, folder=str(root))
    info = records.dataset_info
    known = dict(info.features.items())
    kinds = {"Text": "text", "Image": "image"}  # sounds cannot be had without TensorFlow
    features = {
        kinds[type(feature).__name__]: key
        for key, feature in reversed(known.items())
        if type(feature).__name__ in kinds
    }
    if not features:
        listed = ", ".join(known)
        raise checks.InputError(f"data: tfds:{name} has {listed}; none is an image or a text")

    def load(n: int, modality: str) -> Any:
        value = records[n][features[modality]]
        if modality == "image":
            return items.from_array(value)
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)

    def rows(modality: str, group: Callable[[int], str] = str) -> Iterator[Item]:
        made = pathlib.Path(info.data_dir) / "dataset_info.json"
        for n in range(len(records)):
            yield Item(str(n), functools.partial(load, n, modality), group(n), made)

    prompts = name.split("/")[0].split(":")[0]
    # TFDS names ImageNet's classes by synset and orders both as the published names do.
    published = {"imagenet2012": "imagenet1k", "oxford_flowers102": "flowers"}.get(prompts)
    prompts = published or prompts
    labelled = "image" in features and hasattr(known.get("label"), "names")
    if labelled and prompts in workdir.read_json(classification.TEMPLATES):
        names = classification.published_names(prompts) if published else known["label"].names
        return classification.source(
            prompts, names, lambda: rows("image", lambda n: str(int(records[n]["label"])))
        )
    return Source({modality: functools.partial(rows, modality) for modality in sorted(features)})


# --- by name ------------------------------------------------------------------------------------

DATASETS: dict[str, tuple[Callable[..., Source], str]] = {
    "folder": (folder, ""),
    "webdataset": (webdataset, ""),
    "coco": (coco, "val2017"),
    "flickr30k": (flickr30k, "test"),
    "imagenet": (classification.imagenet, "val"),
    "food101": (classification.food101, "test"),
    "cifar10": (classification.cifar10, "test"),
    "cifar100": (classification.cifar100, "test"),
    "dtd": (classification.dtd, "test1"),
    "flowers": (classification.flowers, "test"),
    "aircraft": (classification.aircraft, "test"),
    "librispeech": (librispeech, "test-clean"),
    "wikitext": (wikitext, "train"),
    "skyscript": (skyscript, "test"),
    "polyvore": (polyvore, ""),
}
"""How a dataset is opened, and the split that the paper evaluates on (or trains on)."""
NAMES = (*DATASETS, "tfds:NAME")


def open_dataset(
    name: str, root: pathlib.Path, *, split: str | None = None, captions: pathlib.Path | None = None
) -> Source:
    """Opens a dataset, `tfds:NAME` included, that lies in `root`.

    Raises:
        InputError: the name is unknown, or `root` does not hold what the dataset consists of.
    """
    options: dict[str, Any] = {} if captions is None else {"captions": captions}
    if name.startswith("tfds:"):
        reader: Callable[..., Source] = tfds
        usual, options["name"] = "test", name.removeprefix("tfds:")
    else:
        checks.choice("data", name, NAMES)
        reader, usual = DATASETS[name]
    if not root.exists():
        raise checks.InputError(f"root: {root} does not exist; pass the dataset's own folder")
    if captions is not None and name not in ("folder", "skyscript"):
        raise checks.InputError(f"captions: {name} has captions of its own; leave --captions out")
    return reader(root, usual if split is None else split, **options)


def captions(data: Mapping[str, Any], ids: Sequence[str]) -> list[str] | None:
    """The texts of some items of a dataset, as an extraction's metadata names it.

    None if it is not at hand, or too large to look through.
    """
    root = pathlib.Path(data["root"])
    if data["name"] not in ("folder", "coco", "flickr30k") or not root.exists():
        return None
    table = data["captions"] and pathlib.Path(data["captions"])
    source = open_dataset(data["name"], root, split=data["split"], captions=table)
    wanted = set(ids)
    found = {item.id: item.load() for item in source.items["text"]() if item.id in wanted}
    return [found.get(name, name) for name in ids]
