"""Heads without JAX: as numpy, as ONNX files, and as vectors for an inner-product index.

`program` describes the arithmetic of a head once, as a list of ONNX operators. `runtime` executes
that list in numpy and `to_onnx` stores it, so both compute the same function.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float
from numpy.typing import ArrayLike

from sotalign_jax import checks, evaluation, runtime, storage, tables
from sotalign_jax.calibration import Calibration
from sotalign_jax.heads import Head, Heads

OPSET = 18
"""ONNX operator set of the exported files: the first one in which all reductions take their axes as
an input."""
# Smallest normal float32 number. As a divisor it leaves zero rows zero.
_TINY = float(np.finfo(np.float32).tiny)


class _Value:
    """A value of a program under construction. Operators append steps to the program.

    Attributes:
        name: Name of the value.
        arrays: Parameters and constants of the program.
        steps: Steps of the program so far.
    """

    def __init__(self, name: str, arrays: dict[str, np.ndarray], steps: list[Any]):
        self.name, self.arrays, self.steps = name, arrays, steps

    def __call__(self, operator: str, *operands: "_Value | float") -> "_Value":
        """Appends a step with this value as its first operand."""
        # Numbers among the operands become constants of the program.
        names = [o.name if isinstance(o, _Value) else self.constant(o).name for o in operands]
        result = f"value{len(self.steps)}"
        self.steps.append((result, operator, (self.name, *names)))
        return self.param(result)

    def param(self, name: str) -> "_Value":
        """Returns a parameter of the head."""
        return _Value(name, self.arrays, self.steps)

    def constant(self, value: Any, name: str | None = None) -> "_Value":
        """Adds a constant to the arrays of the program.

        Args:
            value: A number or an array. Floats are stored as float32.
            name: Name of the array. By default the number itself, so that equal numbers are shared.

        Returns:
            The constant.
        """
        name = repr(value) if name is None else name
        array = np.asarray(value)
        self.arrays[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return self.param(name)

    def reduce(self, operator: str) -> "_Value":
        """Reduces every row to one number."""
        return self(f"Reduce{operator}", self.constant(np.array([1], np.int64), "axes"))

    def clip(self, low: float, high: float) -> "_Value":
        """Limits every entry.

        Args:
            low: Smallest value.
            high: Largest value.

        Returns:
            The limited value.
        """
        # Other steps need "Max" and "Min" as well. "Clip" would be one more operator.
        return self("Max", low)("Min", high)

    def __add__(self, other: "_Value | float") -> "_Value":
        return self("Add", other)

    def __sub__(self, other: "_Value | float") -> "_Value":
        return self("Sub", other)

    def __mul__(self, other: "_Value | float") -> "_Value":
        return self("Mul", other)

    def __truediv__(self, other: "_Value | float") -> "_Value":
        return self("Div", other)

    def __matmul__(self, other: "_Value") -> "_Value":
        return self("MatMul", other)


# --- the heads -----------------------------------------------------------------------------------
# Each function repeats the `__call__` of a head with the operators of `_Value`. `at` is the prefix
# of the head's parameters.


def _largest(x: _Value) -> _Value:
    """Returns the largest absolute entry of every row, or a tiny number for rows of zeros.

    Rows are divided by it before they are squared, because squares of tiny or huge entries leave
    float32.
    """
    return x("Abs").reduce("Max")("Max", _TINY)


def _unit(x: _Value) -> _Value:
    """Describes `affinity.l2_normalize`."""
    x = x / _largest(x)
    return x / (x * x).reduce("Sum")("Max", 1.0)("Sqrt")


def _dense(x: _Value, at: str) -> _Value:
    """Describes `heads.Dense`."""
    return x @ x.param(f"{at}.kernel") + x.param(f"{at}.bias")


def _input(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.InputNorm`."""
    if head.norm == "l2":
        z = _unit(x) * math.sqrt(head.d_in)
    else:
        # `heads.normalize` divides by a power of two instead, which ONNX cannot compute exactly.
        largest = _largest(x)
        x = x / largest
        mean = x.reduce("Mean")
        centred = x - mean
        variance = (centred * centred).reduce("Mean")
        # The minimum with 1 keeps the square finite. The other minimum is below 1 anyway.
        epsilon = (x.constant(math.sqrt(1e-5)) / largest)("Min", 1.0)
        epsilon = (epsilon * epsilon)("Min", variance + mean * mean * 1e-5)("Max", 1e-10)
        z = centred / (variance + epsilon)("Sqrt")
    return z * x.param(f"{at}input.scale") + x.param(f"{at}input.shift")


