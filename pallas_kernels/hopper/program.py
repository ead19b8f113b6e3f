"""A compiled program read from its text: computations, instructions, shapes."""

from collections.abc import Iterator
import dataclasses
import functools
import json
import math
import re
from typing import Any

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"^[a-z]+(\d+)")
_NAME = re.compile(r"%([\w.$-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.$-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations)=\{?(%[\w.$-]+(?:, %[\w.$-]+)*)")
_OPENS, _CLOSES = "([{", ")]}"


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array: dtype as XLA writes it (`bf16`), and its sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, aval: Any) -> "Array":
        """The type of an array of jax."""
        name = aval.dtype.name.replace("_", "")
        for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
            if name.startswith(long):
                return cls(name.replace(long, short, 1), tuple(aval.shape))
        return cls("pred", tuple(aval.shape))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def item_bytes(self) -> float:
        """Bytes of an element; 0 for what is no memory (tokens)."""
        bits = _BITS.match(self.dtype)
        return 1.0 if self.dtype == "pred" else int(bits[1]) / 8 if bits else 0.0

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * self.item_bytes)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


Shape = Array | tuple["Shape", ...]


def leaves(shape: Shape) -> list[Array]:
    """The arrays of a shape, in order."""
    return [shape] if isinstance(shape, Array) else [leaf for part in shape for leaf in leaves(part)]


def shape_bytes(shape: Shape) -> int:
    """Bytes of all its arrays."""
    return sum(leaf.bytes for leaf in leaves(shape))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        name: unique in its computation.
        shape: of the result.
        operation: such as `fusion`, `while`, `dynamic-slice`.
        operands: names of instructions of the same computation.
        literal: what stands between the parentheses, for `parameter(0)` and the like.
        attributes: all that follows, as text.
        root: whether its result is the computation's.
    """

    name: str
    shape: Shape
    operation: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, in the order of the text."""
        return tuple(name for group in _CALLED.findall(self._head) for name in _NAME.findall(group))

    def attribute(self, name: str) -> str:
        """The text of an attribute such as `lhs_contracting_dims={1}`, without its braces; "" where there is none."""
        found = re.search(rf'(?:^|, ){name}=(?:\{{([^}}]*)\}}|"([^"]*)"|([^,\s]+))', self.attributes)
        return next((text for text in found.groups() if text is not None), "") if found else ""

    @property
    def target(self) -> str:
        """Of a custom call: its name."""
        return self.attribute("custom_call_target")

    @property
    def path(self) -> tuple[str, ...]:
        """Where it comes from: `jit(step)`, …, the primitive."""
        found = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', self.attributes)
        return tuple(found[1].split("/")) if found else ()

    @property
    def trips(self) -> int | None:
        """Of a `while`: how often it runs, where that is known."""
        found = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    def backend_config(self) -> dict:
        """The backend's settings; {} where they are not JSON."""
        _, _, text = self.attributes.partition("backend_config=")
        try:
            return json.JSONDecoder().raw_decode(text)[0]
        except ValueError:
            return {}

    @property
    def _head(self) -> str:  # a kernel's code, in the backend's settings, may hold any text
        return self.attributes.partition("backend_config=")[0]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in an order in which they can run (that of the schedule, where there is one)."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        found = [instruction for instruction in self.instructions if instruction.operation == "parameter"]
        return sorted(found, key=lambda instruction: int(instruction.literal))

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.root)

    @functools.cached_property
    def last_use(self) -> dict[str, int]:
        """The place of the last instruction that takes each name, looking through what is the same memory."""
        found: dict[str, int] = {}
        for place, instruction in enumerate(self.instructions):
            if instruction.operation != "bitcast":
                found.update((self.behind(operand).name, place) for operand in instruction.operands)
        return found

    @functools.cached_property
    def place(self) -> dict[str, int]:
        return {instruction.name: place for place, instruction in enumerate(self.instructions)}

    def behind(self, name: str) -> Instruction:
        """The instruction that a name stands for, through bitcasts."""
        instruction = self.by_name[name]
        while instruction.operation == "bitcast":
            instruction = self.by_name[instruction.operands[0]]
        return instruction


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations by name, and which of them is run."""

    computations: dict[str, Computation]
    entry: str

    @property
    def main(self) -> Computation:
        return self.computations[self.entry]


def parse(text: str) -> Program:
    """Reads the text of a compiled program (`jax.stages.Compiled.as_text()`)."""
    computations, entry, name, lines = {}, "", "", []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name, lines = start[2], []
            entry = name if start[1] else entry
        elif line == "}" and name:
            computations[name], name = Computation(name, tuple(lines)), ""
        elif name and (instruction := _instruction(line)):
            lines.append(instruction)
    if not entry:
        raise ValueError("this is not the text of a program: there is no ENTRY")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head, equals, rest = line.strip().partition(" = ")
    root, head = head.startswith("ROOT "), head.removeprefix("ROOT ")
    if not equals or not head.startswith("%"):
        return None
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = _shape(rest[:end]), rest[end:].lstrip()
    opening = rest.index("(")
    end = _closing(rest, opening)
    literal = rest[opening + 1 : end - 1]
    operands = tuple(_NAME.findall(literal))
    attributes = rest[end:].removeprefix(", ")
    return Instruction(head[1:], shape, rest[:opening], operands, literal, attributes, root)


def _closing(text: str, opening: int = 0) -> int:
    """The place after the bracket that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    raise ValueError(f"a bracket is not closed: {text[:80]}")


def _shape(text: str) -> Shape:
    if not text.startswith("("):
        dtype, sizes = _ARRAY.match(text).groups()
        return Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
    return tuple(_shape(part) for part in _parts(text[1:-1]))


def _parts(text: str) -> Iterator[str]:
    """The parts of a tuple, split at the commas outside all brackets."""
    depth, start = 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for place, character in enumerate(text):
        depth += (character in _OPENS) - (character in _CLOSES)
        if character == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()
