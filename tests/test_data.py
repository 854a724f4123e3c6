"""Tests of splits, pools, galleries and datasets."""

import numpy as np
import pytest

from sotalign_jax import checks, data, evaluation, files, teachers, training


def _rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


# --- splits


def test_split_rows_disjoint_pools_share_no_row():
    rows = data.split_rows(101, n_pairs=20, pool="disjoint", seed=3)
    parts = [set(part.tolist()) for part in rows]
    assert [len(part) for part in parts] == [20, 40, 40]
    assert len(set.union(*parts)) == 100


@pytest.mark.parametrize("pool", ["random", "aligned"])
def test_split_rows_shared_pools_hold_the_same_rows(pool):
    rows = data.split_rows(101, n_pairs=20, pool=pool, seed=3)
    assert not set(rows.pairs) & set(rows.x)
    np.testing.assert_array_equal(np.sort(rows.x), np.sort(rows.y))
    assert len(rows.x) == 81
    assert np.array_equal(rows.x, rows.y) == (pool == "aligned")


def test_split_rows_is_a_function_of_the_seed():
    one, same, other = (data.split_rows(50, n_pairs=9, pool="random", seed=s) for s in (1, 1, 2))
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.pairs, other.pairs)


@pytest.mark.parametrize("pool", data.POOLS)
def test_split_rows_of_growing_sizes_are_nested(pool):
    few, many = (data.split_rows(200, n_pairs=20, pool=pool, n_unpaired=u) for u in (30, 60))
    assert set(few.x) < set(many.x)
    assert set(few.y) < set(many.y)
    fewer = data.split_rows(200, n_pairs=6, pool=pool)
    assert set(fewer.pairs) < set(few.pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pairs": 0}, r"n_pairs.* 0"),
        ({"n_pairs": 11}, r"n_pairs.* 11"),
        ({"n_pairs": 6, "n_unpaired": 4}, r"n_unpaired.* 4"),
        ({"n_pairs": 6, "n_unpaired": -1}, r"n_unpaired.* -1"),
        ({"n_pairs": 6, "pool": "halves"}, r"pool.* 'halves'"),
    ],
)
def test_split_rows_rejects_bad_options(options, message):
    with pytest.raises(checks.InputError, match=message):
        data.split_rows(10, **options)


# --- splits by unique row


def test_whole_groups_of_unique_rows_takes_the_first_rows():
    assert data.assign_groups(np.arange(6)[::-1], [1, 2]).tolist() == [0, 1, 1, 2, 2, 2]


def _captioned(pictures, captions):
    """Returns a table with several captions per picture, some of which recur."""
    x = np.repeat(_rows(pictures, 6), captions, axis=0)
    y = _rows(pictures * captions, 5, 1)
    y[captions::7] = y[:1]
    return x, y


def _shared(a, b):
    return {row.tobytes() for row in np.asarray(a)} & {row.tobytes() for row in np.asarray(b)}


def test_hold_out_of_unique_rows_takes_the_first_tenth_of_a_permutation():
    x, y = _rows(123, 4), _rows(123, 3, 1)
    made = data.hold_out(data.dataset((x, y)), seed=3)
    held, kept = np.split(np.random.default_rng(3).permutation(123), [12])
    for found, expected in ((made.val.x, x[held]), (made.val.y, y[held]),
                            (made.pairs_x, x[kept]), (made.pairs_y, y[kept])):  # fmt: skip
        np.testing.assert_array_equal(found, expected)
    assert made.val.x_of_y.tolist() == list(range(12))
    few = data.dataset((x[:99], y[:99]))
    assert data.hold_out(few, seed=0) is few


@pytest.mark.parametrize("seed", range(3))
def test_hold_out_shares_no_picture_and_no_caption_with_the_pairs(seed):
    x, y = _captioned(60, 5)
    made = data.hold_out(data.dataset((x, y)), seed=seed)
    assert not _shared(made.val.x, made.pairs_x)
    assert len(made.val.x) == len(np.unique(made.val.x, axis=0)) < len(made.val.y)
    assert len(made.val.y) + len(made.pairs_y) == 300
    rare = _rows(300, 5, 1)
    rare[7] = rare[200]
    made = data.hold_out(data.dataset((x, rare)), seed=seed)
    assert not _shared(made.val.x, made.pairs_x) and not _shared(made.val.y, made.pairs_y)


