"""Runs a trained aligner with numpy alone.

`Aligner.to_numpy` returns an `Embedder`. `Embedder.save` writes its weights into a folder, and a
copy of this file beside them, so that a server needs that folder and numpy only.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

BLOCK = 1024
"""Number of rows that are embedded at a time. All intermediate values of a block are kept, about 60
MB at width 512."""
MODULE = "sotalign_numpy.py"
"""Name of the copy of this file that `Embedder.save` writes."""
WEIGHTS = "weights.npz"
"""Name of the file of weights that `Embedder.save` writes."""


def erf(x: np.ndarray) -> np.ndarray:
    """Computes the error function, with an absolute error below 2e-7.

    Args:
        x: Values of any shape.

    Returns:
        erf(x), in the dtype of x.

    Example:
        >>> erf(np.array([0.0, 0.5, -3.0])).round(6)
        array([ 0.      ,  0.5205  , -0.999978])

    References:
        Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 7.1.26.
    """
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    series = 0.0
    # Horner's scheme, from the highest power of t down.
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = t * (coefficient + series)
    return np.sign(x) * (1.0 - series * np.exp(-x * x))


def _reduction(name: str) -> Callable[..., np.ndarray]:
    """Returns an ONNX reduction, which keeps the reduced axes and takes them as an array."""
    return lambda x, axes: getattr(np, name)(x, axis=tuple(axes), keepdims=True)


def _pad(x: np.ndarray, pads: np.ndarray) -> np.ndarray:
    """Pads rows with zeros, by ONNX's numbers before and after each of the two axes."""
    return np.pad(x, [(pads[0], pads[2]), (pads[1], pads[3])])


OPERATORS: Mapping[str, Callable[..., np.ndarray]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Div": np.divide,
    "Erf": erf,
    "Exp": np.exp,
    "Log": np.log,
    "MatMul": np.matmul,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Pad": _pad,
    "ReduceMax": _reduction("max"),
    "ReduceMean": _reduction("mean"),
    "ReduceSum": _reduction("sum"),
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Transpose": np.transpose,
}
"""ONNX operators in numpy."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One head as a list of ONNX operators.

    Attributes:
        input: Name of the embeddings that the program takes.
        width: Their width.
        arrays: Parameters and constants by name.
        steps: (result, operator, operands), in the order of execution. Operands are names of
            arrays, of earlier results, or the input.

    Example:
        >>> program = Program("x", 2, {"two": np.array(2.0)}, (("embedding", "Mul", ("x", "two")),))
        >>> program(np.ones((1, 2)))
        array([[2., 2.]], dtype=float32)
    """

    input: str
    width: int
    arrays: dict[str, np.ndarray]
    steps: tuple[tuple[str, str, tuple[str, ...]], ...]

    def __call__(self, rows: Any, output: str = "embedding") -> np.ndarray:
        """Computes an output for any number of rows, in blocks.

        Args:
            rows: Embeddings of the encoder, shape [n, width].
            output: "embedding", or "bias" if the aligner has a calibration.

        Returns:
            Unit rows of shape [n, d], or the calibration's correction of each row, shape [n, 1].

        Raises:
            ValueError: The rows have another width, or the program has no such output.
        """
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(f"{self.input} must have shape [n, {self.width}], got {rows.shape}")
        # Zero rows make one empty block, whose result has the right width.
        starts = range(0, max(len(rows), 1), BLOCK)
        return np.concatenate([self._run(rows[s : s + BLOCK], output) for s in starts])

    def _run(self, rows: np.ndarray, output: str) -> np.ndarray:
        """Executes the steps of the program up to an output."""
        values = {**self.arrays, self.input: rows.astype(np.float32)}
        for result, operator, operands in self.steps:
            values[result] = OPERATORS[operator](*(values[name] for name in operands))
            if result == output:
                return values[result].astype(np.float32)
        raise ValueError(f"output must be 'embedding', or 'bias' if calibrated, got {output!r}")


@dataclasses.dataclass(frozen=True)
class Embedder:
    """Both heads of an aligner in numpy.

    Attributes:
        x: Program of the first modality.
        y: Program of the second modality.
    """

    x: Program
    y: Program

    def embed_x(self, rows: Any) -> np.ndarray:
        """Maps embeddings of the first modality to unit rows.

        Args:
            rows: Embeddings, shape [n, d_x].

        Returns:
            The features, shape [n, d].
        """
        return self.x(rows)

    def embed_y(self, rows: Any) -> np.ndarray:
        """Maps embeddings of the second modality to unit rows.

        Args:
            rows: Embeddings, shape [m, d_y].

        Returns:
            The features, shape [m, d].
        """
        return self.y(rows)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the weights into a folder, and this file as `sotalign_numpy.py` beside them.

        Args:
            folder: The folder, which is created if necessary. Earlier files are replaced.

        Raises:
            OSError: The files cannot be written.
        """
        folder = pathlib.Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {}
        programs = {}
        for side, program in (("x", self.x), ("y", self.y)):
            programs[side] = {"width": program.width, "steps": program.steps}
            arrays |= {f"{side}/{name}": array for name, array in program.arrays.items()}
        with (folder / WEIGHTS).open("wb") as file:
            np.savez(file, programs=np.array(json.dumps(programs)), **arrays)
        (folder / MODULE).write_bytes(pathlib.Path(__file__).read_bytes())


def load(folder: str | os.PathLike[str] | None = None) -> Embedder:
    """Reads an embedder.

    Args:
        folder: A folder that `Embedder.save` wrote. By default the folder of this file.

    Returns:
        The embedder.

    Raises:
        OSError: There are no weights in the folder.
    """
    folder = pathlib.Path(__file__).parent if folder is None else pathlib.Path(folder).expanduser()
    with np.load(folder / WEIGHTS, allow_pickle=False) as stored:
        described = json.loads(str(stored["programs"]))
        programs = {}
        for side, one in described.items():
            names = [name for name in stored.files if name.startswith(f"{side}/")]
            arrays = {name.removeprefix(f"{side}/"): stored[name] for name in names}
            steps = [(result, operator, tuple(names)) for result, operator, names in one["steps"]]
            programs[side] = Program(side, one["width"], arrays, tuple(steps))
    return Embedder(**programs)
