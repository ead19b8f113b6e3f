"""What the layer under the public operations chooses, and how it divides tokens over a mesh.

Most tests use the operation of `scaling`, whose kernels are a few lines, and read the program that is compiled for
H200s. That needs no GPU.
"""

import functools
import logging
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels import dispatch, hopper, rewrite, rewrite_and_read
from tests.h200 import needs_compiler
from tests.pallas_kernels.scaling import scale

ROOT = pathlib.Path(__file__).parents[2]
BATCH, TOKENS, CHANNELS, WIDTH = 16, 8, 4, 256
FORWARD, BACKWARD = "scale_kernel", "scale_backward_kernel"
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    dispatch._say.cache_clear()


@pytest.fixture
def on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("is about machines without a GPU")


def arrays(*leading, width=WIDTH):
    rng = np.random.default_rng(0)
    shapes = [(*leading, CHANNELS, width), leading, (CHANNELS, width)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def placed(mesh, spec, *, weights=None, width=WIDTH):
    """Arguments on a mesh: state, gate, weights."""
    weights = P() if weights is None else weights
    leading = P(*spec[:2])
    return [
        jax.ShapeDtypeStruct((BATCH, TOKENS, CHANNELS, width), jnp.bfloat16, sharding=NamedSharding(mesh, spec)),
        jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.float32, sharding=NamedSharding(mesh, leading)),
        jax.ShapeDtypeStruct((CHANNELS, width), jnp.float32, sharding=NamedSharding(mesh, weights)),
    ]


def mesh_of(kind=AxisType.Auto, **sizes):
    return hopper.mesh(sizes, (kind,) * len(sizes))


def collectives(program):
    """The shapes of each kind."""
    return {name: [found.shape for found in each] for name, each in hopper.collectives(program).items()}


def square(operation):
    return lambda *arguments: jnp.sum(operation(*arguments).astype(jnp.float32) ** 2)


def gradients(operation):
    return jax.grad(square(operation), argnums=(0, 1, 2))


# What is chosen, and why.


def device(platform, kind, capability=None):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU, H200, A100 = device("cpu", "cpu"), device("gpu", "NVIDIA H200", "9.0"), device("gpu", "NVIDIA A100", "8.0")


@pytest.mark.parametrize("implementation, unsupported, where, expected", [
    ("xla", None, H200, "XLA"),
    ("xla", "width 72 is odd", H200, "XLA"),
    ("auto", None, H200, "Pallas (Hopper)"),
    ("auto", "width 72 is odd", H200, "XLA: width 72 is odd"),
    ("auto", None, A100, "XLA: NVIDIA A100 is not a Hopper GPU"),
    ("auto", None, CPU, "XLA: no Hopper GPU here"),
    ("pallas", None, H200, "Pallas (Hopper)"),
    ("pallas", None, CPU, "Pallas (interpreted)"),
])  # fmt: skip
def test_the_choice_is_explained(implementation, unsupported, where, expected):
    assert dispatch.explain(implementation, unsupported, [where]) == expected


def test_a_kernel_that_cannot_run_is_not_explained_but_refused():
    with pytest.raises(ValueError, match="width 72 is odd"):
        dispatch.explain("pallas", "width 72 is odd", [H200])
    with pytest.raises(ValueError, match="A100 is not a Hopper GPU"):
        dispatch.explain("pallas", None, [A100])
    with pytest.raises(ValueError, match="'quantum' is not known; use one of 'auto', 'xla', 'pallas'"):
        dispatch.explain("quantum")


def test_the_local_devices_are_explained_by_default(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [A100])
    assert dispatch.explain("auto") == "XLA: NVIDIA A100 is not a Hopper GPU"


@needs_compiler
def test_devices_that_are_not_here_can_be_explained():
    assert dispatch.explain("auto", None, list(mesh_of(data=4).devices.flat)) == "Pallas (Hopper)"


def values_and_gradients(implementation, *arguments):
    value, vjp = jax.vjp(jax.jit(functools.partial(scale, implementation=implementation)), *arguments)
    return value, *vjp(jnp.cos(value))


def test_auto_on_a_cpu_is_xla_bit_for_bit(on_a_cpu):
    for left, right in zip(*(values_and_gradients(i, *arrays(3, 5)) for i in ("auto", "xla")), strict=True):
        np.testing.assert_array_equal(left, right)


