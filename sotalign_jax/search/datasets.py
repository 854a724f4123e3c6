"""Readers of datasets in their published layouts, by name."""

import codecs
import contextlib
import csv
import functools
import itertools
import json
import pathlib
import pickle
import re
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from sotalign_jax import checks, storage
from sotalign_jax.search import hub, items
from sotalign_jax.search.items import Item, Source

# --- captioned files: folders, COCO, Flickr30k, LibriSpeech, SkyScript ----------------------------

CAPTIONS = 5
"""Number of captions per picture in the protocols of COCO and Flickr30k."""
FILE_COLUMNS = ("file", "file_name", "filename", "filepath", "image", "path")
CAPTION_COLUMNS = ("caption", "text", "title", "sentence")
LONGEST = 2**16
"""Most characters of a caption in a .txt file. Text encoders read about 1,000 tokens."""
Captioned = tuple[Item, list[Item]]
"""A file and its captions. Their common group is the id of the file."""


def _file(
    name: str,
    path: pathlib.Path,
    captions: Iterable[tuple[str, str]],
    read: Callable[[pathlib.Path], Any] = items.picture,
) -> Captioned:
    """Returns the items of a file and of its captions, which are (id, text)."""
    return Item(name, name, path, read), [Item(own, name, text) for own, text in captions]


def _captioned(rows: Callable[[], Iterable[Captioned]], modality: str = "image") -> Source:
    """Returns a source of captioned files."""
    contents = lambda: (content for content, _ in rows())  # noqa: E731
    return Source({modality: contents, "text": lambda: (c for _, own in rows() for c in own)})


