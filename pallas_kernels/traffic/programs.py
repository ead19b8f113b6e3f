"""Runs a Mosaic GPU kernel without its numbers, and counts the bytes that its own copies move.

The kernel's jaxpr is run for all programs of the grid at once: integer and boolean scalars (program indices, loop
counters, predicates) have their real values, one per program; arrays and floating-point scalars are unknown. Every copy
between global and shared memory then counts its bytes once per program that reaches it, and so does every direct access
to global memory. What could hide a copy and is not understood raises `NotImplementedError`; nothing is skipped.

The cache is not modelled: what every program loads again (the reader's weights) counts every time.
"""

import math

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal
import numpy as np

from pallas_kernels.traffic.jaxprs import CALLS, HARMLESS, counts, matters, name_of
from pallas_kernels.traffic.refs import UNKNOWN, Ref, aval_bytes, view_bytes
from pallas_kernels.traffic.scalars import evaluate, is_index
from pallas_kernels.traffic.schedule import Event


class Kernel:
    """One kernel, run for all programs at once; afterwards `operands` and `events` hold what was counted."""

    def __init__(self, equation):
        (mesh,), (jaxpr,) = equation.params["meshes"], equation.params["jaxprs"]
        if not isinstance(mesh, plgpu.Mesh):
            raise NotImplementedError(f"a kernel over {type(mesh).__name__}")
        blocks = [*zip(mesh.grid_names, mesh.grid, strict=True), *zip(mesh.cluster_names, mesh.cluster, strict=True)]
        threads = [(mesh.thread_name, mesh.num_threads)] if mesh.num_threads else []
        self.axes = {}
        sizes = [size for _, size in blocks + threads]
        for (axis, _), index in zip(blocks + threads, np.indices(sizes, np.int32), strict=True):
            self.axes[axis] = index.reshape(-1)
        self.sizes = dict(blocks + threads)
        self.grid_names = mesh.grid_names
        per_block = mesh.num_threads or 1
        self.blocks = math.prod(size for _, size in blocks)
        middle = self.blocks // 2
        self.watched = range(middle * per_block, (middle + 1) * per_block)  # the warpgroups of a block amid the grid
        self.events: list[list[Event]] = [[] for _ in self.watched]
        inputs = len(equation.invars)
        names = [f"input {i}" if i < inputs else f"output {i - inputs}" for i in range(len(jaxpr.invars))]
        self.operands = [Ref(name, var.aval) for name, var in zip(names, jaxpr.invars, strict=True)]
        self.plans, self.used = {}, set()
        with np.errstate(all="ignore"):  # programs that are masked out may compute nonsense
            self.run(jaxpr, self.operands, np.ones(math.prod(sizes), bool))

    def run(self, jaxpr, arguments, mask: np.ndarray) -> list:
        """Runs a jaxpr for the programs in the mask and returns its outputs."""
        constants = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        count = len(jaxpr.constvars)
        if len(arguments) == count + len(jaxpr.invars):  # an open jaxpr: its constants come first
            constants, arguments = arguments[:count], arguments[count:]
        else:
            known = [is_index(var.aval) for var in jaxpr.constvars]
            constants = [np.asarray(c) if k else UNKNOWN for c, k in zip(constants, known, strict=True)]
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(atom):
            if isinstance(atom, Literal):
                return np.asarray(atom.val, atom.aval.dtype) if is_index(atom.aval) else UNKNOWN
            return values.get(atom, UNKNOWN)

        if id(jaxpr) not in self.plans:  # keeps the jaxpr, so that no other gets its id
            self.plans[id(jaxpr)] = (jaxpr, [equation for equation in jaxpr.eqns if matters(equation)])
            atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
            self.used.update(atom for atom in atoms if not isinstance(atom, Literal))
        for equation in self.plans[id(jaxpr)][1]:
            outputs = self.step(equation, [read(atom) for atom in equation.invars], mask)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, equation, inputs: list, mask: np.ndarray) -> list:
        """Runs one equation and returns its outputs."""
        name, params = name_of(equation), equation.params
        nothing = [UNKNOWN] * len(equation.outvars)
        if handler := getattr(self, f"_{name}", None):
            outputs = handler(equation, inputs, mask)
            return nothing if outputs is None else outputs
        if name in CALLS:
            return self.run(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], inputs, mask)
        if any(isinstance(value, Ref) for value in inputs) or equation.effects:
            if name in HARMLESS and not any(isinstance(value, Ref) and value.is_global for value in inputs):
                return nothing
            raise NotImplementedError(f"{name} may move bytes, and nobody has taught pallas_kernels.traffic how many")
        if len(equation.outvars) == 1:
            return [evaluate(equation, inputs)]
        return nothing

    # Indices

    def _axis_index(self, equation, inputs, mask):
        name = equation.params["axis_name"]
        index = np.int32(0)
        for axis in name if isinstance(name, tuple) else (name,):
            if axis not in self.axes:
                raise NotImplementedError(f"axis_index of {axis!r}, which is no axis of the kernel")
            index = index * self.sizes[axis] + self.axes[axis]
        return [index]

    def _program_id(self, equation, inputs, mask):
        return [self.axes[self.grid_names[equation.params["axis"]]]]

    def _num_programs(self, equation, inputs, mask):
        return [np.int32(self.sizes[self.grid_names[equation.params["axis"]]])]

    # Control flow

    def _run_scoped(self, equation, inputs, mask):
        jaxpr = equation.params["jaxpr"]
        scratch = [Ref(f"scratch {var}", var.aval) for var in jaxpr.invars]
        return self.run(jaxpr, [*inputs, *scratch], mask)

    def _cond(self, equation, inputs, mask):
        branches, (index, *operands) = equation.params["branches"], inputs
        if index is UNKNOWN:
            if any(counts(branch.jaxpr) for branch in branches):
                raise NotImplementedError("a condition that depends on data decides about a copy or a barrier")
            return None
        index = np.clip(index, 0, len(branches) - 1)
        merged = None
        for number, branch in enumerate(branches):
            taken = mask & (index == number)
            if taken.any():
                outputs = self.run(branch, operands, taken)
                merged = outputs if merged is None else _select(taken, outputs, merged)
        return merged

    def _while(self, equation, inputs, mask):
        params = equation.params
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        condition, body, carry = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
        while True:
            (more,) = self.run(params["cond_jaxpr"], [*condition, *carry], mask)
            if more is UNKNOWN:
                if counts(params["body_jaxpr"].jaxpr):
                    raise NotImplementedError("how often a loop with a copy or a barrier runs depends on data")
                return None
            mask = mask & more
            if not mask.any():
                return carry
            carry = _select(mask, self.run(params["body_jaxpr"], [*body, *carry], mask), carry)

    def _scan(self, equation, inputs, mask):
        params = equation.params
        # Constants, carry, slices. No public name says how many of each there are: jax.extend could.
        constants, carried = (len(part.vals) for part in params["ft_in"].unpack()[:2])
        carried += constants
        carry, slices = inputs[constants:carried], [UNKNOWN] * (len(inputs) - carried)
        for _ in range(params["length"]):
            outputs = self.run(params["jaxpr"], [*inputs[:constants], *carry, *slices], mask)
            carry = outputs[: len(carry)]
        return [*carry, *[UNKNOWN] * (len(equation.outvars) - len(carry))]

    # Copies and accesses

    def _copy_gmem_to_smem(self, equation, inputs, mask):
        params = equation.params
        if params["collective_axes"] or not params["has_barrier"]:
            raise NotImplementedError("copy_gmem_to_smem to several blocks at once, or without a barrier")
        (source, _, barrier), leaves = inputs[:3], inputs[3:]
        if params["has_user_predicate"]:
            *leaves, predicate = leaves
            mask = mask & self._known(predicate, "the predicate of a copy")
        trees = [params[f"{which}_transforms_treedef"] for which in ("src", "dst", "barrier")]
        at = trees[0].num_leaves, trees[0].num_leaves + trees[1].num_leaves
        sizes = view_bytes(source, trees[0], leaves[: at[0]], _avals(equation, 3, at[0]))
        source.loaded += _total(sizes, mask)
        self._note("issue", mask, barrier, trees[2], leaves[at[1] :], sizes)

    def _copy_smem_to_gmem(self, equation, inputs, mask):
        params, leaves = equation.params, inputs[2:]
        if params["has_user_predicate"]:
            *leaves, predicate = leaves
            mask = mask & self._known(predicate, "the predicate of a copy")
        start, tree = params["src_transforms_treedef"].num_leaves, params["dst_transforms_treedef"]
        end = start + tree.num_leaves
        moved = _total(view_bytes(inputs[1], tree, leaves[start:end], _avals(equation, 2 + start, end - start)), mask)
        inputs[1].stored += moved
        if params["reduction_op"]:
            inputs[1].loaded += moved

    def _get(self, equation, inputs, mask):
        if inputs[0].is_global:
            inputs[0].loaded += _total(aval_bytes(equation.outvars[0].aval), mask)
        else:
            self._note("read", mask)

    _load = _get

    def _swap(self, equation, inputs, mask):
        if inputs[0].is_global:
            moved = _total(aval_bytes(equation.invars[1].aval), mask)
            inputs[0].stored += moved
            if self.used.intersection(equation.outvars):  # the old value
                inputs[0].loaded += moved

    _store = _swap

    def _addupdate(self, equation, inputs, mask):
        if inputs[0].is_global:
            moved = _total(aval_bytes(equation.invars[1].aval), mask)
            inputs[0].stored, inputs[0].loaded = inputs[0].stored + moved, inputs[0].loaded + moved

    # Barriers

    def _barrier_wait(self, equation, inputs, mask):
        self._note("wait", mask, inputs[0], equation.params["transforms_treedef"], inputs[1:])

    def _barrier_arrive(self, equation, inputs, mask):
        self._note("arrive", mask, inputs[0], equation.params["transforms_treedef"], inputs[1:])

    def _note(self, kind, mask, barrier=None, tree=None, leaves=(), sizes=0):
        """Keeps an event of the watched block."""
        for program, events in zip(self.watched, self.events, strict=True):
            if not mask[program]:
                continue
            if barrier is None:
                events.append(Event(kind))
                continue
            slot = [int(_at(self._known(leaf, "which barrier is meant"), program)) for leaf in leaves]
            arrivals = barrier.aval.dtype.num_arrivals
            events.append(Event(kind, (barrier.name, *slot), int(_at(sizes, program)), arrivals))

    def _known(self, value, what: str):
        if value is UNKNOWN:
            raise NotImplementedError(f"{what} depends on data")
        return value


def _avals(equation, start: int, count: int) -> list:
    return [var.aval for var in equation.invars[start : start + count]]


def _select(mask: np.ndarray, new: list, old: list) -> list:
    """The new values where the mask is set, the old ones elsewhere."""
    return [
        UNKNOWN if a is UNKNOWN or b is UNKNOWN else b if isinstance(b, Ref) else np.where(mask, a, b)
        for a, b in zip(new, old, strict=True)
    ]


def _at(value, program: int):
    value = np.asarray(value)
    return value[program] if value.ndim else value


def _total(sizes, mask: np.ndarray) -> int:
    """The sum of a size, or of one size per program, over the programs in the mask."""
    sizes = np.asarray(sizes, np.int64)
    return int(sizes[mask].sum()) if sizes.ndim else int(sizes) * int(np.count_nonzero(mask))
