"""What a compiled program does: its kernels, the bytes they move, the operations they do.

Read from the text of an optimised XLA program. A kernel is an instruction outside fusions: a
fusion, a product, a copy. It reads its operands and writes its result once; of an operand that is
sliced, or a result that is updated in place, only the part that is touched counts, and arrays that
the compiler keeps on chip (memory space 1 of a TPU) count nothing.
"""

import collections
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

VECTOR = "vector"
"""Key of elementwise operations, beside the precisions of products."""
EXCHANGES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTH = {"pred": 1, "c64": 8, "c128": 16, "bf16": 2, "token": 0, "opaque": 0}
_FREE = re.compile(
    "parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|iota|opt-barrier|"
    "(copy|slice|async|all-reduce|all-gather)-done"
)
_SLICES = frozenset(["dynamic-slice", "slice", "gather"])
_RENAMES = frozenset(["parameter", "bitcast", "reshape"])
_MOVES = re.compile(
    "(copy|slice)(-start)?|dynamic-slice|gather|transpose|reshape|broadcast|concatenate|pad|"
    "reverse|convert|dynamic-update-slice|scatter"
)
_COSTLY = {"exponential": 8, "log": 8, "power": 16, "rsqrt": 4, "sqrt": 4, "divide": 4, "tanh": 8}
"""Operations that an element takes more than one of."""
_SWEEP = {"f32": 4, "s8": 7}
"""Operations of an entry in a sweep: two products, two sums; three more where it is widened."""

