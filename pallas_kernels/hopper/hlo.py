"""What XLA made of a function: its collectives and its Mosaic GPU kernels, read from the compiled program's text.

A collective or kernel in the body of a loop is written once, and counted once.
"""

import collections
import dataclasses
import math
import re

from jax.stages import Compiled

OPERATIONS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?\S+ = (?P<shape>\(.*?\)|\S+) (?P<operation>{'|'.join(OPERATIONS)})(?P<start>-start)?\(",
    re.MULTILINE,
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\]")
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu[^"]*".*?metadata=\{[^}]*?op_name="(?P<path>[^"]*)"')
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<operation>[\w-]+)\((?P<operands>.*?)\)"
)
_FREE = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant", "after-all")  # name bytes, move none
_CONTROL = ("while", "conditional", "call")
_BITS = re.compile(r"^[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its result on one device, as XLA writes it (`bf16[8,128]`), and the bytes of that result."""

    shape: str
    bytes: int


def collectives(compiled: Compiled) -> dict[str, list[Collective]]:
    """Every collective of a compiled program, by the name of its operation; an operation that is not there has no key.

    A collective in two halves (`all-gather-start`, `all-gather-done`) is listed once, under its plain name.
    """
    found: dict[str, list[Collective]] = {}
    for match in _COLLECTIVE.finditer(compiled.as_text()):
        shapes = [shape.group() for shape in _SHAPE.finditer(match["shape"])]
        if match["start"] and match["operation"] == "collective-permute":
            shapes = shapes[1:2]  # (operand, result, two words of context)
        elif match["start"] and (match["operation"] != "all-reduce" or match["shape"].startswith("((")):
            shapes = shapes[len(shapes) // 2 :]  # (operands, results); all-reduce-start may also have results alone
        entry = Collective(shape=", ".join(shapes), bytes=sum(map(_bytes, shapes)))
        found.setdefault(match["operation"], []).append(entry)
    return found


def kernels(compiled: Compiled) -> dict[str, int]:
    """How often each Mosaic GPU kernel is called, by the name of the kernel's body."""
    paths = (match["path"].split("/") for match in _KERNEL.finditer(compiled.as_text()))
    # jit(step)/…/name/mpmd_map: the last part is the primitive.
    return dict(collections.Counter(path[-2] if len(path) > 1 else path[-1] for path in paths))


def bytes_accessed(compiled: Compiled) -> int:
    """Bytes that a program's kernels read and write when each reads its operands once, whole, and writes its results.

    A kernel that reads an operand twice moves more, one that reads a slice of it less.

    Raises:
        ValueError: the program has control flow, whose trips the text does not tell.
    """
    sizes, total = {}, 0
    entry = compiled.as_text().partition("\nENTRY ")[2]
    for line in entry.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        if match["operation"] in _CONTROL:
            raise ValueError(f"the program has control flow: {match['operation']} {match['name']}")
        sizes[match["name"]] = sum(_bytes(shape.group()) for shape in _SHAPE.finditer(match["shape"]))
        if match["operation"] not in _FREE:
            operands = set(re.findall(r"%([\w.-]+)", match["operands"]))
            total += sizes[match["name"]] + sum(sizes[operand] for operand in operands)
    return total


def _bytes(shape: str) -> int:
    match = _SHAPE.fullmatch(shape)
    bits = 8 if match["dtype"] == "pred" else int(_BITS.match(match["dtype"])[1])
    return math.prod(int(size) for size in match["sizes"].split(",") if size) * bits // 8
