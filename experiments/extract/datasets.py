"""Readers of datasets by name, each from its published layout."""

import contextlib
import csv
import functools
import json
import pathlib
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments import workdir
from experiments.extract import items
from experiments.extract.items import Item, Source
from sotalign_jax import checks

# --- captioned files: folders, COCO, Flickr30k, LibriSpeech, SkyScript ----------------------------

CAPTIONS = 5
"""Number of captions per picture in the protocols of COCO and Flickr30k."""
FILE_COLUMNS = ("file", "file_name", "filename", "filepath", "image", "path")
CAPTION_COLUMNS = ("caption", "text", "title", "sentence")
Captioned = tuple[Item, list[Item]]
"""A file and its captions. The group of all of them is the id of the file."""


def _file(
    name: str,
    path: pathlib.Path,
    captions: Iterable[tuple[str, str]],
    read: Callable[[pathlib.Path], Any] = items.picture,
) -> Captioned:
    """Returns a file and its captions, which are given with their ids."""
    return Item(name, name, path, read), [Item(own, name, text) for own, text in captions]


def _captioned(rows: Callable[[], Iterable[Captioned]], modality: str = "image") -> Source:
    contents = lambda: (content for content, _ in rows())  # noqa: E731
    return Source({modality: contents, "text": lambda: (c for _, own in rows() for c in own)})


