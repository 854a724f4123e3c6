import subprocess
import sys

import numpy as np
import pytest

from sotalign_jax import checks, data, evaluation, teachers


def _rows(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


# --- splits


def test_disjoint_pools_hide_no_true_pair():
    rows = data.split_rows(101, n_pairs=20, pool="disjoint", seed=3)
    parts = [set(part.tolist()) for part in rows]
    assert [len(part) for part in parts] == [20, 40, 40]
    assert len(set.union(*parts)) == 100


@pytest.mark.parametrize("pool", ["random", "aligned"])
def test_shared_pools_hold_the_same_rows(pool):
    rows = data.split_rows(101, n_pairs=20, pool=pool, seed=3)
    assert not set(rows.pairs) & set(rows.x)
    np.testing.assert_array_equal(np.sort(rows.x), np.sort(rows.y))
    assert len(rows.x) == 81
    assert np.array_equal(rows.x, rows.y) == (pool == "aligned")


def test_split_is_a_function_of_the_seed():
    one, same, other = (data.split_rows(50, n_pairs=9, pool="random", seed=s) for s in (1, 1, 2))
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.pairs, other.pairs)


@pytest.mark.parametrize("pool", data.POOLS)
def test_sweeps_are_nested(pool):
    few, many = (data.split_rows(200, n_pairs=20, pool=pool, n_unpaired=u) for u in (30, 60))
    assert set(few.x) < set(many.x)
    assert set(few.y) < set(many.y)
    fewer = data.split_rows(200, n_pairs=5, pool=pool)
    assert set(fewer.pairs) < set(few.pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pairs": 0}, "n_pairs: is 0"),
        ({"n_pairs": 11}, "n_pairs: is 11"),
        ({"n_pairs": 4, "n_unpaired": 4}, "n_unpaired: is 4"),
        ({"n_pairs": 4, "n_unpaired": -1}, "n_unpaired: is -1"),
        ({"n_pairs": 4, "pool": "halves"}, "pool: 'halves' is unknown"),
    ],
)
def test_impossible_splits(options, message):
    with pytest.raises(checks.InputError, match=message):
        data.split_rows(10, **options)


# --- datasets


def test_semi_supervised_keeps_pairs_paired_and_dtype():
    x = _rows(30, 4).astype(np.float16)
    made = data.semi_supervised(x, -x, n_pairs=10, pool="aligned", n_unpaired=7)
    assert made.pairs_x.dtype == made.pool_x.dtype == np.float16
    np.testing.assert_array_equal(made.pairs_x, -made.pairs_y)
    np.testing.assert_array_equal(made.pool_x, -made.pool_y)
    together = np.concatenate([made.pairs_x, made.pool_x])
    assert len(np.unique(together, axis=0)) == 17


def test_outside_pool_replaces_one_side_and_frees_the_other():
    x, y, other = _rows(30, 4), _rows(30, 3, 1), _rows(50, 4, 2)
    made = data.semi_supervised(x, y, n_pairs=10, unpaired_x=other)
    np.testing.assert_array_equal(made.pool_x, other)
    assert len(made.pool_y) == 20
    fewer = data.semi_supervised(x, y, n_pairs=10, unpaired_x=other, n_unpaired=15)
    assert len(fewer.pool_x) == len(fewer.pool_y) == 15
    assert {tuple(r) for r in fewer.pool_x} < {tuple(r) for r in other}


def test_two_outside_pools_may_exceed_the_table():
    x, y = _rows(12, 4), _rows(12, 3, 1)
    made = data.semi_supervised(
        x, y, n_pairs=12, unpaired_x=_rows(40, 4), unpaired_y=_rows(60, 3), n_unpaired=40
    )
    assert len(made.pairs_x) == 12
    assert len(made.pool_x) == len(made.pool_y) == 40
    with pytest.raises(checks.InputError, match="n_unpaired: is 41"):
        data.semi_supervised(
            x, y, n_pairs=12, unpaired_x=_rows(40, 4), unpaired_y=_rows(60, 3), n_unpaired=41
        )


def test_pool_noise_touches_only_the_pools():
    x = _rows(40, 5)
    clean = data.semi_supervised(x, x, n_pairs=10, pool="aligned")
    noisy = data.semi_supervised(x, x, n_pairs=10, pool="aligned", pool_noise=0.5)
    np.testing.assert_array_equal(noisy.pairs_x, clean.pairs_x)
    changed_x = (noisy.pool_x != clean.pool_x).any(axis=1)
    changed_y = (noisy.pool_y != clean.pool_y).any(axis=1)
    assert changed_x.sum() == changed_y.sum() == 15
    assert not np.array_equal(changed_x, changed_y)


