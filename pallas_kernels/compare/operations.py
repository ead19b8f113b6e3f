"""What is compared: each public operation forward and backward, on random arguments, by either implementation."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import pallas_kernels
from pallas_kernels import cases
from pallas_kernels.cases import Case, Shape
from pallas_kernels.compare import oracle

IMPLEMENTATIONS = ("xla", "pallas")
F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass of one operation.

    Attributes:
        operation: the public function's name.
        direction: `forward` or `backward`.
        kernel: which of `cases` it runs; that knows the least bytes.
    """

    operation: str
    direction: str
    kernel: str


# Forward, the reversible operation differs only by V numbers per token that it keeps.
PASSES = (
    Pass("rewrite", "forward", "rewrite"),
    Pass("rewrite", "backward", "rewrite_backward"),
    Pass("rewrite_and_read", "forward", "rewrite_and_read"),
    Pass("rewrite_and_read", "backward", "rewrite_and_read_backward"),
    Pass("reversible_rewrite_and_read", "backward", "rewrite_and_read_reverse"),
    Pass("token_read", "forward", "token_read"),
    Pass("token_read", "backward", "token_read_backward"),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One pass at one of `cases.SHAPES`."""

    what: Pass
    shape: str

    def __str__(self) -> str:
        return f"{self.what.operation} {self.what.direction} {self.shape}"

    @functools.cached_property
    def case(self) -> Case:
        """Its kernel."""
        (case,) = cases.cases(self.what.kernel, self.shape)
        return case

    def operation(self, implementation: str) -> Callable:
        """The public operation, of the arrays of `arguments`."""
        return functools.partial(getattr(pallas_kernels, self.what.operation), implementation=implementation)

    def arguments(self, seed: int, tokens: int | None = None) -> tuple[jax.Array, ...]:
        """Random arguments of the operation.

        Args:
            seed: of the draw.
            tokens: how many of the shape's tokens, all by default; an even number is cut into two sequences.
        """
        return _draw(self.what.operation, few(cases.SHAPES[self.shape], tokens), seed)

    def call(self, implementation: str, arguments: tuple[jax.Array, ...], seed: int) -> tuple:
        """What `run` takes: the arguments; or backward, a VJP with what forward kept, and random cotangents.

        The VJP is a tree of the arrays that forward kept, so that backward can be a program of its own.
        """
        if self.what.direction == "forward":
            return arguments
        outputs, vjp = self._linearised[implementation](*arguments)
        cotangents = _cotangents(self.what.operation, outputs, seed)
        return vjp, cotangents

    @functools.cached_property
    def _linearised(self) -> dict[str, Callable]:
        """Forward and the VJP, by implementation; compiled once for all calls."""
        operations = {name: self.operation(name) for name in IMPLEMENTATIONS}
        return {name: jax.jit(functools.partial(jax.vjp, operation)) for name, operation in operations.items()}

    def abstract_call(self, implementation: str, sharding: NamedSharding | None = None) -> tuple:
        """`call` at the whole shape, without data: a tree of `jax.ShapeDtypeStruct`s.

        Args:
            implementation: the kernels are interpreted unless `sharding` names another device.
            sharding: of all arrays.
        """

        def placed(tree):
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

        arguments = placed(jax.eval_shape(lambda: self.arguments(0)))
        if self.what.direction == "forward":
            return arguments
        vjp = jax.eval_shape(lambda *arrays: jax.vjp(self.operation(implementation), *arrays), *arguments)
        outputs, vjp = placed(vjp)
        return vjp, outputs

    def run(self, implementation: str) -> Callable:
        """The pass, of what `call` gives; a flat tuple of arrays comes back."""
        if self.what.direction == "forward":
            return lambda *arguments: tuple(jax.tree.leaves(self.operation(implementation)(*arguments)))
        return lambda vjp, cotangents: tuple(vjp(cotangents))

    def relative_error(self, implementation: str, tokens: int) -> float:
        """`oracle.relative_error` at a few tokens."""
        arguments = self.arguments(0, tokens)
        call = self.call(implementation, arguments, 1)
        actual = jax.jit(self.run(implementation))(*call)
        return oracle.relative_error(actual, self._expected(arguments, call))

    def _expected(self, arguments, call):
        forward = self.what.direction == "forward"
        cotangents = None if forward else jax.tree.leaves(call[1])
        if self.what.operation == "token_read":
            return oracle.token_read(*arguments) if forward else oracle.token_read_gradients(*arguments, *cotangents)
        reversible = self.what.operation.startswith("reversible")
        X, *rest = arguments
        h, v, β, *a = rest[1:] if reversible else rest
        if forward:
            return oracle.rewrite(X, h, v, β, *a)
        d_new, *d_read = cotangents
        gradients = oracle.rewrite_gradients(X, h, v, β, a[0] if a else None, d_new, d_read[0] if d_read else None)
        # The cotangent of the shadow is the state before the rewrite, made again.
        return (gradients[0], *oracle.float64(X), *gradients[1:]) if reversible else gradients


def few(shape: Shape, tokens: int | None) -> Shape:
    """The shape with fewer tokens, in two sequences where that number is even."""
    if tokens is None or tokens >= shape.tokens:
        return shape
    return dataclasses.replace(shape, tokens=tokens, sequence=tokens // 2 if tokens % 2 == 0 else tokens)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(operation, shape, seed):
    N, V, d, K, T = shape.tokens, shape.channels, shape.width, shape.taps, shape.sequence
    keys = iter(jax.random.split(jax.random.key(seed), 5))

    def normal(dtype, *sizes):
        return jax.random.normal(next(keys), sizes, dtype)

    if operation == "token_read":
        return normal(shape.dtype, N // T, T, V, d), normal(F32, K, V, d)
    X, h, v, a = normal(shape.dtype, N, V, d), normal(shape.dtype, N, d), normal(F32, N, V), normal(F32, V, d)
    tokens = (h, v, jax.random.uniform(next(keys), (N,), F32, 0, 2))
    if operation == "rewrite":
        return X, *tokens
    # What the shadow holds does not matter.
    return (X, X, *tokens, a) if operation.startswith("reversible") else (X, *tokens, a)


def _cotangents(operation, outputs, seed):
    """Random ones; but the cotangent of the shadow is the new state."""
    leaves, tree = jax.tree.flatten(outputs)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [_normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    if operation.startswith("reversible"):
        drawn[-1] = outputs[0]
    return tree.unflatten(drawn)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
