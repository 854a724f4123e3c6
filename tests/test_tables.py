"""Tests of tables with ids: reading, dropping, and matching pairs by ids."""

import numpy as np
import pytest

import sotalign_jax as sota
from sotalign_jax import checks, tables

pd = pytest.importorskip("pandas", reason="needs the extra 'extract'")
pa = pytest.importorskip("pyarrow", reason="needs the extra 'extract'")
datasets = pytest.importorskip("datasets", reason="needs the extra 'extract'")

D_X, D_Y = 5, 4


@pytest.fixture
def views():
    """Returns 60 matching rows of both modalities."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(60, 3))
    x, y = (z @ rng.normal(size=(3, width)) for width in (D_X, D_Y))
    return x.astype(np.float32), y.astype(np.float32)


IDS = np.array(["img_7", "img_8", "img_9"])
FEATURES = np.array([[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], np.float32)


def structured():
    made = np.zeros(3, [("id", "U8"), ("f0", "f4"), ("f1", "f4")])
    made["id"] = IDS
    made["f0"], made["f1"] = FEATURES.T
    return made


def by_column(x):
    return {"id": IDS, "f0": x[:, 0], "f1": x[:, 1]}


READERS = {
    "index": lambda: pd.DataFrame(FEATURES, index=IDS, columns=["f0", "f1"]),
    "column": lambda: pd.DataFrame(by_column(FEATURES)),
    "nullable": lambda: pd.DataFrame(by_column(FEATURES)).convert_dtypes(),
    "vectors": lambda: pd.DataFrame({"id": IDS, "e": [*FEATURES]}),
    "series": lambda: pd.Series([*FEATURES], index=IDS),
    "structured": structured,
    "mapping": lambda: {"id": [*IDS], "e": FEATURES.tolist()},
    "arrow": lambda: pa.table({"id": [*IDS], "e": FEATURES.tolist()}),
    "arrow columns": lambda: pa.table(by_column(FEATURES)),
    "chunks": lambda: pa.concat_tables(
        [pa.table({"id": [i], "e": [row]}) for i, row in zip(IDS, FEATURES, strict=True)]
    ),
    "fixed": lambda: pa.table(
        {"id": [*IDS], "e": pa.FixedSizeListArray.from_arrays(pa.array(FEATURES.ravel()), 2)}
    ),
    "datasets": lambda: datasets.Dataset.from_dict({"id": [*IDS], "e": FEATURES.tolist()}),
    "selected": lambda: datasets.Dataset.from_dict(
        {"id": ["z", *IDS], "e": [[9.0, 9.0], *FEATURES.tolist()]}
    ).select([1, 2, 3]),
}


@pytest.mark.parametrize("kind", READERS)
def test_read_finds_features_and_ids_of_every_kind_of_table(kind):
    table = tables.read("x", READERS[kind]())
    np.testing.assert_array_equal(table.rows.astype(np.float32), FEATURES)
    assert table.rows.dtype.kind == "f" and table.ids.tolist() == IDS.tolist()


def test_read_of_a_slice_of_chunked_vectors():
    whole = pa.table({"id": [*IDS], "e": FEATURES.tolist()})
    table = tables.read("x", whole.slice(1, 2))
    np.testing.assert_array_equal(table.rows, FEATURES[1:])
    assert table.ids.tolist() == IDS[1:].tolist()


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_read_turns_binary_features_into_floats(dtype):
    bits = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    for given in (bits, pd.DataFrame(bits), {"a": bits[:, 0], "b": bits[:, 1:]}):
        made = tables.rows("x", given)
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made, bits.astype(np.float32))


def test_a_counting_index_is_no_id():
    assert tables.read("x", pd.DataFrame(FEATURES)).ids is None
    shuffled = pd.DataFrame(FEATURES, index=[2, 0, 1])
    assert tables.read("x", shuffled).ids.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"id": IDS, "title": ["a", "b", "c"]}, "title"),
        ({"id": IDS, "e": [[1.0], [2.0, 3.0], [4.0]]}, "e"),
        ({"id": IDS}, "must have a column"),
        ({"when": np.array(["2026-01-01"] * 3, "M8[D]")}, "when"),
        ({"e": 0.5}, "e"),
        ({"e": np.array([np.ones(2), 3.0], object)}, "e"),
        ({"e": [1.0, 2.0], "f": [1.0, 2.0, 3.0]}, "rows 2 in 'e', 3 in 'f'"),
        ({"id": IDS, "e": [1.0, 2.0]}, "rows 2 in 'e', 3 in 'id'"),
        ({"id": IDS[:, None], "e": [1.0, 2.0, 3.0]}, "id"),
    ],
)
def test_read_rejects_columns_that_are_no_features(given, name):
    with pytest.raises(checks.InputError, match=rf"^x.*{name}"):
        tables.read("x", given)


def test_read_of_a_table_without_rows_keeps_its_width():
    assert tables.read("x", pd.DataFrame(FEATURES[:0])).rows.shape == (0, 2)


def test_rows_names_bad_rows_and_columns():
    frame = pd.DataFrame(np.ones((200, 3)), columns=["f0", "f1", "f2"])
    frame.loc[[8, 131], "f0"] = np.nan
    with pytest.raises(checks.InputError, match=r"^x .*rows 8 and 131 of 'f0'"):
        tables.rows("x", frame)
    frame.index = [f"img_{row}" for row in range(200)]
    frame.loc["img_9", "f2"] = np.inf
    with pytest.raises(checks.InputError, match=r"'img_8', 'img_9' and 'img_131' of 'f0' and 'f2'"):
        tables.rows("x", frame)


# --- align --------------------------------------------------------------------------------------


def quick(pairs, x=None, y=None, **options):
    return sota.align(pairs, x, y, **{"steps": 2, "progress": False, **options})


def frames(views, seed=1):
    """Returns shuffled tables of both modalities with ids, and the pairs of the first 20 rows."""
    rng = np.random.default_rng(seed)
    made = []
    for side, rows in zip("ab", views, strict=True):
        frame = pd.DataFrame(rows, index=[f"{side}{row}" for row in range(60)])
        made.append(frame.iloc[rng.permutation(60)])
    pairs = pd.DataFrame({"a": [f"a{i}" for i in range(20)], "b": [f"b{i}" for i in range(20)]})
    return *made, pairs


def test_align_matches_pairs_by_ids(views):
    x, y, pairs = frames(views)
    made = quick(pairs, x, y)
    rest_x = x[~x.index.isin(pairs["a"])].to_numpy()
    rest_y = y[~y.index.isin(pairs["b"])].to_numpy()
    wanted = quick((views[0][:20], views[1][:20]), rest_x, rest_y)
    assert made.info["data"] == wanted.info["data"] and made.info["data"]["pool_x"] == [40, D_X]
    np.testing.assert_array_equal(made.embed_x(x), wanted.embed_x(x.to_numpy()))
    assert "dropped" not in made.info


def test_align_matches_pairs_by_row_numbers_of_arrays(views):
    x, y = views
    numbers = {"x": np.arange(20), "y": np.arange(20)}
    made, wanted = quick(numbers, x, y), quick((x[:20], y[:20]), x[20:], y[20:])
    np.testing.assert_array_equal(made.embed_x(x), wanted.embed_x(x))


def test_align_drops_unusable_rows_and_reports_them(views):
    x, y, pairs = frames(views)
    x.loc["a3"] = np.nan  # paired with b3
    x.loc["a40", 1] = np.inf
    y.loc["b50"] = 0.0
    with pytest.raises(checks.InputError, match=r"^x .*'a3'"):
        quick(pairs, x, y)
    made = quick(pairs, x, y, nan="drop")
    assert sorted(made.info["dropped"]["x"]) == ["a3", "a40"]
    assert made.info["dropped"]["y"] == ["b50"] and made.info["dropped"]["pairs"] == [3]
    shapes = made.info["data"]
    assert (shapes["pairs_x"], shapes["pool_x"], shapes["pool_y"]) == (
        [19, D_X],
        [39, D_X],
        [40, D_Y],  # b3 is unpaired now
    )


def test_align_drops_rows_of_plain_pairs_on_both_sides(views):
    x, y = (rows.copy() for rows in views)
    x[4], y[7], x[30] = np.nan, np.inf, 0.0
    given = {"pairs": (x[:20], y[:20]), "x": x[20:], "y": y[20:]}
    with pytest.raises(checks.InputError, match=r"pairs_x .*row 4\b"):
        quick(**given)
    made = quick(**given, nan="drop", val=(x[:10], y[:10]))
    assert made.info["dropped"] == {"pairs": [4, 7], "x": [10], "val": [4, 7]}
    keep = np.delete(np.arange(20), [4, 7])
    wanted = quick(
        (x[keep], y[keep]),
        np.delete(x[20:], 10, axis=0),
        y[20:],
        val=(np.delete(x[:10], [4, 7], 0), np.delete(y[:10], [4, 7], 0)),
    )
    np.testing.assert_array_equal(made.embed_y(y[:4]), wanted.embed_y(y[:4]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": pd.DataFrame({"a": ["a1", "nobody"], "b": ["b1", "b2"]})}, r"pairs.*'nobody'"),
        ({"pairs": pd.DataFrame({"a": ["a1"]})}, "^pairs"),
        ({"pairs": {"a": ["a1", "a2"], "b": ["b1"]}}, "^pairs"),
        ({"pairs": {"a": [["a1"], ["a2"]], "b": ["b1", "b2"]}}, r"^pairs\['a'\]"),
        ({"pairs": pd.DataFrame({"a": ["a1", None], "b": ["b1", "b2"]})}, r"^pairs .*row 1\b"),
        ({"x": None}, "^x and y"),
        ({"nan": "ignore"}, "^nan"),
    ],
)
def test_align_rejects_bad_ids(views, change, message):
    x, y, pairs = frames(views)
    with pytest.raises(checks.InputError, match=message):
        quick(**({"pairs": pairs, "x": x, "y": y} | change))


def test_align_rejects_ids_that_occur_twice(views):
    x, y, pairs = frames(views)
    with pytest.raises(checks.InputError, match=r"^x .*'a5'"):
        quick(pairs, pd.concat([x, x.loc[["a5"]]]), y)


def test_search_returns_the_ids_of_the_gallery(views):
    x, y, pairs = frames(views)
    aligner = quick(pairs, x, y)
    found = aligner.search(x.iloc[:6], y, k=3)
    scores, indices = found
    np.testing.assert_array_equal(found.ids, y.index.to_numpy()[indices])
    np.testing.assert_array_equal(scores, aligner.search(x.to_numpy()[:6], y.to_numpy(), 3).scores)
    assert aligner.search(x.to_numpy()[:6], y.to_numpy(), 3).ids is None
    gallery = datasets.Dataset.from_dict({"id": [*y.index], "e": y.to_numpy().tolist()})
    np.testing.assert_array_equal(aligner.search(x.iloc[:6], gallery, k=3).ids, found.ids)
    rows = aligner.similarity(x, y), aligner.similarity(x.to_numpy(), y.to_numpy())
    np.testing.assert_array_equal(*rows)
