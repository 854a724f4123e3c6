"""Alignment heads: the trained maps from each encoder's space into the shared space.

Every parameter is an `nnx.Param`, so `nnx.split(heads)` gives one graph definition and one state.
Heads return raw features. Losses and evaluation L2-normalise them.
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
from jaxtyping import Array, ArrayLike, Float

from sotalign_jax import checks, losses
from sotalign_jax.kernels import KernelMap
from sotalign_jax.ot import affinity, device

Rows = Array | np.ndarray
"""Embeddings of any float dtype, one per row, on the host or on a device."""
NORMS = ("layer", "l2")
"""Normalisations of the input, see `normalize`."""


def normalize(x: Float[Array, "... d"], norm: str) -> Float[Array, "... d"]:
    """Normalises every row.

    Args:
        x: Rows of any float dtype.
        norm: "layer" computes (x - mean) / sqrt(var + 1e-5), LayerNorm without parameters. Rows
            with a smaller variance have min(1e-5, var + 1e-5 mean^2) in place of 1e-5, so that
            rows of any scale can be used. "l2" computes x / ||x||.

    Returns:
        The normalised rows.

    Example:
        >>> print(normalize(jnp.array([[3.0, 4.0]]), "l2"))
        [[0.6 0.8]]

    References:
        J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer normalization", 2016.
    """
    if norm == "l2":
        return affinity.l2_normalize(x)
    x = affinity.as_float(x)
    # Squares of small entries would underflow in float32. Powers of two change no digit.
    power = affinity.power_of_two(x)[..., None]
    x = power * x
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    # 1e-5 is the epsilon of torch.nn.LayerNorm. The term with the mean keeps the rounding errors of
    # constant rows small, and 1e-10 prevents a division by zero.
    epsilon = jnp.minimum(1e-5 * jnp.square(power), variance + 1e-5 * jnp.square(mean))
    return centred / jnp.sqrt(variance + jnp.maximum(epsilon, 1e-10))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AffineMap:
    """The map x -> normalize(x, norm) W^T + b in the precision of W, a pytree.

    Attributes:
        weight: The matrix W, one output direction per row.
        bias: The vector b.
        norm: "layer" or "l2", see `normalize`.

    Example:
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
        # Cast before the normalisation, because squares in float16 overflow at 65,504.
        rows = normalize(jnp.asarray(x).astype(self.weight.dtype), self.norm)
        return affinity.dot(rows, self.weight.T, device.profile().heads) + self.bias

    @property
    def d_in(self) -> int:
        """Width of the embeddings."""
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        """Number of output directions."""
        return self.weight.shape[0]

    def leading(self, dim: int) -> "AffineMap":
        """Returns the map to the first output directions.

        Args:
            dim: Number of directions.

        Returns:
            The smaller map.

        Raises:
            InputError: The map has fewer directions.
        """
        checks.within(self.d_out, "directions in this map", dim=dim)
        return AffineMap(self.weight[:dim], self.bias[:dim], self.norm)