def test_pallas_on_a_cpu_is_interpreted(on_a_cpu):
    for left, right in zip(*(values_and_gradients(i, *arrays(2, 3)) for i in ("pallas", "xla")), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation", [rewrite, rewrite_and_read])
def test_the_rewrite_under_auto_on_a_cpu_is_xla_bit_for_bit(on_a_cpu, operation):
    state, gate, weights = arrays(3, 5)
    arguments = (state, state[..., 0, :], state[..., 0], gate, weights)[: 5 if operation is rewrite_and_read else 4]

    def run(implementation):
        outputs, vjp = jax.vjp(jax.jit(functools.partial(operation, implementation=implementation)), *arguments)
        return jax.tree.leaves((outputs, vjp(outputs)))

    for left, right in zip(run("auto"), run("xla"), strict=True):
        np.testing.assert_array_equal(left, right)


def test_what_the_kernel_cannot_take_is_refused_under_pallas():
    with pytest.raises(ValueError, match="scale: width 72 is not a multiple of 128"):
        scale(*arrays(2, 3, width=72), implementation="pallas")


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "pallas_kernels.dispatch"]


def test_what_the_kernel_cannot_take_runs_on_xla_under_auto_and_is_said_once(on_a_cpu, caplog):
    caplog.set_level(logging.INFO, "pallas_kernels")
    arguments = arrays(2, 3, width=72)
    np.testing.assert_array_equal(scale(*arguments), scale(*arguments, implementation="xla"))
    jax.jit(scale)(*arguments)
    assert said(caplog) == ["scale runs on XLA: width 72 is not a multiple of 128"]
    assert caplog.records[0].levelno == logging.INFO  # on a CPU nobody need know


@needs_compiler
def test_what_is_compiled_for_gpus_warns(caplog):
    caplog.set_level(logging.WARNING)
    mesh = mesh_of(data=2)
    program = hopper.compile_for(functools.partial(scale, token_axes="data"), *placed(mesh, P("data"), width=72))
    assert hopper.kernels(program) == {}
    assert said(caplog) == ["scale runs on XLA: width 72 is not a multiple of 128"]


@needs_compiler
def test_auto_on_a_gpu_that_is_no_hopper_is_xla(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [A100])
    operation = functools.partial(scale)  # traced anew, not as some other test had it
    program = hopper.compile_for(operation, *placed(mesh_of(data=1), P()))
    assert hopper.kernels(program) == {}
    assert "scale runs on XLA: NVIDIA A100 is not a Hopper GPU" in caplog.text
    with pytest.raises(ValueError, match="A100 is not a Hopper GPU"):
        scale(*arrays(2), implementation="pallas")


# The program for one H200.


def scanned(step):
    def operation(state, gate, weights):
        return jax.lax.scan(lambda X, _: (step(X, gate, weights), None), state, None, length=3)[0]

    return operation


def remat_scale(state, gate, weights):
    # The sine keeps its argument: the new state has to be made again.
    return jax.checkpoint(lambda *a: jnp.sin(scale(*a)).astype(jnp.bfloat16), prevent_cse=False)(state, gate, weights)


def mapped(state, gate, weights):
    return jax.vmap(scale, in_axes=(0, 0, None))(state, gate, weights)


@needs_compiler
@pytest.mark.parametrize("function, expected", [
    (scale, {FORWARD: 1}),
    (gradients(scale), {FORWARD: 1, BACKWARD: 1}),
    (gradients(scanned(scale)), {FORWARD: 1, BACKWARD: 1}),
    (gradients(scanned(remat_scale)), {FORWARD: 2, BACKWARD: 1}),  # forward, and again in backward
    (mapped, {"batched_body": 1}),
    (gradients(mapped), {"batched_body": 2}),
    (functools.partial(scale, implementation="pallas"), {FORWARD: 1}),
    (functools.partial(scale, implementation="xla"), {}),
], ids=["jit", "grad", "scan", "remat", "vmap", "vmap grad", "pallas", "xla"])  # fmt: skip
def test_a_program_for_hopper_has_the_kernels(function, expected):
    assert hopper.kernels(hopper.compile_for(function, *placed(mesh_of(data=1), P()))) == expected


