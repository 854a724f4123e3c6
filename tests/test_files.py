"""Tests of the readers of embedding files."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from sotalign_jax import checks, files


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((7, 3)).astype(np.float16)


def test_load_array_maps_npy_in_its_own_dtype(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    array = files.load_array(tmp_path / "x.npy")
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, table, strict=True)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_load_array_reads_named_npz_array(tmp_path, table, save):
    save(tmp_path / "t.npz", image=table, text=table[:, :2])
    np.testing.assert_array_equal(files.load_array(tmp_path / "t.npz", key="text"), table[:, :2])
    np.testing.assert_array_equal(files.load_array(f"{tmp_path}/t.npz#text"), table[:, :2])


def test_load_array_reads_single_npz_array_without_key(tmp_path, table):
    np.savez(tmp_path / "t.npz", table)
    np.testing.assert_array_equal(files.load_array(str(tmp_path / "t.npz")), table)


def test_load_array_lists_npz_keys_if_ambiguous(tmp_path, table):
    np.savez(tmp_path / "t.npz", image=table, text=table)
    with pytest.raises(checks.InputError, match=r"holds several arrays; choose .* image, text"):
        files.load_array(tmp_path / "t.npz")
    with pytest.raises(checks.InputError, match=r"no array 'imag'; choose .* image, text"):
        files.load_array(tmp_path / "t.npz", key="imag")


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, np.int64, ml_dtypes.bfloat16]
)
def test_load_array_reads_safetensors_of_every_dtype(tmp_path, table, dtype):
    tensors = {"a": table.astype(dtype), "odd": table[:3, :1].copy(), "z": table.astype(dtype) * 2}
    safetensors.numpy.save_file(tensors, tmp_path / "t.safetensors", metadata={"encoder": "toy"})
    array = files.load_array(tmp_path / "t.safetensors", key="z")
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, tensors["z"], strict=True)


def test_load_array_ignores_safetensors_metadata(tmp_path, table):
    safetensors.numpy.save_file({"a": table}, tmp_path / "t.safetensors", metadata={"k": "v"})
    np.testing.assert_array_equal(files.load_array(tmp_path / "t.safetensors"), table)


def test_load_array_rejects_unsupported_safetensors_dtype(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(3, np.uint16)}, tmp_path / "t.safetensors")
    with pytest.raises(checks.InputError, match=r"t\.safetensors .*U16"):
        files.load_array(tmp_path / "t.safetensors")


def test_load_array_restores_bfloat16_npy(tmp_path, table):
    np.save(tmp_path / "x.npy", table.astype(ml_dtypes.bfloat16))
    array = files.load_array(tmp_path / "x.npy")
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array, table.astype(ml_dtypes.bfloat16))


def write(path, **arrays):
    """Writes arrays with the format's own package. Skips the test if it is not installed."""
    match path.suffix:
        case ".npy":
            np.save(path, *arrays.values())
        case ".npz":
            np.savez(path, **arrays)
        case ".safetensors":
            safetensors.numpy.save_file(arrays, path)
        case ".parquet":
            columns = {name: pa.array(list(array)) for name, array in arrays.items()}
            pq.write_table(pa.table(columns), path, row_group_size=3)
        case ".csv":
            (array,) = arrays.values()
            np.savetxt(path, array, delimiter=",", fmt="%.9g")
        case ".h5":
            with pytest.importorskip("h5py").File(path, "w") as store:
                for name, array in arrays.items():
                    store[name] = array
        case ".pt":
            torch = pytest.importorskip("torch")
            torch.save({name: torch.tensor(array) for name, array in arrays.items()}, path)
    return path


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "parquet", "csv", "h5", "pt"])
def test_load_array_reads_every_format(tmp_path, suffix):
    table = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    path = write(tmp_path / f"x.{suffix}", x=table)
    stored = np.float64 if suffix == "csv" else np.float32
    array = files.load_array(path)
    np.testing.assert_allclose(array, table.astype(stored), rtol=1e-6, strict=True)


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet", "h5", "pt"])
def test_load_array_accepts_key_after_the_path(tmp_path, table, suffix):
    path = write(tmp_path / f"t.{suffix}", image=table, text=table[:, :2].copy())
    np.testing.assert_array_equal(files.load_array(f"{path}#text"), table[:, :2], strict=True)
    np.testing.assert_array_equal(files.load_array(path, key="image"), table, strict=True)
    with pytest.raises(checks.InputError, match="image, text"):
        files.load_array(path)


