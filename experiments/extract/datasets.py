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

# --- a folder of pictures -----------------------------------------------------------------------

FILE_COLUMNS = ("file", "file_name", "filename", "filepath", "image", "path")
CAPTION_COLUMNS = ("caption", "text", "title", "sentence")


class Caption(NamedTuple):
    """One row of a captions file."""

    file: str
    caption: str


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
                yield items.file_item(f"{name}#0", text, str(name), _first_line)

        return Source(
            {"image": lambda: _turned(root, items.pictures_below(root)), "text": sidecars}
        )
    rows = read_captions(captions, split)
    # A split names its own pictures; otherwise those without a caption are embedded as well.
    also = [] if split else [str(name) for name in items.pictures_below(root)]

    def texts() -> Iterator[Item]:
        count: dict[str, int] = defaultdict(int)
        for row in rows:
            yield items.text_item(f"{row.file}#{count[row.file]}", row.caption, row.file)
            count[row.file] += 1
        for name in also:
            if name not in count:
                yield items.bad_item(f"{name}#0", "has no caption", name)

    names = dict.fromkeys([*(row.file for row in rows), *also])
    return Source({"image": lambda: _turned(root, names), "text": texts})


def read_captions(path: pathlib.Path, split: str = "") -> list[Caption]:
    """Rows of a CSV or JSONL file of captions.

    Raises:
        InputError: the file is missing, of another format, or lacks a column.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise checks.InputError(f"captions: {path} is neither .csv nor .jsonl; convert it")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records: list[dict[str, Any]]
            if path.suffix == ".csv":
                records = list(csv.DictReader(file))
            else:
                records = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise checks.InputError(f"captions: {path} cannot be read ({error})") from error
    if not records:
        raise checks.InputError(f"captions: {path} has no rows; write one per caption")
    name, caption = (_column(path, records[0], c) for c in (FILE_COLUMNS, CAPTION_COLUMNS))
    if split and "split" not in records[0]:
        raise checks.InputError(f"split: {split!r} asked but {path} has no column 'split'")
    return [
        Caption(str(record.get(name) or ""), str(record.get(caption) or ""))
        for record in records
        if not split or record.get("split") == split
    ]


def _column(path: pathlib.Path, record: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if name in record:
            return name
    raise checks.InputError(
        f"captions: {path} has the columns {', '.join(map(str, record))}; name one {names[0]!r}"
    )


def _turned(root: pathlib.Path, names: Iterable[pathlib.Path | str]) -> Iterator[Item]:
    for name in names:
        yield items.file_item(str(name), root / name, str(name), items.oriented)


def _first_line(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()


# --- tar shards in the webdataset layout, as CC3M and CC12M are distributed -----------------------


class Member(NamedTuple):
    """A file inside a tar: its suffix and where its bytes lie."""

    suffix: str
    tar: pathlib.Path
    offset: int
    size: int

    def read(self) -> bytes:
        """The file's bytes, without touching the rest of the tar."""
        with self.tar.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"{self.tar.name} is cut short")
        return content


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
            for key, members in itertools.groupby(_members(tar), key=lambda named: named[0]):
                load = functools.partial(pick, [member for _, member in members])
                yield Item(f"{tar.stem}/{key}", load, f"{tar.stem}/{key}", tar)
            if _cut_short(tar):
                reason = f"{tar.name} is cut short; fetch it again"
                yield items.bad_item(f"{tar.stem}/", reason, "")

    return Source({"image": lambda: samples(_picture), "text": lambda: samples(_caption)})


def _members(tar: pathlib.Path) -> Iterator[tuple[str, Member]]:
    """Keys and members in order; only headers are read."""
    try:
        with tarfile.open(tar, "r:") as archive:
            for entry in archive:
                archive.members = []  # type: ignore[attr-defined]  # or every header is kept
                if entry.isfile():
                    parent, _, name = entry.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    member = Member(f".{suffix.lower()}", tar, entry.offset_data, entry.size)
                    yield f"{parent}/{key}" if parent else key, member
    except tarfile.ReadError:
        return  # an item after those that could be read says so


def _cut_short(tar: pathlib.Path) -> bool:
    """Whether the two empty blocks that end a tar are missing."""
    with tar.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 1024, 0))
        return file.read() != bytes(1024)