def test_memory_mapped_tables_work(tmp_path):
    np.save(tmp_path / "x.npy", _rows(20, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert data.semi_supervised(mapped, mapped, n_pairs=5).summary()["pool_x"] == [7, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:9], y), "y: has 10 rows"),
        (lambda x, y: (np.where(x == x[3], np.nan, x), y), "x: row 3 is NaN"),
        (lambda x, y: (x, np.where(y == y[4], 0.0, y)), "y: row 4 is all zeros"),
        (lambda x, y: (x.astype(int), y), "dtype int64; pass real floating-point"),
        (lambda x, y: (x[0], y), "pass a 2-D array"),
    ],
)
def test_bad_tables_name_the_row_in_the_users_own_array(change, message):
    x, y = change(_rows(10, 4), _rows(10, 3, 1))
    with pytest.raises(checks.InputError, match=message):
        data.semi_supervised(x, y, n_pairs=5)


def test_dataset_from_parts():
    made = data.dataset(
        (_rows(5, 4), _rows(5, 3)), x=_rows(9, 4), val=data.gallery(_rows(6, 4), _rows(6, 3))
    )
    assert made.summary() == {
        "pairs_x": [5, 4],
        "pairs_y": [5, 3],
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
        ({"x": _rows(9, 3)}, "x: rows have width 3"),
        ({"val": data.gallery(_rows(6, 4), _rows(6, 4))}, "val_y: width 4"),
        ({"test": data.gallery(_rows(6, 3), _rows(6, 3))}, "test_x: width 3"),
        (
            {"zero_shot": data.zero_shot(_rows(2, 4), [0, 1], np.ones((2, 1, 5)))},
            "zero_shot_prompts: width 5",
        ),
    ],
)
def test_parts_from_another_encoder_are_refused(part, message):
    with pytest.raises(checks.InputError, match=message):
        data.dataset((_rows(5, 4), _rows(5, 3)), **part)


@pytest.mark.parametrize(
    ("x_of_y", "message"),
    [
        (None, "x has 2 rows but y has 3; pass x_of_y"),
        ([0, 1], "pass 3 integers"),
        ([0.0, 1.0, 1.0], "dtype float64"),
        ([0, 1, 2], "from 0 to 2; keep them within 0..1"),
        ([-1, 0, 1], "from -1 to 1"),
        ([1, 1, 1], "row 0 of x has no row of y"),
    ],
)
def test_bad_galleries(x_of_y, message):
    with pytest.raises(checks.InputError, match=message):
        data.gallery(_rows(2, 4), _rows(3, 4), x_of_y)


@pytest.mark.parametrize(
    ("labels", "prompts", "names", "message"),
    [
        ([0, 2], np.ones((2, 1, 3)), None, "labels: values run from 0 to 2"),
        ([0], np.ones((2, 1, 3)), None, "pass 2 integers"),
        ([0, 1], np.ones((2, 3)), None, r"prompts: has shape \(2, 3\)"),
        ([0, 1], np.ones((2, 1, 3)), ("cat",), "1 names for 2 prompted classes"),
    ],
)
def test_bad_zero_shot_tasks(labels, prompts, names, message):
    with pytest.raises(checks.InputError, match=message):
        data.zero_shot(_rows(2, 4), labels, prompts, names)


# --- robustness protocols


@pytest.mark.parametrize(
    ("n", "fraction", "moved"), [(10, 0.3, 3), (100, 0.29, 29), (9, 1.0, 9), (9, 0.0, 0)]
)
def test_mismatch_deranges_exactly_the_asked_share(n, fraction, moved):
    y = np.arange(n, dtype=np.float16)[:, None]
    out = data.mismatch_pairs(y, fraction=fraction, seed=4)
    assert (out != y).sum() == moved
    np.testing.assert_array_equal(np.sort(out, axis=0), y)
    assert out.dtype == y.dtype


@pytest.mark.parametrize(
    ("fraction", "message"), [(0.1, "picks one row"), (1.5, "outside 0..1"), (-0.1, "outside")]
)
def test_impossible_mismatch(fraction, message):
    with pytest.raises(checks.InputError, match=message):
        data.mismatch_pairs(_rows(10, 2), fraction=fraction)


def test_noise_keeps_lengths_and_points_everywhere():
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


def test_a_teacher_of_some_photographs_finds_captions_of_others():
    image, text, caption = data.photographs()
    assert len(image) == len(text) == len(caption) == 640
    assert image.dtype == text.dtype == np.float32
    teacher = teachers.cca(image[:540], text[:540])
    scores = evaluation.retrieval(teacher.x(image[540:]), teacher.y(text[540:]))
    assert scores["mean/R@10"] > 70  # chance is 10


def test_importing_data_stays_light():
    program = (
        "import sys, sotalign_jax.data\n"
        "heavy = {'tensorflow', 'tensorflow_datasets', 'torch', 'matplotlib', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
