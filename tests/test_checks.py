import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sotalign_jax import checks


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_real_embeddings_pass(rng, dtype):
    checks.embeddings("x", rng.normal(size=(5, 3)).astype(dtype), width=3, min_rows=5)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones(3), {}, r"x: has shape \(3,\)"),
        (np.ones((0, 3)), {}, "x: has 0 rows"),
        (np.ones((2, 3)), {"min_rows": 4}, "x: has 2 rows"),
        (np.ones((2, 0)), {}, "x: rows have width 0"),
        (np.ones((2, 3)), {"width": 5}, "x: rows have width 3"),
        (np.ones((2, 3), int), {}, "x: has dtype int64"),
        (np.ones((2, 3), complex), {}, "x: has dtype complex128"),
        (np.array([[1.0], [np.nan]]), {}, "x: row 1 is NaN or inf"),
        (np.array([[1.0], [2.0], [-np.inf]]), {}, "x: row 2 is NaN or inf"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), {}, "x: row 1 is all zeros"),
    ],
)
def test_bad_embeddings_are_named(x, options, message):
    with pytest.raises(checks.InputError, match=message) as caught:
        checks.embeddings("x", x, **options)
    assert "\n" not in str(caught.value)


def test_bad_rows_are_found_beyond_the_first_chunk(monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ROWS", 4)
    x = np.ones((11, 2))
    x[9, 1] = np.nan
    with pytest.raises(checks.InputError, match="row 9 is NaN"):
        checks.embeddings("x", x)
    x[9, 1], x[6] = 1.0, 0.0
    with pytest.raises(checks.InputError, match="row 6 is all zeros"):
        checks.embeddings("x", x)


def test_memory_mapped_files_are_checked(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((6, 2), np.float16))
    checks.embeddings("x", np.load(tmp_path / "x.npy", mmap_mode="r"), width=2)


def test_pairs_need_equal_length():
    checks.pairs(np.ones((3, 2)), np.ones((3, 5)))
    with pytest.raises(checks.InputError, match="captions: has 4 rows"):
        checks.pairs(np.ones((3, 2)), np.ones((4, 5)), names=("images", "captions"))
    with pytest.raises(checks.InputError, match="pairs_x: has 1 rows"):
        checks.pairs(np.ones((1, 2)), np.ones((1, 5)), min_rows=2)


def test_choice():
    checks.choice("targets", "soft", ("soft", "hard"))
    with pytest.raises(checks.InputError, match="targets: 'sfot' is unknown"):
        checks.choice("targets", "sfot", ("soft", "hard"))


def test_input_errors_are_value_errors():
    assert issubclass(checks.InputError, ValueError)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: checks.positive(epsilon=1e-9, tau=float("inf")), "tau: is inf"),
        (lambda: checks.positive(tau=float("nan")), "tau: is nan"),
        (lambda: checks.at_least(0, ridge=0, weight=-0.5), "weight: is -0.5"),
        (lambda: checks.whole(2, batch=2, rows=1), "rows: is 1"),
        (lambda: checks.whole(1, steps=10.5), "steps: is 10.5"),
        (lambda: checks.whole(1, steps=None), "steps: is None"),
        (lambda: checks.whole(1, or_none=True, size=0), "size: is 0"),
    ],
)
def test_numbers_out_of_range_are_named(check, message):
    with pytest.raises(checks.InputError, match=message):
        check()


def test_numbers_in_range_pass_and_traced_ones_are_not_looked_at():
    checks.positive(epsilon=np.float32(0.1), tolerance=jnp.float32(1e-6))
    checks.at_least(0, ridge=0.0)
    checks.whole(1, or_none=True, block_size=None, chunk=np.int64(3))
    jax.jit(lambda epsilon: checks.positive(epsilon=epsilon))(-1.0)