Map = AffineMap | KernelMap
"""A frozen map of one modality, linear or through a Gaussian kernel."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """Frozen maps of both modalities into a shared space, a pytree.

    Attributes:
        map_x: Map of the first modality.
        map_y: Map of the second modality.
        correlations: Pearson correlation of each direction on the pairs that the teacher was
            fitted on. In-sample, so near 1 when there are fewer pairs than features.
    """

    map_x: Map
    map_y: Map
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
        """Maps embeddings of the first modality to unit rows of the shared space.

        Args:
            rows: Embeddings, shape [n, d_x].

        Returns:
            The features, shape [n, dim].
        """
        return affinity.l2_normalize(self.map_x(rows))

    def y(self, rows: Rows) -> Float[Array, "n dim"]:
        """Maps embeddings of the second modality to unit rows of the shared space.

        Args:
            rows: Embeddings, shape [n, d_y].

        Returns:
            The features, shape [n, dim].
        """
        return affinity.l2_normalize(self.map_y(rows))

    def leading(self, dim: int) -> "Teacher":
        """Returns the teacher of the first directions.

        Args:
            dim: Number of directions.

        Returns:
            The smaller teacher.

        Raises:
            InputError: The teacher has fewer directions.
        """
        checks.within(self.dim, "directions in the teacher", dim=dim)
        maps = self.map_x.leading(dim), self.map_y.leading(dim)
        return Teacher(*maps, self.correlations[:dim])


# --- building blocks of heads ---


class Head(nnx.Module):
    """Base of all heads: a map of rows, [n, d_in] -> [n, d_out], into the shared space.

    Its variables are `nnx.Param`. A subclass with a `kind` can be saved and loaded under that name.

    Attributes:
        kind: Name of the subclass.
        structure: Names of the attributes that `options` returns.
        classes: Registry of all subclasses by their kind.
        d_in: Width of the embeddings.
        d_out: Width of the shared space.
    """

    kind: ClassVar[str]
    structure: ClassVar[tuple[str, ...]]
    classes: ClassVar[dict[str, type["Head"]]] = {}
    d_in: int
    d_out: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not `hasattr`: a subclass without a kind of its own must not replace its parent.
        if "kind" in vars(cls):
            Head.classes[cls.kind] = cls

    @abc.abstractmethod
    def __call__(self, x: Rows) -> Float[Array, "n d_out"]: ...

    def options(self) -> dict[str, Any]:
        """Returns the structure of the head as JSON values, which `from_options` takes."""
        return {name: getattr(self, name) for name in self.structure}

    @classmethod
    def from_options(cls, *args: Any, **options: Any) -> "Head":
        """Builds a head of this structure with arbitrary parameters.

        Args:
            *args: Positional arguments of the subclass.
            **options: Result of `options`.

        Returns:
            The head.
        """
        make: Any = cls
        return make(*args, **options, rngs=nnx.Rngs(0))


class InputNorm(nnx.Module):
    """Normalisation of the input, normalize(x) * scale + shift with learned scale and shift.

    With norm="layer" this is LayerNorm. With norm="l2" rows are scaled to length sqrt(d), which is
    also their length after LayerNorm.

    Args:
        width: Width of the rows.
        norm: "layer" or "l2".
        dtype: Type of the parameters.
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

    def centre(self, rows: Rows) -> None:
        """Sets the shift so that these rows have the mean 0 after the normalisation."""
        self.shift[...] = self.shift[...] - jnp.mean(self(rows), axis=0)


