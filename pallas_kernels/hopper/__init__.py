"""What a function becomes on an H200, without one: `compile_for`, `collectives`, `kernels`, `resources`, `bytes_moved`.

`python -m pallas_kernels.hopper` says it for our own kernels.
"""

from pallas_kernels.hopper.compile import compile_for, resources
from pallas_kernels.hopper.hlo import Collective, bytes_accessed, collectives, kernels
from pallas_kernels.hopper.ptx import Resources
from pallas_kernels.hopper.target import MissingExtra, mesh
from pallas_kernels.traffic import Traffic, bytes_moved

__all__ = [
    "Collective",
    "MissingExtra",
    "Resources",
    "Traffic",
    "bytes_accessed",
    "bytes_moved",
    "collectives",
    "compile_for",
    "kernels",
    "mesh",
    "resources",
]
