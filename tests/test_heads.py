"""Tests of the heads against numpy and Flax."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import erf

from sotalign_jax import checks, heads, losses, teachers
from sotalign_jax.ot import affinity


def rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) + 0.3


def random_map(norm, d_out=4, d_in=7):
    return heads.AffineMap(jnp.asarray(rows(1, d_out, d_in)), jnp.asarray(rows(2, d_out)), norm)


def perturbed(head, size=0.3):
    """Adds noise to every parameter, so that no scale is 1 and no shift is 0."""
    graphdef, params = nnx.split(head)
    moved = jax.tree.map(lambda p: p + size * rows(p.size, *p.shape), params)
    return nnx.merge(graphdef, moved)


def test_normalize_layer_matches_flax():
    x = jnp.asarray(5.0 * rows(0, 6, 7))
    reference = nnx.LayerNorm(7, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(heads.normalize(x, "layer"), reference(x), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-9, 1e20])
def test_normalize_layer_accepts_rows_of_any_scale(scale):
    x = rows(0, 6, 7)
    scaled = heads.normalize(jnp.asarray(scale * x, jnp.float32), "layer")
    whitened = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    # For small rows, epsilon equals the variance, which doubles the square of the divisor.
    factor = np.sqrt(2.0) if scale < 1 else 1.0
    np.testing.assert_allclose(factor * scaled, whitened, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-25, 0.1, 1 / 3, 123.456])
def test_normalize_layer_maps_constant_rows_close_to_zero(value):
    row = jnp.full((1, 768), value)  # the mean of 768 equal numbers has a rounding error
    assert jnp.abs(heads.normalize(row, "layer")).max() < 0.05
    gradient = jax.grad(lambda x: heads.normalize(x, "layer")[0, 0])(row)
    assert np.isfinite(gradient).all()


def test_affine_map_matches_numpy():
    x, affine = rows(0, 6, 7), random_map("l2")
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(affine(x), unit @ affine.weight.T + affine.bias, atol=1e-5)


def test_affine_map_is_a_pytree_with_static_norm():
    affine = random_map("layer")
    leaves, treedef = jax.tree.flatten(affine)
    assert len(leaves) == 2
    assert jax.tree.unflatten(treedef, leaves).norm == "layer"
    x = rows(0, 3, 7)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(affine, x), affine(x), atol=1e-6)
    assert jax.tree.map(jnp.shape, affine).bias == (4,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
@pytest.mark.parametrize("kind", heads.KINDS)
def test_heads_compute_inputs_of_any_dtype_in_float32(dtype, kind):
    x = rows(0, 5, 7).astype(dtype)
    head = heads.build_heads(7, 6, 4, kind=kind, hidden=9).x
    out = head(x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, head(x.astype(np.float32)), rtol=1e-6)


def test_heads_do_not_overflow_on_large_float16_inputs():
    x = (3e4 * np.sign(rows(0, 2, 512))).astype(np.float16)
    for norm in ("layer", "l2"):
        assert np.isfinite(heads.build_heads(512, 512, 4, norm=norm).x(x)).all()


def test_heads_with_float64_parameters_compute_in_float64(x64):
    built = heads.build_heads(7, 6, 4, dtype=jnp.float64)
    assert built.x(rows(0, 5, 7)).dtype == jnp.float64
    assert built.log_scale[...].dtype == jnp.float64


def test_linear_head_starts_as_in_sail():
    built = heads.build_heads(300, 200, 100, seed=3)
    kernel = np.asarray(built.x.linear.kernel[...])
    limit = np.sqrt(6 / 400)
    assert kernel.shape == (300, 100)
    assert np.abs(kernel).max() <= limit
    assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
    assert not built.x.linear.bias[...].any()
    assert float(built.log_scale[...]) == pytest.approx(np.log(20.0))
    assert float(built.bias[...]) == -10.0


def test_linear_head_is_layer_norm_then_linear():
    x = rows(0, 6, 7)
    head = perturbed(heads.LinearHead(7, 4, rngs=nnx.Rngs(0)))
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    inner = normed * head.input.scale[...] + head.input.shift[...]
    expected = inner @ head.linear.kernel[...] + head.linear.bias[...]
    np.testing.assert_allclose(head(x), expected, atol=1e-5)


@pytest.mark.parametrize("norm", ["layer", "l2"])
def test_linear_head_gradient_matches_layer_by_layer(x64, norm):
    x, direction = rows(0, 6, 7).astype(np.float64), rows(3, 6, 4)
    head = perturbed(heads.LinearHead(7, 4, norm=norm, dtype=jnp.float64, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(head)

    def value(params, x, apply):
        return jnp.sum(direction * jnp.square(apply(nnx.merge(graphdef, params), x)))

    def layer_by_layer(head, x):
        return head.linear(head.input(x))

    ours, expected = (
        jax.value_and_grad(value, argnums=(0, 1))(params, x, apply)
        for apply in (heads.LinearHead.__call__, layer_by_layer)
    )
    chex.assert_trees_all_close(ours, expected, rtol=1e-11)


def test_linear_head_keeps_only_raw_rows_for_the_backward_pass():
    x = jnp.ones((50, 7), jnp.float16)
    graphdef, params = nnx.split(heads.LinearHead(7, 4, rngs=nnx.Rngs(0)))
    pull = jax.eval_shape(lambda p: jax.vjp(lambda p: nnx.merge(graphdef, p)(x), p)[1], params)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert kept == [jnp.float16]  # the raw embeddings


def test_mlp_head_matches_numpy():
    x = rows(0, 6, 7)
    head = perturbed(heads.MLPHead(7, 4, hidden=9, rngs=nnx.Rngs(0)))
    inner = head.input(x) @ head.inner.kernel[...] + head.inner.bias[...]
    gelu = 0.5 * inner * (1 + erf(inner / np.sqrt(2)))
    expected = gelu @ head.outer.kernel[...] + head.outer.bias[...]
    np.testing.assert_allclose(head(x), expected, atol=1e-5)
    assert heads.MLPHead(7, 4, rngs=nnx.Rngs(0)).inner.kernel.shape == (7, 7)


def test_glu_head_matches_numpy():
    x = rows(0, 6, 7)
    head = perturbed(heads.GLUHead(7, 4, hidden=9, rngs=nnx.Rngs(0)))
    gate, inner = (head.input(x) @ d.kernel[...] + d.bias[...] for d in (head.gate, head.inner))
    expected = (np.clip(gate, 0, 6) * inner) @ head.outer.kernel[...] + head.outer.bias[...]
    np.testing.assert_allclose(head(x), expected, atol=1e-5)
    assert heads.GLUHead(7, 4, rngs=nnx.Rngs(0)).hidden == 56


def test_glu_head_clips_both_branches_after_their_linear_maps():
    """Matches SAIL's code, which clips after the linear maps but not before them."""
    head = heads.GLUHead(7, 4, hidden=9, rngs=nnx.Rngs(0))
    head.input.scale[...] = jnp.full(7, 3e3)
    head.gate.kernel[...] = 1e-3 * head.gate.kernel[...]
    x = rows(0, 6, 7)
    z = np.asarray(head.input(x))
    gate, inner = (np.clip(z @ d.kernel[...], -1e3, 1e3) for d in (head.gate, head.inner))
    assert np.abs(z).max() > 1e3 and np.abs(inner).max() == 1e3
    expected = (np.clip(gate, 0, 6) * inner) @ head.outer.kernel[...]
    np.testing.assert_allclose(head(x), expected, rtol=1e-4, atol=1e-2)