class Dense(nnx.Module):
    """Dense layer x W + b. Initially W is drawn Xavier-uniform and b is 0.

    Args:
        d_in: Width of the input.
        d_out: Width of the output.
        dtype: Type of the parameters.
        rngs: Source of random keys.

    References:
        X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural
        networks", AISTATS 2010.
    """

    # Not `nnx.Linear`, which draws a random key for its zero bias as well. Every layer after the
    # first would start from other weights, and recorded results could not be reproduced.
    def __init__(self, d_in: int, d_out: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        xavier = nnx.initializers.xavier_uniform()
        self.kernel = nnx.Param(xavier(rngs.params(), (d_in, d_out), dtype))
        self.bias = nnx.Param(jnp.zeros(d_out, dtype))

    @classmethod
    def of(cls, kernel: Rows, bias: Rows) -> "Dense":
        """Builds a layer with given parameters, in float32.

        Args:
            kernel: The matrix W, shape [d_in, d_out].
            bias: The vector b, shape [d_out].

        Returns:
            The layer.

        Example:
            >>> print(Dense.of(2 * np.eye(2), np.ones(2))(jnp.array([[3.0, 4.0]])))
            [[7. 9.]]
        """
        layer = cls(*kernel.shape, rngs=nnx.Rngs(0))
        layer.kernel[...] = jnp.asarray(kernel, jnp.float32)
        layer.bias[...] = jnp.asarray(bias, jnp.float32)
        return layer

    def __call__(self, x: Float[Array, "n d_in"]) -> Float[Array, "n d_out"]:
        return affinity.dot(x, self.kernel[...], device.profile().heads) + self.bias[...]


# --- heads ---


class Network(Head):
    """Base of heads that are an `InputNorm` followed by dense layers."""

    structure: ClassVar[tuple[str, ...]] = ("d_in", "d_out", "hidden", "norm")
    default_norm: ClassVar[str] = "layer"

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
        self.d_in, self.d_out, self.norm = d_in, d_out, norm or self.default_norm
        self.hidden = self.default_hidden(d_in) if hidden is None else hidden
        self.input = InputNorm(d_in, norm=self.norm, dtype=dtype)
        self.draw(functools.partial(Dense, dtype=dtype, rngs=rngs))

    def centre(self, rows: Rows) -> None:
        """Starts from rows that are centred after the normalisation.

        Rows that share a large mean have features of nearly one direction, from which training may
        not recover.

        Args:
            rows: Embeddings that determine the mean, shape [n, d_in].
        """
        self.input.centre(rows)

    @staticmethod
    def default_hidden(d_in: int) -> int:
        """Returns the default width of the hidden layers."""
        return d_in

    @abc.abstractmethod
    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Creates the layers. Their order determines their random numbers."""


class LinearHead(Network):
    """SAIL's linear head, LayerNorm(x) W^T + b.

    W starts Xavier-uniform and b at 0. With norm="l2", sqrt(d) x / ||x|| replaces LayerNorm(x).
    The paper mentions neither LayerNorm nor b, see docs/paper.md.

    Example:
        >>> LinearHead(8, 3, rngs=nnx.Rngs(0))(jnp.ones((5, 8), jnp.float16)).shape
        (5, 3)

    References:
        L. Zhang et al., "Assessing and learning alignment of unimodal vision and language models",
        CVPR 2025.
    """

    kind = "linear"
    structure = ("d_in", "d_out", "norm")

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Creates the only layer."""
        self.linear = dense(self.d_in, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        # Rematerialisation: the backward pass normalises the rows again, so no activation of shape
        # [n, d_in] is stored.
        return jax.checkpoint(AffineMap.__call__)(self.to_affine(), x)

    @classmethod
    def from_affine(cls, affine: AffineMap) -> "LinearHead":
        """Builds a head that computes c * affine(x) for some c > 0, which does not change cosines.

        Args:
            affine: The map to start from, such as that of a teacher.

        Returns:
            The head.

        Raises:
            InputError: The weight is zero or not finite.
        """
        d_out, d_in = affine.weight.shape
        head = cls(d_in, d_out, norm=affine.norm, dtype=affine.weight.dtype, rngs=nnx.Rngs(0))
        weight = affine.weight / head.input.gain
        rms = float(jnp.sqrt(jnp.mean(jnp.square(weight))))
        if not (math.isfinite(rms) and rms > 0):
            raise checks.InputError(
                f"affine must have a non-zero finite weight, got root mean square {rms}"
            )
        # c scales W to the root mean square of Xavier-uniform weights. Lion's updates have a fixed
        # size, so relative to W they are then as large as from a random start.
        c = math.sqrt(2.0 / (d_in + d_out)) / rms
        head.linear.kernel[...] = c * weight.T
        head.linear.bias[...] = c * affine.bias
        return head

    def to_affine(self) -> AffineMap:
        """Returns the head as an affine map, with scale and shift folded into weight and bias."""
        kernel, bias = self.linear.kernel[...], self.linear.bias[...]
        scale, shift = self.input.scale[...], self.input.shift[...]
        weight = (kernel * (self.input.gain * scale)[:, None]).T
        return AffineMap(weight, affinity.dot(shift, kernel) + bias, self.norm)


class MLPHead(Network):
    """Two-layer head, LayerNorm -> Linear -> GELU -> Linear.

    By default the hidden layer is as wide as the input.

    Example:
        >>> MLPHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
        (5, 3)

    References:
        D. Hendrycks and K. Gimpel, "Gaussian error linear units (GELUs)", 2016.
    """

    kind = "mlp"

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Creates the hidden and the output layer."""
        self.inner = dense(self.d_in, self.hidden)
        self.outer = dense(self.hidden, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        return self.outer(jax.nn.gelu(self.inner(self.input(x)), approximate=False))


class GLUHead(Network):
    """SAIL's gated head: W_3 (relu6(clip(W_1 z)) * clip(W_2 z)) of z = LayerNorm(x).

    By default both branches are eight times as wide as the input.

    Example:
        >>> GLUHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
        (5, 3)

    References:
        L. Zhang et al., "Assessing and learning alignment of unimodal vision and language models",
        CVPR 2025.
    """

    kind = "glu"
    default_hidden = staticmethod(lambda d_in: 8 * d_in)

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Creates both branches and the output layer."""
        self.gate = dense(self.d_in, self.hidden)
        self.inner = dense(self.d_in, self.hidden)
        self.outer = dense(self.hidden, self.d_out)

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        z = self.input(x)
        # The limits of +-1,000 are those of SAIL's code.
        gate, inner = (jnp.clip(layer(z), -1e3, 1e3) for layer in (self.gate, self.inner))
        return self.outer(jax.nn.relu6(gate) * inner)


class TanhHead(Network):
    """SUE's network: L2-normalised rows, three LeakyReLU layers, then tanh.

    The first two layers are `hidden` wide, by default 512, and 4096 in the paper. The third has
    1024 units, or `hidden` if that is less.

    Example:
        >>> TanhHead(8, 3, hidden=16, rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
        (5, 3)

    References:
        A. Yacobi et al., "Learning shared representations from unpaired data", NeurIPS 2025.
    """

    kind = "tanh"
    default_norm = "l2"
    default_hidden = staticmethod(lambda d_in: 512)

    def draw(self, dense: Callable[[int, int], Dense]) -> None:
        """Creates three hidden layers and the output layer."""
        widths = (self.d_in, self.hidden, self.hidden, min(1024, self.hidden), self.d_out)
        self.layers = nnx.List([dense(a, b) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        rows = self.input(x)
        *inner, last = self.layers
        for layer in inner:
            rows = jax.nn.leaky_relu(layer(rows))
        return jnp.tanh(last(rows))


class KernelHead(Head):
    """A kernel map as a head. It cannot be trained.

    Args:
        features: The kernel map.

    Example:
        >>> near = KernelMap(jnp.zeros(2), jnp.eye(2), jnp.array(1.0), jnp.zeros(2), jnp.eye(2))
        >>> KernelHead(near)(jnp.ones((3, 2))).shape
        (3, 2)
    """

    kind = "kernel"

    def __init__(self, features: KernelMap):
        self.d_in, self.d_out = features.d_in, features.d_out
        # The map's arrays become variables of this module, so that they are saved with the head.
        for field in dataclasses.fields(KernelMap):
            setattr(self, field.name, nnx.Param(getattr(features, field.name)))

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        return self.features(x)

    @property
    def features(self) -> KernelMap:
        """The kernel map."""
        return KernelMap(*(getattr(self, f.name)[...] for f in dataclasses.fields(KernelMap)))

    def options(self) -> dict[str, Any]:
        """Returns the widths of the map as JSON values."""
        widths = {"d_in": self.d_in, "d_out": self.d_out}
        return {**widths, "landmarks": len(self.features.landmarks)}

    @classmethod
    def from_options(cls, d_in: int, d_out: int, landmarks: int) -> "KernelHead":
        """Builds a head of this structure with arbitrary parameters.

        Args:
            d_in: Width of the embeddings.
            d_out: Number of output directions.
            landmarks: Number of landmarks of the kernel map.

        Returns:
            The head.
        """
        # In the order of the fields of `KernelMap`.
        shapes = (d_in,), (landmarks, d_in), (), (landmarks,), (d_out, landmarks)
        return cls(KernelMap(*(jnp.zeros(shape) for shape in shapes)))


class MixedHead(Head):
    """Concatenates the unit features of two heads, which averages their cosines.

    The features are (sqrt(w) f, sqrt(1 - w) g) for unit features f and g of the two heads. The
    cosine of two such rows is w times the cosine of the first heads plus 1 - w times that of the
    second.

    Args:
        first: A head.
        second: Another head of the same embeddings.
        weight: Weight w of the first head, between 0 and 1.

    Raises:
        InputError: The heads take embeddings of different widths, or the weight is out of range.

    Example:
        >>> linear, wide = (LinearHead(4, d, rngs=nnx.Rngs(d)) for d in (2, 3))
        >>> MixedHead(linear, wide, 0.5)(jnp.ones((7, 4))).shape
        (7, 5)
    """

    kind = "mixed"

    def __init__(self, first: Head, second: Head, weight: float = 0.5):
        if first.d_in != second.d_in:
            raise checks.InputError(
                f"second takes width {second.d_in} but first takes width {first.d_in}; mix heads "
                "of the same encoder"
            )
        if not 0.0 <= weight <= 1.0:
            raise checks.InputError(f"weight must be between 0 and 1, got {weight}")
        self.d_in, self.d_out = first.d_in, first.d_out + second.d_out
        self.first, self.second = first, second
        self.weight = nnx.Param(jnp.asarray(weight, jnp.float32))

    def __call__(self, x: Rows) -> Float[Array, "n d_out"]:
        f, g = (affinity.l2_normalize(head(x)) for head in (self.first, self.second))
        return mix_features(f, g, self.weight[...])

    def options(self) -> dict[str, Any]:
        """Returns kind and structure of both heads as JSON values."""
        parts = {"first": self.first, "second": self.second}
        return {name: {"kind": h.kind, "options": h.options()} for name, h in parts.items()}

    @classmethod
    def from_options(cls, first: dict[str, Any], second: dict[str, Any]) -> "MixedHead":
        """Builds a head of this structure with arbitrary parameters.

        Args:
            first: Kind and options of the first head.
            second: Kind and options of the second head.

        Returns:
            The head.
        """
        return cls(rebuild(**first), rebuild(**second))


def mix_features(f: Rows, g: Rows, weight: ArrayLike) -> Float[Array, "n d"]:
    """Computes the features of a `MixedHead` from those of its two heads.

    Args:
        f: Unit features of the first head.
        g: Unit features of the second head.
        weight: Weight of the first head, between 0 and 1.

    Returns:
        The features (sqrt(w) f, sqrt(1 - w) g).

    Example:
        >>> print(mix_features(jnp.ones((1, 1)), jnp.ones((1, 1)), 0.36))
        [[0.6 0.8]]
    """
    return jnp.concatenate([jnp.sqrt(weight) * f, jnp.sqrt(1.0 - weight) * g], axis=1)


# --- both modalities together ---

KINDS = ("linear", "mlp", "glu", "tanh")
"""Heads that start from random weights and can be trained by any objective."""


def rebuild(kind: str, options: dict[str, Any]) -> Head:
    """Builds a head of a described structure with arbitrary parameters.

    Args:
        kind: A key of `Head.classes`.
        options: The structure, as `Head.options` returned it.

    Returns:
        The head.

    Raises:
        InputError: The kind is unknown, or a width is not a positive integer.

    Example:
        >>> rebuild("linear", {"d_in": 4, "d_out": 2, "norm": "l2"}).d_out
        2
    """
    checks.choice("kind", kind, tuple(Head.classes))
    # The description may come from a file: check the widths before anything is allocated.
    widths = {n: value for n, value in options.items() if not isinstance(value, str | dict)}
    checks.whole(1, or_none=True, **widths)
    return Head.classes[kind].from_options(**options)


class Heads(nnx.Module):
    """All trained parameters: a head per modality, and SigLIP's logit scale and bias.

    Args:
        x: Head of the first modality.
        y: Head of the second modality.
        like: Heads whose scale and bias are shared. By default they have their initial values, a
            log-scale of log 20 and a bias of -10.
    """

    def __init__(self, x: Head, y: Head, *, like: "Heads | None" = None):
        self.x = x
        self.y = y
        # float64 heads need a float64 scale and bias, or their loss would be rounded.
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
        hidden: Width of the hidden layers. By default that of the kind.
        norm: "layer" or "l2". By default that of the kind.
        seed: Seed of the random weights.
        teacher: If given, linear heads start at its first `dim` directions, with its norm and
            dtype. The heads of a kernel teacher are its kernel maps, and cannot be trained.
        dtype: Type of the parameters.

    Returns:
        The heads, with the initial logit scale and bias.

    Raises:
        InputError: The teacher does not fit the widths or the kind.

    Example:
        >>> heads = build_heads(8, 6, 4)
        >>> heads.x(jnp.ones((2, 8))).shape, heads.y(jnp.ones((2, 6))).shape
        ((2, 4), (2, 4))
    """
    checks.choice("kind", kind, KINDS)
    checks.whole(1, d_x=d_x, d_y=d_y, dim=dim)
    checks.whole(1, or_none=True, hidden=hidden)
    if teacher is None:
        options: dict[str, Any] = {"hidden": hidden, "norm": norm, "dtype": dtype}
        # One stream of keys for both heads, because two streams of one seed would be equal.
        rngs, made = nnx.Rngs(seed), Head.classes[kind]
        return Heads(*(made(width, dim, **options, rngs=rngs) for width in (d_x, d_y)))  # type: ignore[call-arg]
    if kind != "linear":
        raise checks.InputError(
            f"kind must be 'linear' to start from a teacher, got {kind!r}; pass teacher=None"
        )
    check_widths(teacher, d_x, d_y)
    # CCA sorts its directions by correlation: the first ones are the most reliable.
    first = teacher.leading(dim)
    return Heads(*(_as_head(one) for one in (first.map_x, first.map_y)))


def _as_head(apply: Map) -> Head:
    """Returns a head that computes the same cosines as a teacher's map."""
    return KernelHead(apply) if isinstance(apply, KernelMap) else LinearHead.from_affine(apply)


def check_widths(teacher: Teacher, d_x: int, d_y: int) -> None:
    """Checks that the teacher maps embeddings of these widths.

    Args:
        teacher: The teacher.
        d_x: Width of the first modality's embeddings.
        d_y: Width of the second modality's embeddings.

    Raises:
        InputError: It maps embeddings of other widths.
    """
    widths = teacher.map_x.d_in, teacher.map_y.d_in
    if widths != (d_x, d_y):
        raise checks.InputError(
            f"teacher maps embeddings of widths {widths} but the data have widths {(d_x, d_y)}; "
            "fit the teacher on the same encoders"
        )


def mix(first: Heads, second: Heads, weight: float) -> Heads:
    """Builds heads whose cosines are the weighted mean of those of two others.

    Args:
        first: Heads of both modalities.
        second: Other heads of the same embeddings. Their logit scale and bias are kept.
        weight: Weight of the first heads, between 0 and 1.

    Returns:
        The heads, see `MixedHead`.

    Example:
        >>> mix(build_heads(4, 3, 2), build_heads(4, 3, 5), 0.5).x.d_out
        7
    """
    x, y = MixedHead(first.x, second.x, weight), MixedHead(first.y, second.y, weight)
    return Heads(x, y, like=second)