def folder(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """Reads pictures at any depth. The group of a caption is the path of its picture.

    Args:
        root: folder of the pictures.
        split: only rows of `captions` whose column `split` has this value, if not empty.
        captions: CSV or JSONL file with one row per caption and the columns `file` and `caption`,
            or other usual names. Without it, the caption of a picture is the first line of the
            .txt file beside it.

    Returns:
        The source.

    Raises:
        InputError: the captions cannot be read, or none of their files is below `root`.
    """
    said: dict[str, list[str]] = defaultdict(list)
    for name, caption in read_captions(captions, split) if captions else ():
        said[_relative(root, name)].append(caption)
    _check_files(root, list(said))

    def rows() -> Iterator[Captioned]:
        # A split names its own pictures; otherwise all are embedded.
        below = () if captions and split else items.pictures_below(root)
        for name in dict.fromkeys((*said, *below)):
            texts = [Item(f"{name}#{n}", name, text) for n, text in enumerate(said.get(name, ()))]
            if captions is None:
                beside = (root / name).with_suffix(".txt")
                texts = [Item(f"{name}#0", name, beside, _first_line)]
            yield Item(name, name, root / name, items.oriented), texts

    return _captioned(rows)


def _relative(root: pathlib.Path, name: str) -> str:
    """Returns an absolute path relative to `root` if it is below, and any other as it is."""
    for base in (root.absolute(), root.resolve()):
        with contextlib.suppress(ValueError):
            return str(pathlib.Path(name).relative_to(base))
    return name


def _check_files(root: pathlib.Path, names: list[str]) -> None:
    """Raises if no captioned file is below `root`, and says so of some."""
    missing = [n for n in names if pathlib.Path(n).is_absolute() or not (root / n).is_file()]
    if not missing:
        return
    one, stem = missing[0], pathlib.Path(missing[0]).stem
    if len(missing) < len(names):
        text = f"captions: {len(missing)} of {len(names)} files are not below {root}"
        print(f"{text}, such as {one!r}; their captions stay unpaired", file=sys.stderr)
        return
    close = [path for path in items.pictures_below(root) if pathlib.Path(path).stem == stem]
    remedy = f"did you mean {close[0]!r}?" if close else "check --root"
    text = f"captions: none of its {len(names)} files is below {root}, such as {one!r}"
    raise checks.InputError(f"{text}; write paths below it with their extension, {remedy}")


def _first_line(path: pathlib.Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()


def read_captions(
    path: pathlib.Path,
    split: str = "",
    columns: Sequence[Sequence[str]] = (FILE_COLUMNS, CAPTION_COLUMNS),
) -> list[tuple[str, str]]:
    """Reads files and captions from a CSV or JSONL file.

    Args:
        path: the file, in UTF-8.
        split: only rows whose column `split` has this value, if not empty.
        columns: possible names of both columns; the first that exists is used.

    Returns:
        (file, caption) of every row.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise checks.InputError(f"captions: {path} is neither .csv nor .jsonl; convert it")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records = list(_csv_rows(file) if path.suffix == ".csv" else _json_rows(file))
    except UnicodeDecodeError as error:
        raise checks.InputError(f"captions: {path} is not UTF-8; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise checks.InputError(f"captions: {path} cannot be read ({error})") from error
    if not records:
        raise checks.InputError(f"captions: {path} has no rows; write one per caption")
    first = records[0]
    if split and "split" not in first:
        raise checks.InputError(f"split: {split!r} asked but {path} has no column 'split'")
    name, caption = (next((n for n in names if n in first), names[0]) for names in columns)
    if missing := [column for column in (name, caption) if column not in first]:
        has = ", ".join(map(str, first))
        raise checks.InputError(f"captions: {path} has the columns {has}; name one {missing[0]!r}")
    return [
        (str(record.get(name) or ""), str(record.get(caption) or ""))
        for record in records
        if not split or record.get("split") == split
    ]


def _csv_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    reader, line = csv.DictReader(file, strict=True), 1  # strict: an open quote is an error
    try:
        for row in reader:
            yield row
            line = reader.line_num
    except csv.Error as error:
        raise ValueError(f"{error} in the row after line {line}; close its quotes") from error


def _json_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not a JSON object; write one per line")
            yield row


def coco(root: pathlib.Path, split: str) -> Source:
    """Reads COCO captions, split val2017, train2017 or karpathy-train, -val, -test.

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
    images = sorted((one["id"], one["file_name"]) for one in table["images"])
    return _captioned(
        lambda: (_file(str(n), root / split / name, texts[n][:CAPTIONS]) for n, name in images)
    )


def flickr30k(root: pathlib.Path, split: str) -> Source:
    """Reads Flickr30k in Karpathy's splits: `dataset_flickr30k.json` beside the pictures."""
    table = items.find(root, "dataset_flickr30k.json")
    pictures = items.find(root, "flickr30k-images", "flickr30k_images", "images", "Images")
    return _karpathy(table, split, lambda r: (r["filename"], pictures / r["filename"]))


def _karpathy(
    table: pathlib.Path, split: str, place: Callable[[dict[str, Any]], tuple[str, pathlib.Path]]
) -> Source:
    checks.choice("split", split, ("train", "val", "test"))
    wanted = (
        ("train", "restval") if split == "train" else (split,)
    )  # restval: pictures of val2014 for training
    records = [r for r in workdir.read_json(table)["images"] if r["split"] in wanted]
    return _captioned(
        lambda: (
            _file(*place(r), [(str(s["sentid"]), s["raw"]) for s in r["sentences"][:CAPTIONS]])
            for r in records
        )
    )


def librispeech(root: pathlib.Path, split: str) -> Source:
    """Reads LibriSpeech: SPLIT/SPEAKER/CHAPTER/ID.flac with transcripts in *.trans.txt."""
    place = items.find(root, split, f"LibriSpeech/{split}")

    def utterances() -> Iterator[Captioned]:
        for path in sorted(place.glob("*/*/*.trans.txt")):
            for line in items.lines(path):
                name, _, text = line.partition(" ")
                yield _file(name, path.with_name(f"{name}.flac"), [(name, text)], items.sound)

    return _captioned(utterances, "audio")


def skyscript(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """Reads SkyScript: a CSV per split (or one given as captions) and pictures in images2/, ..."""
    parts = {"train": "train_top30pct", "train50": "train_top50pct", "val": "val_5K"}
    parts["test"] = "test_30K"
    if captions is None:
        checks.choice("split", split, tuple(parts))
        name = f"SkyScript_{parts[split]}_filtered_by_CLIP_openai.csv"
        captions = items.find(root, name, f"dataframe/{name}")
    rows = read_captions(captions, columns=(("filepath",), ("title_multi_objects",)))
    return _captioned(lambda: (_file(name, root / name, [(name, title)]) for name, title in rows))


# --- labelled pictures: ImageNet, Food-101, DTD, Flowers-102, FGVC-Aircraft, CIFAR ---------------

_FOLDER = pathlib.Path(__file__).parents[1] / "zero_shot"
TEMPLATES, CLASS_NAMES = _FOLDER / "templates.json", _FOLDER / "class_names.json"
"""Prompts and class names of CLIP's zero-shot evaluation."""


def _prompted(prompts: str, names: Iterable[str], pictures: Callable[[], Iterator[Item]]) -> Source:
    """Returns labelled pictures, and as texts every template filled with every class name.

    The group of a picture or a prompt is the number of its class.
    """
    templates = workdir.read_json(TEMPLATES)[prompts]
    classes = tuple(name.replace("_", " ") for name in names)

    def texts() -> Iterator[Item]:
        for label, name in enumerate(classes):
            for number, template in enumerate(templates):
                yield Item(f"{label}/{number}", str(label), template.format(c=name))

    return Source({"image": pictures, "text": texts}, classes)


def _labelled(
    prompts: str,
    classes: Sequence[Any],
    folder: pathlib.Path,
    rows: Iterable[tuple[str, Any]],
    names: Sequence[str] | None = None,
) -> Source:
    """Returns picture files with a class each. `names` are the classes' names in prompts."""
    number = {one: str(label) for label, one in enumerate(classes)}
    listed = [(name, number[one]) for name, one in rows]

    def pictures() -> Iterator[Item]:
        return (Item(name, label, folder / name, items.picture) for name, label in listed)

    return _prompted(prompts, names or classes, pictures)


def imagenet(root: pathlib.Path, split: str) -> Source:
    """Reads ImageNet-1k: SPLIT/SYNSET/*.JPEG, or Kaggle's layout with LOC_val_solution.csv."""
    checks.choice("split", split, ("train", "val"))
    mapping, solution = root / "LOC_synset_mapping.txt", root / "LOC_val_solution.csv"
    if mapping.exists():
        synsets = [line.split()[0] for line in items.lines(mapping)]
        folder = root / "ILSVRC" / "Data" / "CLS-LOC" / split
    else:
        folder = items.find(root, split)
        synsets = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = workdir.read_json(CLASS_NAMES)["imagenet1k"]
    if len(synsets) != len(names):
        text = f"root: {folder} has {len(synsets)} synset folders, not {len(names)}"
        raise checks.InputError(f"{text}; names go by their order, so keep empty ones as well")
    if split == "val" and solution.exists():
        listed = csv.DictReader(items.lines(solution))
        rows = sorted((f"{r['ImageId']}.JPEG", r["PredictionString"].split()[0]) for r in listed)
    else:
        rows = [(name, pathlib.Path(name).parts[0]) for name in items.pictures_below(folder)]
    return _labelled("imagenet1k", synsets, folder, rows, names)


def food101(root: pathlib.Path, split: str) -> Source:
    """Reads Food-101: images/CLASS/ID.jpg, meta/classes.txt, meta/test.txt or train.txt."""
    meta = items.find(root, "meta")
    checks.choice("split", split, ("train", "test"))
    rows = ((f"{name}.jpg", name.split("/")[0]) for name in items.lines(meta / f"{split}.txt"))
    return _labelled("food101", items.lines(meta / "classes.txt"), root / "images", rows)


def dtd(root: pathlib.Path, split: str) -> Source:
    """Reads DTD, split 1: images/CLASS/*.jpg and labels/test1.txt, train1.txt, ..."""
    listed, folder = items.find(root, f"labels/{split}.txt"), root / "images"
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    rows = ((name, name.split("/")[0]) for name in items.lines(listed))
    return _labelled("dtd", classes, folder, rows)


def flowers(root: pathlib.Path, split: str) -> Source:
    """Reads Flowers-102: jpg/image_NNNNN.jpg, imagelabels.mat and setid.mat."""
    import scipy.io

    parts = {"train": "trnid", "val": "valid", "test": "tstid"}
    checks.choice("split", split, tuple(parts))
    numbers = scipy.io.loadmat(items.find(root, "setid.mat"))[parts[split]].ravel()
    labels = scipy.io.loadmat(root / "imagelabels.mat")["labels"].ravel()
    rows = ((f"image_{n:05d}.jpg", labels[n - 1]) for n in numbers)
    names = workdir.read_json(CLASS_NAMES)["flowers"]
    return _labelled("flowers", range(1, len(names) + 1), root / "jpg", rows, names)


def aircraft(root: pathlib.Path, split: str) -> Source:
    """Reads FGVC-Aircraft by variant: data/images/*.jpg, variants.txt, images_variant_SPLIT.txt."""
    data = items.find(root, "data/variants.txt", "variants.txt").parent
    listed = items.lines(items.find(data, f"images_variant_{split}.txt"))
    named = (line.strip().split(maxsplit=1) for line in listed)
    rows = ((f"{name}.jpg", variant) for name, variant in named)
    return _labelled("fgvc_aircraft", items.lines(data / "variants.txt"), data / "images", rows)


CIFAR: dict[str, tuple[str, int, dict[str, list[str]]]] = {
    "cifar10": (
        *("batches.meta.txt", 1),
        {"test": ["test_batch.bin"], "train": [f"data_batch_{n}.bin" for n in range(1, 6)]},
    ),
    "cifar100": ("fine_label_names.txt", 2, {"test": ["test.bin"], "train": ["train.bin"]}),
}
"""File of the class names, bytes of labels before a picture, and files by split."""


def cifar(root: pathlib.Path, split: str, *, name: str) -> Source:
    """Reads the binary version of CIFAR-10, or of CIFAR-100 with its fine labels."""
    names, labels, parts = CIFAR[name]
    checks.choice("split", split, tuple(parts))
    classes = items.lines(items.find(root, names))

    def pictures() -> Iterator[Item]:
        for file in (items.find(root, part) for part in parts[split]):
            content, width = np.fromfile(file, np.uint8), labels + 3 * 32 * 32
            if len(content) % width:
                raise checks.InputError(f"root: {file} is cut short; fetch it again")
            for n, row in enumerate(content.reshape(-1, width)):
                read = functools.partial(_pixels, row[labels:])
                yield Item(f"{file.name}/{n}", str(row[labels - 1]), file, read)

    return _prompted(name, classes, pictures)


def _pixels(planes: np.ndarray, _: pathlib.Path) -> Any:
    """Returns a picture from its red, green and blue planes of 32 x 32."""
    import PIL.Image

    return PIL.Image.fromarray(planes.reshape(3, 32, 32).transpose(1, 2, 0).copy())


# --- tar shards in the webdataset layout, as CC3M and CC12M are distributed -----------------------

Members = dict[str, tuple[int, int]]
"""Offset and size in a tar of the files of a sample, by suffix."""


def webdataset(root: pathlib.Path, split: str) -> Source:
    """Reads uncompressed .tar files, in which `KEY.jpg`, `KEY.txt` and `KEY.json` are a sample.

    The caption is the .txt, or the "caption" of the .json. A split selects tars by name. Ids are
    TAR/KEY, because keys often start anew in every tar.
    """
    tars = sorted(root.glob("*.tar")) if root.is_dir() else [root]
    tars = [tar for tar in tars if split in tar.name]
    if not tars:
        raise checks.InputError(f"root: {root} holds no .tar with {split!r} in its name")

    def samples(read: Callable[[Members, pathlib.Path], Any]) -> Iterator[Item]:
        for tar in tars:
            for key, members in _samples(tar).items():
                name = f"{tar.stem}/{key}"
                yield Item(name, name, tar, functools.partial(read, members))
            with tar.open("rb") as file:
                file.seek(max(tar.stat().st_size - 1024, 0))
                if file.read() != bytes(1024):  # the two empty blocks that end a tar
                    reason = f"{tar.name} is cut short; fetch it again"
                    yield Item(f"{tar.stem}/", "", reason, items.fail)

    return Source({"image": lambda: samples(_picture), "text": lambda: samples(_caption)})


def _samples(tar: pathlib.Path) -> dict[str, Members]:
    """Returns the samples of a tar by key. Only headers are read, up to any damage."""
    found: dict[str, Members] = defaultdict(dict)
    with contextlib.suppress(tarfile.ReadError), tarfile.open(tar, "r:") as archive:
        for entry in archive:
            if entry.isfile():
                folder, slash, name = entry.name.rpartition("/")
                key, _, suffix = name.partition(".")
                place = entry.offset_data, entry.size
                found[f"{folder}{slash}{key}"][f".{suffix.lower()}"] = place
    return found


def _read(members: Members, suffixes: tuple[str, ...], tar: pathlib.Path) -> bytes:
    """Reads the first member with one of the suffixes; empty if there is none."""
    places = [place for suffix, place in members.items() if suffix.endswith(suffixes)]
    offset, size = places[0] if places else (0, 0)
    with tar.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise EOFError(f"{tar.name} is cut short")
    return content


def _picture(members: Members, tar: pathlib.Path) -> Any:
    if content := _read(members, items.IMAGE_SUFFIXES, tar):
        return items.picture(content)
    raise ValueError("has no picture")


def _caption(members: Members, tar: pathlib.Path) -> str:
    if text := _read(members, (".txt",), tar).decode("utf-8"):
        return text
    return str(json.loads(_read(members, (".json",), tar) or "{}").get("caption") or "")


# --- WikiText, Polyvore --------------------------------------------------------------------------


def wikitext(root: pathlib.Path, split: str) -> Source:
    """Reads WikiText-103 or -2: a text per paragraph of wiki.SPLIT.raw (or .tokens)."""
    split = {"val": "valid"}.get(split, split)
    path = items.find(root, f"wiki.{split}.raw", f"wiki.{split}.tokens")

    def paragraphs() -> Iterator[Item]:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(map(str.strip, file), 1):
                if text and not (text.startswith("= ") and text.endswith(" =")):
                    yield Item(str(number), str(number), text)

    return Source({"text": paragraphs})


def polyvore(root: pathlib.Path, split: str) -> Source:
    """Reads Polyvore as parquet files with the columns image (bytes), text and item_ID."""
    tables = sorted([*root.glob("*.parquet"), *root.glob("data/*.parquet")])
    if not tables:
        raise checks.InputError(f"root: {root} holds no .parquet, nor does its data/")
    lock = threading.Lock()  # a column is large, so only one thread reads it

    @functools.lru_cache(maxsize=2)
    def cells(file: pathlib.Path, column: str) -> Any:
        return items.require("pyarrow.parquet").read_table(file, columns=[column])[column]

    def load(column: str, row: int, file: pathlib.Path) -> Any:
        with lock:
            value = cells(file, column)[row].as_py()
        if value is None:
            raise ValueError("is empty")
        return items.picture(value["bytes"]) if column == "image" else str(value)

    def rows(column: str) -> Iterator[Item]:
        for file in tables:
            for row, name in enumerate(map(str, cells(file, "item_ID").to_pylist())):
                yield Item(name, name, file, functools.partial(load, column, row))

    return Source({column: functools.partial(rows, column) for column in ("image", "text")})


# --- by name ------------------------------------------------------------------------------------

DATASETS: dict[str, tuple[Callable[..., Source], str]] = {
    "folder": (folder, ""),
    "webdataset": (webdataset, ""),
    "coco": (coco, "val2017"),
    "flickr30k": (flickr30k, "test"),
    "imagenet": (imagenet, "val"),
    "food101": (food101, "test"),
    "cifar10": (functools.partial(cifar, name="cifar10"), "test"),
    "cifar100": (functools.partial(cifar, name="cifar100"), "test"),
    "dtd": (dtd, "test1"),
    "flowers": (flowers, "test"),
    "aircraft": (aircraft, "test"),
    "librispeech": (librispeech, "test-clean"),
    "wikitext": (wikitext, "train"),
    "skyscript": (skyscript, "test"),
    "polyvore": (polyvore, ""),
}
"""Reader of a dataset, and the split that the paper evaluates or trains on."""


def open_dataset(
    name: str, root: pathlib.Path, *, split: str | None = None, captions: pathlib.Path | None = None
) -> Source:
    """Opens a dataset.

    Args:
        name: one of DATASETS.
        root: folder of the dataset.
        split: its split; by default the one that the paper uses.
        captions: CSV or JSONL file of captions, for folder and skyscript.

    Returns:
        The source.

    Raises:
        InputError: the name is unknown, or the folder does not hold the dataset.
    """
    checks.choice("data", name, tuple(DATASETS))
    reader, usual = DATASETS[name]
    if not root.exists():
        raise checks.InputError(f"root: {root} does not exist; pass the dataset's own folder")
    if captions is not None and name not in ("folder", "skyscript"):
        raise checks.InputError(f"captions: {name} has captions of its own; leave --captions out")
    given = {} if captions is None else {"captions": captions}
    return reader(root, usual if split is None else split, **given)
