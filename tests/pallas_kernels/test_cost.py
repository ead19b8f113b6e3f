"""What a compiled program moves and computes: counted by hand on small texts, and on programs compiled for H200s."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hopper, rewrite
from pallas_kernels.hopper.accesses import Accesses
from pallas_kernels.hopper.cost import cost
from pallas_kernels.hopper.custom_calls import UnknownCustomCall, known_kernels
from pallas_kernels.hopper.program import Array, parse
from pallas_kernels.hopper.stacks import stacks
from tests.h200 import needs_compiler
from tests.quick import QUICK

FAST = QUICK | {"xla_gpu_autotune_level": 0}

# A loop of 6 trips adds row i of `stack` to a carried vector of 32 numbers and writes the sum into row i of `out`.
LOOP = """HloModule step, is_scheduled=true

%cut_add_write (p0: f32[6,32], p1: s32[], p2: f32[32], p3: f32[6,32]) -> (f32[32], f32[6,32]) {
  %p0 = f32[6,32]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[32]{0} parameter(2)
  %p3 = f32[6,32]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %row = f32[1,32]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,32}
  %flat = f32[32]{0} bitcast(%row)
  %sum = f32[32]{0} add(%flat, %p2)
  %update = f32[1,32]{1,0} bitcast(%sum)
  %written = f32[6,32]{1,0} dynamic-update-slice(%p3, %update, %p1, %zero)
  ROOT %both = (f32[32]{0}, f32[6,32]{1,0}) tuple(%sum, %written)
}

