"""Alignment heads: the maps f and g from each encoder's space into the shared one.

Every parameter is an `nnx.Param`, so `nnx.split(heads)` gives one graph definition and one state.
Heads return raw features; the losses and the evaluation L2-normalise them.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from sotalign_jax import checks, losses
from sotalign_jax.kernels import KernelMap
from sotalign_jax.ot import affinity, device

Rows = Array | np.ndarray
"""Embeddings of any float dtype, one a row, on the host or on a device."""
NORMS = ("layer", "l2")


def normalize(x: Float[Array, "... d"], norm: str) -> Float[Array, "... d"]:
    """Rows made comparable: "layer" = (x - mean) / sqrt(var + 1e-5), "l2" = x / ||x||.

    >>> print(normalize(jnp.array([[3.0, 4.0]]), "l2"))
    [[0.6 0.8]]
    """
    if norm == "l2":
        return affinity.l2_normalize(x)
    x = affinity.as_float(x)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AffineMap:
    """The map x -> normalize(x, norm) W^T + b in the precision of W, a pytree.

    >>> half = AffineMap(weight=0.5 * jnp.eye(2), bias=jnp.zeros(2), norm="l2")
    >>> print(half(jnp.array([[3.0, 4.0]])))
    [[0.3 0.4]]
    """

    weight: Float[Array, "d_out d_in"]
    bias: Float[Array, " d_out"]
    norm: str = dataclasses.field(default="l2", metadata={"static": True})

    def __post_init__(self) -> None:
        checks.choice("norm", self.norm, NORMS)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        rows = normalize(jnp.asarray(x).astype(self.weight.dtype), self.norm)
        return affinity.dot(rows, self.weight.T, device.profile().heads) + self.bias

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    def leading(self, dim: int) -> "AffineMap":
        """The first `dim` output directions."""
        checks.within(self.d_out, "directions in this map", dim=dim)
        return AffineMap(self.weight[:dim], self.bias[:dim], self.norm)


Map = AffineMap | KernelMap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """One frozen map per modality into a shared space, a pytree.

    Attributes:
        map_x: Map of the first modality. None if the rows are in the shared space already.
        map_y: Map of the second modality, or None.
        correlations: Pearson correlation of each direction on the pairs that the teacher was
            fitted on. In-sample, so near 1 when there are fewer pairs than features.
    """

    map_x: Map | None
    map_y: Map | None
    correlations: Float[Array, " dim"]

    @property
    def dim(self) -> int:
        """Width of the shared space."""
        return len(self.correlations)

    @property
    def is_kernel(self) -> bool:
        """True if rows pass through a Gaussian kernel."""
        return isinstance(self.map_x, KernelMap)

    def x(self, rows: Rows) -> Float[Array, "n dim"]:
        """Maps rows of the first modality to unit rows of the shared space."""
        return _unit_rows(self.map_x, rows)

    def y(self, rows: Rows) -> Float[Array, "n dim"]:
        """Maps rows of the second modality to unit rows of the shared space."""
        return _unit_rows(self.map_y, rows)

    def leading(self, dim: int) -> "Teacher":
        """Returns the teacher of the first `dim` directions."""
        checks.within(self.dim, "directions in the teacher", dim=dim)
        assert self.map_x is not None and self.map_y is not None
        maps = self.map_x.leading(dim), self.map_y.leading(dim)
        return Teacher(*maps, self.correlations[:dim])


def _unit_rows(apply: Map | None, rows: Rows) -> Float[Array, "n dim"]:
    return jnp.asarray(rows) if apply is None else affinity.l2_normalize(apply(rows))


# --- what heads are made of ---


class Head(nnx.Module):
    """A map of rows, (n, d_in) -> (n, d_out), from one encoder's space into the shared one.

    Its variables are `nnx.Param`. A subclass with a `kind` can be saved and loaded under that name.
    """

    kind: ClassVar[str]
    structure: ClassVar[tuple[str, ...]]
    classes: ClassVar[dict[str, type["Head"]]] = {}
    d_in: int
    d_out: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            Head.classes[cls.kind] = cls

    @abc.abstractmethod
    def __call__(self, x: Rows) -> Float[Array, "n d_out"]: ...

    def options(self) -> dict[str, Any]:
        """What `from_options` needs for a head of the same structure, as JSON values."""
        return {name: getattr(self, name) for name in self.structure}

    @classmethod
    def from_options(cls, *args: Any, **options: Any) -> "Head":
        """A head of this structure; its values are arbitrary."""
        make: Any = cls
        return make(*args, **options, rngs=nnx.Rngs(0))


class InputNorm(nnx.Module):
    """normalize(x) * scale + shift with learned scale and shift; norm="layer" is LayerNorm.

    With norm="l2" rows are brought to length sqrt(d), the length LayerNorm gives them.
    """

    def __init__(self, width: int, *, norm: str = "layer", dtype: Any = jnp.float32):
        checks.choice("norm", norm, NORMS)
        self.norm = norm
        self.gain = math.sqrt(width) if norm == "l2" else 1.0
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.shift = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Rows) -> Float[Array, "n d"]:
        rows = normalize(jnp.asarray(x).astype(self.scale[...].dtype), self.norm)
        return rows * (self.gain * self.scale[...]) + self.shift[...]


class Dense(nnx.Module):
    """x W + b at the affinities' precision: Xavier-uniform W, zero b.

    `nnx.Linear` draws a random key for its zero bias, too: every layer after the first, and with it
    every recorded result of a seed, would start elsewhere.
    """

    def __init__(self, d_in: int, d_out: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        xavier = nnx.initializers.xavier_uniform()
        self.kernel = nnx.Param(xavier(rngs.params(), (d_in, d_out), dtype))
        self.bias = nnx.Param(jnp.zeros(d_out, dtype))

    @classmethod
    def of(cls, kernel: Rows, bias: Rows) -> "Dense":
        """The layer of these values, in float32."""
        layer = cls(*kernel.shape, rngs=nnx.Rngs(0))
        layer.kernel[...] = jnp.asarray(kernel, jnp.float32)
        layer.bias[...] = jnp.asarray(bias, jnp.float32)
        return layer

    def __call__(self, x: Float[Array, "n d_in"]) -> Float[Array, "n d_out"]:
        return affinity.dot(x, self.kernel[...], device.profile().heads) + self.bias[...]


# --- heads ---


class _Network(Head):
    """An `InputNorm` and dense layers; `hidden` and `norm` are the kind's usual ones unless given.

    A linear head has no hidden layer.
    """

    structure: ClassVar[tuple[str, ...]] = ("d_in", "d_out", "hidden", "norm")
    usual_norm: ClassVar[str] = "layer"

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        hidden: int | None = None,
        norm: str | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.d_in, self.d_out, self.norm = d_in, d_out, norm or self.usual_norm
        self.hidden = self.usual_hidden(d_in) if hidden is None else hidden
        self.input = InputNorm(d_in, norm=self.norm, dtype=dtype)
        self.draw(functools.partial(Dense, dtype=dtype, rngs=rngs))

    @staticmethod
    def usual_hidden(d_in: int) -> int:
        return d_in

    @abc.abstractmethod
    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Sets the layers, in the order that random numbers are drawn in."""


