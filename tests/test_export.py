"""Tests of exported aligners against their JAX embeddings."""

import errno
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sotalign_jax as sota
from sotalign_jax import checks, data, export, heads, kernels, runtime
from sotalign_jax.methods import csa, sue

D_X, D_Y, DIM = 12, 10, 5


def rows(seed, n=40, width=D_X):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


def kernel_features(width):
    landmarks = rows(7, 30, width)
    landmarks /= np.linalg.norm(landmarks, axis=1, keepdims=True)
    gamma, centre = np.float32(1.5), np.full(30, 0.1, np.float32)
    arrays = 0.05 * rows(8, 1, width)[0], landmarks, gamma, centre, rows(9, 8, 30)
    return kernels.KernelMap(*map(jnp.asarray, arrays))


def networks(kind, norm=None):
    return heads.build_heads(D_X, D_Y, DIM, kind=kind, norm=norm)


def kernel():
    return heads.Heads(*(heads.KernelHead(kernel_features(width)) for width in (D_X, D_Y)))


def csa_heads():
    rho = np.linspace(1.0, 0.1, DIM)
    sides = ("x", D_X), ("y", D_Y)
    return heads.Heads(
        *(csa.CSAHead.fitted(rows(1, 1, w)[0], rows(2, w, DIM), rho, side) for side, w in sides)
    )


def sue_heads():
    made = []
    for width, residual in ((D_X, sue.Residual(DIM, 6, rngs=nnx.Rngs(1))), (D_Y, None)):
        network = heads.TanhHead(width, 7, hidden=16, rngs=nnx.Rngs(2))
        made.append(sue.SUEHead(network, heads.Dense(7, DIM, rngs=nnx.Rngs(3)), residual))
    return heads.Heads(*made)


KINDS = {
    "linear": lambda: networks("linear"),
    "linear-l2": lambda: networks("linear", "l2"),
    "mlp": lambda: networks("mlp"),
    "glu": lambda: networks("glu"),
    "tanh": lambda: networks("tanh"),
    "kernel": kernel,
    "mixed": lambda: heads.mix(kernel(), heads.build_heads(D_X, D_Y, DIM, kind="mlp"), 0.3),
    "csa": csa_heads,
    "sue": sue_heads,
}


@pytest.fixture(params=KINDS)
def aligner(request):
    """Returns calibrated heads of every kind. Noise makes the initially zero biases non-zero."""
    graph, state = nnx.split(KINDS[request.param]())
    noise = np.random.default_rng(3)
    if request.param != "csa":  # CSA is random already, and its correlations must stay in 0..1
        state = jax.tree.map(
            lambda leaf: (
                leaf + jnp.float32(0.3) * noise.normal(size=leaf.shape).astype(np.float32)
                if leaf.ndim == 1
                else leaf
            ),
            state,
        )
    return sota.Aligner(nnx.merge(graph, state), {}).calibrated_by(rows(4), rows(5, width=D_Y))


GIVEN = {
    "x": np.concatenate([rows(10), 1e-25 * rows(11), 1e12 * rows(12), 0.5 + 0 * rows(13)]),
    "y": np.concatenate(
        [rows(13, width=D_Y), 1e-20 * rows(14, width=D_Y), 1e-4 * rows(15)[:, :D_Y]]
    ),
}


def expected(aligner, side):
    """Returns the embeddings and biases computed by JAX."""
    embedding = getattr(aligner, f"embed_{side}")(GIVEN[side])
    return embedding, getattr(aligner.calibration, side)(embedding)[:, None]


def test_export_cases_cover_every_head_class():
    assert {name.split("-")[0] for name in KINDS} == set(heads.Head.classes)


@pytest.mark.parametrize("side", ["x", "y"])
def test_to_numpy_matches_jax_embeddings_and_biases(aligner, side):
    embedder = export.to_numpy(aligner.heads, aligner.calibration)
    embedding, bias = expected(aligner, side)
    found = getattr(embedder, f"embed_{side}")(GIVEN[side])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, embedding, atol=1e-5)
    np.testing.assert_allclose(getattr(embedder, side)(GIVEN[side], "bias"), bias, atol=1e-5)