Trips = Callable[[str], float]
"""How often a loop is repeated, by its scope."""


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
    def full_bytes(self) -> int:
        """Bytes wherever it is."""
        width = _WIDTH.get(self.dtype)
        if width is None:
            width = -(-int("".join(filter(str.isdigit, self.dtype.split("e")[0])) or 32) // 8)
        return width * self.size

    @property
    def bytes(self) -> int:
        """Bytes in the device's main memory."""
        return 0 if self.on_chip else self.full_bytes


def _bytes(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays)


def _full_bytes(arrays: tuple[Array, ...]) -> int:
    """Of arrays inside a fusion, which are slices of arrays in memory."""
    return sum(array.full_bytes for array in arrays)


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

    @property
    def branches(self) -> list[str]:
        """Computations of a condition; the one for false first."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return [name.strip().lstrip("%") for name in listed[1].split(",")]
        return self.called("false_computation") + self.called("true_computation")


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


class Exchange(NamedTuple):
    """What devices tell each other: numbers of each array, bytes, and whether it is in a loop."""

    kind: str
    sizes: tuple[int, ...]
    bytes: int
    in_loop: bool


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
        self.entry = name = ""
        for line in text.splitlines():
            header = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
            if header and " = " not in line.split("(")[0]:
                name = header[2]
                self.computations[name] = {}
                self.entry = name if header[1] else self.entry
            elif name and " = " in line:
                instruction = _parse(line)
                self.computations[name][instruction.name] = instruction

    def kernels(self, trips: Trips = lambda scope: 1.0) -> Iterator[Kernel]:
        """All kernels of a run; `trips` tells how often loops of unknown length are repeated.

        Of the branches of a condition, the one that does least runs; but one under the scope
        `narrow_or_exact` runs its second branch in a share of cases, which `trips` tells.
        """
        yield from self._kernels(self.entry, 1.0, trips, "")

    def _kernels(self, name: str, times: float, trips: Trips, loop: str) -> Iterator[Kernel]:
        for one in self.computations[name].values():
            if one.opcode == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.attributes)
                inner = times * (float(known[1]) if known else trips(one.scope))
                for part in one.called("body", "condition"):
                    yield from self._kernels(part, inner, trips, one.scope or loop)
            elif one.opcode == "conditional":
                if "narrow_or_exact" in one.scope:
                    share = trips(one.scope)
                    for part, weight in zip(one.branches, (1 - share, share), strict=True):
                        yield from self._kernels(part, weight * times, trips, loop)
                    continue
                runs = [list(self._kernels(part, times, trips, loop)) for part in one.branches]
                yield from min(runs, key=lambda kernels: sum(k.bytes for k in kernels))
            elif one.opcode in ("call", "async-start"):
                for part in one.called("calls", "to_apply"):
                    yield from self._kernels(part, times, trips, loop)
            elif not _FREE.fullmatch(one.opcode):
                moved, done = self._moved(name, one), self._operations(name, one)
                if moved or done:
                    scope = self._scope(name, one, loop)
                    cycles = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
                    guess = int(cycles[1]) if cycles else 0
                    yield Kernel(one.name, scope, one.opcode, times, moved, done, guess)

    def exchanges(self) -> list[Exchange]:
        """What devices tell each other, the largest first; what is in a loop counts once.

        >>> program = Program('''
        ... %body (x: f32[16]) -> f32[16] {
        ...   ROOT %r = f32[16]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
        ... }
        ... ENTRY %main (x: f32[16]) -> f32[16] {
        ...   %w = f32[16]{0} while(%x), condition=%less, body=%body
        ...   ROOT %g = (f32[16]{0}, f32[32]{0}) all-gather-start(%w), dimensions={0}
        ... }''')
        >>> [(one.kind, one.bytes, one.in_loop) for one in program.exchanges()]
        [('all-gather', 128, False), ('all-reduce', 64, True)]
        """
        every = [one for body in self.computations.values() for one in body.values()]
        looping: set[str] = set()
        names = [name for one in every for name in one.called("body", "condition")]
        while names:
            name = names.pop()
            if name in self.computations and name not in looping:
                looping.add(name)
                for one in self.computations[name].values():
                    names += one.branches + re.findall(r"=%([\w.-]+)", one.attributes)
        # A TPU continues and ends an exchange in computations of their own.
        later = {
            name
            for one in every
            if one.name.startswith("async-collective-done")
            for name in one.called("calls")
        }
        found = []
        for name, body in self.computations.items():
            if name in later or name.startswith("async_collective_fusion"):
                continue
            for one in body.values():
                kind = one.opcode.removesuffix("-start")
                if kind not in EXCHANGES:
                    continue
                arrays = one.results
                if kind not in ("all-reduce", one.opcode):  # with operands and counters
                    arrays = tuple(array for array in arrays if array.size > 1)
                    arrays = arrays[len(arrays) // 2 :]
                sizes = tuple(array.size for array in arrays)
                found.append(Exchange(kind, sizes, _full_bytes(arrays), name in looping))
        return sorted(found, key=lambda one: -one.bytes)

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

    def _arrays(self, computation: str, operand: str) -> tuple[Array, ...]:
        found = self.computations[computation].get(operand)
        return found.results if found else ()

    # --- bytes ---

    def _moved(self, name: str, instruction: Instruction) -> int:
        opcode, operands = instruction.opcode, instruction.operands
        written = _bytes(instruction.results)
        if "AllocateBuffer" in instruction.attributes:
            return 0
        if opcode in _SLICES:
            return 2 * written
        if opcode == "dynamic-update-slice":
            return 2 * _bytes(self._arrays(name, operands[1]))
        if opcode.endswith("-start"):  # results hold source and target
            return sum(array.bytes for array in instruction.results if array.size > 1)
        if opcode != "fusion":
            return written + sum(_bytes(self._arrays(name, operand)) for operand in set(operands))
        (body,) = instruction.called("calls")
        read = 0
        for index in range(len(operands)):
            if parameter := self._parameter(body, index):
                whole = _bytes(parameter.results)
                read += min(whole, self._used(body, parameter.name, whole))
        return read + self._written(body, self._root(body))

    def _root(self, computation: str) -> str:
        return next(one.name for one in self.computations[computation].values() if one.root)

    def _parameter(self, computation: str, index: int) -> Instruction | None:
        for one in self.computations[computation].values():
            if one.opcode == "parameter" and one.operands == (str(index),):
                return one
        return None

    def _used(self, computation: str, value: str, whole: int) -> int:
        """Bytes of a fusion's value, of which there are `whole`, that it reads."""
        if self.computations[computation][value].root:  # handed on as it is
            return whole
        total = 0
        for user in self.computations[computation].values():
            if value not in user.operands:
                continue
            first = user.operands[0] == value
            if user.opcode in _SLICES and first:
                total += _full_bytes(user.results) if whole else 0
            elif user.opcode == "dynamic-update-slice" and first:
                pass
            elif user.opcode in _RENAMES:
                total += self._used(computation, user.name, whole)
            elif user.opcode == "fusion":
                (body,) = user.called("calls")
                if all(one.opcode in _RENAMES for one in self.computations[body].values()):
                    total += self._used(computation, user.name, whole)
                    continue
                for index, operand in enumerate(user.operands):
                    parameter = self._parameter(body, index) if operand == value else None
                    total += self._used(body, parameter.name, whole) if parameter else 0
            else:
                return whole
        return total

    def _written(self, computation: str, value: str) -> int:
        """Bytes that a fusion writes for a value of its root."""
        found = self.computations[computation][value]
        if found.opcode == "tuple":
            return sum(self._written(computation, operand) for operand in found.operands)
        if found.opcode == "dynamic-update-slice":
            update = self._arrays(computation, found.operands[1])
            return _full_bytes(update) if _bytes(found.results) else 0
        if found.opcode == "bitcast":
            return self._written(computation, found.operands[0])
        if found.opcode == "fusion":
            (body,) = found.called("calls")
            return self._written(body, self._root(body))
        return _bytes(found.results)

    # --- operations ---

    @functools.cache  # noqa: B019 - lives as long as the program
    def _of_fusion(self, name: str) -> dict[str, float]:
        total: collections.Counter[str] = collections.Counter()
        for instruction in self.computations[name].values():
            total.update(self._operations(name, instruction))
        return dict(total)

    def _operations(self, name: str, instruction: Instruction) -> dict[str, float]:
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode == "fusion":
            return self._of_fusion(*instruction.called("calls"))
        if _FREE.fullmatch(opcode) or _MOVES.fullmatch(opcode) or not instruction.results:
            return {}
        result = instruction.results[0]
        operands = [array for o in instruction.operands for array in self._arrays(name, o)]
        if opcode in ("reduce", "reduce-window", "sort"):
            return {VECTOR: float(sum(array.size for array in operands))}
        if opcode == "dot":
            (listed,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
            depth = math.prod(operands[0].shape[int(d)] for d in listed.split(",") if d)
        elif opcode == "convolution":
            labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
            assert labels is not None
            depth = operands[1].size // operands[1].shape[labels[1].index("o")]
        elif opcode == "custom-call":
            if re.search(r"tpu_custom_call|triton", attributes):  # the sweep over a kernel
                matrix = max(operands, key=lambda array: array.size)
                return {VECTOR: float(matrix.size * _SWEEP[matrix.dtype])}
            if not re.search(r"gemm|matmul", attributes):
                return {}
            config = re.search(r"backend_config=(\{.*\})", attributes)
            settings = json.loads(config[1]) if config else {}
            numbers = settings.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
            if contracted := numbers.get("lhs_contracting_dimensions"):
                depth = math.prod(operands[0].shape[int(d)] for d in contracted)
            else:  # a plain matrix product
                depth = round(math.sqrt(operands[0].size * operands[1].size / max(result.size, 1)))
        else:
            return {VECTOR: float(result.size * _COSTLY.get(opcode, 1))}
        return {_precision(attributes, operands[0].dtype): 2.0 * result.size * depth}


def _precision(attributes: str, dtype: str) -> str:
    """Key of a product's precision: element type and what was asked for, or an algorithm."""
    if algorithm := re.search(r"\balgorithm=(\w+)", attributes):
        return algorithm[1]
    if dtype != "f32":
        return {"bf16": "bfloat16", "f16": "float16", "f64": "float64"}.get(dtype, dtype)
    asked = re.search(r'operand_precision(?:=\{|":\[")(\w+)', attributes, flags=re.IGNORECASE)
    return f"float32 {asked[1].lower() if asked else 'default'}"


def _parse(line: str) -> Instruction:
    text = line.strip()
    name, _, rest = text.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    arrays = tuple(
        Array(
            dtype,
            tuple(int(size.lstrip("<=")) for size in shape.split(",") if size),
            "S(1)" in layout,
        )
        for dtype, shape, layout in re.findall(
            r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,<=]*)\](\{[^}]*\})?", rest[:end]
        )
    )
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside = rest[:opening], rest[opening + 1 : closing]
    operands = re.findall(r"%([\w.-]+)", inside) if opcode != "parameter" else [inside.strip()]
    root = text.startswith("ROOT ")
    return Instruction(name.lstrip("%"), arrays, opcode, tuple(operands), rest[closing + 1 :], root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced: {text[:80]}")
