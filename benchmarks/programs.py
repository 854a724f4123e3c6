"""What a compiled program does: its kernels, the bytes they move, the operations they do.

Read from the text of an optimised XLA program. A kernel is an instruction outside fusions: a
fusion, a product, a copy. It reads its operands and writes its result once; of an operand that is
sliced, or a result that is updated in place, only the part that is touched counts, and arrays that
the compiler keeps on chip (memory space 1 of a TPU) count nothing.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

VECTOR = "vector"
"""Key of elementwise operations, beside the precisions of products."""
EXCHANGES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTH = {"pred": 1, "token": 0, "opaque": 0}
"""Bytes of types whose name does not tell their bits."""
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
    on_chip: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, wherever it is."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (-(-int(bits[0]) // 8) if bits else _WIDTH[self.dtype])


def _bytes(arrays: Iterable[Array], everywhere: bool = False) -> int:
    """Bytes in the device's main memory; or `everywhere`, as arrays inside a fusion are."""
    return sum(array.bytes for array in arrays if everywhere or not array.on_chip)


class Instruction:
    """One line of a program, with what makes its operands and what uses its results."""

    def __init__(self, line: str) -> None:
        text = line.strip()
        self.root = text.startswith("ROOT ")
        name, _, rest = text.removeprefix("ROOT ").partition(" = ")
        self.name = name.lstrip("%")
        end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
        self.results = tuple(
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
        self.opcode, self.inside = rest[:opening], rest[opening + 1 : closing]
        self.attributes = rest[closing + 1 :]
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        self.scope = found[1] if found else ""
        """Where in the source it comes from: names of functions and of `jax.named_scope`s."""
        self.operands: list[Instruction] = []
        self.users: list[Instruction] = []

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


Computation = dict[str, Instruction]


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
        self.computations: dict[str, Computation] = {}
        self.entry = name = ""
        for line in text.splitlines():
            header = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
            if header and " = " not in line.split("(")[0]:
                name = header[2]
                self.computations[name] = {}
                self.entry = name if header[1] else self.entry
            elif name and " = " in line:
                instruction = Instruction(line)
                self.computations[name][instruction.name] = instruction
        for body in self.computations.values():
            for one in body.values():
                names = re.findall(r"%([\w.-]+)", one.inside)
                one.operands = [body[operand] for operand in names]
                for operand in dict.fromkeys(one.operands):
                    operand.users.append(one)

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
                moved, done = self._moved(one), self._operations(one)
                if moved or done:
                    scope = self._scope(one, loop)
                    cycles = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
                    guess = int(cycles[1]) if cycles else 0
                    yield Kernel(one.name, scope, one.opcode, times, moved, done, guess)

    def exchanges(self) -> list[Exchange]:
        """What devices tell each other, the largest first; what is in a loop counts once.

        >>> program = Program('''
        ... %body (x: f32[16]) -> f32[16] {
        ...   %x = f32[16]{0} parameter(0)
        ...   ROOT %r = f32[16]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
        ... }
        ... ENTRY %main (y: f32[16]) -> f32[16] {
        ...   %y = f32[16]{0} parameter(0)
        ...   %w = f32[16]{0} while(%y), condition=%less, body=%body
        ...   ROOT %g = (f32[16]{0}, f32[32]{0}) all-gather-start(%w), dimensions={0}
        ... }''')
        >>> [(one.kind, one.bytes, one.in_loop) for one in program.exchanges()]
        [('all-gather', 128, False), ('all-reduce', 64, True)]
        """
        every = [(name, one) for name, body in self.computations.items() for one in body.values()]
        looping: set[str] = set()
        names = [part for _, one in every for part in one.called("body", "condition")]
        while names:
            name = names.pop()
            if name in self.computations and name not in looping:
                looping.add(name)
                for one in self.computations[name].values():
                    names += one.branches + re.findall(r"=%([\w.-]+)", one.attributes)
        # A TPU continues and ends an exchange in computations of their own.
        ends = [one for _, one in every if one.name.startswith("async-collective-done")]
        later = {name for one in ends for name in one.called("calls")}
        found = []
        for name, one in every:
            kind = one.opcode.removesuffix("-start")
            continued = name in later or name.startswith("async_collective_fusion")
            if kind not in EXCHANGES or continued:
                continue
            arrays = one.results
            if kind not in ("all-reduce", one.opcode):  # with operands and counters
                arrays = tuple(array for array in arrays if array.size > 1)
                arrays = arrays[len(arrays) // 2 :]
            sizes, moved = tuple(array.size for array in arrays), _bytes(arrays, everywhere=True)
            found.append(Exchange(kind, sizes, moved, name in looping))
        return sorted(found, key=lambda one: -one.bytes)

    def _scope(self, one: Instruction, loop: str) -> str:
        """Of a fusion, that of its product, if it has one.

        The compiler's own copies have none: they count to the loop that they are in, and outside
        of loops to what makes or uses them.
        """
        inner = [x for part in one.called("calls") for x in self.computations[part].values()]
        products = [x.scope for x in inner if x.opcode in ("dot", "convolution")]
        near = [x.scope for x in (*one.users, *one.operands)]
        known = (*products, one.scope, *(x.scope for x in reversed(inner)), loop, *near)
        return next(filter(None, known), "")

    def _body(self, fusion: Instruction) -> Computation:
        (name,) = fusion.called("calls")
        return self.computations[name]

    # --- bytes ---

    def _moved(self, one: Instruction) -> int:
        if "AllocateBuffer" in one.attributes:
            return 0
        if one.opcode in _SLICES:
            return 2 * _bytes(one.results)
        if one.opcode == "dynamic-update-slice":
            return 2 * _bytes(one.operands[1].results)
        if one.opcode.endswith("-start"):  # results hold source and target
            return _bytes(array for array in one.results if array.size > 1)
        if one.opcode != "fusion":
            return _bytes(one.results) + sum(_bytes(x.results) for x in set(one.operands))
        body = self._body(one)
        whole = {parameter: _bytes(parameter.results) for parameter in _parameters(body)}
        read = sum(min(size, self._used(value, size)) for value, size in whole.items())
        return read + self._written(_root(body))

    def _used(self, value: Instruction, whole: int) -> int:
        """Bytes of a fusion's value, of which there are `whole`, that it reads."""
        if value.root:  # handed on as it is
            return whole
        total = 0
        for user in value.users:
            first = user.operands[0] is value
            body = self._body(user) if user.opcode == "fusion" else {}
            if user.opcode in _SLICES and first:
                total += _bytes(user.results, everywhere=True) if whole else 0
            elif user.opcode == "dynamic-update-slice" and first:
                pass
            elif user.opcode in _RENAMES or (
                body and all(one.opcode in _RENAMES for one in body.values())
            ):
                total += self._used(user, whole)
            elif body:
                pairs = zip(_parameters(body), user.operands, strict=True)
                total += sum(self._used(inner, whole) for inner, x in pairs if x is value)
            else:
                return whole
        return total

    def _written(self, value: Instruction) -> int:
        """Bytes that a fusion writes for a value of its root."""
        if value.opcode == "tuple":
            return sum(self._written(operand) for operand in value.operands)
        if value.opcode == "dynamic-update-slice":
            update = value.operands[1].results
            return _bytes(update, everywhere=True) if _bytes(value.results) else 0
        if value.opcode == "bitcast":
            return self._written(value.operands[0])
        if value.opcode == "fusion":
            return self._written(_root(self._body(value)))
        return _bytes(value.results)

    # --- operations ---

    @functools.cache  # noqa: B019 - lives as long as the program
    def _operations(self, one: Instruction) -> dict[str, float]:
        opcode, attributes = one.opcode, one.attributes
        if opcode == "fusion":
            total: collections.Counter[str] = collections.Counter()
            for inner in self._body(one).values():
                total.update(self._operations(inner))
            return dict(total)
        if _FREE.fullmatch(opcode) or _MOVES.fullmatch(opcode) or not one.results:
            return {}
        result = one.results[0]
        operands = [array for operand in one.operands for array in operand.results]
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
            depth = math.isqrt(operands[0].size * operands[1].size // result.size)  # no batches
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


def _parameters(body: Computation) -> list[Instruction]:
    found = [one for one in body.values() if one.opcode == "parameter"]
    return sorted(found, key=lambda one: int(one.inside))


def _root(body: Computation) -> Instruction:
    return next(one for one in body.values() if one.root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced: {text[:80]}")