def external_storage(h5py, store):
    np.full((4,), 7.0).tofile("raw.bin")
    store.create_dataset("x", (2, 2), "<f8", external=[("raw.bin", 0, 32)])


def external_link(h5py, store):
    store["x"] = h5py.ExternalLink("other.h5", "secret")


def virtual_dataset(h5py, store):
    layout = h5py.VirtualLayout((3, 2), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "secret", (3, 2))
    store.create_virtual_dataset("x", layout)


def virtual_dataset_of_external_storage(h5py, store):
    np.full((4,), 7.0).tofile("raw.bin")
    store.create_dataset("hidden", (2, 2), "<f8", external=[("raw.bin", 0, 32)])
    layout = h5py.VirtualLayout((2, 2), "f8")
    layout[:] = h5py.VirtualSource(".", "hidden", (2, 2))
    store.create_virtual_dataset("x", layout)


@pytest.mark.parametrize(
    "write_foreign",
    [external_storage, external_link, virtual_dataset, virtual_dataset_of_external_storage],
)
def test_load_array_reads_no_other_file_that_hdf5_names(tmp_path, monkeypatch, write_foreign):
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    with h5py.File("other.h5", "w") as other:
        other["secret"] = np.ones((3, 2))
    with h5py.File("x.h5", "w") as store:
        store["ok"] = np.zeros((2, 2))
        write_foreign(h5py, store)
    with pytest.raises(checks.InputError, match=r"'x', which .*; (write|copy)") as caught:
        files.load_array("x.h5", key="x")
    assert "\n" not in str(caught.value)
    assert files.load_array("x.h5", key="ok").shape == (2, 2)


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "h5", "pt"])
def test_load_array_memory_maps_where_possible(tmp_path, table, suffix):
    array = files.load_array(write(tmp_path / f"x.{suffix}", x=table))
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    assert isinstance(array, np.memmap) or suffix == "pt"  # torch maps the file itself


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("suffix", ["npz", "safetensors", "h5", "pt"])
def test_load_array_decodes_quantised_rows(tmp_path, suffix, kind):
    codes = np.random.default_rng(0).integers(0, 127, (6, 3)).astype(kind)
    scale, mean = np.float32([0.5, 0.25, 2.0]), np.float32([1.0, 0.0, -3.0])
    alone = write(tmp_path / f"a.{suffix}", x=codes, scale=scale)
    np.testing.assert_array_equal(files.load_array(alone), codes * scale, strict=True)
    both = {"x": codes, "x_scale": scale, "x_mean": mean, "y": codes, "y_scale": scale * 2}
    path = write(tmp_path / f"b.{suffix}", **both)
    np.testing.assert_array_equal(files.load_array(f"{path}#x"), codes * scale + mean)
    np.testing.assert_array_equal(files.load_array(f"{path}#y"), codes * scale * 2)
    np.testing.assert_array_equal(files.load_array(f"{path}#x_scale"), scale)
    raw = files.load_array(write(tmp_path / f"c.{suffix}", x=codes))
    if kind == np.int8:
        with pytest.raises(checks.InputError, match=r"x .*int8.*scale"):
            checks.embeddings("x", raw)
    else:  # unsigned bytes without a scale are features, such as binary fingerprints
        np.testing.assert_array_equal(checks.rows("x", raw), codes)


def test_load_array_reads_parquet_list_and_float_columns(tmp_path, table):
    lists = {"id": list("abcdefg"), "embedding": pa.array(list(table)), "n": range(7)}
    pq.write_table(pa.table(lists), tmp_path / "lists.parquet")
    np.testing.assert_array_equal(files.load_array(tmp_path / "lists.parquet"), table, strict=True)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(table.ravel()), 3)
    pq.write_table(pa.table({"e": fixed}), tmp_path / "fixed.parquet")
    np.testing.assert_array_equal(files.load_array(tmp_path / "fixed.parquet"), table, strict=True)
    wide = {"id": range(7), **{f"f{n}": table[:, n].astype(np.float32) for n in range(3)}}
    pq.write_table(pa.table(wide), tmp_path / "wide.parquet")
    np.testing.assert_array_equal(files.load_array(tmp_path / "wide.parquet"), table)
    np.testing.assert_array_equal(files.load_array(f"{tmp_path}/wide.parquet#id"), np.arange(7))