@pytest.mark.parametrize("side", ["x", "y"])
def test_to_onnx_matches_jax_embeddings_and_biases(aligner, side, tmp_path):
    pytest.importorskip("onnx", reason="needs the extra 'onnx'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'test'")
    files = export.to_onnx(aligner.heads, tmp_path / "model.onnx", aligner.calibration)
    assert [file.name for file in files] == ["model_x.onnx", "model_y.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / f"model_{side}.onnx")
    for count in (1, 40, 80):  # any number of rows
        found = session.run(["embedding", "bias"], {side: GIVEN[side][:count]})
        for got, wanted in zip(found, expected(aligner, side), strict=True):
            np.testing.assert_allclose(got, wanted[:count], atol=1e-5)


def test_to_numpy_matches_kernel_teacher_on_photographs():
    """Uses real embeddings, because whitening kernel features amplifies rounding errors."""
    x, y = data.photographs().image, data.photographs().text
    teacher = sota.kernel_cca(x[:200], y[:200], power=0.5, ridge=0.01)
    made = heads.build_heads(x.shape[1], y.shape[1], teacher.dim, teacher=teacher)
    aligner, embedder = sota.Aligner(made, {}), export.to_numpy(made)
    np.testing.assert_allclose(embedder.embed_x(x), aligner.embed_x(x), atol=1e-5)
    np.testing.assert_allclose(embedder.embed_y(y), aligner.embed_y(y), atol=1e-5)


def test_saved_embedder_needs_only_numpy(aligner, tmp_path):
    embedder = export.to_numpy(aligner.heads, aligner.calibration)
    embedder.save(tmp_path / "served")
    np.savez(tmp_path / "rows.npz", **GIVEN)
    code = """if True:
        import sys
        for name in ("jax", "jaxlib", "flax", "sotalign_jax", "onnx", "safetensors"):
            sys.modules[name] = None  # makes its import fail
        sys.path.insert(0, sys.argv[1])
        import numpy as np
        from served import sotalign_numpy
        embedder, rows = sotalign_numpy.load(), np.load(sys.argv[1] + "/rows.npz")
        bias = embedder.y(rows["y"], "bias")
        np.savez(sys.argv[1] + "/found.npz", x=embedder.embed_x(rows["x"]), bias=bias)
    """
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["x"], embedder.embed_x(GIVEN["x"]))
    np.testing.assert_array_equal(found["bias"], embedder.y(GIVEN["y"], "bias"))


def test_numpy_embedder_in_blocks_matches_one_pass(monkeypatch):
    embedder = export.to_numpy(networks("linear"))
    whole = embedder.embed_x(GIVEN["x"])
    monkeypatch.setattr(runtime, "BLOCK", 7)
    np.testing.assert_allclose(embedder.embed_x(GIVEN["x"]), whole, atol=1e-6)
    assert embedder.embed_x(GIVEN["x"][:0]).shape == (0, DIM)
    with pytest.raises(ValueError, match=r"^x\b"):
        embedder.embed_x(GIVEN["y"])
    with pytest.raises(ValueError, match="output"):
        embedder.x(GIVEN["x"], "bias")


@pytest.mark.parametrize("direction", ["x_to_y", "y_to_x"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_index_inner_products_match_search_scores(direction, calibrated):
    aligner = sota.Aligner(networks("linear"), {}).calibrated_by(rows(4), rows(5, width=D_Y))
    tables = rows(6, 300), rows(7, 300, D_Y)
    queries, gallery = tables if direction == "x_to_y" else tables[::-1]
    calibration = aligner.calibration if calibrated else None
    index = export.index(aligner.heads, gallery, calibration, direction=direction)
    scores = index.queries(queries) @ index.keys.T
    found = np.argsort(-scores, axis=1)[:, :5]
    wanted = aligner.search(queries, gallery, 5, direction=direction, calibrated=calibrated)
    np.testing.assert_array_equal(found, wanted.indices)
    np.testing.assert_allclose(np.take_along_axis(scores, found, 1), wanted.scores, atol=1e-5)


def test_exported_biases_extend_an_index():
    """Keys are [embedding, bias, 1], so that a gallery can grow without JAX."""
    aligner = sota.Aligner(networks("linear"), {}).calibrated_by(rows(4), rows(5, width=D_Y))
    gallery = rows(7, 30, D_Y)
    embedder = aligner.to_numpy()
    ones = np.ones((len(gallery), 1), np.float32)
    keys = np.hstack([embedder.embed_y(gallery), embedder.y(gallery, "bias"), ones])
    wanted = export.index(aligner.heads, gallery, aligner.calibration).keys
    np.testing.assert_allclose(keys, wanted, atol=1e-5)


def test_to_onnx_on_full_disk_keeps_the_old_files(tmp_path, monkeypatch):
    made = networks("linear")
    written = export.to_onnx(made, tmp_path / "model.onnx")
    before = [file.read_bytes() for file in written]

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"model_x.onnx .*No space left") as caught:
        export.to_onnx(networks("mlp"), tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)
    assert [file.read_bytes() for file in written] == before
    assert sorted(tmp_path.iterdir()) == sorted(written)


def test_export_rejects_bad_arguments(tmp_path):
    made = networks("linear")
    with pytest.raises(checks.InputError, match="path"):
        export.to_onnx(made, tmp_path / "model.pt")
    with pytest.raises(checks.InputError, match="direction"):
        export.index(made, rows(1, width=D_Y), direction="x")
    with pytest.raises(checks.InputError, match="gallery"):
        export.index(made, rows(1))

    class Other(heads.LinearHead):
        pass

    other = Other(D_X, DIM, rngs=nnx.Rngs(0))
    Other.kind = "other"
    with pytest.raises(checks.InputError, match="other"):
        export.program(other, "x", None)