def test_semi_supervised_disjoint_pools_share_no_picture():
    x, y = _captioned(40, 5)
    y = _rows(200, 5, 2)
    made = data.semi_supervised(x, y, n_pairs=20)
    picture_of = {
        caption.tobytes(): picture.tobytes() for picture, caption in zip(x, y, strict=True)
    }
    of_texts = {picture_of[caption.tobytes()] for caption in made.pool_y}
    assert not {picture.tobytes() for picture in made.pool_x} & of_texts
    assert len(made.pool_x) == len(made.pool_y) > 80


@pytest.mark.parametrize("n_pairs", [50, 448])
def test_semi_supervised_holds_out_validation_and_test(n_pairs):
    x, y = _rows(640, 4), _rows(640, 3, 1)
    made = data.semi_supervised(x, y, n_pairs=n_pairs, held_out=data.VAL_AND_TEST)
    again = data.semi_supervised(x, y, n_pairs=n_pairs, held_out=data.VAL_AND_TEST, seed=1)
    assert (len(made.val.x), len(made.test.x), len(made.pairs_x)) == (64, 128, n_pairs)
    np.testing.assert_array_equal(
        made.test.x, again.test.x
    )  # the test set does not depend on the seed
    assert not np.array_equal(made.pairs_x, again.pairs_x)
    for gallery in (made.val, made.test):
        assert not _shared(gallery.x, np.concatenate([made.pairs_x, made.pool_x]))
        assert not _shared(gallery.y, np.concatenate([made.pairs_y, made.pool_y]))
    assert not _shared(made.val.x, made.test.x)
    assert len(made.pool_x) == (
        448 if n_pairs == 448 else 199
    )  # with no rows left, the pool is the pairs


@pytest.mark.parametrize("held_out", [None, (0.1, 0.2)])
def test_pair_rows_are_the_rows_of_the_pairs(held_out):
    x, y = np.random.default_rng(0).normal(size=(2, 400, 4)).astype(np.float32)
    made = data.semi_supervised(x, y, n_pairs=150, held_out=held_out)
    smaller = data.hold_out(made, seed=0)
    assert len(smaller.pairs_x) < len(made.pairs_x)
    for one in (made, smaller):
        np.testing.assert_array_equal(x[one.pair_rows], one.pairs_x)
        np.testing.assert_array_equal(y[one.pair_rows], one.pairs_y)


def test_semi_supervised_holds_out_whole_pictures():
    x, y = _captioned(60, 5)
    made = data.semi_supervised(x, y, n_pairs=50, held_out=data.VAL_AND_TEST)
    for gallery in (made.val, made.test):
        assert not _shared(gallery.x, np.concatenate([made.pairs_x, made.pool_x]))
        assert len(gallery.x) == len(np.unique(gallery.x, axis=0))


def test_held_out_sizes_rejects_fractions_that_leave_no_rows():
    with pytest.raises(checks.InputError, match=r"0\.5 and 0\.5"):
        data.held_out_sizes(10, (0.5, 0.5))


# --- datasets


def test_semi_supervised_keeps_pairs_paired_and_dtype():
    x = _rows(30, 4).astype(np.float16)
    made = data.semi_supervised(x, -x, n_pairs=10, pool="aligned", n_unpaired=7)
    assert made.pairs_x.dtype == made.pool_x.dtype == np.float16
    np.testing.assert_array_equal(made.pairs_x, -made.pairs_y)
    np.testing.assert_array_equal(made.pool_x, -made.pool_y)
    together = np.concatenate([made.pairs_x, made.pool_x])
    assert len(np.unique(together, axis=0)) == 17


def test_semi_supervised_with_one_outside_pool():
    x, y, other = _rows(30, 4), _rows(30, 3, 1), _rows(50, 4, 2)
    made = data.semi_supervised(x, y, n_pairs=10, unpaired_x=other)
    np.testing.assert_array_equal(made.pool_x, other)
    assert len(made.pool_y) == 20
    fewer = data.semi_supervised(x, y, n_pairs=10, unpaired_x=other, n_unpaired=15)
    assert len(fewer.pool_x) == len(fewer.pool_y) == 15
    assert {tuple(r) for r in fewer.pool_x} < {tuple(r) for r in other}


def test_semi_supervised_uses_pairs_as_pool_when_no_rows_are_left():
    x, y, other = _rows(12, 4), _rows(12, 3, 1), _rows(50, 4, 2)
    made = data.semi_supervised(x, y, n_pairs=12, unpaired_x=other)
    np.testing.assert_array_equal(made.pool_y, made.pairs_y)