@pytest.mark.parametrize(
    ("cells", "problem"), [([[1.0], [1.0, 2.0]], "1 to 2 numbers"), ([[1.0], None], "empty cells")]
)
def test_load_array_rejects_uneven_parquet_rows(tmp_path, cells, problem):
    pq.write_table(pa.table({"e": cells}), tmp_path / "x.parquet")
    with pytest.raises(checks.InputError, match=rf"'e' .*x.parquet .*{problem}"):
        files.load_array(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5,2\n3,4\n", [[1.5, 2], [3, 4]]),
        ("id,a,b\n7,1.5,2.5\n8,3.5,4.5\n", [[1.5, 2.5], [3.5, 4.5]]),
        ('name,e\ncat,"[1.5, 2]"\ndog,"[3, 4.5]"\n', [[1.5, 2], [3, 4.5]]),
        ("row\n2\n0\n", [2, 0]),
    ],
)
def test_load_array_reads_csv_with_or_without_header(tmp_path, text, expected):
    (tmp_path / "x.csv").write_text(text)
    key = "e" if "name" in text else None
    np.testing.assert_array_equal(files.load_array(tmp_path / "x.csv", key=key), expected)


def test_load_array_reads_pt_tensor_in_bfloat16(tmp_path, table):
    torch = pytest.importorskip("torch")
    torch.save(torch.tensor(table).bfloat16(), tmp_path / "x.pt")
    array = files.load_array(tmp_path / "x.pt")
    np.testing.assert_array_equal(array, table.astype(ml_dtypes.bfloat16), strict=True)


def test_load_array_rejects_pt_with_pickled_objects(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(pathlib.PurePosixPath("anything but a tensor"), tmp_path / "x.pt")
    with pytest.raises(checks.InputError, match=r"x.pt .*tensor") as caught:
        files.load_array(tmp_path / "x.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "module", "extra"),
    [("parquet", "pyarrow.parquet", "files"), ("h5", "h5py", "files"), ("pt", "torch", "extract")],
)
def test_load_array_without_reader_names_the_extra(tmp_path, monkeypatch, suffix, module, extra):
    (tmp_path / f"x.{suffix}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(checks.InputError, match=rf"not installed; .*\[{extra}\]"):
        files.load_array(tmp_path / f"x.{suffix}")


def test_describe_names_shape_dtype_and_file(tmp_path, table):
    np.save(tmp_path / "x.npy", table)
    mapped = files.load_array(tmp_path / "x.npy")
    assert files.describe(mapped, tmp_path / "x.npy") == "7 x 3 float16 from x.npy"
    rows = files.MappedRows(mapped, np.arange(2))
    assert files.describe(rows, "a/t.npz#text") == "2 x 3 float16 from t.npz#text"


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "parquet", "h5", "pt"])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.6, 0.99])
def test_load_array_rejects_truncated_files(tmp_path, suffix, keep):
    big = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    path = write(tmp_path / f"x.{suffix}", x=big)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(
        checks.InputError, match=re.escape(str(path)) + ".*write it again"
    ) as caught:
        files.load_array(path)
    assert "\n" not in str(caught.value)


def test_load_array_rejects_corrupt_npz(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, np.zeros((50, 40)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(checks.InputError, match="corrupt"):
        files.load_array(path)


def _entry(shape: list[int], begin: int, end: int) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}})


@pytest.mark.parametrize(
    "header",
    [
        _entry([2, 2], 0, 4),
        _entry([2, 2], -16, 0),  # offsets into the header
        _entry([2, 2], 16, 0),
        _entry([-2, -2], 0, 16),
        _entry([10**30], 0, 4 * 10**30),
        _entry([2**40], 0, 4 * 2**40),
        "3",
        "[" * 100_000,
    ],
)
def test_load_array_rejects_bad_safetensors_header(tmp_path, header):
    path = tmp_path / "x.safetensors"
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(checks.InputError, match="cannot be read") as caught:
        files.load_array(path)
    assert "\n" not in str(caught.value)


def test_load_array_expands_the_home_folder(tmp_path, monkeypatch, table):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "x.npy", table)
    np.testing.assert_array_equal(files.load_array("~/x.npy"), table)


def test_load_array_rejects_missing_unknown_and_object_files(tmp_path):
    with pytest.raises(checks.InputError, match=r"absent\.npy"):
        files.load_array(tmp_path / "absent.npy")
    with pytest.raises(checks.InputError, match=r"table\.mat .*\.npy, \.npz"):
        files.load_array("table.mat")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(checks.InputError, match="cannot be read"):
        files.load_array(tmp_path / "o.npy")
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(checks.InputError, match=r"key .*'a'"):
        files.load_array(tmp_path / "x.npy", key="a")


