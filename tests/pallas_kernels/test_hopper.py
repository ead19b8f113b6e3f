"""Compiling for an H200 without one: what is read from the compiled program and its PTX, and the command."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from pallas_kernels import cases, console, hopper
from pallas_kernels.hopper import __main__ as command
from pallas_kernels.hopper import measure, target
from pallas_kernels.hopper.compile import compile_lowered
from pallas_kernels.hopper.ptx import Resources, parse
from tests.h200 import needs_compiler
from tests.pallas_kernels.scale_kernel import arguments, scale

WIDTH = 256


def resources(**changes) -> Resources:
    values = {"name": "k", "threads": 128, "registers": 32, "spill_stores": 0, "spill_loads": 0}
    return Resources(**{**values, "static_shared_memory": 0, "dynamic_shared_memory": 0, **changes})


# By hand from the limits of compute capability 9.0.
@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 16),  # 2048 threads
        ({"threads": 32, "registers": 16}, 32),  # the most blocks
        ({"registers": 80}, 6),  # 80 x 32 = 2560 a warp: 6 warps in each quarter
        ({"registers": 81}, 5),  # rounded up to 2816: 5
        ({"registers": 255}, 2),
        ({"threads": 384, "registers": 168}, 1),
        ({"dynamic_shared_memory": 48 * 1024}, 4),  # 49 KB with the reserve
        ({"dynamic_shared_memory": 227 * 1024}, 1),
        ({"dynamic_shared_memory": 227 * 1024 + 1}, 0),
    ],
)
def test_blocks_per_multiprocessor(changes, blocks):
    assert resources(**changes).blocks_per_multiprocessor == blocks


def test_registers_and_spills_are_read_from_the_assembler():
    ptx = ".version 9.0\n.visible .entry step_mosaic_gpu_kernel(\n)\n.maxntid 128, 2, 1\n.minnctapersm 1\n"
    report = (
        "ptxas info    : Compiling entry function 'step_mosaic_gpu_kernel' for 'sm_90a'\n"
        "    296 bytes stack frame, 280 bytes spill stores, 312 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 2 barriers, 296 bytes cumulative stack size, 1 bytes smem\n"
    )
    passes = "mosaic_gpu.smem_bytes = 7 : i32\nmosaic_gpu.smem_bytes = 11296 : i32}\n"
    got = parse(ptx, report, passes)
    assert got == Resources("step", 256, 255, 280, 312, 1, 11296)
    assert (got.spill_bytes, got.shared_memory_bytes) == (592, 11297)
    with pytest.raises(ValueError, match="ptxas's report"):
        parse(ptx, "", passes)


@needs_compiler
def test_the_resources_of_a_compiled_kernel():
    function = functools.partial(scale, stages=3, rows=2)
    got = hopper.resources(function, *arguments(4096, WIDTH))
    assert (got.name, got.threads, got.spill_bytes) == ("body", 128, 0)
    assert 8 <= got.registers <= 64
    # Three tiles in the ring and one on the way out, three barriers of 8 bytes.
    assert got.dynamic_shared_memory >= 4 * 2 * WIDTH * 2 + 3 * 8
    assert got.dynamic_shared_memory < 4 * 2 * WIDTH * 2 + 2048
    assert hopper.resources(function, *arguments(4096, WIDTH)) == got, "from jax's cache the second time"
    with pytest.raises(ValueError, match="this one has 0"):
        hopper.resources(lambda x, factor: x * 2, *arguments(4096, WIDTH))


@needs_compiler
def test_a_kernel_that_spills_says_so():
    got = hopper.resources(functools.partial(scale, live=40), *arguments(1000, 1024))
    assert got.registers == 255
    assert got.spill_stores > 0
    assert got.spill_loads > 0


@needs_compiler
def test_plain_jit_gathers_a_kernels_operands_and_shard_map_does_not():
    mesh = hopper.mesh({"data": 4})
    rows, all_columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    types = arguments(1024, WIDTH, rows, all_columns)
    plain = hopper.compile_for(scale, *types)
    (gather,) = hopper.collectives(plain)["all-gather"]
    assert gather.bytes == 1024 * WIDTH * 2
    assert gather.shape.startswith("bf16[1024,")
    mapped = jax.shard_map(scale, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
    compiled = hopper.compile_for(mapped, *types)
    assert hopper.collectives(compiled) == {}
    assert hopper.kernels(compiled) == hopper.kernels(plain) == {"body": 1}
    # Counted on one device; and compiling the same kernel by itself finds its resources, though jax has it cached.
    assert hopper.bytes_moved(mapped, *types) == hopper.bytes_moved(scale, *arguments(256, WIDTH))
    assert hopper.resources(scale, *arguments(256, WIDTH)).spill_bytes == 0


@needs_compiler
def test_every_collective_is_found_with_its_bytes():
    mesh = hopper.mesh({"a": 2, "b": 2})
    axes = ("a", "b")

    def body(x):  # (4096, 512) bfloat16, 4 MB on each device
        return (
            jax.lax.psum(x, axes),
            jax.lax.all_gather(x, axes),
            jax.lax.ppermute(x, "a", [(0, 1), (1, 0)]),
            jax.lax.all_to_all(x.reshape(4, -1), axes, 0, 0),
            jax.lax.psum_scatter(x, axes, tiled=True),
        )

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    x = jax.ShapeDtypeStruct((4 * 4096, 512), "bfloat16", sharding=NamedSharding(mesh, P(axes)))
    found = hopper.collectives(hopper.compile_for(mapped, x))
    megabytes = {name: sum(entry.bytes for entry in entries) / 2**20 for name, entries in found.items()}
    assert megabytes == {
        "all-reduce": 4,
        "all-gather": 16,
        "collective-permute": 4,
        "all-to-all": 4,
        "reduce-scatter": 1,
    }


class Text:
    """A compiled program that is nothing but its text."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


