"""Files: readers of numpy, safetensors, parquet, CSV, HDF5, torch and TFDS, and a safe writer."""

import csv
import json
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from sotalign_jax import checks

_SAFETENSORS_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 8)},
    "U8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Number of records that TFDS reads at a time. It limits the Python objects beside the array.
_TFDS_CHUNK = 1024
# Names of members that hold the scale and the mean of 8-bit codes, and no embeddings.
_SIDECAR = re.compile(r"(^|_)(scale|mean)$")
# Largest number of keys that an error message lists.
_SHOWN = 20
# Rows of a file cost a seek in every step. A gigabyte fits into the memory of any machine.
MAPPED_BYTES = 2**30
"""Largest selection of rows of a memory-mapped file that is copied to memory."""


class MappedRows:
    """Selected rows of a memory-mapped array, read and converted when they are indexed.

    Args:
        array: The memory-mapped array.
        rows: Indices of the selected rows. Row i is `array[rows[i]]`, in its `native_dtype`.

    Example:
        >>> rows = MappedRows(np.arange(8.0).reshape(4, 2), np.array([3, 1]))
        >>> rows[:1].tolist(), np.asarray(rows).shape
        ([[6.0, 7.0]], (2, 2))
    """

    def __init__(self, array: np.ndarray, rows: np.ndarray) -> None:
        self._array, self._rows = array, rows
        self.dtype = checks.native_dtype(array.dtype)
        self.shape = (len(rows), *array.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return checks.native(self._array[self._rows[index]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray | MappedRows:
    """Selects rows of an array.

    Args:
        array: Any array.
        rows: Indices of the rows.

    Returns:
        `array[rows]` in its `native_dtype`, or `MappedRows` if the array is memory-mapped and the
        rows take more than `MAPPED_BYTES`.

    Example:
        >>> take(np.arange(3), np.array([2, 0])).tolist()
        [2, 0]
    """
    selected = MappedRows(array, rows)
    large = math.prod(selected.shape) * selected.dtype.itemsize > MAPPED_BYTES
    return selected if checks.is_mapped(array) and large else selected[:]


def pool(array: np.ndarray) -> np.ndarray | MappedRows:
    """Returns a pool whose rows JAX can use.

    Args:
        array: Any array.

    Returns:
        The array itself, or `MappedRows` if it is memory-mapped in a type that JAX does not use.

    Example:
        >>> pool(np.ones((2, 3))).shape
        (2, 3)
    """
    # In memory, `checks.array` has converted the array already.
    foreign = array.dtype != checks.native_dtype(array.dtype)
    return MappedRows(array, np.arange(len(array))) if foreign else array


def describe(array: np.ndarray | MappedRows, path: str | os.PathLike[str]) -> str:
    """Returns a short description of an array, for a progress line.

    Args:
        array: An array that was read.
        path: The file that it was read from.

    Returns:
        Shape, dtype and the name of the file.

    Example:
        >>> describe(np.zeros((1000, 4), np.float16), "data/x.npy")
        '1,000 x 4 float16 from x.npy'
    """
    shape = " x ".join(f"{size:,}" for size in array.shape)
    return f"{shape} {array.dtype} from {os.path.basename(path)}"


def split_key(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Splits PATH#KEY into the file and the name of an array in it.

    Args:
        path: Path of a file, with or without #KEY.

    Returns:
        The file and the key. The key is None if there is none or the format has no keys.

    Example:
        >>> split_key("a.npz#text"), split_key("#1.npy")
        (('a.npz', 'text'), ('#1.npy', None))
    """
    address = os.fspath(path)
    file, _, key = address.rpartition("#")
    # File names may contain "#". It separates a key only after the suffix of a format with keys.
    keyed = tuple(suffix for suffix in READERS if suffix != ".npy")
    return (file, key) if file.lower().endswith(keyed) else (address, None)


def load_array(path: str | os.PathLike[str], *, key: str | None = None) -> np.ndarray:
    """Reads one array of a file. Formats that allow it are memory-mapped.

    | path                            | reading                                                  |
    |---------------------------------|----------------------------------------------------------|
    | `x.npy`                         | memory-mapped                                            |
    | `x.npz`                         | one array                                                |
    | `x.safetensors`                 | one tensor, memory-mapped                                |
    | `x.h5`, `x.hdf5`                | one dataset, memory-mapped if contiguous (h5py)          |
    | `x.pt`, `x.pth`                 | a tensor, or one of a dictionary, memory-mapped (torch)  |
    | `x.parquet`, `x.csv`            | one column of lists, or all float columns (pyarrow)      |
    | `tfds:NAME[:SPLIT[:FEATURE]]`   | TensorFlow Datasets, random access, no TensorFlow        |

    Arrays keep their stored dtype, float16 and bfloat16 included. Arrays of 8-bit codes are decoded
    to float32 if the file also holds their scale: `KEY * KEY_scale + KEY_mean`, where `KEY_mean`
    may be missing, and both may be called `scale` and `mean`. They broadcast against the codes.

    A .pt file is read with `weights_only=True`, so it cannot run code. An HDF5 file must hold its
    values itself, because a link, external storage or a virtual dataset may read any file. The
    NAME of a `tfds:` address may have a config and a version (`name/config:1.0.0`), and SPLIT may
    be a slice (`train[:50%]`). Features of one split are read in the same order, so two of them
    make pairs.

    Args:
        path: Path of the file, PATH#KEY, or a `tfds:` address.
        key: Name of the member, column or feature, if there are several.

    Returns:
        The array.

    Raises:
        InputError: The file is missing, damaged, of an unknown format or has no such member, or the
            package that reads it is not installed.

    Example:
        >>> from sotalign_jax import data
        >>> load_array(data.SAMPLE, key="text").shape
        (640, 384)
    """
    address = os.fspath(path)
    if key is None:
        address, key = split_key(address)
    if address.startswith("tfds:"):
        return _load_tfds(address, key)
    file = pathlib.Path(address).expanduser()
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        known = ", ".join(READERS)
        raise checks.InputError(f"{file} has no known format; use {known} or tfds:NAME")
    if not file.is_file():
        raise checks.InputError(f"{file} does not exist; check the path")
    try:
        return reader(file, key)
    except checks.InputError:
        raise
    # Readers raise exceptions of many types for damaged files.
    except Exception as error:
        raise checks.InputError(
            f"{file} cannot be read ({checks.first_line(error)}); "
            "the file is truncated, corrupt or not numeric, so write it again"
        ) from error


def _load_npy(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Maps a .npy file into memory."""
    if key is not None:
        raise checks.InputError(f"key must be None for a .npy file, got {key!r} for {file}")
    return _as_bfloat16(np.load(file, mmap_mode="r", allow_pickle=False))


def _load_npz(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Reads one array of a .npz file."""
    with zipfile.ZipFile(file) as archive:

        def get(name: str) -> np.ndarray:
            with archive.open(f"{name}.npy") as stream:
                return _as_bfloat16(np.lib.format.read_array(stream, allow_pickle=False))

        names = [name.removesuffix(".npy") for name in archive.namelist()]
        return _pick(file, names, key, get)


def _as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Restores bfloat16, which numpy stores as anonymous 2-byte values."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _load_safetensors(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Maps one tensor of a .safetensors file into memory."""
    # The format is a length, a JSON header and raw tensors. The numpy reader of safetensors would
    # read the tensor into memory. Mapping the bytes also works for files larger than memory.
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(length))

    def get(name: str) -> np.ndarray:
        entry = header[name]
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(_SAFETENSORS_DTYPES)
            raise checks.InputError(
                f"{file} has the unsupported dtype {entry['dtype']}; convert it to one of {known}"
            )
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        # A damaged header must not map bytes of another tensor.
        inside = 0 <= begin <= end and all(width >= 0 for width in shape)
        if not inside or end - begin != dtype.itemsize * math.prod(shape):
            raise ValueError("its header contradicts itself")
        return np.memmap(file, dtype, "r", offset=8 + length + begin, shape=shape)

    return _pick(file, [name for name in header if name != "__metadata__"], key, get)


def _load_hdf5(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Reads one dataset of an HDF5 file, or maps it into memory."""
    h5py = checks.require("h5py", extra="files")
    with h5py.File(file) as store:

        def get(name: str) -> np.ndarray:
            entry = store[name]
            # The file may come from somebody else and must not name which other file is read. Even
            # a virtual dataset of its own file may lead to a dataset that is stored elsewhere.
            if entry.external or entry.is_virtual:
                text = f"{file} holds no values of {name!r}, which names other storage"
                raise checks.InputError(f"{text}; write the values into the file")
            # A contiguous dataset is mapped at its offset in the file. The offset is None if the
            # dataset is chunked, compressed or empty.
            offset = entry.id.get_offset()
            if offset is None or entry.dtype.kind not in "fiu":
                return np.asarray(entry[()])
            return np.memmap(file, entry.dtype, "r", offset=offset, shape=entry.shape)

        names: list[str] = []
        links: list[str] = []
        # Datasets behind links are not visited.
        store.visititems(
            lambda name, entry: names.append(name) if isinstance(entry, h5py.Dataset) else None
        )
        store.visititems_links(
            lambda name, link: links.append(name) if isinstance(link, h5py.ExternalLink) else None
        )
        if links and (key in links or not names):
            text = f"{file} holds no values of {key or links[0]!r}, which links to another file"
            raise checks.InputError(f"{text}; copy them into the file")
        return _pick(file, names, key, get)


def _load_torch(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Reads one tensor of a torch file."""
    torch = checks.require("torch", extra="extract")
    try:
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        options = {"weights_only": True, "map_location": "cpu", "mmap": zipfile.is_zipfile(file)}
        saved = torch.load(file, **options)
    # torch has no exception type for forbidden content, so its message is inspected.
    except Exception as error:
        if "weights_only" not in str(error).lower() and "Weights only" not in str(error):
            raise
        remedy = "save a tensor, or a dictionary of tensors, with torch.save"
        raise checks.InputError(f"{file} holds more than tensors; {remedy}") from error
    tensors = saved if isinstance(saved, dict) else {"": saved}
    tensors = {name: value for name, value in tensors.items() if torch.is_tensor(value)}
    return _pick(file, tensors, key, lambda name: checks.stored(name, tensors[name]))


def _load_parquet(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Reads one column of lists, or all float columns, of a parquet file."""
    parquet = checks.require("pyarrow.parquet", extra="files")
    with parquet.ParquetFile(file) as table:
        names = _columns(file, table.schema_arrow, key)
        return _from_columns(file, table.read(columns=names), names)


def _load_csv(file: pathlib.Path, key: str | None) -> np.ndarray:
    """Reads one column, or all float columns, of a CSV file with or without column names."""
    arrow_csv = checks.require("pyarrow.csv", extra="files")
    with file.open(newline="", encoding="utf-8-sig") as stream:
        first = next(csv.reader(stream), [])
    line = ",".join(first)
    parts = line.split(";")
    numbers = all(_is_number(part.replace(",", ".")) for part in parts)
    if len(parts) > 1 and (len(first) == 1 or numbers):
        raise checks.InputError(
            f"{file} separates its columns with semicolons, got {line[:40]!r}; separate them with "
            "commas, and write decimals with points"
        )
    # A first line of numbers is data, not column names.
    bare = bool(first) and all(_is_number(cell) for cell in first)
    # A table without column names is one matrix, even if some of its columns hold integers.
    matrix = {f"f{n}": "float64" for n in range(len(first))} if bare and len(first) > 1 else None
    table = arrow_csv.read_csv(
        file,
        arrow_csv.ReadOptions(autogenerate_column_names=bare),
        arrow_csv.ParseOptions(newlines_in_values=True),
        arrow_csv.ConvertOptions(column_types=matrix),
    )
    names = _columns(file, table.schema, key)
    return _from_columns(file, table, names)


def _is_number(text: str) -> bool:
    """Returns True if a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _columns(file: pathlib.Path, schema: Any, key: str | None) -> list[str]:
    """Returns the column `key`, or else the only column of lists, or else all float columns."""
    types = checks.require("pyarrow.types", extra="files")
    kinds = dict(zip(schema.names, schema.types, strict=True))
    lists = [
        name
        for name, kind in kinds.items()
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    ]
    # Integer columns are usually ids or labels.
    floats = [name for name, kind in kinds.items() if types.is_floating(kind)]
    if key is None and not lists and len(kinds) > 1 and floats:
        return floats
    return [_pick_key(str(file), lists if key is None and lists else list(kinds), key)]


def _from_columns(file: pathlib.Path, table: Any, names: list[str]) -> np.ndarray:
    """Converts columns to a matrix. A single column of numbers becomes a vector."""
    if missing := [name for name in names if table[name].null_count]:
        raise checks.InputError(
            f"column {missing[0]!r} of {file} has empty cells; remove such rows"
        )
    if len(names) > 1:
        return np.stack([table[name].to_numpy() for name in names], axis=1)
    column = table[names[0]]
    # pandas writes lists to a CSV file as text, such as "[0.1, 0.2]".
    if str(column.type) == "string":
        return np.array([json.loads(cell) for cell in column.to_pylist()], np.float32)
    if not hasattr(column.type, "value_type"):
        return column.to_numpy()
    # Lists of equal length are contiguous in an Arrow chunk, so they become a matrix by a reshape,
    # without a Python loop over rows.
    compute, parts = checks.require("pyarrow.compute", extra="files"), []
    for chunk in column.chunks:
        widths = compute.list_value_length(chunk).unique().to_pylist()
        if len(widths) != 1:
            raise checks.InputError(
                f"column {names[0]!r} of {file} has lists of {min(widths)} to {max(widths)} "
                "numbers; make them equally long"
            )
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        parts.append(values.reshape(len(chunk), widths[0]))
    return np.concatenate(parts)


READERS: dict[str, Callable[[pathlib.Path, str | None], np.ndarray]] = {
    ".npy": _load_npy,
    ".npz": _load_npz,
    ".safetensors": _load_safetensors,
    ".parquet": _load_parquet,
    ".csv": _load_csv,
    ".h5": _load_hdf5,
    ".hdf5": _load_hdf5,
    ".pt": _load_torch,
    ".pth": _load_torch,
}
"""Reader of each format by suffix."""


def _open_tfds(name: str, split: str) -> Any:
    """Opens a dataset that TFDS prepared with `file_format="array_record"`."""
    folder = os.environ.get("TFDS_DATA_DIR")
    tfds = checks.require("tensorflow_datasets", extra="data")
    where = folder and os.path.expanduser(folder)
    try:
        # `download=False`, because a typo should not download a large dataset.
        return tfds.data_source(name, split=split, data_dir=where, download=False)
    except (ValueError, AssertionError, NotImplementedError, OSError) as error:
        raise checks.InputError(
            f"tfds:{name}:{split} cannot be opened ({checks.first_line(error)}); prepare it with "
            "file_format='array_record' and set TFDS_DATA_DIR to its folder"
        ) from error


def _load_tfds(address: str, key: str | None) -> np.ndarray:
    """Reads one feature of a split of a TFDS dataset."""
    # Colons inside brackets belong to a split slice such as train[10:20].
    name, *rest = re.split(r":(?![^\[]*\])", address.removeprefix("tfds:"))
    # "name:1.0.0" is a name and its version, and "name:train" is a name and a split.
    if rest and re.fullmatch(r"[\d*]+\.[\d*]+\.[\d*]+", rest[0]):
        name = f"{name}:{rest.pop(0)}"
    if not name or len(rest) > 2 or (len(rest) == 2 and key is not None):
        raise checks.InputError(
            f"path must be tfds:NAME, tfds:NAME:SPLIT or tfds:NAME:SPLIT:FEATURE, without a second "
            f"feature in key, got {address}"
        )
    source = _open_tfds(name, rest[0] if rest else "train")
    features = source.dataset_info.features
    wanted = _pick_key(address, list(features), rest[1] if len(rest) == 2 else key)
    feature = features[wanted]
    if None in feature.shape or np.dtype(feature.np_dtype).kind not in "fiuV":
        raise checks.InputError(
            f"feature {wanted!r} of {address} must be numeric and of fixed shape, got {feature}"
        )
    out = np.empty((len(source), *feature.shape), feature.np_dtype)
    for start in range(0, len(out), _TFDS_CHUNK):
        rows = range(start, min(start + _TFDS_CHUNK, len(out)))
        out[start : rows.stop] = [record[wanted] for record in source.__getitems__(rows)]
    return out


def _pick(
    file: pathlib.Path, names: Iterable[str], key: str | None, get: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Returns the member `key`, or the only one, decoded if it is 8-bit codes with a scale."""
    found = list(names)
    members = [name for name in found if not _SIDECAR.search(name)] or found
    chosen = _pick_key(str(file), members if key is None else found, key)
    array = get(chosen)
    scale, mean = (
        next((name for name in (f"{chosen}_{part}", part) if name in found), None)
        for part in ("scale", "mean")
    )
    # Only 8-bit codes are decoded. The "scale" of an array of floats means something else.
    if array.dtype.itemsize > 1 or scale is None or scale == chosen:
        return array
    decoded = array * get(scale).astype(np.float32)
    return decoded if mean is None else decoded + get(mean).astype(np.float32)


def _pick_key(where: str, names: list[str], key: str | None) -> str:
    """Returns `key`, or the only name. Raises InputError if there is no such choice."""
    if key is None and len(names) == 1:
        return names[0]
    if key not in names:
        problem = "holds several arrays" if key is None else f"has no array {key!r}"
        shown = ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
        raise checks.InputError(f"{where} {problem}; choose a key from {shown}")
    return key