def test_tanh_head_matches_numpy():
    x = rows(0, 6, 7)
    head = perturbed(heads.TanhHead(7, 4, hidden=9, rngs=nnx.Rngs(0)))
    hidden = np.asarray(head.input(x))
    for layer in head.layers[:-1]:
        hidden = hidden @ layer.kernel[...] + layer.bias[...]
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    expected = np.tanh(hidden @ head.layers[-1].kernel[...] + head.layers[-1].bias[...])
    np.testing.assert_allclose(head(x), expected, atol=1e-5)
    assert [layer.kernel.shape for layer in head.layers] == [(7, 9), (9, 9), (9, 9), (9, 4)]


def test_input_norms_give_rows_of_equal_size():
    x = 9.0 * rows(0, 6, 50)
    for norm in ("layer", "l2"):
        lengths = jnp.linalg.norm(heads.InputNorm(50, norm=norm)(x), axis=1)
        np.testing.assert_allclose(lengths, np.sqrt(50), rtol=1e-4)


@pytest.mark.parametrize("norm", ["layer", "l2"])
def test_to_affine_matches_the_head(norm):
    x = rows(0, 6, 7)
    head = perturbed(heads.LinearHead(7, 4, norm=norm, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(head.to_affine()(x), head(x), atol=2e-5)


@pytest.mark.parametrize("norm", ["layer", "l2"])
def test_from_affine_is_proportional_at_xavier_scale(norm):
    x, affine = rows(0, 6, 7), random_map(norm)
    head = heads.LinearHead.from_affine(affine)
    ratio = np.asarray(head(x) / affine(x))
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-4)
    assert ratio[0, 0] > 0
    rms = jnp.sqrt(jnp.mean(head.linear.kernel[...] ** 2))
    assert float(rms) == pytest.approx(np.sqrt(2 / (7 + 4)), rel=1e-5)


def test_build_heads_from_teacher_keeps_its_cosines():
    A, B = rows(0, 40, 7), rows(1, 40, 6)
    teacher = teachers.cca(A, B)
    built = heads.build_heads(7, 6, 3, teacher=teacher)
    short = teachers.cca(A, B, dim=3)
    np.testing.assert_allclose(
        affinity.cosine(built.x(A), built.y(B)), short.x(A) @ short.y(B).T, atol=1e-5
    )


def test_every_head_variable_is_a_parameter_and_trains():
    for kind in heads.KINDS:
        graphdef, params = nnx.split(heads.build_heads(7, 6, 4, kind=kind, hidden=9))
        variables = jax.tree.leaves(params, is_leaf=lambda v: isinstance(v, nnx.Variable))
        assert all(isinstance(v, nnx.Param) for v in variables)
        optimizer = optax.sgd(0.1)

        @jax.jit
        def step(params, state, a, b, graphdef=graphdef, optimizer=optimizer):
            def objective(params):
                built = nnx.merge(graphdef, params)
                return losses.siglip(
                    built.x(a), built.y(b), log_scale=built.log_scale[...], bias=built.bias[...]
                )

            value, gradient = jax.value_and_grad(objective)(params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        a, b = rows(0, 8, 7), rows(1, 8, 6)
        new, state, first = step(params, optimizer.init(params), a, b)
        _, _, second = step(new, state, a, b)
        assert second < first
        moved = jax.tree.map(lambda p, q: bool(jnp.any(p != q)), params, new)
        assert all(jax.tree.leaves(moved))


def test_mixed_head_averages_the_cosines_of_two_heads():
    first, second = heads.build_heads(7, 6, 4, seed=1), heads.build_heads(7, 6, 9, kind="mlp")
    mixed = heads.mix(first, second, 0.3)
    x, y = rows(0, 8, 7), rows(1, 5, 6)
    cosines = [affinity.cosine(one.x(x), one.y(y)) for one in (first, second, mixed)]
    np.testing.assert_allclose(cosines[2], 0.3 * cosines[0] + 0.7 * cosines[1], atol=1e-6)
    assert mixed.x.d_out == 13 and mixed.log_scale is second.log_scale
    with pytest.raises(checks.InputError, match=r"^second takes width 6"):
        heads.MixedHead(first.x, second.y)
    with pytest.raises(checks.InputError, match=r"^weight\b.* 1.5"):
        heads.mix(first, second, 1.5)


def test_build_heads_is_a_function_of_the_seed():
    kernels = [heads.build_heads(7, 7, 4, seed=s).x.linear.kernel[...] for s in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).any()
    twin = heads.build_heads(7, 7, 4)
    assert (twin.x.linear.kernel[...] != twin.y.linear.kernel[...]).any()


def test_build_heads_rejects_bad_arguments():
    teacher = teachers.procrustes(rows(0, 40, 7), rows(1, 40, 6))
    with pytest.raises(checks.InputError, match=r"kind.* 'conv'"):
        heads.build_heads(7, 6, 4, kind="conv")
    with pytest.raises(checks.InputError, match=r"norm.* 'batch'"):
        heads.build_heads(7, 6, 4, norm="batch")
    with pytest.raises(checks.InputError, match=r"dim.* 0"):
        heads.build_heads(7, 6, 0)
    with pytest.raises(checks.InputError, match=r"kind.* 'mlp'"):
        heads.build_heads(7, 6, 4, kind="mlp", teacher=teacher)
    with pytest.raises(checks.InputError, match=r"teacher .*\(7, 6\)"):
        heads.build_heads(6, 7, 4, teacher=teacher)
    with pytest.raises(checks.InputError, match=r"dim.* 9"):
        heads.build_heads(7, 6, 9, teacher=teacher)
    with pytest.raises(checks.InputError, match="affine"):
        heads.LinearHead.from_affine(heads.AffineMap(jnp.zeros((4, 7)), jnp.zeros(4)))