def _linear(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.LinearHead`."""
    return _dense(_input(x, head, at), f"{at}linear")


def _mlp(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.MLPHead`."""
    h = _dense(_input(x, head, at), f"{at}inner")
    # The exact GELU, h (1 + erf(h / sqrt 2)) / 2. Opset 18 has no operator "Gelu".
    return _dense(h * ((h * math.sqrt(0.5))("Erf") + 1.0) * 0.5, f"{at}outer")


def _glu(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.GLUHead`."""
    z = _input(x, head, at)
    # relu6 clips the gate to 0..6, well within the head's limits of +-1,000.
    gate, inner = _dense(z, f"{at}gate").clip(0.0, 6.0), _dense(z, f"{at}inner").clip(-1e3, 1e3)
    return _dense(gate * inner, f"{at}outer")


def _tanh(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.TanhHead`."""
    z, last = _input(x, head, at), len(head.layers) - 1
    for number in range(last):
        z = _dense(z, f"{at}layers.{number}")
        # LeakyReLU, with the default slope of JAX.
        z = z("Max", z * 0.01)
    return _dense(z, f"{at}layers.{last}")("Tanh")


def _kernel(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.KernelHead`."""
    z = _unit(_unit(x) - x.param(f"{at}mean"))
    squares = (z * z).reduce("Sum") + 1.0
    distances = squares - z @ x.param(f"{at}landmarks")("Transpose") * 2.0
    k = (distances("Max", 0.0) * x.param(f"{at}gamma") * -1.0)("Exp")
    return (k - x.param(f"{at}centre")) @ x.param(f"{at}weight")("Transpose")


def _mixed(x: _Value, head: Any, at: str) -> _Value:
    """Describes `heads.MixedHead`."""
    weight, (d, e) = x.param(f"{at}weight"), (head.first.d_out, head.second.d_out)
    f = _unit(_describe(x, head.first, f"{at}first.")) * weight("Sqrt")
    g = _unit(_describe(x, head.second, f"{at}second.")) * (weight * -1.0 + 1.0)("Sqrt")
    # Padding with zeros and adding concatenates. The operator "Concat" would need an attribute.
    after = x.constant(np.array([0, 0, 0, e], np.int64), f"{at}after")
    before = x.constant(np.array([0, d, 0, 0], np.int64), f"{at}before")
    return f("Pad", after) + g("Pad", before)


def _csa(x: _Value, head: Any, at: str) -> _Value:
    """Describes `methods.csa.CSAHead`."""
    z = _unit((x - x.param(f"{at}mean")) @ x.param(f"{at}kernel")) * x.param(f"{at}rho")("Sqrt")
    # sqrt(1 - ||z||^2), written without a constant as the first operand.
    rest = ((z * z).reduce("Sum")("Sub", 1.0) * -1.0)("Max", 0.0)("Sqrt")
    directions = head.d_out - 2
    end = directions if head.side == "x" else directions + 1
    columns = np.eye(head.d_out, dtype=np.float32)
    # Products with rows of the identity place z and the remainder in their columns, so that no
    # operator for concatenation is needed.
    z = z @ x.constant(columns[:directions], f"{at}columns")
    return z + rest * x.constant(columns[end], f"{at}end")


def _sue(x: _Value, head: Any, at: str) -> _Value:
    """Describes `methods.sue.SUEHead`."""
    z = _dense(_tanh(x, head.network, f"{at}network."), f"{at}linear")
    if head.residual is None:
        return z
    h = z
    for number in range(2):
        h = _dense(h, f"{at}residual.layers.{number}")("Max", 0.0)
    return z + _dense(h, f"{at}residual.layers.2")


_DESCRIBED: dict[str, Callable[[_Value, Any, str], _Value]] = {
    "linear": _linear,
    "mlp": _mlp,
    "glu": _glu,
    "tanh": _tanh,
    "kernel": _kernel,
    "mixed": _mixed,
    "csa": _csa,
    "sue": _sue,
}


def _describe(x: _Value, head: Head, at: str = "") -> _Value:
    """Appends the steps of a head of any kind."""
    checks.choice("kind", head.kind, tuple(_DESCRIBED))
    return _DESCRIBED[head.kind](x, head, at)


def _potential(f: _Value, others: Any, scalings: Any, epsilon: Any) -> _Value:
    """Describes `Calibration.x` or `Calibration.y`, a soft minimum over the other modality."""
    scale = f.constant(epsilon, "calibration.epsilon")
    cosines = f @ f.constant(others, "calibration.others")("Transpose")
    logits = cosines / scale + f.constant(scalings, "calibration.scalings")
    # Logsumexp with the largest logit subtracted.
    largest = logits.reduce("Max")
    return ((logits - largest)("Exp").reduce("Sum")("Log") + largest) * scale * -1.0


def program(head: Head, side: str, calibration: Calibration | None) -> runtime.Program:
    """Describes a head as a list of ONNX operators.

    Args:
        head: A trained head.
        side: Its modality, "x" or "y", which becomes the name of the input.
        calibration: Adds the output "bias", the correction of each row for hubness.

    Returns:
        The program. Its parameters have the names that `Aligner.save` gives them.

    Raises:
        InputError: The kind of the head is not one of this package.

    Example:
        >>> from sotalign_jax import heads
        >>> made = program(heads.build_heads(4, 3, 2).x, "x", None)
        >>> made(np.ones((5, 4))).shape, made.arrays["linear.kernel"].shape
        ((5, 2), (4, 2))
    """
    x = _Value(side, {}, [])
    for path, leaf in nnx.to_flat_state(nnx.state(head)):
        x.constant(np.asarray(leaf[...], np.float32), ".".join(map(str, path)))
    ends = {"embedding": _unit(_describe(x, head))}
    if calibration is not None:
        c = calibration
        others = (c.g, c.v) if side == "x" else (c.f, c.u)
        ends["bias"] = _potential(ends["embedding"], *others, c.epsilon)
    # Results have numbered names. Those of the outputs become "embedding" and "bias".
    names = {value.name: name for name, value in ends.items()}
    steps = tuple(
        (names.get(result, result), operator, tuple(names.get(name, name) for name in operands))
        for result, operator, operands in x.steps
    )
    return runtime.Program(side, head.d_in, x.arrays, steps)


# --- targets -------------------------------------------------------------------------------------


def to_numpy(heads: Heads, calibration: Calibration | None = None) -> runtime.Embedder:
    """Converts heads to numpy.

    Args:
        heads: Both heads.
        calibration: The aligner's calibration, if the output "bias" is needed.

    Returns:
        An object with `embed_x` and `embed_y`, whose `save` writes a folder that needs no JAX. The
        parameters are in `.x.arrays` and `.y.arrays`.

    Example:
        >>> from sotalign_jax import heads
        >>> to_numpy(heads.build_heads(4, 3, 2)).embed_y(np.ones((5, 3))).shape
        (5, 2)
    """
    sides = {"x": heads.x, "y": heads.y}
    made = {side: program(head, side, calibration) for side, head in sides.items()}
    return runtime.Embedder(**made)


def to_onnx(
    heads: Heads, path: str | os.PathLike[str], calibration: Calibration | None = None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes one ONNX file per modality.

    There are two files because ONNX Runtime requires all inputs of a file in every call. The input
    of `model_x.onnx` is "x", float32 of shape [rows, d_x], with any number of rows. Its outputs are
    "embedding", unit rows of shape [rows, d], and "bias", shape [rows, 1], if there is a
    calibration. `model_y.onnx` has the input "y".

    Args:
        heads: Both heads.
        path: "model.onnx" writes `model_x.onnx` and `model_y.onnx`. Existing files are replaced.
        calibration: The aligner's calibration, for the output "bias".

    Returns:
        The paths of the two files.

    Raises:
        InputError: `path` has another suffix, or the package `onnx` is missing.
        OSError: A file cannot be written. An earlier one stays intact.
    """
    path = pathlib.Path(path).expanduser()
    if path.suffix != ".onnx":
        raise checks.InputError(f"path must end in .onnx, got {path}")
    onnx = checks.require("onnx", extra="onnx")
    made = to_numpy(heads, calibration)
    written = path.with_stem(f"{path.stem}_x"), path.with_stem(f"{path.stem}_y")
    for file, program, head in zip(written, (made.x, made.y), (heads.x, heads.y), strict=True):
        model = _model(onnx, program, head.d_out, bias=calibration is not None)
        with storage.replacing(file) as stream:
            stream.write(model.SerializeToString())
    return written


def _model(onnx: Any, program: runtime.Program, d_out: int, *, bias: bool) -> Any:
    """Returns a checked ONNX model of a program."""

    def info(name: str, width: int) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", width])

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, operands, [to]) for to, op, operands in program.steps],
        "sotalign",
        [info(program.input, program.width)],
        [info("embedding", d_out), *([info("bias", 1)] if bias else [])],
        [onnx.numpy_helper.from_array(array, name) for name, array in program.arrays.items()],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    # The oldest file format that supports the operator set, for older versions of ONNX Runtime.
    version = onnx.helper.find_min_ir_version_for(opsets)
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, ir_version=version, producer_name="sotalign-jax"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@dataclasses.dataclass(frozen=True)
class Index:
    """Vectors for an index of inner products, such as FAISS or a vector database.

    Attributes:
        keys: One vector per row of the gallery, shape [m, d], or [m, d + 2] if calibrated. The
            last two coordinates are then the row's correction and 1.
        head: Head of the queries.
        correction: Computes the correction of embedded queries. None if not calibrated.
    """

    keys: Float[np.ndarray, "m k"]
    head: Head
    correction: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def calibrated(self) -> bool:
        """True if the inner products are calibrated scores."""
        return self.correction is not None

    def queries(self, rows: ArrayLike) -> Float[np.ndarray, "n k"]:
        """Embeds queries for the search.

        Args:
            rows: Embeddings of the queries.

        Returns:
            One vector per row, a unit row, with 1 and the query's correction appended if the index
            is calibrated.
        """
        width = self.head.d_in
        f = evaluation.embed(self.head, tables.rows("queries", rows, width=width, min_rows=0))
        return f if self.correction is None else _extended(f, np.ones(len(f)), self.correction(f))


