"""The public operations with their kernels: against XLA where a CPU interprets them, and as compiled for H200s."""

import functools

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels import (
    hopper,
    reversible_rewrite,
    reversible_rewrite_and_read,
    rewrite,
    rewrite_and_read,
    token_read,
)
from tests.h200 import needs_compiler

# Two float32 computations of the same sums, of at most 1024 terms, in another order; in bfloat16 a rounding each.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-6}


def arrays(*leading, channels=2, width=128, dtype="float32"):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "state": normal(*leading, channels, width),
        "branch": normal(*leading, width),
        "value": normal(*leading, channels, dtype="float32"),
        "gate": jnp.asarray(rng.uniform(0, 2, leading), jnp.float32),
        "weights": normal(channels, width, dtype="float32"),
    }


def without(arguments, *names):
    return {name: array for name, array in arguments.items() if name not in names}


def rewrite_of(arguments, **options):
    return rewrite(**without(arguments, "weights"), **options)


def rewrite_and_read_of(arguments, **options):
    return rewrite_and_read(**arguments, **options)


@jax.custom_vjp
def sealed(state, shadow):
    """The state; it is also the cotangent with which the shadow goes into backward."""
    return state


sealed.defvjp(lambda state, shadow: (state, state), lambda state, cotangent: (cotangent, state))


def reversible_rewrite_of(arguments, **options):
    state, shadow = reversible_rewrite(
        **without(arguments, "weights"), shadow=jnp.zeros_like(arguments["state"]), **options
    )
    return sealed(state, shadow)


def reversible_rewrite_and_read_of(arguments, **options):
    state, read, shadow = reversible_rewrite_and_read(**arguments, shadow=jnp.zeros_like(arguments["state"]), **options)
    return sealed(state, shadow), read


def token_read_of(arguments, **options):
    return token_read(arguments["state"], jnp.stack([arguments["weights"], -arguments["weights"]]), **options)


OPERATIONS = [rewrite_of, rewrite_and_read_of, reversible_rewrite_of, reversible_rewrite_and_read_of, token_read_of]