def test_collectives_in_two_halves_and_in_tuples_are_listed_once():
    program = Text("""
  %ag = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%x), channel_id=1
  %agd = bf16[32,4]{1,0} all-gather-done(%ag)
  ROOT %ar = (f32[], pred[3]{0}, u32[2]{0}) all-reduce(%a, %b), channel_id=2
  %cp = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%c)
  %a2a = ((bf16[4,2]{1,0}), bf16[4,2]{1,0}) all-to-all-start(%d)
  %not = f32[8] fusion(%all-gather-start), calls=%all-reduce
""")
    found = hopper.collectives(program)
    assert {name: [entry.bytes for entry in entries] for name, entries in found.items()} == {
        "all-gather": [32 * 4 * 2],
        "all-reduce": [4 + 3 + 2 * 4],
        "collective-permute": [24],
        "all-to-all": [16],
    }


def test_bytes_accessed_are_the_operands_and_results_of_every_kernel():
    program = """HloModule m
%fused (p: f32[8]) -> f32[8] {
  ROOT %double = f32[8]{0} add(%p, %p)
}

ENTRY %main (x: f32[8], y: bf16[4,8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %y = bf16[4,8]{1,0} parameter(1), metadata={op_name="y"}
  %two = (f32[8]{0}, f32[4]{0}) fusion(%x, %y, /*index=2*/%x), kind=kLoop, calls=%fused
  %part = f32[8]{0} get-tuple-element(%two), index=0
  %view = f32[2,4]{1,0} bitcast(%part)
  %copied = f32[8]{0} copy(%part)
  ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%part, %copied)
}
"""
    assert hopper.bytes_accessed(Text(program)) == (32 + 64 + 32 + 16) + (32 + 32)
    with pytest.raises(ValueError, match="control flow: while loop"):
        hopper.bytes_accessed(Text(program.replace("%copied = f32[8]{0} copy", "%loop = f32[8]{0} while")))


@needs_compiler
def test_bytes_accessed_by_a_compiled_program():
    x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    compiled = hopper.compile_for(lambda x: jax.numpy.sum(x * 2, axis=1), x)
    assert hopper.bytes_accessed(compiled) == 4 * (1024 * 1024 + 1024)