def test_semi_supervised_outside_pools_may_exceed_the_table():
    x, y = _rows(12, 4), _rows(12, 3, 1)
    made = data.semi_supervised(
        x, y, n_pairs=12, unpaired_x=_rows(40, 4), unpaired_y=_rows(60, 3), n_unpaired=40
    )
    assert len(made.pairs_x) == 12
    assert len(made.pool_x) == len(made.pool_y) == 40
    with pytest.raises(checks.InputError, match=r"n_unpaired.* 41"):
        data.semi_supervised(
            x, y, n_pairs=12, unpaired_x=_rows(40, 4), unpaired_y=_rows(60, 3), n_unpaired=41
        )


def test_semi_supervised_pool_noise_changes_only_the_pools():
    x = _rows(40, 5)
    clean = data.semi_supervised(x, x, n_pairs=10, pool="aligned")
    noisy = data.semi_supervised(x, x, n_pairs=10, pool="aligned", pool_noise=0.5)
    np.testing.assert_array_equal(noisy.pairs_x, clean.pairs_x)
    changed_x = (noisy.pool_x != clean.pool_x).any(axis=1)
    changed_y = (noisy.pool_y != clean.pool_y).any(axis=1)
    assert changed_x.sum() == changed_y.sum() == 15
    assert not np.array_equal(changed_x, changed_y)


@pytest.mark.parametrize("dtype", [">f4", np.uint8, bool])
def test_pools_of_mapped_files_are_converted_when_they_are_read(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(files, "MAPPED_BYTES", 64)
    x = (np.arange(80).reshape(20, 4) % 7 > 2).astype(dtype)
    x[:, 0] = 1
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pairs = mapped[:6], mapped[:6]
    made = data.dataset(pairs, x=mapped, y=mapped)
    split = data.semi_supervised(mapped, mapped, n_pairs=6, unpaired_x=mapped)
    for pool in (made.pool_x, split.pool_x, split.pool_y):
        assert isinstance(pool, files.MappedRows) and pool.dtype == np.float32
        assert pool[:3].dtype == np.float32 and pool[:3].dtype.isnative
    np.testing.assert_array_equal(made.pool_x[:], x.astype(np.float32))
    batch = training.place(made).pool_x
    np.testing.assert_array_equal(batch, x.astype(np.float32))
    assert made.pairs_x.dtype == split.pairs_x.dtype == np.float32


def test_semi_supervised_accepts_memory_mapped_tables(tmp_path):
    np.save(tmp_path / "x.npy", _rows(20, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert data.semi_supervised(mapped, mapped, n_pairs=6).summary()["pool_x"] == [7, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:9], y), r"y:? has 10 rows"),
        (lambda x, y: (np.where(x == x[3], np.nan, x), y), r"x .*row 3\b"),
        (lambda x, y: (x, np.where(y == y[4], 0.0, y)), r"y .*row 4\b"),
        (lambda x, y: (x.astype(int), y), "dtype int64"),
        (lambda x, y: (x[0], y), r"x .*\(4,\)"),
    ],
)
def test_semi_supervised_rejects_bad_tables(change, message):
    x, y = change(_rows(10, 4), _rows(10, 3, 1))
    with pytest.raises(checks.InputError, match=message):
        data.semi_supervised(x, y, n_pairs=5)


def test_dataset_summary_of_parts():
    made = data.dataset(
        (_rows(7, 4), _rows(7, 3)), x=_rows(9, 4), val=data.gallery(_rows(6, 4), _rows(6, 3))
    )
    assert made.summary() == {
        "pairs_x": [7, 4],
        "pairs_y": [7, 3],
        "pool_x": [9, 4],
        "pool_y": [0, 3],
        "val_x": [6, 4],
        "val_y": [6, 3],
        "test_x": None,
        "test_y": None,
        "zero_shot_x": None,
        "zero_shot_prompts": None,
    }


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"x": _rows(9, 3)}, r"x.* 3\b"),
        ({"val": data.gallery(_rows(6, 4), _rows(6, 4))}, r"val_y.* 4\b"),
        ({"test": data.gallery(_rows(6, 3), _rows(6, 3))}, r"test_x.* 3\b"),
        (
            {"zero_shot": data.zero_shot(_rows(2, 4), [0, 1], np.ones((2, 1, 5)))},
            r"zero_shot_prompts.* 5\b",
        ),
    ],
)
def test_dataset_rejects_parts_of_other_widths(part, message):
    with pytest.raises(checks.InputError, match=message):
        data.dataset((_rows(7, 4), _rows(7, 3)), **part)