class LinearHead(_Network):
    """LayerNorm(x) W^T + b, the linear head of SAIL: Xavier-uniform W, zero b.

    With norm="l2", x / ||x|| * sqrt(d) takes the place of LayerNorm(x).

    >>> LinearHead(8, 3, rngs=nnx.Rngs(0))(jnp.ones((5, 8), jnp.float16)).shape
    (5, 3)
    """

    kind = "linear"
    structure = ("d_in", "d_out", "norm")

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        self.linear = dense(self.d_in, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        # The backward pass normalises rows again: nothing of shape (n, d_in) is stored.
        return jax.checkpoint(AffineMap.__call__)(self.to_affine(), x)

    @classmethod
    def from_affine(cls, affine: AffineMap) -> "LinearHead":
        """A head that computes c * affine(x) with one c > 0, and so the same cosines.

        c gives W the root mean square of a Xavier start, sqrt(2 / (d_in + d_out)): a step of a
        sign-based optimiser is then as large, relative to W, as it is from a random start.
        """
        d_out, d_in = affine.weight.shape
        head = cls(d_in, d_out, norm=affine.norm, dtype=affine.weight.dtype, rngs=nnx.Rngs(0))
        weight = affine.weight / head.input.gain
        rms = float(jnp.sqrt(jnp.mean(jnp.square(weight))))
        if not (math.isfinite(rms) and rms > 0):
            raise checks.InputError(
                f"affine: the weight's root mean square is {rms}; start from a non-zero finite map"
            )
        c = math.sqrt(2.0 / (d_in + d_out)) / rms
        head.linear.kernel[...] = c * weight.T
        head.linear.bias[...] = c * affine.bias
        return head

    def to_affine(self) -> AffineMap:
        """The same map as one weight and one bias, scale and shift folded in."""
        kernel, bias = self.linear.kernel[...], self.linear.bias[...]
        scale, shift = self.input.scale[...], self.input.shift[...]
        weight = (kernel * (self.input.gain * scale)[:, None]).T
        return AffineMap(weight, affinity.dot(shift, kernel) + bias, self.norm)


class MLPHead(_Network):
    """LayerNorm -> Linear -> GELU -> Linear; the hidden layer is usually as wide as the input.

    >>> MLPHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
    (5, 3)
    """

    kind = "mlp"

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        self.inner = dense(self.d_in, self.hidden)
        self.outer = dense(self.hidden, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        return self.outer(jax.nn.gelu(self.inner(self.input(x)), approximate=False))


class GLUHead(_Network):
    """SAIL's gated head: W_3 (relu6(clip(W_1 z)) * clip(W_2 z)) of z = LayerNorm(x).

    Both branches are clipped to [-1000, 1000], as in SAIL's code; they are usually eight times as
    wide as the input.

    >>> GLUHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
    (5, 3)
    """

    kind = "glu"
    usual_hidden = staticmethod(lambda d_in: 8 * d_in)

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        self.gate = dense(self.d_in, self.hidden)
        self.inner = dense(self.d_in, self.hidden)
        self.outer = dense(self.hidden, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        z = self.input(x)
        gate, inner = (jnp.clip(layer(z), -1e3, 1e3) for layer in (self.gate, self.inner))
        return self.outer(jax.nn.relu6(gate) * inner)


class TanhHead(_Network):
    """SUE's network: L2-normalised rows, hidden-hidden-1024 LeakyReLU layers, then tanh.

    The third layer is no wider than `hidden`, which is 512, or 4096 as published.

    >>> TanhHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
    (5, 3)
    """

    kind = "tanh"
    usual_norm = "l2"
    usual_hidden = staticmethod(lambda d_in: 512)

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        widths = (self.d_in, self.hidden, self.hidden, min(1024, self.hidden), self.d_out)
        self.layers = nnx.List([dense(a, b) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        rows = self.input(x)
        *inner, last = self.layers
        for layer in inner:
            rows = jax.nn.leaky_relu(layer(rows))
        return jnp.tanh(last(rows))


class KernelHead(Head):
    """Another head on kernel features: inner(l2(map(x))), where the map is a `KernelMap`.

    Training works on the inner head alone, with rows that were mapped once.

    >>> near = KernelMap(jnp.zeros(2), jnp.eye(2), jnp.array(1.0), jnp.zeros(2), jnp.eye(2))
    >>> KernelHead(near, LinearHead(2, 5, rngs=nnx.Rngs(0)))(jnp.ones((3, 2))).shape
    (3, 5)
    """

    kind = "kernel"

    def __init__(self, features: KernelMap, inner: Head):
        if inner.d_in != features.d_out:
            raise checks.InputError(
                f"inner: takes {inner.d_in} features but the map gives {features.d_out}"
            )
        self.inner = inner
        self.d_in, self.d_out = features.d_in, inner.d_out
        for field in dataclasses.fields(KernelMap):
            setattr(self, field.name, nnx.Param(getattr(features, field.name)))

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        return self.inner(affinity.l2_normalize(self.features(x)))

    @property
    def features(self) -> KernelMap:
        """The map in front of the inner head."""
        return KernelMap(*(getattr(self, f.name)[...] for f in dataclasses.fields(KernelMap)))

    def options(self) -> dict[str, Any]:
        inner = {"kind": self.inner.kind, "options": self.inner.options()}
        return {"d_in": self.d_in, "landmarks": len(self.features.landmarks), "inner": inner}

    @classmethod
    def from_options(cls, d_in: int, landmarks: int, inner: dict[str, Any]) -> "KernelHead":
        head = rebuild(**inner)
        shapes = (d_in,), (landmarks, d_in), (), (landmarks,), (head.d_in, landmarks)
        return cls(KernelMap(*(jnp.zeros(shape) for shape in shapes)), head)


# --- both modalities together ---

KINDS = ("linear", "mlp", "glu", "tanh")
"""Heads that start from random weights and can be trained by any objective."""


def rebuild(kind: str, options: dict[str, Any]) -> Head:
    """A head of the structure that `Head.options` described; its values are arbitrary.

    >>> rebuild("linear", {"d_in": 4, "d_out": 2, "norm": "l2"}).d_out
    2
    """
    checks.choice("kind", kind, tuple(Head.classes))
    widths = {n: value for n, value in options.items() if not isinstance(value, str | dict)}
    checks.whole(1, or_none=True, **widths)
    return Head.classes[kind].from_options(**options)


class Heads(nnx.Module):
    """Everything that is trained: heads x and y, log of the logit scale (log 20), bias (-10).

    Scale and bias are those of `like`, if given.
    """

    def __init__(self, x: Head, y: Head, *, like: "Heads | None" = None):
        self.x = x
        self.y = y
        dtype = jax.tree.leaves(nnx.state(x))[0].dtype
        self.log_scale = nnx.Param(jnp.asarray(losses.INITIAL_LOG_SCALE, dtype))
        self.bias = nnx.Param(jnp.asarray(losses.INITIAL_BIAS, dtype))
        if like is not None:
            self.log_scale, self.bias = like.log_scale, like.bias


def build_heads(
    d_x: int,
    d_y: int,
    dim: int,
    *,
    kind: str = "linear",
    hidden: int | None = None,
    norm: str | None = None,
    seed: int = 0,
    teacher: Teacher | None = None,
    dtype: Any = jnp.float32,
) -> Heads:
    """Builds heads from widths d_x and d_y to a shared space of width `dim`.

    Args:
        d_x: Width of the first modality's embeddings.
        d_y: Width of the second modality's embeddings.
        dim: Width of the shared space.
        kind: One of `KINDS`.
        hidden: Width of the hidden layers. None takes the kind's usual one.
        norm: "layer" or "l2". None takes the kind's usual one.
        seed: Seed of the random weights.
        teacher: If given, linear heads start at its first `dim` directions, with its norm and
            dtype. Heads that start at a kernel teacher contain its kernel maps.
        dtype: Type of the parameters.

    Returns:
        The heads, with the initial logit scale and bias.

    Raises:
        InputError: The teacher does not fit the widths or the kind.

    >>> heads = build_heads(8, 6, 4)
    >>> heads.x(jnp.ones((2, 8))).shape, heads.y(jnp.ones((2, 6))).shape
    ((2, 4), (2, 4))
    """
    checks.choice("kind", kind, KINDS)
    checks.whole(1, d_x=d_x, d_y=d_y, dim=dim)
    checks.whole(1, or_none=True, hidden=hidden)
    if teacher is None:
        options: dict[str, Any] = {"hidden": hidden, "norm": norm, "dtype": dtype}
        rngs, made = nnx.Rngs(seed), Head.classes[kind]
        return Heads(*(made(width, dim, **options, rngs=rngs) for width in (d_x, d_y)))  # type: ignore[call-arg]
    if kind != "linear":
        raise checks.InputError(
            f"teacher: cannot start heads of kind {kind!r}; use kind='linear' or teacher=None"
        )
    check_widths(teacher, d_x, d_y)
    first = teacher.leading(dim)
    if not first.is_kernel:
        return Heads(*(LinearHead.from_affine(one) for one in (first.map_x, first.map_y)))  # type: ignore[arg-type]
    return prepend(first, identity_heads(dim))


def check_widths(teacher: Teacher, d_x: int, d_y: int) -> None:
    """Raises InputError unless the teacher maps embeddings of these widths."""
    widths = tuple(teacher.dim if m is None else m.d_in for m in (teacher.map_x, teacher.map_y))
    if widths != (d_x, d_y):
        raise checks.InputError(
            f"teacher: maps widths {widths} but the embeddings have {(d_x, d_y)}; fit the teacher "
            "on the same encoders"
        )


def identity_heads(dim: int) -> Heads:
    """Builds linear heads that keep the direction of rows that are in the shared space already."""
    identity = AffineMap(jnp.eye(dim), jnp.zeros(dim), norm="l2")
    return Heads(LinearHead.from_affine(identity), LinearHead.from_affine(identity))


def prepend(features: Teacher, heads: Heads) -> Heads:
    """Prepends kernel maps, so that heads of kernel features accept embeddings.

    Args:
        features: A kernel teacher, such as `teachers.kernel_cca` fits.
        heads: Heads whose inputs are the unit features of its maps.

    Returns:
        Heads of the embeddings, with the same logit scale and bias.
    """
    map_x, map_y = features.map_x, features.map_y
    if not (isinstance(map_x, KernelMap) and isinstance(map_y, KernelMap)):
        raise checks.InputError(
            "features: not kernel maps; fit them with teachers.kernel_cca(pairs_x, pairs_y)"
        )
    return Heads(KernelHead(map_x, heads.x), KernelHead(map_y, heads.y), like=heads)