def test_missing_packages_are_named(monkeypatch, capsys):
    target._devices.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(hopper.MissingExtra, match=r"pip install -e '\.\[compile\]'"):
            hopper.mesh({"device": 1})
        assert command.main(["--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "compile" in output.err

    class Lowered(Text):
        def compile(self):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Neither ptxas/nvlink nor nvjtlink is available.")

    with pytest.raises(hopper.MissingExtra, match="ptxas"):
        compile_lowered(Lowered(""))


def case(kernel, shape, number, excess=0.0, width=WIDTH, **options) -> cases.Case:
    """`scale` on a state of two channels; it moves `excess` more than the case says is the least."""
    minimum = int((2 * number * width * 2 + 8 * width * 4) / (1 + excess))
    x, factor = arguments(number, width)

    def function(state, factor):
        return scale(state.reshape(x.shape), factor, **options)

    return cases.Case(
        kernel, shape, function, (jax.ShapeDtypeStruct((number, 2, width // 2), x.dtype), factor), minimum
    )


@pytest.fixture
def listed(monkeypatch):
    """The command's cases: two that are as they should be, but for the few bytes that they have in flight."""
    monkeypatch.setattr(measure, "LEAST_IN_FLIGHT", 1024)

    def put(*extra):
        good = [case("scale", "small", 1000, excess=0.5), case("scale", "large", 32768)]
        monkeypatch.setattr(cases, "_all", lambda: [*good, *extra])

    put()
    return put


@needs_compiler
def test_the_command_prints_a_table_and_pure_json(listed, capfd):
    assert command.main([]) == 0
    output = capfd.readouterr()
    assert output.out.splitlines()[0].split()[:3] == ["kernel", "shape", "registers"]
    assert len(output.out.splitlines()) == 3
    assert "compiling 2/2 scale large" in output.err
    assert "nvdisasm" not in output.err

    assert command.main(["--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [(row["kernel"], row["shape"]) for row in rows] == [("scale", "small"), ("scale", "large")]
    assert all(tuple(row) == command.COLUMNS for row in rows)
    large = rows[1]
    assert large["bytes_moved"] == large["minimum_bytes"] == 2 * 32768 * WIDTH * 2 + 8 * WIDTH * 4
    assert large["bytes_in_flight"] == 2 * WIDTH * 2, "of the one block that its grid has for each multiprocessor"

    assert command.main(["--json", "--shape", "small", "--kernel", "scale"]) == 0
    assert len(json.loads(capfd.readouterr().out)) == 1


@needs_compiler
def test_the_command_names_what_is_not_as_it_should_be(listed, capfd):
    listed(case("spilling", "tiny", 100, width=1024, live=40), case("wasteful", "large", 32768, excess=0.06, rows=2))
    assert command.main(["--json"]) == 1
    output = capfd.readouterr()
    assert len(json.loads(output.out)) == 4
    assert "spilling tiny: spills" in output.err
    assert "wasteful large: moves 1.060 times the least bytes" in output.err
    assert "scale small:" not in output.err, "few tokens may move more"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel", "scal"], "no kernel 'scal'; did you mean 'scale'? there are: scale"),
        (["--shape", "smal"], "no shape 'smal'; did you mean 'small'? there are: large, small"),
        (["--kernl", "scale"], "did you mean --kernel?"),
        (["--kernel"], "argument --kernel: expected one argument\n"),
    ],
)
def test_bad_arguments_end_in_one_line(listed, capsys, words, message):
    assert command.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_stopped_it_prints_what_it_has(listed, monkeypatch, capsys, words):
    def measured(case):
        if case.shape == "large":
            raise KeyboardInterrupt
        return dict.fromkeys(command.COLUMNS, 40_000) | {"kernel": case.kernel, "shape": case.shape}

    monkeypatch.setattr(command, "mesh", lambda _: None)
    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "faults", lambda *_: [])
    assert command.main(words) == 3
    output = capsys.readouterr()
    if words:
        assert [row["shape"] for row in json.loads(output.out)] == ["small"]
    else:
        assert [line.split()[:2] for line in output.out.splitlines()] == [["kernel", "shape"], ["scale", "small"]]
    assert output.err.count(f"{console.STOPPED}\n") == 1


def test_the_command_as_a_process():
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=120)
    asked = run([sys.executable, "-m", "pallas_kernels.hopper", "--help"])
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "--kernel" in asked.stdout
    wrong = run([sys.executable, "-m", "pallas_kernels.hopper", "--json", "--kernel", "no such kernel"])
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no kernel 'no such kernel'" in wrong.stderr