_IMAGES = np.random.default_rng(1).standard_normal((1500, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory) -> pathlib.Path:
    """Prepares a TFDS dataset `tiny_pairs`. Text is the negated image, to check the pairing."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyPairs(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            vector = tfds.features.Tensor(shape=(4,), dtype=np.float32)
            features = {"image": vector, "text": vector, "caption": tfds.features.Text()}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(_IMAGES),
                "val": self._generate_examples(-_IMAGES[:3]),
            }

        def _generate_examples(self, rows):
            for i, row in enumerate(rows):
                yield i, {"image": row, "text": -row, "caption": str(i)}

    folder = tmp_path_factory.mktemp("tfds")
    TinyPairs(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def _sorted_rows(x: np.ndarray) -> np.ndarray:
    return x[np.lexsort(x.T)]


def test_load_array_reads_paired_tfds_features(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    image = files.load_array("tfds:tiny_pairs:train:image")
    text = files.load_array("tfds:tiny_pairs", key="text")
    np.testing.assert_array_equal(_sorted_rows(image), _sorted_rows(_IMAGES), strict=True)
    np.testing.assert_array_equal(text, -image)


def test_load_array_reads_tfds_versions_splits_and_slices(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    val = files.load_array("tfds:tiny_pairs:1.0.0:val:image")
    np.testing.assert_array_equal(_sorted_rows(val), _sorted_rows(-_IMAGES[:3]))
    np.testing.assert_array_equal(files.load_array("tfds:tiny_pairs:val[1:3]:image"), val[1:3])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tfds:tiny_pairs:train", "several arrays; choose a key from image, text, caption"),
        ("tfds:tiny_pairs:train:sound", "no array 'sound'"),
        ("tfds:tiny_pairs:train:caption", "caption.* numeric"),
        ("tfds:tiny_pairs:test:image", "Unknown split 'test'"),
        ("tfds:no_such_set:train:image", "no_such_set not found"),
        ("tfds:a:b:c:d", "path .*tfds:a:b:c:d"),
        ("tfds:", "path "),
    ],
)
def test_load_array_rejects_bad_tfds_addresses(tfds_folder, monkeypatch, address, message):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    with pytest.raises(checks.InputError, match=message) as caught:
        files.load_array(address)
    assert "\n" not in str(caught.value)


def test_load_array_rejects_tfds_without_random_access(tfds_folder, tmp_path, monkeypatch):
    shutil.copytree(tfds_folder / "tiny_pairs", tmp_path / "tiny_pairs")
    info = tmp_path / "tiny_pairs" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(checks.InputError, match="file_format='array_record'"):
        files.load_array("tfds:tiny_pairs:train:image")


def test_load_array_reads_tfds_without_tensorflow(tfds_folder):
    program = (
        "import sys; from sotalign_jax import files\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        "print(files.load_array('tfds:tiny_pairs:val:text').shape)\n"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program],
        env={"TFDS_DATA_DIR": str(tfds_folder), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout.strip() == "(3, 4)", out.stderr


def test_load_array_without_tfds_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(checks.InputError, match=r"not installed; .*\[data\]"):
        files.load_array("tfds:anything")


def test_take_of_large_mapped_files_is_lazy(tmp_path, monkeypatch, rng):
    table = rng.normal(size=(20, 3)).astype(np.float16)
    np.save(tmp_path / "x.npy", table)
    mapped, rows = files.load_array(tmp_path / "x.npy"), rng.permutation(20)[:7]
    assert isinstance(files.take(mapped, rows), np.ndarray)
    monkeypatch.setattr(files, "MAPPED_BYTES", 7 * 6 - 1)
    assert isinstance(files.take(table, rows), np.ndarray)  # in memory already
    taken = files.take(mapped, rows)
    assert isinstance(taken, files.MappedRows)
    assert (len(taken), taken.shape, taken.dtype) == (7, (7, 3), np.float16)
    np.testing.assert_array_equal(taken, table[rows])
    np.testing.assert_array_equal(taken[np.array([2, 0])], table[rows[[2, 0]]])
    np.testing.assert_array_equal(np.concatenate([taken, table]), [*table[rows], *table])


@pytest.mark.parametrize("first", ["a;b", "0,5;1,5"])
def test_load_array_names_semicolons_in_a_csv_file(tmp_path, first):
    (tmp_path / "x.csv").write_text(f"{first}\n1.5;2.5\n")
    with pytest.raises(checks.InputError, match=r"x\.csv .*semicolon"):
        files.load_array(tmp_path / "x.csv")