def _picture(members: list[Member]) -> Any:
    for member in members:
        if member.suffix.endswith(items.IMAGE_SUFFIXES):
            return items.picture(member.read())
    raise ValueError("has no picture")


def _caption(members: list[Member]) -> str:
    by_suffix = {member.suffix: member for member in members}
    if ".txt" in by_suffix:
        return by_suffix[".txt"].read().decode("utf-8")
    if ".json" in by_suffix:
        caption = json.loads(by_suffix[".json"].read()).get("caption")
        if caption:
            return str(caption)
    raise ValueError("has no caption")


# --- several captions a picture: COCO (2017 and Karpathy's splits) and Flickr30k -----------------

CAPTIONS = 5
"""Captions per picture that COCO's and Flickr30k's protocols score."""
KARPATHY = {
    "train": ("train", "restval"),  # as usual, what Karpathy left over is trained on
    "val": ("val",),
    "test": ("test",),
}


class Captioned(NamedTuple):
    """A picture and its captions, with ids."""

    id: str
    file: pathlib.Path
    captions: list[tuple[str, str]]


def coco(root: pathlib.Path, split: str) -> Source:
    """COCO captions: split val2017, train2017 or karpathy-train, -val, -test; five captions each.

    The 2017 splits need `annotations/captions_SPLIT.json` and the pictures in `SPLIT/`, the
    others `dataset_coco.json` and the pictures in `train2014/` and `val2014/`.
    """
    if split.startswith("karpathy-"):
        records = _karpathy(root, "dataset_coco.json", split.removeprefix("karpathy-"))
        return _captioned(
            Captioned(str(r["cocoid"]), root / r["filepath"] / r["filename"], _sentences(r))
            for r in records
        )
    name = f"captions_{split}.json"
    table = workdir.read_json(items.find(root, f"annotations/{name}", name))
    texts: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for entry in table["annotations"]:
        texts[entry["image_id"]].append((str(entry["id"]), entry["caption"]))
    return _captioned(
        Captioned(str(entry["id"]), root / split / entry["file_name"], texts[entry["id"]])
        for entry in sorted(table["images"], key=lambda entry: entry["id"])
    )


def flickr30k(root: pathlib.Path, split: str) -> Source:
    """Flickr30k in Karpathy's splits: `dataset_flickr30k.json` beside the folder of pictures."""
    records = _karpathy(root, "dataset_flickr30k.json", split)
    pictures = items.find(root, "flickr30k-images", "flickr30k_images", "images", "Images")
    return _captioned(
        Captioned(r["filename"], pictures / r["filename"], _sentences(r)) for r in records
    )


def _karpathy(root: pathlib.Path, name: str, split: str) -> list[dict[str, Any]]:
    checks.choice("split", split, tuple(KARPATHY))
    records = workdir.read_json(items.find(root, name))["images"]
    return [record for record in records if record["split"] in KARPATHY[split]]


def _sentences(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(sentence["sentid"]), sentence["raw"]) for sentence in record["sentences"]]


def _captioned(records: Iterable[Captioned]) -> Source:
    table = list(records)

    def texts() -> Iterator[Item]:
        for record in table:
            for identity, caption in record.captions[:CAPTIONS]:
                yield items.text_item(identity, caption, record.id)
            if not record.captions:
                yield items.bad_item(f"{record.id}#0", "has no caption", record.id)

    def images() -> Iterator[Item]:
        return (items.file_item(record.id, record.file, record.id) for record in table)

    return Source({"image": images, "text": texts})


# --- LibriSpeech, WikiText, SkyScript -----------------------------------------------------------


def librispeech(root: pathlib.Path, split: str) -> Source:
    """LibriSpeech: SPLIT/SPEAKER/CHAPTER/ID.flac with transcripts in *.trans.txt."""
    place = items.find(root, split, f"LibriSpeech/{split}")

    def transcripts() -> Iterator[Item]:
        for path in sorted(place.glob("*/*/*.trans.txt")):
            for line in items.lines(path):
                name, _, text = line.partition(" ")
                yield items.text_item(name, text, name)

    def utterances() -> Iterator[Item]:
        for name, *_ in transcripts():
            speaker, chapter, _ = name.split("-")
            path = place / speaker / chapter / f"{name}.flac"
            yield items.file_item(name, path, name, items.sound)

    return Source({"audio": utterances, "text": transcripts})