def folder(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """Reads a folder of pictures, with subfolders. The group of a caption is its picture's path.

    Args:
        root: Folder of the pictures.
        split: If not empty, only rows of `captions` with this value in the column `split` are read.
        captions: CSV or JSONL file with one row per caption and the columns `file` and `caption`,
            or other usual names. Without it, the caption of a picture is the first line of the
            .txt file beside it.

    Returns:
        The source.

    Raises:
        InputError: The captions cannot be read, one of them names a file outside of `root`, or no
            named file exists.
    """
    said: dict[str, list[str]] = defaultdict(list)
    for name, caption in read_captions(captions, split) if captions else ():
        relative = _relative(root, name)
        if captions and items.leaves(relative):
            # Rows are counted as in a spreadsheet, where the names of the columns are the first.
            row = read_captions(captions).index((name, caption)) + 1 + (captions.suffix == ".csv")
            text = f"captions row {row} names {name!r}, which is not below {root}"
            raise checks.InputError(f"{text}; {_remedy(root, name)}")
        said[relative].append(caption)
    _check_files(root, list(said))

    def rows() -> Iterator[Captioned]:
        # A split consists of the pictures that it names. Otherwise pictures without a caption are
        # embedded, too, for the pools.
        below = () if captions and split else items.pictures_below(root)
        for name in dict.fromkeys((*said, *below)):
            texts = [Item(f"{name}#{n}", name, text) for n, text in enumerate(said.get(name, ()))]
            if captions is None:
                beside = (root / name).with_suffix(".txt")
                texts = [Item(f"{name}#0", name, beside, _first_line)]
            yield Item(name, name, root / name, items.oriented), texts

    return _captioned(rows)


def _relative(root: pathlib.Path, name: str) -> str:
    """Makes an absolute path below `root` relative to it, and returns any other path unchanged."""
    for base in (root.absolute(), root.resolve()):
        with contextlib.suppress(ValueError):
            return str(pathlib.Path(name).relative_to(base))
    return name


def _check_files(root: pathlib.Path, names: list[str]) -> None:
    """Raises if all captioned files are missing below `root`, and prints a line if some are."""
    missing = [name for name in names if not (root / name).is_file()]
    if not missing:
        return
    one = missing[0]
    if len(missing) < len(names):
        text = f"{len(missing)} of {len(names)} captioned files are not below {root}"
        print(f"{text}, such as {one!r}; their captions stay unpaired", file=sys.stderr)
        return
    text = f"captions has {len(names)} files but none is below {root}, such as {one!r}"
    raise checks.InputError(f"{text}; {_remedy(root, one)}")


def _remedy(root: pathlib.Path, name: str) -> str:
    """Returns a remedy for a path that is not below `root`, with the likely path if any."""
    # A frequent mistake is to leave out the folder or the extension of a file.
    stem = pathlib.Path(name).stem
    close = [path for path in items.pictures_below(root) if pathlib.Path(path).stem == stem]
    likely = f"did you mean {close[0]!r}?" if close else "check --root"
    return f"write relative paths with their extension, {likely}"


def _first_line(path: pathlib.Path) -> str:
    with storage.open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        return file.readline(LONGEST).strip()


def read_captions(
    path: pathlib.Path,
    split: str = "",
    columns: Sequence[Sequence[str]] = (FILE_COLUMNS, CAPTION_COLUMNS),
) -> list[tuple[str, str]]:
    """Reads files and captions from a CSV or JSONL file.

    Args:
        path: The file, in UTF-8.
        split: If not empty, only rows with this value in the column `split` are returned.
        columns: Possible names of both columns. The first that exists is used.

    Returns:
        (file, caption) of every row.

    Raises:
        InputError: The file cannot be read, or lacks a column.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise checks.InputError(f"captions must be a .csv or .jsonl file, got {path}")
    try:
        # Spreadsheets write a byte order mark, which "utf-8-sig" skips.
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _two_columns(path, file, split, columns)
    except checks.InputError:
        raise
    except UnicodeDecodeError as error:
        raise checks.InputError(f"captions {path} is not UTF-8; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise checks.InputError(f"captions {path} cannot be read ({error})") from error


def _two_columns(
    path: pathlib.Path, file: Iterable[str], split: str, columns: Sequence[Sequence[str]]
) -> list[tuple[str, str]]:
    """Returns two columns of a table. Its other columns may be larger than memory."""
    records = _csv_rows(file) if path.suffix == ".csv" else _json_rows(file)
    first = next(records, None)
    if first is None:
        raise checks.InputError(f"captions {path} has no rows; write one per caption")
    if split and "split" not in first:
        raise checks.InputError(f"split is {split!r} but {path} has no column 'split'")
    name, caption = (next((n for n in names if n in first), names[0]) for names in columns)
    if missing := [column for column in (name, caption) if column not in first]:
        has = ", ".join(map(str, first))
        raise checks.InputError(
            f"captions {path} has no column {missing[0]!r}; rename one of {has}"
        )
    return [
        (str(record.get(name) or ""), str(record.get(caption) or ""))
        for record in itertools.chain([first], records)
        if not split or record.get("split") == split
    ]


def _csv_rows(file: Iterable[str]) -> Iterator[dict[str, Any]]:
    # By default, an open quote would silently swallow the rest of the file.
    reader, line = csv.DictReader(file, strict=True), 1
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
    """Reads COCO with its captions.

    The splits of 2017 need `annotations/captions_SPLIT.json` and the pictures in `SPLIT/`. Those of
    Karpathy need `dataset_coco.json` and the pictures in `train2014/` and `val2014/`.

    Args:
        root: Folder of the dataset.
        split: "val2017", "train2017", "karpathy-train", "karpathy-val" or "karpathy-test".

    Returns:
        The source, with five captions per picture.
    """
    if split.startswith("karpathy-"):
        return _karpathy(
            items.find(root, "dataset_coco.json"),
            split.removeprefix("karpathy-"),
            lambda record: (
                str(record["cocoid"]),
                items.below(root, f"{record['filepath']}/{record['filename']}"),
            ),
        )
    name = f"captions_{split}.json"
    table = storage.read_json(items.find(root, f"annotations/{name}", name))
    texts: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for entry in table["annotations"]:
        texts[entry["image_id"]].append((str(entry["id"]), entry["caption"]))
    images = sorted((one["id"], one["file_name"]) for one in table["images"])
    return _captioned(
        lambda: (
            _file(str(n), items.below(root / split, name), texts[n][:CAPTIONS])
            for n, name in images
        )
    )


def flickr30k(root: pathlib.Path, split: str) -> Source:
    """Reads Flickr30k in Karpathy's splits.

    Args:
        root: Folder with `dataset_flickr30k.json` and the folder of the pictures.
        split: "train", "val" or "test".

    Returns:
        The source, with five captions per picture.
    """
    table = items.find(root, "dataset_flickr30k.json")
    pictures = items.find(root, "flickr30k-images", "flickr30k_images", "images", "Images")
    return _karpathy(table, split, lambda r: (r["filename"], items.below(pictures, r["filename"])))


def _karpathy(
    table: pathlib.Path, split: str, place: Callable[[dict[str, Any]], tuple[str, pathlib.Path]]
) -> Source:
    """Reads a split of one of Karpathy's JSON files."""
    checks.choice("split", split, ("train", "val", "test"))
    wanted = (
        ("train", "restval") if split == "train" else (split,)
    )  # "restval" are pictures of val2014 that are used for training
    records = [r for r in storage.read_json(table)["images"] if r["split"] in wanted]
    return _captioned(
        lambda: (
            _file(*place(r), [(str(s["sentid"]), s["raw"]) for s in r["sentences"][:CAPTIONS]])
            for r in records
        )
    )


def librispeech(root: pathlib.Path, split: str) -> Source:
    """Reads LibriSpeech: SPLIT/SPEAKER/CHAPTER/ID.flac with transcripts in *.trans.txt.

    Args:
        root: Folder of the dataset.
        split: Name of a folder, such as "test-clean", or several with commas between them.

    Returns:
        The source.
    """
    places = [items.find(root, one, f"LibriSpeech/{one}") for one in split.split(",")]

    def utterances() -> Iterator[Captioned]:
        for path in (path for place in places for path in sorted(place.glob("*/*/*.trans.txt"))):
            for line in items.lines(path):
                name, _, text = line.partition(" ")
                yield _file(name, path.with_name(f"{name}.flac"), [(name, text)], items.sound)

    return _captioned(utterances, "audio")


def skyscript(root: pathlib.Path, split: str, captions: pathlib.Path | None = None) -> Source:
    """Reads SkyScript: pictures in images2/ and so on, and a CSV file per split.

    Args:
        root: Folder of the dataset.
        split: "train", "train50", "val" or "test".
        captions: CSV file in place of that of the split.

    Returns:
        The source.
    """
    parts = {"train": "train_top30pct", "train50": "train_top50pct", "val": "val_5K"}
    parts["test"] = "test_30K"
    if captions is None:
        checks.choice("split", split, tuple(parts))
        name = f"SkyScript_{parts[split]}_filtered_by_CLIP_openai.csv"
        captions = items.find(root, name, f"dataframe/{name}")
    rows = read_captions(captions, columns=(("filepath",), ("title_multi_objects",)))
    return _captioned(
        lambda: (_file(name, items.below(root, name), [(name, title)]) for name, title in rows)
    )


# --- labelled pictures: ImageNet, Food-101, DTD, Flowers-102, FGVC-Aircraft, CIFAR ---------------

_FOLDER = pathlib.Path(__file__).parent / "zero_shot"
TEMPLATES, CLASS_NAMES = _FOLDER / "templates.json", _FOLDER / "class_names.json"
"""Prompts and class names of CLIP's zero-shot evaluation."""


def _prompted(prompts: str, names: Iterable[str], pictures: Callable[[], Iterator[Item]]) -> Source:
    """Returns a classification set, whose texts are all templates filled with all class names.

    The group of a picture or a prompt is the number of its class.
    """
    templates = storage.read_json(TEMPLATES)[prompts]
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
    """Returns a classification set of files. `names` replace the classes in the prompts."""
    number = {one: str(label) for label, one in enumerate(classes)}
    listed = [(name, number[one]) for name, one in rows]

    def pictures() -> Iterator[Item]:
        return (
            Item(name, label, items.below(folder, name), items.picture) for name, label in listed
        )

    return _prompted(prompts, names or classes, pictures)


def imagenet(root: pathlib.Path, split: str) -> Source:
    """Reads ImageNet-1k, as SPLIT/SYNSET/*.JPEG or in the layout of Kaggle.

    Args:
        root: Folder of the dataset.
        split: "train" or "val".

    Returns:
        The source.
    """
    checks.choice("split", split, ("train", "val"))
    mapping, solution = root / "LOC_synset_mapping.txt", root / "LOC_val_solution.csv"
    if mapping.exists():
        synsets = [line.split()[0] for line in items.lines(mapping)]
        folder = root / "ILSVRC" / "Data" / "CLS-LOC" / split
    else:
        folder = items.find(root, split)
        synsets = sorted(path.name for path in folder.iterdir() if path.is_dir())
    # The class names are in the order of the sorted synsets, so none may be missing.
    names = storage.read_json(CLASS_NAMES)["imagenet1k"]
    if len(synsets) != len(names):
        text = f"root has {len(synsets)} synset folders in {folder}, but {len(names)} are needed"
        raise checks.InputError(f"{text}; keep empty ones, because class names follow their order")
    if split == "val" and solution.exists():
        listed = csv.DictReader(items.lines(solution))
        rows = sorted((f"{r['ImageId']}.JPEG", r["PredictionString"].split()[0]) for r in listed)
    else:
        rows = [(name, pathlib.Path(name).parts[0]) for name in items.pictures_below(folder)]
    return _labelled("imagenet1k", synsets, folder, rows, names)


def food101(root: pathlib.Path, split: str) -> Source:
    """Reads Food-101: images/CLASS/ID.jpg, meta/classes.txt and meta/SPLIT.txt.

    Args:
        root: Folder of the dataset.
        split: "train" or "test".

    Returns:
        The source.
    """
    meta = items.find(root, "meta")
    checks.choice("split", split, ("train", "test"))
    rows = ((f"{name}.jpg", name.split("/")[0]) for name in items.lines(meta / f"{split}.txt"))
    return _labelled("food101", items.lines(meta / "classes.txt"), root / "images", rows)


def dtd(root: pathlib.Path, split: str) -> Source:
    """Reads DTD: images/CLASS/*.jpg and labels/SPLIT.txt.

    Args:
        root: Folder of the dataset.
        split: Name of a file in labels, such as "test1".

    Returns:
        The source.
    """
    listed, folder = items.find(root, f"labels/{split}.txt"), root / "images"
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    rows = ((name, name.split("/")[0]) for name in items.lines(listed))
    return _labelled("dtd", classes, folder, rows)


def flowers(root: pathlib.Path, split: str) -> Source:
    """Reads Flowers-102: jpg/image_NNNNN.jpg, imagelabels.mat and setid.mat.

    Args:
        root: Folder of the dataset.
        split: "train", "val" or "test".

    Returns:
        The source.
    """
    import scipy.io

    parts = {"train": "trnid", "val": "valid", "test": "tstid"}
    checks.choice("split", split, tuple(parts))
    numbers = scipy.io.loadmat(items.find(root, "setid.mat"))[parts[split]].ravel()
    labels = scipy.io.loadmat(root / "imagelabels.mat")["labels"].ravel()
    rows = ((f"image_{n:05d}.jpg", labels[n - 1]) for n in numbers)  # MATLAB counts from 1
    names = storage.read_json(CLASS_NAMES)["flowers"]
    return _labelled("flowers", range(1, len(names) + 1), root / "jpg", rows, names)


def aircraft(root: pathlib.Path, split: str) -> Source:
    """Reads FGVC-Aircraft with its variants as classes.

    Args:
        root: Folder of the dataset.
        split: "train", "val", "trainval" or "test".

    Returns:
        The source.
    """
    data = items.find(root, "data/variants.txt", "variants.txt").parent
    listed = items.lines(items.find(data, f"images_variant_{split}.txt"))
    named = (line.strip().split(maxsplit=1) for line in listed)
    rows = ((f"{name}.jpg", variant) for name, variant in named)
    return _labelled("fgvc_aircraft", items.lines(data / "variants.txt"), data / "images", rows)


PYTHON_CIFAR = {
    "cifar10": ("batches.meta", {"test": ["test_batch"],
                                 "train": [f"data_batch_{n}" for n in range(1, 6)]}),
    "cifar100": ("meta", {"test": ["test"], "train": ["train"]}),
}  # fmt: skip
"""File of the class names, and files by split, of the Python version."""
CIFAR: dict[str, tuple[str, int, dict[str, list[str]]]] = {
    "cifar10": (
        *("batches.meta.txt", 1),
        {"test": ["test_batch.bin"], "train": [f"data_batch_{n}.bin" for n in range(1, 6)]},
    ),
    "cifar100": ("fine_label_names.txt", 2, {"test": ["test.bin"], "train": ["train.bin"]}),
}
"""File of the class names, number of label bytes before a picture, and files by split."""


def cifar(root: pathlib.Path, split: str, *, name: str) -> Source:
    """Reads the binary or the Python version of CIFAR-10, or of CIFAR-100 with its fine labels.

    Args:
        root: Folder of the dataset.
        split: "train" or "test".
        name: "cifar10" or "cifar100".

    Returns:
        The source.
    """
    names, labels, parts = CIFAR[name]
    checks.choice("split", split, tuple(parts))
    meta, python_parts = PYTHON_CIFAR[name]
    if (root / meta).exists() and not (root / names).exists():
        return _python_cifar(root, name, meta, python_parts[split])
    classes = items.lines(items.find(root, names))

    def pictures() -> Iterator[Item]:
        for file in (items.find(root, part) for part in parts[split]):
            content, width = np.fromfile(file, np.uint8), labels + 3 * 32 * 32
            if len(content) % width:
                raise checks.InputError(f"root file {file} is cut short; download it again")
            for n, row in enumerate(content.reshape(-1, width)):
                read = functools.partial(_pixels, row[labels:])
                yield Item(f"{file.name}/{n}", str(row[labels - 1]), file, read)

    return _prompted(name, classes, pictures)


def _python_cifar(root: pathlib.Path, name: str, meta: str, parts: list[str]) -> Source:
    """Reads the Python version of CIFAR, which consists of pickled arrays."""
    fine = "fine_" if name == "cifar100" else ""
    classes = [one.decode() for one in _unpickled(root / meta)[f"{fine}label_names".encode()]]

    def pictures() -> Iterator[Item]:
        for file in (items.find(root, part) for part in parts):
            stored = _unpickled(file)
            labels = stored[f"{fine}labels".encode()]
            for n, (row, label) in enumerate(zip(stored[b"data"], labels, strict=True)):
                read = functools.partial(_pixels, row)
                yield Item(f"{file.name}/{n}", str(label), file, read)

    return _prompted(name, classes, pictures)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays only, because other pickles can run code."""

    _ALLOWED: ClassVar = {"_reconstruct", "ndarray", "dtype"}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            # The function that rebuilds arrays has moved between versions of numpy.
            known = {"_reconstruct": np.empty(0).__reduce__()[0]}
            return known.get(name) or getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # bytes in pickles of Python 2
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")


def _unpickled(file: pathlib.Path) -> dict[bytes, Any]:
    try:
        with file.open("rb") as opened:
            found: dict[bytes, Any] = _ArrayUnpickler(opened, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError) as error:
        text = f"root file {file} is damaged ({checks.first_line(error)})"
        raise checks.InputError(f"{text}; download it again") from error
    return found


def _pixels(planes: np.ndarray, _: pathlib.Path) -> Any:
    """Returns a picture from its red, green and blue planes of 32 x 32 bytes."""
    import PIL.Image

    return PIL.Image.fromarray(planes.reshape(3, 32, 32).transpose(1, 2, 0).copy())


# --- tar shards in the webdataset layout, as CC3M and CC12M are distributed -----------------------

Members = dict[str, tuple[int, int]]
"""Offset and size of the files of a sample in their tar, by suffix."""


def webdataset(
    root: pathlib.Path, split: str, captions: pathlib.Path | None = None, column: str | None = None
) -> Source:
    """Reads uncompressed .tar files in which `KEY.jpg`, `KEY.txt` and `KEY.json` are a sample.

    The caption is the content of the .txt, or "caption" of the .json. Ids are TAR/KEY, because the
    same keys often occur in every tar.

    Args:
        root: Folder of the .tar files, or a single one.
        split: Only tars with this text in their name are read.
        captions: CSV or JSONL file with other captions, such as DreamLIP's synthetic ones of CC3M.
            Its column "Image Path" or "url" has the "url" of a sample's .json.
        column: Column of the caption in `captions`, or in the .json if there is no such file.

    Returns:
        The source. A tar that was cut short is listed as a skipped item.
    """
    tars = sorted(root.glob("*.tar")) if root.is_dir() else [root]
    tars = items.regular([tar for tar in tars if split in tar.name])
    if not tars:
        raise checks.InputError(
            f"root {root} holds no .tar file with {split!r} in its name; check --split"
        )

    def samples(read: Callable[[Members, pathlib.Path], Any]) -> Iterator[Item]:
        for tar in tars:
            for key, members in _samples(tar).items():
                name = f"{tar.stem}/{key}"
                yield Item(name, name, tar, functools.partial(read, members))
            with tar.open("rb") as file:
                file.seek(max(tar.stat().st_size - 1024, 0))
                if file.read() != bytes(1024):  # a complete tar ends with two empty blocks
                    reason = f"{tar.name} is cut short; download it again"
                    yield Item(f"{tar.stem}/", "", reason, items.fail)

    @functools.cache  # read when texts are listed, because pictures do not need it
    def told() -> dict[str, str] | None:
        if captions is None:
            return None
        names = (column,) if column else ("caption", "raw_caption")
        return dict(read_captions(captions, columns=(URL_COLUMNS, names)))

    def texts() -> Iterator[Item]:
        if captions is None and column is None:
            return samples(_caption)
        return samples(functools.partial(_other_caption, column, told()))

    return Source({"image": lambda: samples(_picture), "text": texts})


def _samples(tar: pathlib.Path) -> dict[str, Members]:
    """Returns the samples of a tar by key, up to the first damage. Only headers are read."""
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
    """Returns the first member with one of the suffixes, or no bytes if there is none."""
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
    raise ValueError("sample has no picture")


URL_COLUMNS = ("Image Path", "url")
"""Columns of the address of a picture. DreamLIP's files have the first one."""


def _other_caption(
    column: str | None, told: dict[str, str] | None, members: Members, tar: pathlib.Path
) -> str:
    """Returns a caption from a file of captions, or from a column of the sample's .json."""
    stored = json.loads(_read(members, (".json",), tar) or "{}")
    if told is None:
        found = stored.get(str(column))
        return str((found[0] if isinstance(found, list) and found else found) or "")
    if stored.get("url") not in told:
        raise ValueError(f"file of captions has no row for {stored.get('url')!r}")
    return told[stored["url"]]


def _caption(members: Members, tar: pathlib.Path) -> str:
    if text := _read(members, (".txt",), tar).decode("utf-8"):
        return text
    return str(json.loads(_read(members, (".json",), tar) or "{}").get("caption") or "")


# --- WikiText, Polyvore --------------------------------------------------------------------------


def wikitext(root: pathlib.Path, split: str) -> Source:
    """Reads the paragraphs of WikiText-103 or -2 from wiki.SPLIT.raw or wiki.SPLIT.tokens.

    Args:
        root: Folder of the dataset.
        split: "train", "val" or "test".

    Returns:
        The source.
    """
    split = {"val": "valid"}.get(split, split)
    path = items.find(root, f"wiki.{split}.raw", f"wiki.{split}.tokens")

    def paragraphs() -> Iterator[Item]:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(map(str.strip, file), 1):
                # Headings look like "= Title =".
                if text and not (text.startswith("= ") and text.endswith(" =")):
                    yield Item(str(number), str(number), text)

    return Source({"text": paragraphs})


def polyvore(root: pathlib.Path, split: str) -> Source:
    """Reads Polyvore from parquet files with the columns image (bytes), text and item_ID.

    Args:
        root: Folder of the dataset.
        split: Not used. All readers have the same arguments.

    Returns:
        The source.
    """
    tables = items.regular(sorted([*root.glob("*.parquet"), *root.glob("data/*.parquet")]))
    if not tables:
        raise checks.InputError(
            f"root {root} and its folder data hold no .parquet file; check --root"
        )

    def rows(column: str) -> Iterator[Item]:
        for file in tables:
            for row, name in enumerate(map(str, _cells(file, "item_ID").to_pylist())):
                yield Item(name, name, file, functools.partial(_cell, column, row))

    return Source({column: functools.partial(rows, column) for column in ("image", "text")})


_LOCK = threading.Lock()  # without it, several threads would read a large column at once


def _cells(file: pathlib.Path, column: str) -> Any:
    return _read_cells(file, column, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read_cells(file: pathlib.Path, column: str, modified: int) -> Any:
    """Reads a column. `modified` tells versions of the file apart."""
    return items.require("pyarrow.parquet").read_table(file, columns=[column])[column]


def _cell(column: str, row: int, file: pathlib.Path) -> Any:
    with _LOCK:
        value = _cells(file, column)[row].as_py()
    if value is None:
        raise ValueError(f"{column} is empty")
    return items.picture(value["bytes"]) if column == "image" else str(value)


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
"""Reader and default split of each dataset. The default is the split that the paper uses."""


CAPTIONED = ("folder", "skyscript", "webdataset")
"""Datasets that read a file of captions."""
NAMES = (*DATASETS, "hf:NAME[:SPLIT]", "tfds:NAME[:SPLIT]")


def open_dataset(
    name: str,
    root: pathlib.Path | None,
    *,
    split: str | None = None,
    captions: pathlib.Path | None = None,
    column: str | None = None,
    streaming: bool = False,
) -> Source:
    """Opens a dataset.

    Args:
        name: One of `DATASETS`, "hf:NAME[:SPLIT]" or "tfds:NAME[:SPLIT]".
        root: Folder of the dataset. Those of the hub need none.
        split: Split to read. The default is the one that the paper uses.
        captions: CSV or JSONL file of captions, for those in `CAPTIONED` only.
        column: Column to embed, for "hf:", "tfds:" and "webdataset" only.
        streaming: Read rows of "hf:" when they are needed, without storing the dataset.

    Returns:
        The source.

    Raises:
        InputError: The name is unknown, or the folder does not hold the dataset.
    """
    library, _, address = name.partition(":")
    if streaming and library != "hf":
        raise checks.InputError(f"streaming is set but {name} is local; leave --streaming out")
    if column is not None and library not in ("hf", "tfds", "webdataset"):
        raise checks.InputError(f"column is set but {name} has fixed ones; leave --column out")
    if captions is not None and name not in CAPTIONED:
        raise checks.InputError(
            f"captions is set but {name} has its own captions; leave --captions out"
        )
    if library in ("hf", "tfds") and address:
        place, own = _divided(address)
        chosen = own or split or "train"
        table = (
            hub.huggingface(place, chosen, streaming=streaming)
            if library == "hf"
            else hub.tfds(place, chosen, root)
        )
        return hub.source(table, column, functools.partial(_prompted, "imagenet1k"))
    checks.choice("data", name, NAMES)
    reader, usual = DATASETS[name]
    if root is None:
        raise checks.InputError("root is not set; pass --root=FOLDER, the folder of the dataset")
    if not root.exists():
        raise checks.InputError(f"root {root} does not exist; pass the folder of the dataset")
    given: dict[str, Any] = {} if captions is None else {"captions": captions}
    given |= {} if column is None else {"column": column}
    return reader(root, usual if split is None else split, **given)


def _divided(address: str) -> tuple[str, str]:
    """Divides NAME:SPLIT. Colons in brackets belong to a slice such as train[10:20]."""
    found = re.fullmatch(r"(.*?)(?::([^:\[/]+(?:\[.*\])?))?", address)
    assert found is not None  # it matches any text
    return found[1], found[2] or ""
