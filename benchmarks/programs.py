"""What a compiled program does: its kernels, the bytes they move and the operations they do.

Read from the text of an optimised XLA program. A kernel is an instruction outside fusions: a
fusion, a product, a copy. It reads its operands and writes its result once; of an operand that is
sliced, or a result that is updated in place, only the part that is touched counts, and arrays that
the compiler keeps on chip (memory space 1 of a TPU) count nothing.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

VECTOR = "vector"
"""Key of elementwise operations, beside the precisions of products."""
_WIDTH = {"pred": 1, "c64": 8, "c128": 16, "bf16": 2, "token": 0, "opaque": 0}
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "iota",
        "copy-done",
        "slice-done",
        "async-done",
        "all-reduce-done",
        "all-gather-done",
        "opt-barrier",
    ]
)
_SLICES = frozenset(["dynamic-slice", "slice", "gather"])
_CALLS = frozenset(["call", "async-start"])
_COSTLY = {"exponential": 8, "log": 8, "power": 16, "rsqrt": 4, "sqrt": 4, "divide": 4, "tanh": 8}
"""Operations that an element takes more than one of."""
_MOVES = frozenset(
    [
        "copy",
        "copy-start",
        "slice-start",
        "transpose",
        "reshape",
        "broadcast",
        "concatenate",
        "pad",
        "reverse",
        "convert",
        "dynamic-slice",
        "dynamic-update-slice",
        "slice",
        "gather",
        "scatter",
    ]
)


class Array(NamedTuple):
    """An array of a program: its element type, shape, and whether it stays on chip."""

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in the device's main memory."""
        width = _WIDTH.get(self.dtype)
        if width is None:
            width = -(-int("".join(filter(str.isdigit, self.dtype.split("e")[0])) or 32) // 8)
        return 0 if self.on_chip else width * self.size


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def scope(self) -> str:
        """Where in the source it comes from: names of functions and of `jax.named_scope`s."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self, *roles: str) -> list[str]:
        """Computations that it calls in these roles, such as `calls` or `body`."""
        return re.findall(rf"\b(?:{'|'.join(roles)})=%?([\w.-]+)", self.attributes)


class Kernel(NamedTuple):
    """An instruction that runs `times` times a step, with what it moves and does each time."""

    name: str
    scope: str
    opcode: str
    times: float
    bytes: int
    operations: Mapping[str, float]
    cycles: int = 0
    """What a TPU's compiler thinks it takes."""


class Program:
    """A parsed program.

    >>> program = Program('''
    ... ENTRY %main (x: f32[4,8], y: f32[8,2]) -> f32[4,2] {
    ...   %x = f32[4,8]{1,0} parameter(0)
    ...   %y = f32[8,2]{1,0} parameter(1)
    ...   ROOT %d = f32[4,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''')
    >>> [(kernel.name, kernel.bytes, dict(kernel.operations)) for kernel in program.kernels()]
    [('d', 224, {'float32 default': 128.0})]
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            header = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
            if header and " = " not in line.split("(")[0]:
                name = header[2]
                self.computations[name] = {}
                self.entry = name if header[1] else self.entry
            elif name and " = " in line:
                instruction = _parse(line)
                self.computations[name][instruction.name] = instruction

    def kernels(self, trips: Callable[[str], float] | None = None) -> Iterator[Kernel]:
        """All kernels of a run; `trips` tells how often loops of unknown length are repeated.

        It is given the loop's scope. Of the branches of a condition, the one that does least runs.
        """
        yield from self._kernels(self.entry, 1.0, trips, "")

    def _kernels(
        self, name: str, times: float, trips: Callable[[str], float] | None, loop: str
    ) -> Iterator[Kernel]:
        for instruction in self.computations[name].values():
            opcode = instruction.opcode
            if opcode == "while":
                inner = times * _trip_count(instruction, trips)
                for part in instruction.called("body", "condition"):
                    yield from self._kernels(part, inner, trips, instruction.scope or loop)
            elif opcode == "conditional":
                branches = [
                    list(self._kernels(part, times, trips, loop))
                    for part in self._branches(instruction)
                ]
                yield from min(branches, key=lambda kernels: sum(k.bytes for k in kernels))
            elif opcode in _CALLS:
                for part in instruction.called("calls", "to_apply"):
                    yield from self._kernels(part, times, trips, loop)
            elif opcode not in _FREE:
                moved = self._bytes(name, instruction)
                done = self._operations(name, instruction)
                if moved or done:
                    scope = self._scope(name, instruction, loop)
                    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
                    guess = int(cycles[1]) if cycles else 0
                    yield Kernel(instruction.name, scope, opcode, times, moved, done, guess)

    def _scope(self, name: str, instruction: Instruction, loop: str) -> str:
        """Of a fusion, that of its product, if it has one.

        The compiler's own copies have none: they count to the loop that they are in, and outside
        of loops to what makes or uses them.
        """
        scopes = []
        for part in instruction.called("calls"):
            for inner in self.computations.get(part, {}).values():
                if inner.opcode in ("dot", "convolution") and inner.scope:
                    return inner.scope
                scopes.append(inner.scope)
        own = self.computations[name]
        makers = [own[operand].scope for operand in instruction.operands if operand in own]
        users = [user.scope for user in own.values() if instruction.name in user.operands]
        known = (instruction.scope, *reversed(scopes), loop, *users, *makers)
        return next(filter(None, known), "")

    def _branches(self, instruction: Instruction) -> list[str]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        if listed:
            return [name.strip().lstrip("%") for name in listed[1].split(",")]
        return instruction.called("true_computation", "false_computation")

    def _array(self, computation: str, operand: str) -> tuple[Array, ...]:
        found = self.computations[computation].get(operand)
        return found.results if found else ()

    # --- bytes ---

    def _bytes(self, name: str, instruction: Instruction) -> int:
        opcode, operands = instruction.opcode, instruction.operands
        written = sum(array.bytes for array in instruction.results)
        if opcode in _SLICES:
            return 2 * written
        if opcode == "dynamic-update-slice":
            return 2 * sum(array.bytes for array in self._array(name, operands[1]))
        if opcode.endswith("-start"):  # results hold source and target
            return sum(array.bytes for array in instruction.results if array.size > 1)
        if opcode != "fusion":
            return written + sum(
                array.bytes for operand in set(operands) for array in self._array(name, operand)
            )
        (body,) = instruction.called("calls")
        read = sum(self._read(body, index) for index in range(len(operands)))
        return read + self._written(body, self._root(body).name)

    def _root(self, computation: str) -> Instruction:
        return next(one for one in self.computations[computation].values() if one.root)

    def _parameter(self, computation: str, index: int) -> Instruction | None:
        for one in self.computations[computation].values():
            if one.opcode == "parameter" and one.operands == (str(index),):
                return one
        return None

    def _read(self, computation: str, index: int) -> int:
        """Bytes of a fusion's operand that it reads."""
        parameter = self._parameter(computation, index)
        if parameter is None:
            return 0
        whole = sum(array.bytes for array in parameter.results)
        return min(whole, self._used(computation, parameter.name, whole))

    def _used(self, computation: str, value: str, whole: int) -> int:
        if self.computations[computation][value].root:  # handed on as it is
            return whole
        total = 0
        for user in self.computations[computation].values():
            if value not in user.operands:
                continue
            if user.opcode in _SLICES and user.operands[0] == value:
                total += _full_bytes(user.results) if whole else 0
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value:
                total += 0
            elif user.opcode in ("bitcast", "reshape"):
                total += self._used(computation, user.name, whole)
            elif user.opcode == "fusion":
                total += self._used_by_fusion(computation, value, user, whole)
            else:
                return whole
        return total

    def _used_by_fusion(self, computation: str, value: str, user: Instruction, whole: int) -> int:
        """Bytes that a fusion within a fusion reads; one that only renames hands on its users'."""
        (body,) = user.called("calls")
        inside = self.computations[body].values()
        if all(one.opcode in ("parameter", "bitcast", "reshape") for one in inside):
            return self._used(computation, user.name, whole)
        parameters = [
            self._parameter(body, index)
            for index, operand in enumerate(user.operands)
            if operand == value
        ]
        return sum(self._used(body, one.name, whole) for one in parameters if one is not None)

    def _written(self, computation: str, value: str) -> int:
        """Bytes that a fusion writes for a value of its root."""
        found = self.computations[computation][value]
        if found.opcode == "tuple":
            return sum(self._written(computation, operand) for operand in found.operands)
        if found.opcode == "dynamic-update-slice":
            update = self._array(computation, found.operands[1])
            in_memory = any(array.bytes for array in found.results)
            return _full_bytes(update) if in_memory else 0
        if found.opcode == "bitcast":
            return self._written(computation, found.operands[0])
        if found.opcode == "fusion":
            (body,) = found.called("calls")
            return self._written(body, self._root(body).name)
        return sum(array.bytes for array in found.results)

    # --- operations ---

    def _operations(self, name: str, instruction: Instruction) -> dict[str, float]:
        if instruction.opcode == "fusion":
            (body,) = instruction.called("calls")
            return dict(self._of_computation(body))
        return self._own_operations(name, instruction)

    @functools.cache  # noqa: B019 - lives as long as the program
    def _of_computation(self, name: str) -> tuple[tuple[str, float], ...]:
        total: dict[str, float] = {}
        for instruction in self.computations[name].values():
            for key, count in self._operations(name, instruction).items():
                total[key] = total.get(key, 0.0) + count
        return tuple(total.items())

    def _own_operations(self, name: str, instruction: Instruction) -> dict[str, float]:
        opcode = instruction.opcode
        if opcode in _FREE or opcode in _MOVES or not instruction.results:
            return {}
        result = instruction.results[0]
        operands = [array for o in instruction.operands for array in self._array(name, o)]
        if opcode == "dot":
            (contracted,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
            depth = math.prod(operands[0].shape[int(d)] for d in contracted.split(",") if d)
            return {_precision(instruction, operands[0]): 2.0 * result.size * depth}
        if opcode == "convolution":
            labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
            assert labels is not None
            outputs = operands[1].shape[labels[1].index("o")]
            depth = operands[1].size // outputs
            return {_precision(instruction, operands[0]): 2.0 * result.size * depth}
        if opcode == "custom-call":
            return self._library_call(instruction, operands, result)
        if opcode in ("reduce", "reduce-window", "sort"):
            return {VECTOR: float(sum(array.size for array in operands))}
        return {VECTOR: float(result.size * _COSTLY.get(opcode, 1))}

    def _library_call(
        self, instruction: Instruction, operands: list[Array], result: Array
    ) -> dict[str, float]:
        if not re.search(r"gemm|matmul", instruction.attributes):
            return {}
        config = re.search(r"backend_config=(\{.*\})", instruction.attributes)
        settings = json.loads(config[1]) if config else {}
        numbers = settings.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        contracted = numbers.get("lhs_contracting_dimensions")
        if contracted:
            depth = math.prod(operands[0].shape[int(d)] for d in contracted)
        else:  # a plain matrix product
            depth = round(math.sqrt(operands[0].size * operands[1].size / max(result.size, 1)))
        return {_precision(instruction, operands[0]): 2.0 * result.size * depth}


def _full_bytes(arrays: tuple[Array, ...]) -> int:
    """Bytes of arrays inside a fusion, which are slices of arrays in memory."""
    return sum(array._replace(on_chip=False).bytes for array in arrays)


def _precision(instruction: Instruction, operand: Array) -> str:
    """Key of a product's precision: element type and what was asked for, or an algorithm."""
    algorithm = re.search(r"\balgorithm=(\w+)", instruction.attributes)
    if algorithm:
        return algorithm[1]
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
    dtype = names.get(operand.dtype, operand.dtype)
    if dtype != "float32":
        return dtype
    asked = re.search(
        r'operand_precision(?:=\{|":\[")(\w+)', instruction.attributes, flags=re.IGNORECASE
    )
    return f"{dtype} {asked[1].lower() if asked else 'default'}"


def _trip_count(instruction: Instruction, trips: Callable[[str], float] | None) -> float:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
    if known:
        return float(known[1])
    return 1.0 if trips is None else trips(instruction.scope)


_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](\{[^}]*\})?")


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, shape, layout in _ARRAY.findall(text):
        sizes = tuple(int(size.lstrip("<=")) for size in shape.split(",") if size)
        found.append(Array(dtype, sizes, "S(1)" in layout))
    return tuple(found)


def _parse(line: str) -> Instruction:
    text = line.strip()
    root = text.startswith("ROOT ")
    name, _, rest = text.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside = rest[:opening], rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    if opcode == "parameter":
        operands = (inside.strip(),)
    return Instruction(
        name.lstrip("%"), _arrays(result), opcode, operands, rest[closing + 1 :], root
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced: {text[:80]}")