@pytest.mark.parametrize(
    ("x_of_y", "message"),
    [
        (None, "y has 3 rows but .*x has 2; pass x_of_y"),
        ([0, 1], r"x_of_y .*\(2,\)"),
        ([0.0, 1.0, 1.0], "dtype float64"),
        ([0, 1, 2], r"0\.\.1, got values from 0 to 2"),
        ([-1, 0, 1], "from -1 to 1"),
        ([1, 1, 1], "row 0 of x"),
    ],
)
def test_gallery_rejects_bad_x_of_y(x_of_y, message):
    with pytest.raises(checks.InputError, match=message):
        data.gallery(_rows(2, 4), _rows(3, 4), x_of_y)


@pytest.mark.parametrize(
    ("labels", "prompts", "names", "message"),
    [
        ([0, 2], np.ones((2, 1, 3)), None, "labels .*from 0 to 2"),
        ([0], np.ones((2, 1, 3)), None, r"labels .*\(1,\)"),
        ([0, 1], np.ones((2, 3)), None, r"prompts .*\(2, 3\)"),
        ([0, 1], np.ones((2, 1, 3)), ("cat",), "class_names has 1 names"),
    ],
)
def test_zero_shot_rejects_bad_tasks(labels, prompts, names, message):
    with pytest.raises(checks.InputError, match=message):
        data.zero_shot(_rows(2, 4), labels, prompts, names)


@pytest.mark.parametrize(
    ("pairs", "part", "message"),
    [
        ((_rows(9, 4), _rows(9, 3)), {"x": _rows(5, 3), "y": _rows(5, 4)}, "x .*exchanged"),
        ((_rows(9, 4), _rows(9, 3)), {"y": _rows(5, 4)}, "y .*exchanged"),
        ((_rows(9, 4), _rows(9, 3)), {"x": _rows(4, 5)}, r"x .*\(4, 5\).*transposed.*x\.T"),
        ((_rows(9, 4), _rows(3, 9)), {}, r"pairs_y .*transposed.*pairs_y\.T"),
        ((_rows(4, 9), _rows(9, 3)), {}, r"pairs_x .*transposed.*pairs_x\.T"),
        ((_rows(9, 4), _rows(9, 3)), {"val": (_rows(5, 3), _rows(5, 4))}, "val_x .*exchanged"),
        ((_rows(5, 4), _rows(5, 3)), {}, "pairs_x .*rows.* 5"),
    ],
)
def test_dataset_error_suggests_the_likely_fix(pairs, part, message):
    if "val" in part:
        part = {"val": data.gallery(*part["val"])}
    with pytest.raises(checks.InputError, match=message) as caught:
        data.dataset(pairs, **part)
    assert "\n" not in str(caught.value)


# --- robustness protocols


@pytest.mark.parametrize(
    ("n", "fraction", "moved"), [(10, 0.3, 3), (100, 0.29, 29), (9, 1.0, 9), (9, 0.0, 0)]
)
def test_mismatch_pairs_deranges_exactly_the_given_fraction(n, fraction, moved):
    y = np.arange(n, dtype=np.float16)[:, None]
    out = data.mismatch_pairs(y, fraction=fraction, seed=4)
    assert (out != y).sum() == moved
    np.testing.assert_array_equal(np.sort(out, axis=0), y)
    assert out.dtype == y.dtype


@pytest.mark.parametrize(
    ("fraction", "message"), [(0.1, "one row"), (1.5, "got 1.5"), (-0.1, "got -0.1")]
)
def test_mismatch_pairs_rejects_bad_fractions(fraction, message):
    with pytest.raises(checks.InputError, match=message):
        data.mismatch_pairs(_rows(10, 2), fraction=fraction)


def test_replace_with_noise_keeps_norms_and_is_uniform_on_the_sphere():
    x = (_rows(4000, 8) + 5.0).astype(np.float16)
    out = data.replace_with_noise(x, fraction=0.5, seed=1)
    changed = (out != x).any(axis=1)
    assert changed.sum() == 2000
    lengths = [np.linalg.norm(a.astype(np.float64), axis=1) for a in (x, out)]
    np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-3)
    directions = out[changed] / lengths[1][changed, None]
    # Uniform on the sphere: mean 0 and second moment 1/d, each within five standard errors.
    np.testing.assert_allclose(directions.mean(axis=0), 0.0, atol=5 / np.sqrt(8 * 2000))
    np.testing.assert_allclose((directions.T @ directions) / 2000, np.eye(8) / 8, atol=0.02)


# --- the sample of photographs


def test_photographs_can_be_aligned_by_cca():
    image, text, caption = data.photographs()
    assert len(image) == len(text) == len(caption) == 640
    assert image.dtype == text.dtype == np.float32
    teacher = teachers.cca(image[:540], text[:540])
    scores = evaluation.retrieval(teacher.x(image[540:]), teacher.y(text[540:]))
    assert scores["mean/R@10"] > 70  # chance is 10
