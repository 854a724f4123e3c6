"""Tests of the input checks and their error messages."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

from sotalign_jax import checks


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_embeddings_accepts_every_float_dtype(rng, dtype):
    checks.embeddings("x", rng.normal(size=(5, 3)).astype(dtype), width=3, min_rows=5)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones(3), {}, r"x .*\(3,\)"),
        (np.ones((0, 3)), {}, r"x .*rows.* 0"),
        (np.ones((2, 3)), {"min_rows": 4}, r"x .*rows.* 2"),
        (np.ones((2, 0)), {}, r"x.* 0\b"),
        (np.ones((2, 3)), {"width": 5}, r"x.* 3\b"),
        (np.ones((2, 3), int), {}, r"x .*int64"),
        (np.ones((2, 3), complex), {}, r"x .*complex128"),
        (np.array([[1.0], [np.nan]]), {}, r"x .*row 1\b"),
        (np.array([[1.0], [2.0], [-np.inf]]), {}, r"x .*row 2\b"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), {}, r"x .*row 1\b"),
    ],
)
def test_embeddings_rejects_bad_arrays(x, options, message):
    with pytest.raises(checks.InputError, match=message) as caught:
        checks.embeddings("x", x, **options)
    assert "\n" not in str(caught.value)


def test_embeddings_finds_bad_rows_beyond_the_first_chunk(monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    x = np.ones((11, 2))
    x[9, 1] = np.nan
    with pytest.raises(checks.InputError, match=r"row 9\b"):
        checks.embeddings("x", x)
    x[9, 1], x[6] = 1.0, 0.0
    with pytest.raises(checks.InputError, match=r"row 6\b"):
        checks.embeddings("x", x)


def test_embeddings_accepts_memory_mapped_files(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((6, 2), np.float16))
    checks.embeddings("x", np.load(tmp_path / "x.npy", mmap_mode="r"), width=2)


def test_pairs_rejects_unequal_or_few_rows():
    checks.pairs(np.ones((3, 2)), np.ones((3, 5)))
    with pytest.raises(checks.InputError, match=r"captions:? has 4 rows"):
        checks.pairs(np.ones((3, 2)), np.ones((4, 5)), names=("images", "captions"))
    with pytest.raises(checks.InputError, match=r"pairs_x .*rows.* 1"):
        checks.pairs(np.ones((1, 2)), np.ones((1, 5)), min_rows=2)


def test_choice_rejects_unknown_value():
    checks.choice("targets", "soft", ("soft", "hard"))
    with pytest.raises(checks.InputError, match=r"targets.* 'sfot'"):
        checks.choice("targets", "sfot", ("soft", "hard"))


def test_input_error_is_a_value_error():
    assert issubclass(checks.InputError, ValueError)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.positive(epsilon=1e-9, tau=float("inf")), r"tau.* inf"),
        (lambda: checks.positive(tau=float("nan")), r"tau.* nan"),
        (lambda: checks.at_least(0, ridge=0, weight=-0.5), r"weight.* -0.5"),
        (lambda: checks.whole(2, batch=2, rows=1), r"rows.* 1"),
        (lambda: checks.whole(1, steps=10.5), r"steps.* 10.5"),
        (lambda: checks.whole(1, steps=None), r"steps.* None"),
        (lambda: checks.whole(1, or_none=True, size=0), r"size.* 0"),
    ],
)
def test_number_checks_reject_values_out_of_range(check, message):
    with pytest.raises(checks.InputError, match=message):
        check()


def test_number_checks_accept_valid_and_traced_values():
    checks.positive(epsilon=np.float32(0.1), tolerance=jnp.float32(1e-6))
    checks.at_least(0, ridge=0.0)
    checks.whole(1, or_none=True, block_size=None, chunk=np.int64(3))
    jax.jit(lambda epsilon: checks.positive(epsilon=epsilon))(-1.0)


def _column(*cells):
    column = np.empty(len(cells), object)
    column[:] = [np.asarray(cell) for cell in cells]
    return column


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (_column([1.0, 2.0], [3.0, 4.0]), r"x .*2 arrays .*np\.stack\(x\)"),
        (_column([1.0, 2.0], [3.0]), "x .*2 arrays .*equal length"),
        ([[1.0, 2.0], [3.0]], "x .*numbers"),
        (np.array([["a", 1.0]], object), "x .*object"),
        (np.ones((3, 2), np.int32), r"x .*int32.*astype\(np\.float32\)"),
        (np.ones((3, 2), np.int8), "x .*int8"),
    ],
)
def test_rows_error_suggests_the_likely_fix(x, message):
    with pytest.raises(checks.InputError, match=message) as caught:
        checks.rows("x", x)
    assert "\n" not in str(caught.value)


def test_rows_suggests_toarray_for_sparse_matrices():
    with pytest.raises(checks.InputError, match=r"x .*csr_matrix.*x\.toarray\(\)"):
        checks.rows("x", scipy.sparse.csr_matrix(np.eye(3)))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(">f2", "f2"), (">f4", "f4"), (np.longdouble, "f8"), (np.uint8, "f4"), (bool, "f4")],
)
def test_rows_converts_types_that_jax_does_not_use(stored, wanted):
    x = np.array([[1, 0], [1, 1]], stored)
    made = checks.rows("x", x)
    assert made.dtype == np.dtype(wanted) and made.dtype.isnative
    np.testing.assert_array_equal(made, x)


def test_rows_suggests_stack_for_pandas_column_of_arrays():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"e": [np.ones(3), np.ones(3)], "a": [1.0, 2.0]})
    with pytest.raises(checks.InputError, match=r"np\.stack\(x\)"):
        checks.rows("x", frame["e"])
    assert checks.rows("x", np.stack(frame["e"])).shape == (2, 3)
    assert checks.rows("x", frame[["a"]]).shape == (2, 1)


def test_array_keeps_bfloat16_tensors():
    torch = pytest.importorskip("torch")
    made = checks.array("x", torch.tensor([[0.1, 2.0]], dtype=torch.bfloat16, requires_grad=True))
    assert made.dtype == ml_dtypes.bfloat16 and made[0, 1] == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(2), 2),
        (np.uint8(7), 7),
        (np.float32(0.1), 0.1),
        (np.float64(1e-300), 1e-300),
        (np.array(3.5), 3.5),
        (np.bool_(True), True),
        (jnp.float32(0.2), 0.2),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (4, 4),
        ("sum", "sum"),
        (None, None),
    ],
)
def test_to_python_converts_scalars_to_python_numbers(value, expected):
    made = checks.to_python(value)
    assert made == expected and type(made) is type(expected)


def test_to_python_keeps_arrays_and_tracers():
    array = np.ones(2)
    assert checks.to_python(array) is array
    assert jax.jit(lambda x: checks.to_python(x) + 1)(1.0) == 2


def test_checks_accept_numpy_scalars():
    checks.whole(1, steps=np.int64(2), size=np.array(3))
    checks.within(5, "rows", k=np.uint8(5))
    checks.at_least(0, ridge=np.float32(0.1))
    checks.choice("pool", np.str_("random"), ("random",))
    with pytest.raises(checks.InputError, match=r"steps .*got 0$"):
        checks.whole(1, steps=np.int64(0))