%body (state: (s32[], f32[32], f32[6,32], f32[6,32])) -> (s32[], f32[32], f32[6,32], f32[6,32]) {
  %state = (s32[], f32[32]{0}, f32[6,32]{1,0}, /*index=3*/f32[6,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[32]{0} get-tuple-element(%state), index=1
  %stack = f32[6,32]{1,0} get-tuple-element(%state), index=2
  %out = f32[6,32]{1,0} get-tuple-element(%state), index=3
  %fused = (f32[32]{0}, f32[6,32]{1,0}) fusion(%stack, %i, %x, %out), kind=kLoop, calls=%cut_add_write
  %next = f32[32]{0} get-tuple-element(%fused), index=0
  %filled = f32[6,32]{1,0} get-tuple-element(%fused), index=1
  ROOT %again = (s32[], f32[32]{0}, f32[6,32]{1,0}, f32[6,32]{1,0}) tuple(%i, %next, %stack, %filled)
}

%more (state: (s32[], f32[32], f32[6,32], f32[6,32])) -> pred[] {
  %state = (s32[], f32[32]{0}, f32[6,32]{1,0}, f32[6,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[32], stack: f32[6,32], out: f32[6,32], i: s32[]) -> (s32[], f32[32], f32[6,32], f32[6,32]) {
  %x = f32[32]{0} parameter(0)
  %stack = f32[6,32]{1,0} parameter(1)
  %out = f32[6,32]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %start = (s32[], f32[32]{0}, f32[6,32]{1,0}, f32[6,32]{1,0}) tuple(%i, %x, %stack, %out)
  ROOT %loop = (s32[], f32[32]{0}, f32[6,32]{1,0}, f32[6,32]{1,0}) while(%start), condition=%more, body=%body, """
KNOWN = 'backend_config={"known_trip_count":{"n":"6"}}\n}\n'
VECTOR, INDEX = 32 * 4, 4


def entry(*lines: str, before: str = ""):
    """The cost of a program of these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return cost(parse(f"HloModule step\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"))


def test_a_loop_over_a_stack_counts_the_slice_and_every_trip():
    counted = cost(parse(LOOP + KNOWN))
    # Reads a row, the index and the vector; writes the vector and a row.
    assert [(part.runs, part.accesses) for part in counted.parts] == [(6, Accesses(2 * VECTOR + INDEX, 2 * VECTOR))]
    assert counted.bytes == 6 * (4 * VECTOR + INDEX)


def test_loops_within_loops_multiply():
    outer = LOOP.replace("ENTRY %main", "%outer_body").replace("ROOT %loop", "ROOT %inner") + KNOWN
    text = outer + LOOP[LOOP.index("ENTRY") :].replace("body=%body", "body=%outer_body") + KNOWN.replace("6", "5")
    assert cost(parse(text)).bytes == 5 * 6 * (4 * VECTOR + INDEX)


def test_a_loop_of_unknown_trips_is_refused():
    with pytest.raises(ValueError, match="how often the loop loop runs is not known"):
        cost(parse(LOOP + "metadata={}\n}\n"))


def test_a_stack_that_is_read_later_cannot_be_written_to_in_place():
    text = LOOP.replace("tuple(%i, %next, %stack, %filled)", "tuple(%i, %next, %out, %filled)") + KNOWN
    counted = cost(parse(text))
    assert counted.bytes == 6 * (INDEX + VECTOR + VECTOR + 6 * VECTOR + VECTOR + 6 * VECTOR)


def test_what_one_loop_stacks_up_and_a_later_one_reads():
    """The second loop takes apart what the first one filled, and hands on what it stacks up itself."""
    assert stacks(parse(LOOP + KNOWN)) == []
    first = LOOP[LOOP.index("ENTRY") :].replace("ROOT %loop", "%loop") + KNOWN.removesuffix("}\n")
    second = """
  %filled = f32[6,32]{1,0} get-tuple-element(%loop), index=3
  %moved = f32[6,32]{0,1} copy(%filled)
  %last = f32[32]{0} get-tuple-element(%loop), index=1
  %begin = (s32[], f32[32]{0}, f32[6,32]{0,1}, f32[6,32]{1,0}) tuple(%i, %last, %moved, %stack)
  ROOT %back = (s32[], f32[32]{0}, f32[6,32]{0,1}, f32[6,32]{1,0}) while(%begin), condition=%more, body=%body, """
    program = parse(LOOP[: LOOP.index("ENTRY")] + first + second + KNOWN)
    assert stacks(program) == [Array("f32", (6, 32))]
    assert [part.name for part in cost(program).parts] == ["fused", "moved", "fused"]


def test_an_operation_on_its_own():
    counted = entry(
        "%table = bf16[1000,64]{1,0} parameter(0)",
        "%rows = s32[7,1]{1,0} parameter(1)",
        "%found = bf16[7,64]{1,0} gather(%table, %rows), offset_dims={1}, slice_sizes={1,64}",
        "%added = bf16[1000,64]{1,0} scatter(%table, %rows, %found), update_window_dims={1}, to_apply=%sum",
        "%shuffled = bf16[64,7]{0,1} bitcast(%found)",
        "%copied = bf16[64,7]{1,0} copy(%shuffled)",
        "%cut = bf16[8,7]{1,0} slice(%copied), slice={[0:8], [0:7]}",
        "ROOT %all = (bf16[1000,64]{1,0}, bf16[8,7]{1,0}) tuple(%added, %cut)",
    )
    rows = 7 * 64 * 2
    assert {part.name: part.accesses for part in counted.parts} == {
        "found": Accesses(rows + 28, rows),
        "added": Accesses(rows + rows + 28, rows),
        "copied": Accesses(rows, rows),
        "cut": Accesses(112, 112),
    }
    assert [part.kind for part in counted.parts] == [*["gathers and scatters"] * 2, *["copies and casts"] * 2]


def test_an_asynchronous_fusion_counts_once_and_a_constant_is_only_written():
    counted = entry(
        "%x = f32[4,8]{1,0} parameter(0)",
        "%fusion-start = ((f32[4,8]{1,0}), f32[8,4]{1,0}, u32[]) fusion-start(%x), kind=kLoop, calls=%turn",
        "%fusion-done = f32[8,4]{1,0} fusion-done(%fusion-start)",
        "%zeros = f32[16,4]{1,0} fusion(), kind=kLoop, calls=%fill",
        "ROOT %all = (f32[8,4]{1,0}, f32[16,4]{1,0}) tuple(%fusion-done, %zeros)",
        before="""
%turn (p: f32[4,8]) -> f32[8,4] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %t = f32[8,4]{1,0} transpose(%p), dimensions={1,0}
}

%fill () -> f32[16,4] {
  %zero = f32[] constant(0)
  ROOT %b = f32[16,4]{1,0} broadcast(%zero), dimensions={}
}
""",
    )
    assert counted.bytes_by_kind() == {"copies and casts": 256, "fills": 256}


FMHA = (
    "operand_layout_constraints={}, backend_config={{"
    '"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"dimensions":["2","3","64","64"]}},"mask_type":"{}"}}}}'
)


@pytest.mark.parametrize("mask, share", [("CAUSAL", 2), ("NO_MASK", 1)])
def test_the_calls_of_libraries(mask, share):
    array, scores = "bf16[2,64,3,16]{3,2,1,0}", FMHA.format("{}", mask)
    counted = entry(
        f"%q = {array} parameter(0)",
        "%a = bf16[32,16]{1,0} parameter(1)",
        "%b = bf16[16,8]{1,0} parameter(2)",
        f"%f = ({array}, f32[2,3,64]{{2,1,0}}, u8[512]{{0}}) custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn$fmhaSoftmax", {scores}',
        f"%o = {array} get-tuple-element(%f), index=0",
        f"%g = ({array}, {array}, {array}, u8[9]{{0}}) custom-call(%q, %q, %q, %o), "
        f'custom_call_target="__cudnn$fmhaSoftmaxBackward", {scores}',
        '%m = (f32[32,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        "ROOT %all = f32[32,8]{1,0} get-tuple-element(%m), index=0",
    )
    forward, backward, product = counted.parts
    one = 2 * 64 * 3 * 16 * 2
    assert (forward.accesses, backward.accesses) == (
        Accesses(3 * one, one + 2 * 3 * 64 * 4),
        Accesses(4 * one, 3 * one),
    )
    assert product.accesses == Accesses(32 * 16 * 2 + 16 * 8 * 2, 32 * 8 * 4)
    scores = 2 * 3 * 64 * 64 * 16
    assert forward.flops == {"bf16": 2 * 2 * scores // share}
    assert backward.flops == {"bf16": 5 * 2 * scores // share}
    assert product.flops == {"bf16": 2 * 32 * 8 * 16}


@pytest.mark.parametrize("target", ["__cudnn$convForward", "mosaic_gpu_v2"])
def test_a_call_that_nobody_knows_is_refused_by_name(target):
    name = 'metadata={op_name="jit(f)/strange/mpmd_map"}'
    message = "strange" if target.startswith("mosaic") else r"__cudnn\$convForward"
    with pytest.raises(UnknownCustomCall, match=message):
        entry(f'ROOT %x = f32[4]{{0}} custom-call(), custom_call_target="{target}", {name}')


def test_a_collective_counts_what_one_device_sends_and_no_memory():
    counted = entry(
        "%x = f32[1000]{0} parameter(0)",
        "%r = f32[1000]{0} all-reduce-start(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum",
        "%s = f32[1000]{0} all-reduce-done(%r)",
        "%g = f32[4000]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}",
        "%t = f32[500]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%sum",
        "%m = f32[1000]{0} all-reduce(%x), replica_groups=mesh['data'=2,'fsdp'=8] {'data','fsdp':(1)2}, to_apply=%sum",
        "%p = f32[1000]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        "ROOT %all = (f32[1000]{0}, f32[4000]{0}) tuple(%s, %g)",
    )
    assert {part.name: part.wire for part in counted.parts} == {"r": 6000, "g": 12000, "t": 2000, "m": 6000, "p": 4000}
    assert counted.bytes == 0
    assert counted.collective_bytes == 30000
    # Half of the eight devices along fsdp and both along data: of 16, from the first to the last.
    assert {part.name: part.span for part in counted.parts} == {"r": 4, "g": 4, "t": 2, "m": 16, "p": 2}
    assert counted.collective_bytes_within(8) == (24000, 6000)
    assert counted.collective_bytes_within(2) == (6000, 24000)


def test_types_are_written_as_xla_does():
    aval = functools.partial(jax.ShapeDtypeStruct, (2, 3))
    types = [jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8, jnp.bool_, jnp.float8_e4m3fn]
    written = ["bf16[2,3]", "f32[2,3]", "s32[2,3]", "u8[2,3]", "pred[2,3]", "f8e4m3fn[2,3]"]
    assert [str(Array.of(aval(dtype))) for dtype in types] == written
    assert [Array.of(aval(dtype)).bytes for dtype in types] == [12, 24, 24, 6, 6, 6]


# ---- programs compiled for an H200

# So many tokens that XLA does not cut a product's contraction into parts, to be summed up later.
LAYERS, BATCHES, TOKENS, CHANNELS, WIDTH = 5, 3, 16384, 4, 256


def scanned(state, matrices, branches):
    """Micro-batches × layers: a product with the layer's matrix, then a rewrite of the state by a kernel."""
    value, gate = jnp.ones((TOKENS, CHANNELS), jnp.float32), jnp.ones(TOKENS, jnp.float32)

    def layer(state, matrix_and_branch):
        matrix, branch = matrix_and_branch
        return rewrite(state, branch @ matrix, value, gate, implementation="auto"), None

    def batch(total, branch):
        after, _ = jax.lax.scan(layer, state, (matrices, branch))
        return total + after, None

    return jax.lax.scan(batch, jnp.zeros_like(state), branches)[0]


@needs_compiler
def test_a_kernel_and_a_product_within_nested_scans():
    state = jax.ShapeDtypeStruct((TOKENS, CHANNELS, WIDTH), jnp.bfloat16)
    matrices = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    branches = jax.ShapeDtypeStruct((BATCHES, LAYERS, TOKENS, WIDTH), jnp.bfloat16)
    function = jax.jit(scanned, compiler_options=FAST)
    known = known_kernels(function.trace(state, matrices, branches).jaxpr)
    (moved,) = known.values()
    features, states = TOKENS * WIDTH * 2, TOKENS * CHANNELS * WIDTH * 2
    assert moved.written == states
    scalars = TOKENS * (CHANNELS + 1) * 4  # of value and gate; what comes with them is known to the kernel's own tests
    assert states + features + scalars <= moved.read <= states + features + 3 * scalars

    compiled = hopper.compile_for(function, state, matrices, branches)
    counted = cost(parse(compiled.as_text()), known)
    runs = BATCHES * LAYERS
    assert counted.flops == {"bf16": runs * 2 * TOKENS * WIDTH * WIDTH}
    kinds = counted.bytes_by_kind()
    assert kinds["kernel rewrite"] == runs * moved.total
    matrix = WIDTH * WIDTH * 2
    assert kinds["matrix products"] == runs * (features + matrix + features)
    assert kinds["elementwise"] == pytest.approx(BATCHES * 3 * states, rel=1e-3)  # total + state; and loop counters
    assert kinds["fills"] == states + runs * scalars
    # The state at the start of each batch and as each layer's result; what is cut out of the stacks: a batch's
    # branches, and for every product its two operands.
    copied = 2 * (BATCHES + runs) * states + 2 * runs * features + 2 * runs * (features + matrix)
    assert kinds["copies and casts"] == pytest.approx(copied, rel=1e-3)
    with pytest.raises(UnknownCustomCall, match="'rewrite'"):
        cost(parse(compiled.as_text()))
