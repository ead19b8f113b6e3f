"""What a function becomes on an H200, without one: `compile_for`, `collectives`, `kernels`, `resources`, `bytes_moved`.

`cost` counts what a whole program moves and computes: `cost(parse(compiled.as_text()), known_kernels(jaxpr))`.

`python -m pallas_kernels.hopper` says it for our own kernels.
"""

from pallas_kernels.hopper.compile import compile_for, compile_traced, resources, trace
from pallas_kernels.hopper.cost import Cost, Part, cost
from pallas_kernels.hopper.custom_calls import UnknownCustomCall, known_kernels
from pallas_kernels.hopper.hlo import Collective, bytes_accessed, collectives, kernels
from pallas_kernels.hopper.program import parse
from pallas_kernels.hopper.ptx import Resources
from pallas_kernels.hopper.target import MissingExtra, mesh
from pallas_kernels.traffic import Traffic, bytes_moved

__all__ = [
    "Collective",
    "Cost",
    "MissingExtra",
    "Part",
    "Resources",
    "Traffic",
    "UnknownCustomCall",
    "bytes_accessed",
    "bytes_moved",
    "collectives",
    "compile_for",
    "compile_traced",
    "cost",
    "kernels",
    "known_kernels",
    "mesh",
    "parse",
    "resources",
    "trace",
]
