"""Embedding files in: npy, npz, safetensors and TensorFlow Datasets, read as little as possible."""

import json
import math
import os
import pathlib
import re
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from sotalign_jax import checks

_SAFETENSORS_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_TFDS_CHUNK = 1024
MAPPED_BYTES = 2**30
"""Rows that are chosen from a memory-mapped file are copied to memory when they take less."""


class MappedRows:
    """Some rows of a memory-mapped array, read when they are taken.

    >>> rows = MappedRows(np.arange(8.0).reshape(4, 2), np.array([3, 1]))
    >>> rows[:1].tolist(), np.asarray(rows).shape
    ([[6.0, 7.0]], (2, 2))
    """

    def __init__(self, array: np.ndarray, rows: np.ndarray) -> None:
        """Row i is array[rows[i]]."""
        self._array, self._rows = array, rows
        self.dtype, self.shape = array.dtype, (len(rows), *array.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._array[self._rows[index]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray | MappedRows:
    """array[rows], of a large memory-mapped array without reading them yet."""
    mapped = isinstance(array, np.memmap) or isinstance(array.base, np.memmap)
    large = len(rows) * array[:1].nbytes > MAPPED_BYTES
    return MappedRows(array, rows) if mapped and large else array[rows]


def split_key(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The file of PATH#KEY and the array in it; of any other path itself and None.

    >>> split_key("a.npz#text"), split_key("#1.npy")
    (('a.npz', 'text'), ('#1.npy', None))
    """
    address = os.fspath(path)
    file, _, key = address.rpartition("#")
    return (file, key) if file.endswith((".npz", ".safetensors")) else (address, None)


def load_array(path: str | os.PathLike[str], *, key: str | None = None) -> np.ndarray:
    """Opens one array of embeddings, reading as little as the format allows.

    | path                            | reading                                             |
    |---------------------------------|-----------------------------------------------------|
    | `x.npy`                         | memory-mapped                                       |
    | `x.npz`, `x.npz#KEY`            | only the array `key`                                |
    | `x.safetensors`, the same       | only the tensor `key`, memory-mapped                |
    | `tfds:NAME[:SPLIT[:FEATURE]]`   | TensorFlow Datasets, random access, no TensorFlow   |

    Arrays keep their stored dtype (float16 and bfloat16 included). `key` chooses from a file that
    holds several, or is the FEATURE of a `tfds:` address. NAME may have a config and version
    (`name/config:1.0.0`), SPLIT may be a slice (`train[:50%]`); features of one split are read in
    the same order, so two of them make pairs.

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
    readers = {".npy": _load_npy, ".npz": _load_npz, ".safetensors": _load_safetensors}
    reader = readers.get(file.suffix)
    if reader is None:
        raise checks.InputError(
            f"{file}: unknown format {file.suffix!r}; use {', '.join(readers)} or tfds:NAME"
        )
    if not file.is_file():
        raise checks.InputError(f"{file}: no such file; check the path")
    try:
        array = reader(file, key)
    except checks.InputError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise checks.InputError(
            f"{file}: cannot be read ({checks.first_line(error)}); "
            "the file is truncated, corrupt or not numeric, so write it again"
        ) from error
    # numpy stores bfloat16 as anonymous 2-byte values; no other 2-byte void is an embedding.
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _load_npy(file: pathlib.Path, key: str | None) -> np.ndarray:
    if key is not None:
        raise checks.InputError(f"{file}: key {key!r} given but .npy holds one array; drop the key")
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _load_npz(file: pathlib.Path, key: str | None) -> np.ndarray:
    with zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        member = _pick_key(str(file), names, key)
        with archive.open(f"{member}.npy") as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)


def _load_safetensors(file: pathlib.Path, key: str | None) -> np.ndarray:
    # The format is a length, a JSON header and raw tensors: mapping the bytes ourselves keeps
    # files larger than memory usable, which the library's own numpy reader does not.
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(length))
    entry = header[_pick_key(str(file), [k for k in header if k != "__metadata__"], key)]
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise checks.InputError(
            f"{file}: dtype {entry['dtype']} is not supported; "
            f"convert to one of {', '.join(_SAFETENSORS_DTYPES)}"
        )
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    inside = 0 <= begin <= end and all(width >= 0 for width in shape)
    if not inside or end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError("its header contradicts itself")
    return np.memmap(file, dtype, "r", offset=8 + length + begin, shape=shape)


def _open_tfds(name: str, split: str) -> Any:
    """Records of a dataset that TFDS prepared with `file_format="array_record"`."""
    folder = os.environ.get("TFDS_DATA_DIR")
    tfds = checks.require("tensorflow_datasets", extra="data")
    where = folder and os.path.expanduser(folder)
    try:  # never fetch a large dataset as a side effect of a typo
        return tfds.data_source(name, split=split, data_dir=where, download=False)
    except (ValueError, AssertionError, NotImplementedError, OSError) as error:
        raise checks.InputError(
            f"tfds:{name}:{split}: {checks.first_line(error)} Prepare it with "
            "file_format='array_record' and set TFDS_DATA_DIR to its folder"
        ) from error


def _load_tfds(address: str, key: str | None) -> np.ndarray:
    # Colons inside brackets belong to a split slice such as train[10:20].
    name, *rest = re.split(r":(?![^\[]*\])", address.removeprefix("tfds:"))
    if rest and re.fullmatch(r"[\d*]+\.[\d*]+\.[\d*]+", rest[0]):
        name = f"{name}:{rest.pop(0)}"
    if not name or len(rest) > 2 or (len(rest) == 2 and key is not None):
        raise checks.InputError(
            f"{address}: not understood; write tfds:NAME, tfds:NAME:SPLIT or "
            "tfds:NAME:SPLIT:FEATURE, and name the feature once"
        )
    source = _open_tfds(name, rest[0] if rest else "train")
    features = source.dataset_info.features
    wanted = _pick_key(address, list(features), rest[1] if len(rest) == 2 else key)
    feature = features[wanted]
    if None in feature.shape or np.dtype(feature.np_dtype).kind not in "fiuV":
        raise checks.InputError(
            f"{address}: feature {wanted!r} is {feature}; choose a numeric one of fixed shape"
        )
    out = np.empty((len(source), *feature.shape), feature.np_dtype)
    for start in range(0, len(out), _TFDS_CHUNK):
        rows = range(start, min(start + _TFDS_CHUNK, len(out)))
        out[start : rows.stop] = [record[wanted] for record in source.__getitems__(rows)]
    return out


def _pick_key(where: str, names: list[str], key: str | None) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key not in names:
        problem = "holds several arrays" if key is None else f"has no array {key!r}"
        raise checks.InputError(f"{where}: {problem}; choose a key from {', '.join(names)}")
    return key