def _extended(rows: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """Appends columns to rows, in the dtype of the rows."""
    return np.column_stack([rows, *columns]).astype(rows.dtype)


def index(
    heads: Heads,
    gallery: ArrayLike,
    calibration: Calibration | None = None,
    *,
    direction: str = "x_to_y",
) -> Index:
    """Embeds a gallery for an index of inner products.

    The inner products of `queries(rows)` with `keys` are the scores of `Aligner.search`. Calibrated
    scores are sums of a cosine and both rows' corrections, which two more coordinates turn into an
    inner product: (f, 1, u(f)) . (g, v(g), 1).

    Args:
        heads: Both heads.
        gallery: Embeddings to search among, of the second modality if direction is "x_to_y".
        calibration: The aligner's calibration, for calibrated scores.
        direction: "x_to_y" for queries of the first modality, "y_to_x" for queries of the second.

    Returns:
        The `Index`.

    Example:
        >>> from sotalign_jax import heads
        >>> found = index(heads.build_heads(4, 3, 2), np.eye(3))
        >>> (found.queries(np.eye(4)) @ found.keys.T).shape
        (4, 3)
    """
    checks.choice("direction", direction, ("x_to_y", "y_to_x"))
    forward = direction == "x_to_y"
    own, other = (heads.x, heads.y) if forward else (heads.y, heads.x)
    rows = tables.rows("gallery", gallery, width=other.d_in, min_rows=0)
    keys = evaluation.embed(other, rows)
    if calibration is None:
        return Index(keys, own)
    of_key = calibration.y(keys) if forward else calibration.x(keys)
    keys = _extended(keys, of_key, np.ones(len(keys)))
    return Index(keys, own, calibration.x if forward else calibration.y)