@needs_compiler
def test_a_program_for_hopper_needs_no_mesh(on_a_cpu):
    lowered = jax.jit(scale).trace(*arrays(2, 3)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert "mosaic_gpu" not in jax.jit(scale).lower(*arrays(2, 3)).as_text()


# The program for several H200s.

SUM = f"f32[{CHANNELS},{WIDTH}]"  # the gradient of the weights
AXES = ("data", "fsdp")


def axes_for(kind, token_axes=AXES):
    return token_axes if kind == AxisType.Auto else None


@needs_compiler
@pytest.mark.parametrize("implementation", ["auto", "pallas"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_stay_where_they_are(kind, devices, implementation):
    arguments = placed(mesh_of(kind, data=2, fsdp=devices // 2), P(AXES))
    operation = functools.partial(scale, token_axes=axes_for(kind), implementation=implementation)
    forward, both = hopper.compile_for(operation, *arguments), hopper.compile_for(gradients(operation), *arguments)
    assert (hopper.kernels(forward), collectives(forward)) == ({FORWARD: 1}, {})
    assert (hopper.kernels(both), collectives(both)) == ({FORWARD: 1, BACKWARD: 1}, {"all-reduce": [SUM]})
    assert "conditional(" not in both.as_text()  # nothing is left of the choice


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_stay_where_they_are_under_scan_and_remat(kind):
    def step(*arguments):
        operation = functools.partial(scale, token_axes=axes_for(kind))
        return jax.checkpoint(lambda *a: jnp.sin(operation(*a)).astype(jnp.bfloat16), prevent_cse=False)(*arguments)

    program = hopper.compile_for(gradients(scanned(step)), *placed(mesh_of(kind, data=2, fsdp=2), P(AXES)))
    assert hopper.kernels(program) == {FORWARD: 2, BACKWARD: 1}
    assert collectives(program) == {"all-reduce": [SUM]}


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_may_be_divided(kind):
    spec = P("data", "fsdp")
    operation = functools.partial(scale, token_axes=axes_for(kind, spec))
    program = hopper.compile_for(gradients(operation), *placed(mesh_of(kind, data=2, fsdp=2), spec))
    assert (hopper.kernels(program)[BACKWARD], collectives(program)) == (1, {"all-reduce": [SUM]})


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_divided_weights_are_gathered_and_nothing_else(kind):
    arguments = placed(mesh_of(kind, data=2, fsdp=2), P(AXES), weights=P(None, "fsdp"))
    found = collectives(hopper.compile_for(gradients(functools.partial(scale, token_axes=axes_for(kind))), *arguments))
    assert found == {"all-gather": [SUM], "all-reduce": [SUM]}


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_mesh_of_the_context_will_do(kind):
    mesh = mesh_of(kind, data=2, fsdp=2)
    state, gate, weights = placed(mesh, P(AXES))
    operation = functools.partial(scale, token_axes=axes_for(kind))
    with jax.set_mesh(mesh):
        program = hopper.compile_for(lambda g, w: operation(jnp.ones(state.shape, state.dtype), g, w), gate, weights)
    assert (hopper.kernels(program), collectives(program)) == ({FORWARD: 1}, {})


@needs_compiler
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("manual", [AXES, ("data",)], ids=["all axes", "one axis"])
def test_an_enclosing_shard_map_has_divided_already(manual, kind, check_vma):
    mesh = mesh_of(kind, data=2, fsdp=2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(manual), P(manual), P()), out_specs=P(manual),
                       axis_names=set(manual), check_vma=check_vma)  # fmt: skip
    def operation(*arguments):
        return scale(*arguments, token_axes=axes_for(kind))

    program = hopper.compile_for(gradients(operation), *placed(mesh, P(AXES)))
    assert hopper.kernels(program) == {FORWARD: 1, BACKWARD: 1}
    assert collectives(program) == {"all-reduce": [SUM]}


@needs_compiler
def test_vmap_over_divided_examples_keeps_them_divided_on_auto_axes():
    def operation(*arguments):
        one = functools.partial(scale, token_axes=())
        return jax.vmap(one, in_axes=(0, 0, None), spmd_axis_name=AXES)(*arguments)

    program = hopper.compile_for(gradients(operation), *placed(mesh_of(data=2, fsdp=2), P(AXES)))
    assert (hopper.kernels(program), collectives(program)) == ({"batched_body": 2}, {"all-reduce": [SUM]})


@needs_compiler
def test_vmap_over_an_explicit_axis_is_xla_under_auto(caplog):
    arguments = placed(mesh_of(AxisType.Explicit, data=2, fsdp=2), P(AXES))
    program = hopper.compile_for(mapped, *arguments)
    assert (hopper.kernels(program), collectives(program)) == ({}, {})
    assert "vmap maps over an Explicit mesh axis" in caplog.text
    with pytest.raises(ValueError, match="pass what it maps over as a leading axis"):
        jax.eval_shape(jax.vmap(functools.partial(scale, implementation="pallas"), in_axes=(0, 0, None)), *arguments)


# What is refused.


def refused(kind, spec, **options):
    """The message; the mesh needs no devices, as nothing is compiled."""
    mesh = jax.sharding.AbstractMesh((2, 2), AXES, axis_types=(kind,) * 2)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(functools.partial(scale, **{"implementation": "pallas", **options}), *placed(mesh, spec))
    return str(error.value)


def test_a_mesh_that_does_not_say_where_tokens_are_is_refused():
    message = refused(AxisType.Auto, P(AXES))
    assert "the Auto axes of the mesh (data=2, fsdp=2)" in message and "pass token_axes" in message


@pytest.mark.parametrize("implementation", ["auto", "xla", "pallas"])
def test_divided_width_and_channels_are_refused(implementation):
    message = refused(AxisType.Explicit, P("data", None, None, "fsdp"), implementation=implementation)
    assert message.startswith("scale: state is sharded as P('data', None, None, 'fsdp')")
    assert "only its first 2 axes may be: a device needs the whole channels and width of its tokens" in message
    assert "only its first 2 axes" in refused(AxisType.Explicit, P("data", None, "fsdp"), implementation=implementation)


def test_an_operation_that_looks_at_other_tokens_has_only_its_batch_divided():
    whole = ("tokens", "channels", "width")
    assert "only its first 1 axes" in refused(AxisType.Explicit, P("data", "fsdp"), whole=whole)
    message = refused(AxisType.Auto, P("data", "fsdp"), whole=whole, token_axes=P("data", "fsdp"))
    assert "divides more than the first 1 axes" in message


def test_arrays_that_are_divided_differently_are_refused():
    mesh = jax.sharding.AbstractMesh((2, 2), AXES, axis_types=(AxisType.Explicit,) * 2)
    arguments = placed(mesh, P("data"))
    arguments[1] = placed(mesh, P("fsdp"))[1]
    with pytest.raises(ValueError, match="gate is sharded as P\\('fsdp', None\\), but state as P\\('data'"):
        jax.eval_shape(scale, *arguments)


def test_token_axes_that_do_not_fit_are_refused():
    assert "token_axes names 'tensor', but the mesh has data, fsdp" in refused(AxisType.Auto, P(), token_axes="tensor")
    message = refused(AxisType.Auto, P(), token_axes=P(None, None, "data"))
    assert "divides more than the first 2 axes" in message
    mesh = jax.sharding.AbstractMesh((5,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="axis 0 of the state has length 16, not a multiple of 5 \\(data\\)"):
        jax.eval_shape(functools.partial(scale, implementation="pallas", token_axes="data"), *placed(mesh, P()))


def test_without_a_mesh_token_axes_say_nothing_to_a_single_device(on_a_cpu):
    scale(*arrays(4), implementation="pallas", token_axes="data")


@needs_compiler
def test_auto_on_a_mesh_that_does_not_say_where_tokens_are_is_xla(caplog):
    program = hopper.compile_for(scale, *placed(mesh_of(data=4), P("data")))
    assert (hopper.kernels(program), collectives(program)) == ({}, {})
    assert "pass token_axes" in caplog.text


# Numbers on several devices, of the real operations.

ON_FOUR_DEVICES = """
import functools
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
from pallas_kernels import rewrite_and_read
from tests.pallas_kernels.scaling import scale
from tests.quick import QUICK

rng = np.random.default_rng(0)
shapes = [(8, 3, 4, 128), (8, 3, 128), (8, 3, 4), (8, 3), (4, 128)]
arguments = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

def run(operation, *arguments):
    outputs, vjp = jax.vjp(operation, *arguments)
    return jax.tree.leaves((outputs, vjp(jax.tree.map(jnp.cos, outputs))))

def jitted(operation):
    return jax.jit(functools.partial(run, operation), compiler_options=QUICK)

def check(name, got, expected):
    for left, right in zip(got, expected, strict=True):
        error = np.max(np.abs(left - right)) / np.max(np.abs(right))
        assert error < 1e-6, (name, error)  # not 0: a sum over devices has another order

for operation, which in ((rewrite_and_read, range(5)), (scale, (0, 3, 4))):
    expected = jitted(functools.partial(operation, implementation="xla"))(*(arguments[i] for i in which))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(kind, kind))
        for axes in (("data", "fsdp"), "data"):
            specs = tuple(P() if i == 4 else P(axes) for i in which)
            placed = [jax.device_put(arguments[i], NamedSharding(mesh, spec)) for i, spec in zip(which, specs)]
            for options in (dict(implementation="xla"), dict(), dict(token_axes=axes)):
                function = functools.partial(operation, **options)
                got = jitted(function)(*placed)
                assert got[0].sharding.spec[0] == axes, (kind, options, got[0].sharding)
                check((operation, kind, options), got, expected)
    check("not under jit", run(operation, *placed), expected)
    for check_vma in (True, False):
        function = jax.shard_map(operation, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=check_vma)
        check(("in shard_map", operation, check_vma), jitted(function)(*placed), expected)
print("equal")
"""


def python(program):
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def test_on_several_devices_the_numbers_are_those_of_one():
    assert python(ON_FOUR_DEVICES) == ["equal"]


# What it costs those who do without.

WITHOUT_PALLAS = """
import sys
import jax.numpy as jnp
from pallas_kernels import rewrite
import jax
arrays = jnp.ones((2, 4, 128)), jnp.ones((2, 128)), jnp.ones((2, 4)), jnp.ones(2)
rewrite(*arrays)
jax.jit(lambda *a: rewrite(*a, implementation="xla"))(*arrays)
print("jax.experimental.pallas" in sys.modules)
"""


def test_xla_does_not_import_pallas():
    assert python(WITHOUT_PALLAS) == ["False"]