def outputs_and_gradients(operation, arguments, **options):
    """Of a loss in which every output number counts differently."""

    def loss(arguments):
        outputs = operation(arguments, **options)
        return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in jax.tree.leaves(outputs)), outputs

    (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(arguments)
    return outputs, gradients


def assert_close(left, right, tolerance):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_the_kernel_equals_xla_in_values_and_gradients(operation, dtype):
    arguments = arrays(2, 3, dtype=dtype)
    run = jax.jit(functools.partial(outputs_and_gradients, operation), static_argnames="implementation")
    assert_close(run(arguments, implementation="pallas"), run(arguments, implementation="xla"), TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("erase", [True, False])
def test_a_reversible_stack_has_the_gradients_of_a_plain_one(erase, implementation):
    arguments = arrays(2, 2)
    options = {"erase": erase, "implementation": implementation}
    layers = {k: jnp.stack([v, v[::-1], -v]) for k, v in without(arguments, "state").items()}

    def plain(state, layers):
        def layer(state, of_layer):
            return rewrite_and_read(state, **of_layer, **options)

        return jax.lax.scan(layer, state, layers)

    def reversible(state, layers):
        def layer(states, of_layer):
            state, read, shadow = reversible_rewrite_and_read(*states, **of_layer, **options)
            return (state, shadow), read

        states, reads = jax.lax.scan(layer, (state, jnp.zeros_like(state)), layers)
        return sealed(*states), reads

    def run(stack):
        def loss(state, layers):
            state, reads = stack(state, layers)
            return jnp.sum(jnp.sin(state)) + jnp.sum(jnp.cos(reads))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(arguments["state"], layers)

    # Restoring X adds a rounding per layer.
    assert_close(run(reversible), run(plain), 3 * TOLERANCE["float32"])


def test_backward_keeps_the_state_or_with_the_reversible_form_no_state():
    arguments = arrays(7, channels=4)
    shape = arguments["state"].shape

    def states_kept(operation):
        _, vjp = jax.vjp(lambda arguments: operation(**arguments), arguments)
        return sum(jnp.shape(leaf) == shape for leaf in jax.tree.leaves(vjp))

    assert states_kept(rewrite_and_read) == 1
    reversible = functools.partial(reversible_rewrite_and_read, shadow=jnp.zeros(shape))
    assert states_kept(reversible) == 0


def test_vmap_and_scan_over_the_kernel():
    arguments = arrays(3, 2)
    tokens, weights = without(arguments, "weights"), arguments["weights"]

    def over(how, implementation):
        def one(of_batch):
            return rewrite_and_read_of(of_batch | {"weights": weights}, implementation=implementation)

        if how == "vmap":
            return jax.jit(jax.vmap(one))(tokens)
        return jax.lax.scan(lambda _, of_batch: (None, one(of_batch)), None, tokens)[1]

    for how in ("vmap", "scan"):
        assert_close(over(how, "pallas"), over(how, "xla"), TOLERANCE["float32"])


# Compiled for H200s.


def placed(mesh, spec, *, tokens=(16, 8), channels=4, width=768):
    structs = {}
    for name, array in jax.eval_shape(
        lambda: arrays(*tokens, channels=channels, width=width, dtype="bfloat16")
    ).items():
        cut = P() if name == "weights" else P(*spec[: array.ndim])
        structs[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, cut))
    return structs


def loss_of(operation, **options):
    def loss(arguments):
        return sum(jnp.sum(out.astype(jnp.float32) ** 2) for out in jax.tree.leaves(operation(arguments, **options)))

    return loss


def kernels_of(operation, backward=True):
    name = operation.__name__.removesuffix("_of")
    forward = name.removeprefix("reversible_")
    ending = "_reverse" if name.startswith("reversible") else "_backward"
    return {forward: 1} | ({forward + ending: 1} if backward else {})


@needs_compiler
@pytest.mark.parametrize("devices, kind", [(4, AxisType.Auto), (8, AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_over_a_mesh_nothing_moves_but_the_weights_gradient(operation, devices, kind):
    mesh = hopper.mesh({"data": 2, "fsdp": devices // 2}, (kind,) * 2)
    axes = ("data", "fsdp")
    options = {} if kind == AxisType.Explicit else {"token_axes": axes}
    arguments = placed(mesh, P(axes))
    forward = hopper.compile_for(functools.partial(operation, **options), arguments)
    assert (hopper.kernels(forward), hopper.collectives(forward)) == (kernels_of(operation, backward=False), {})
    both = hopper.compile_for(jax.grad(loss_of(operation, **options)), arguments)
    assert hopper.kernels(both) == kernels_of(operation)
    sums = [found.shape for found in hopper.collectives(both).pop("all-reduce", [])]
    has_weights = "weights" in arguments and operation not in (rewrite_of, reversible_rewrite_of)
    taps = "2," if operation is token_read_of else ""
    assert sums == [f"f32[{taps}4,768]"] * has_weights
    assert set(hopper.collectives(both)) <= {"all-reduce"}


@needs_compiler
def test_a_shadow_that_is_placed_otherwise_follows_the_state():
    mesh = hopper.mesh({"data": 4}, (AxisType.Explicit,))
    arguments = placed(mesh, P("data"))
    shadow = jax.ShapeDtypeStruct(arguments["state"].shape, arguments["state"].dtype, sharding=NamedSharding(mesh, P()))

    def operation(arguments):
        arguments, shadow = arguments
        state, read, shadow = reversible_rewrite_and_read(**arguments, shadow=shadow)
        return sealed(state, shadow), read

    program = hopper.compile_for(jax.grad(loss_of(operation)), (arguments, shadow))
    assert hopper.kernels(program) == kernels_of(reversible_rewrite_and_read_of)


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS[:2] + OPERATIONS[4:], ids=lambda f: f.__name__)
def test_remat_runs_the_forward_kernel_again(operation):
    mesh = hopper.mesh({"data": 1})

    def stack(arguments):
        @jax.checkpoint
        def layer(state, _):
            outputs = operation(arguments | {"state": state})
            first = jax.tree.leaves(outputs)[0]
            return (first if first.shape == state.shape else state * first[..., None, :]), None

        return jax.lax.scan(layer, arguments["state"], None, length=3)[0]

    program = hopper.compile_for(jax.grad(loss_of(stack)), placed(mesh, P()))
    (forward, _), (backward, _) = kernels_of(operation).items()
    found = hopper.kernels(program)
    # Once in the scan forward. In backward's the rewrite itself need not run again: its arguments are what it keeps.
    assert found[backward] == 1
    assert found[forward] == (2 if operation is token_read_of else 1)


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_a_divided_width_is_refused(operation):
    mesh = hopper.mesh({"data": 2, "tensor": 2}, (AxisType.Explicit,) * 2)
    arguments = placed(mesh, P("data"))
    state = arguments["state"]
    width = NamedSharding(mesh, P("data", None, None, "tensor"))
    arguments["state"] = jax.ShapeDtypeStruct(state.shape, state.dtype, sharding=width)
    with pytest.raises(ValueError, match="'tensor'.* needs the whole .*width"):
        hopper.compile_for(operation, arguments)


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_a_mesh_without_a_word_about_its_axes_is_refused(operation):
    arguments = placed(hopper.mesh({"data": 4}, (AxisType.Auto,)), P("data"))
    with pytest.raises(ValueError, match="token_axes"):
        hopper.compile_for(functools.partial(operation, implementation="pallas"), arguments)


@needs_compiler
def test_kernels_can_be_exported():
    arguments = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays(4, 6, width=256).items()}
    calls = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(jax.jit(rewrite_and_read_of), platforms=["cuda"], disabled_checks=calls)(arguments)
    again = jax.export.deserialize(exported.serialize())
    assert again.mlir_module().count("mosaic_gpu") >= 1
    assert [aval.shape for aval in again.out_avals] == [(4, 6, 2, 256), (4, 6, 256)]


# What users get wrong.


@pytest.mark.parametrize("change, message", [
    ({"state": [[1.0]]}, "branch has shape"),
    ({"gate": None}, "gate is a NoneType"),
    ({"gate": "open"}, "gate"),
    ({"state": np.ones((6, 2, 128), int)}, "state has dtype int32, but has to be of floating-point numbers"),
    ({"value": np.ones((6, 2), complex)}, "value has dtype complex64"),
    ({"state": np.ones((6, 0, 128), np.float32)}, "both at least 1"),
    ({"epsilon": -1.0}, "epsilon -1.0 has to be finite and at least 0"),
    ({"epsilon": "small"}, "epsilon 'small' has to be a number"),
    ({"epsilon": float("nan")}, "epsilon nan"),
])  # fmt: skip
@pytest.mark.parametrize("implementation", ["auto", "pallas"])
def test_arguments_that_make_no_sense_are_refused_by_name(change, message, implementation):
    with pytest.raises(ValueError, match=message):
        rewrite_and_read(**arrays(6) | change, implementation=implementation)


def test_an_epsilon_that_is_traced_is_refused():
    arguments = arrays(3)
    with pytest.raises(ValueError, match="known when the operation is traced"):
        jax.jit(lambda epsilon: rewrite_and_read(**arguments, epsilon=epsilon))(1e-5)
    assert rewrite_and_read(**arguments, epsilon=jnp.float32(1e-5), implementation="pallas")[1].shape == (3, 128)


@pytest.mark.parametrize("shadow", [None, np.ones((6, 2, 128), jnp.bfloat16), np.ones((5, 2, 128), np.float32)])
def test_a_shadow_unlike_the_state_is_refused(shadow):
    with pytest.raises(ValueError, match="shadow"):
        reversible_rewrite_and_read(**arrays(6), shadow=shadow)


@pytest.mark.parametrize("operation", [rewrite_and_read_of, token_read_of])
def test_kernels_run_where_64_bits_are_enabled(operation):
    arguments = arrays(2, 3)
    expected = outputs_and_gradients(operation, arguments, implementation="xla")
    with jax.enable_x64(True):
        assert_close(outputs_and_gradients(operation, arguments, implementation="pallas"), expected, 1e-4)


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_kernels_compile_where_64_bits_are_enabled(operation):
    arguments = placed(hopper.mesh({"data": 1}), P())
    with jax.enable_x64(True):
        program = hopper.compile_for(jax.grad(loss_of(operation)), arguments)
    assert hopper.kernels(program) == kernels_of(operation)


def test_the_interpreter_takes_one_device(monkeypatch):
    from pallas_kernels.layout import Layout

    monkeypatch.setattr(Layout, "devices", 4)
    with pytest.raises(ValueError, match="takes one device; use 'auto' or 'xla'"):
        rewrite_and_read(**arrays(6), implementation="pallas")