def wikitext(root: pathlib.Path, split: str) -> Source:
    """WikiText-103 or -2: a text per paragraph of wiki.SPLIT.raw (or .tokens), no headings."""
    split = {"val": "valid"}.get(split, split)
    path = items.find(root, f"wiki.{split}.raw", f"wiki.{split}.tokens")

    def paragraphs() -> Iterator[Item]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                text = line.strip()
                if text and not (text.startswith("= ") and text.endswith(" =")):
                    yield items.text_item(str(number), text, str(number))

    return Source({"text": paragraphs})


SKYSCRIPT = {
    "train": "SkyScript_train_top30pct_filtered_by_CLIP_openai.csv",
    "train50": "SkyScript_train_top50pct_filtered_by_CLIP_openai.csv",
    "val": "SkyScript_val_5K_filtered_by_CLIP_openai.csv",
    "test": "SkyScript_test_30K_filtered_by_CLIP_openai.csv",
}
SKYSCRIPT_COLUMN = "title_multi_objects"


def skyscript(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """SkyScript: a CSV per split (or one given as captions) and pictures in images2/, ..."""
    if captions is None:
        checks.choice("split", split, tuple(SKYSCRIPT))
        captions = items.find(root, SKYSCRIPT[split], f"dataframe/{SKYSCRIPT[split]}")
    path = captions
    with path.open(newline="", encoding="utf-8") as file:
        columns = next(csv.reader(file), [])
    missing = {"filepath", SKYSCRIPT_COLUMN} - set(columns)
    if missing:
        raise checks.InputError(
            f"captions: {path} has no column {', '.join(sorted(missing))} but "
            f"{', '.join(columns)}; pass a file of multi-object captions"
        )

    def table() -> Iterator[tuple[str, str]]:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield row["filepath"], row[SKYSCRIPT_COLUMN] or ""

    return Source(
        {
            "image": lambda: (items.file_item(name, root / name, name) for name, _ in table()),
            "text": lambda: (items.text_item(name, title, name) for name, title in table()),
        }
    )


# --- Polyvore -----------------------------------------------------------------------------------


def polyvore(root: pathlib.Path, split: str) -> Source:
    """Polyvore items as parquet files with the columns image (bytes), text and item_ID."""
    tables = sorted([*root.glob("*.parquet"), *root.glob("data/*.parquet")])
    if not tables:
        raise checks.InputError(f"root: {root} holds no .parquet, nor does its data/")

    def rows(column: str, decode: Callable[[Any], Any]) -> Iterator[Item]:
        for file in tables:
            with items.require("pyarrow.parquet").ParquetFile(file) as table:
                for group in range(table.num_row_groups):
                    cells = _Cells(file, group, column)
                    names = table.read_row_group(group, columns=["item_ID"])["item_ID"]
                    for row, name in enumerate(map(str, names.to_pylist())):
                        yield Item(name, functools.partial(cells.load, row, decode), name, file)

    return Source(
        {
            "image": lambda: rows("image", lambda cell: items.picture(cell["bytes"])),
            "text": lambda: rows("text", str),
        }
    )


class _Cells:
    """A column of a row group: large, so read once, when the first cell is asked for."""

    def __init__(self, file: pathlib.Path, group: int, column: str) -> None:
        self._place, self._lock = (file, group, column), threading.Lock()
        self._cells: Any = None

    def load(self, row: int, decode: Callable[[Any], Any]) -> Any:
        file, group, column = self._place
        with self._lock:
            if self._cells is None:
                with items.require("pyarrow.parquet").ParquetFile(file) as table:
                    self._cells = table.read_row_group(group, columns=[column])[column]
            value = self._cells[row].as_py()
        if value is None:
            raise ValueError("is empty")
        return decode(value)


# --- what TensorFlow Datasets has prepared, through random access; no TensorFlow needed ----------

TFDS_PROMPTS = {
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "dtd": "dtd",
    "food101": "food101",
    "imagenet2012": "imagenet1k",
    "oxford_flowers102": "flowers",
}
"""Which prompts go with a dataset of TFDS."""


def tfds(root: pathlib.Path, split: str, *, name: str) -> Source:
    """The first Image and Text feature of NAME; row n of one belongs to row n of the other.

    A ClassLabel `label` and known prompts make it a classification set.
    """
    records = files.open_tfds(name, split, folder=str(root))
    kinds = {"Image": "image", "Text": "text"}  # sounds cannot be had without TensorFlow
    features: dict[str, str] = {}
    for key, feature in records.dataset_info.features.items():
        modality = kinds.get(type(feature).__name__)
        if modality is not None:
            features.setdefault(modality, key)
    if not features:
        known = ", ".join(records.dataset_info.features)
        raise checks.InputError(f"data: tfds:{name} has {known}; none is an image or a text")
    made = pathlib.Path(records.dataset_info.data_dir) / "dataset_info.json"

    def rows(modality: str, group: Callable[[int], str] = str) -> Iterator[Item]:
        for n in range(len(records)):
            load = functools.partial(_tfds_value, records, n, modality, features[modality])
            yield Item(str(n), load, group(n), made)

    labels: Any = dict(records.dataset_info.features.items()).get("label")
    prompts = TFDS_PROMPTS.get(name.split("/")[0].split(":")[0])
    if "image" in features and hasattr(labels, "names") and prompts is not None:
        # TFDS names ImageNet's classes by synset and orders both as the published names do.
        published = prompts in ("imagenet1k", "flowers")
        names = classification.published_names(prompts) if published else labels.names
        return classification.source(
            prompts, names, lambda: rows("image", lambda n: str(int(records[n]["label"])))
        )
    return Source({modality: functools.partial(rows, modality) for modality in features})


def _tfds_value(records: Any, n: int, modality: str, key: str) -> Any:
    value = records[n][key]
    if modality == "image":
        import PIL.Image

        return PIL.Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


# --- by name ------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """How a dataset is opened, and the split that the paper evaluates on (or trains on)."""

    open: Callable[..., Source]
    split: str


DATASETS = {
    "folder": Adapter(folder, ""),
    "webdataset": Adapter(webdataset, ""),
    "coco": Adapter(coco, "val2017"),
    "flickr30k": Adapter(flickr30k, "test"),
    "imagenet": Adapter(classification.imagenet, "val"),
    "food101": Adapter(classification.food101, "test"),
    "cifar10": Adapter(classification.cifar10, "test"),
    "cifar100": Adapter(classification.cifar100, "test"),
    "dtd": Adapter(classification.dtd, "test1"),
    "flowers": Adapter(classification.flowers, "test"),
    "aircraft": Adapter(classification.aircraft, "test"),
    "librispeech": Adapter(librispeech, "test-clean"),
    "wikitext": Adapter(wikitext, "train"),
    "skyscript": Adapter(skyscript, "test"),
    "polyvore": Adapter(polyvore, ""),
}
NAMES = (*DATASETS, "tfds:NAME")


def open_dataset(
    name: str, root: pathlib.Path, *, split: str | None = None, captions: pathlib.Path | None = None
) -> Source:
    """Opens a dataset, `tfds:NAME` included, that lies in `root`.

    Raises:
        InputError: the name is unknown, or `root` does not hold what the dataset consists of.
    """
    if name.startswith("tfds:"):
        adapter = Adapter(functools.partial(tfds, name=name.removeprefix("tfds:")), "test")
    else:
        checks.choice("data", name, NAMES)
        adapter = DATASETS[name]
    if not root.exists():
        raise checks.InputError(f"root: {root} does not exist; pass the dataset's own folder")
    split = adapter.split if split is None else split
    if captions is None:
        return adapter.open(root, split)
    if name not in ("folder", "skyscript"):
        raise checks.InputError(f"captions: {name} has captions of its own; leave --captions out")
    return adapter.open(root, split, captions)


def captions(data: Mapping[str, Any], ids: Sequence[str]) -> list[str] | None:
    """The texts of some items of a dataset, as an extraction's metadata names it.

    None if it is not at hand, or too large to look through.
    """
    if (
        data["name"] not in ("folder", "coco", "flickr30k")
        or not pathlib.Path(data["root"]).exists()
    ):
        return None
    source = open_dataset(
        data["name"],
        pathlib.Path(data["root"]),
        split=data["split"],
        captions=data["captions"] and pathlib.Path(data["captions"]),
    )
    wanted = set(ids)
    found = {item.id: item.load() for item in source.items["text"]() if item.id in wanted}
    return [found.get(name, name) for name in ids]
