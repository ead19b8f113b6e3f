"""XLA against Pallas: the float64 that both are compared with, the clock, the command and its chart."""

import functools
import importlib.util
import json
import os
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from pallas_kernels import cases, console, hopper
from pallas_kernels.cases import Shape
from pallas_kernels.compare import __main__ as command
from pallas_kernels.compare import compiled, measure, oracle, report, timing
from pallas_kernels.compare.measure import Outcome, finite, row
from pallas_kernels.compare.operations import PASSES, Comparison
from pallas_kernels.hopper import MissingExtra
from pallas_kernels.rewrite import api, mosaic_gpu, xla
from tests.pallas_kernels import test_token_read
from tests.pallas_kernels.oracle import draw, oracle_gradients
from tests.pallas_kernels.oracle import oracle as rewrite_oracle

needs_plots = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plots")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A shape of that name; and no H200 is compiled for."""
    monkeypatch.setitem(cases.SHAPES, "tiny", Shape(4, 2, 128, sequence=4))
    monkeypatch.setattr(compiled, "compiled", compiled.moved)


# What both are compared with.


def test_float64_equals_the_oracle_and_its_differences():
    arguments, (d_new, d_read) = draw(np.random.default_rng(0), (5,), 3, 24)
    for ours, theirs in zip(oracle.rewrite(*arguments), rewrite_oracle(*arguments, erase=True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    ours = oracle.rewrite_gradients(*arguments, d_new, d_read)
    for got, wanted in zip(ours, oracle_gradients(*arguments, d_new, d_read, erase=True), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    alone = oracle.rewrite_gradients(*arguments[:4], None, d_new, None)
    for got, wanted in zip(alone, oracle_gradients(*arguments, d_new, 0 * d_read, erase=True), strict=False):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 7])
def test_float64_equals_the_token_reads_oracle(tokens):
    arguments = test_token_read.draw(test_token_read.Case(3, tokens, 2, 16, 4, "float32", 132))
    X, a, dx = arguments
    ours = (*oracle.token_read(X, a), *oracle.token_read_gradients(X, a, dx))
    for got, wanted in zip(ours, test_token_read.oracle(*arguments), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_relative_error_is_that_of_the_worst_token():
    wanted = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]])
    size = np.sqrt((25 + 100) / 3)  # of a token on average
    assert oracle.relative_error([wanted], [wanted]) == 0
    large, small = np.zeros((2, 3, 2))
    large[1, 0] = small[2, 0] = 0.1
    assert oracle.relative_error([wanted + large], [wanted]) == pytest.approx(0.01)
    assert oracle.relative_error([wanted + small], [wanted]) == pytest.approx(0.1 / size)
    assert np.isnan(oracle.relative_error([wanted * [[1], [np.nan], [1]], wanted], [wanted, wanted]))


@pytest.mark.parametrize("what", PASSES, ids=lambda what: f"{what.operation}-{what.direction}")
def test_every_pass_runs_what_it_says(what):
    comparison = Comparison(what, "tiny")
    assert 0 < comparison.relative_error("xla", 4) < 2.0**-8
    assert comparison.case.kernel == what.kernel
    # Results are what the kernel's own program gives, in number and in shape.
    call = comparison.call("xla", comparison.arguments(0), 1)
    results = [(result.shape, result.dtype) for result in jax.eval_shape(comparison.run("xla"), *call)]
    abstract = jax.eval_shape(comparison.run("xla"), *comparison.abstract_call("xla"))
    assert results == [(result.shape, result.dtype) for result in abstract]


# The clock.


class Device:
    """Does what is enqueued one after the other while the host's clock goes on."""

    def __init__(self):
        self.now = self.free = 0.0

    def program(self, seconds, calls, launch=1e-6):
        def enqueue():
            self.now += launch
            self.free = max(self.free, self.now + 50e-6) + next(seconds)  # 50 µs until the first begins
            return self.free

        return timing.Program(enqueue, calls)

    def wait(self, until):
        self.now = max(self.now, until) + 30e-6  # and 30 µs to notice the end


def constantly(seconds):
    while True:
        yield seconds


def test_launching_and_noticing_are_not_counted():
    device = Device()
    programs = {"slow": device.program(constantly(400e-6), 4), "fast": device.program(constantly(80e-6), 8)}
    seconds = timing.median_seconds(programs, clock=lambda: device.now, wait=device.wait)
    assert seconds == {"slow": pytest.approx(100e-6, rel=1e-6), "fast": pytest.approx(10e-6, rel=1e-6)}


def test_compiling_and_the_first_rounds_are_not_counted_and_one_slow_program_changes_no_median():
    device = Device()

    def seconds():
        yield 3.0  # compiles
        for _ in range(25):
            yield 2e-3  # clocks are rising
        yield 0.5
        yield from constantly(1e-3)

    programs = {"one": device.program(seconds(), 1)}
    assert timing.median_seconds(programs, clock=lambda: device.now, wait=device.wait)["one"] == pytest.approx(1e-3)


def test_programs_take_turns():
    order = []
    programs = {name: timing.Program(functools.partial(order.append, name), 1) for name in "ab"}
    timing.median_seconds(programs, rounds=4, clock=iter(np.arange(1000.0)).__next__, wait=lambda _: None)
    turns = "".join(order).replace("aa", "a").replace("aa", "a").replace("bb", "b").replace("bb", "b")
    assert turns.count("ab") >= 4 + timing.WARMUP


def test_a_program_writes_over_its_own_results():
    program = timing.program(lambda x, y: (x + y, x), [(jnp.ones(3), jnp.full(3, n)) for n in range(3)])
    first = program.enqueue()
    second = program.enqueue()
    assert program.calls == 3
    assert all(result.is_deleted() for result in first)
    np.testing.assert_array_equal(second[4], 3 * np.ones(3))


def test_a_program_moves_more_than_the_cache_holds():
    for nbytes in (20 * 2**20, 500 * 2**20, 4 * 2**30):
        assert 2 <= timing.calls_for(nbytes) <= timing.CALLS
        assert timing.uncached(nbytes)
    assert not timing.uncached(2**20)


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="needs the extra h200")
@pytest.mark.parametrize(("what", "implementation"), [(PASSES[2], "xla"), (PASSES[4], "pallas")])
def test_what_is_timed_holds_the_calls_and_nothing_else(what, implementation):
    comparison = Comparison(what, "small")
    alone = NamedSharding(hopper.mesh({"device": 1}), PartitionSpec())
    arrays, tree = jax.tree.flatten([comparison.abstract_call(implementation, alone) for _ in range(2)])
    run = timing.batch(comparison.run(implementation), tree)
    results = jax.eval_shape(run, [], arrays)
    results = [jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=alone) for result in results]
    program = hopper.compile_for(run, results, arrays)
    assert hopper.kernels(program) == ({what.kernel: 2} if implementation == "pallas" else {})
    assert " copy(" not in program.as_text().partition("\nENTRY ")[2]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(result.size * result.dtype.itemsize for result in results)


def test_a_row_is_the_least_bytes_over_the_time():
    comparison = Comparison(PASSES[0], "small")
    least = comparison.case.minimum_bytes
    got = row(comparison, "pallas", Outcome(seconds=1e-3, copied=2e3 * least, relative_error=np.nan))
    assert tuple(got) == report.COLUMNS
    assert (got["gigabytes_per_second"], got["copy_fraction"]) == (pytest.approx(least / 1e6), pytest.approx(0.5))
    assert finite(got)["relative_error"] is None
    tiny = row(Comparison(PASSES[0], "tiny"), "xla", Outcome(seconds=1e-6, copied=1e12))
    assert tiny["copy_fraction"] is None, "the cache holds it"


# The command.


def test_json_is_pure_and_complete(capfd):
    assert command.main(["--json", "--shape", "tiny", "--operation", "rewrite"]) == 0
    output = capfd.readouterr()
    rows = json.loads(output.out)
    assert [(r["pass"], r["implementation"]) for r in rows] == [
        (which, name) for which in ("forward", "backward") for name in ("xla", "pallas")
    ]
    for found in rows:
        assert tuple(found) == report.COLUMNS
        assert (found["operation"], found["shape"]) == ("rewrite", "tiny")
        assert found["seconds"] is found["gigabytes_per_second"] is found["copy_fraction"] is None
        assert 0 < found["relative_error"] < 2.0**-8
    assert "times would mean nothing" in output.err
    assert "comparing 2/2 rewrite backward tiny, about" in output.err


@needs_plots
def test_the_table_says_what_was_not_measured_and_the_chart_what_is_moved(capfd, tmp_path):
    chart = tmp_path / "chart.png"
    assert command.main(["--shape", "tiny", "--operation", "rewrite_and_read", "--plot", str(chart)]) == 0
    heading, titles, *lines = capfd.readouterr().out.splitlines()
    assert "times would mean nothing" in heading and "4 tokens" not in heading
    assert titles.split()[:4] == ["operation", "shape", "pass", "implementation"]
    assert len(lines) == 4
    forward = lines[1].split()
    assert forward[:7] == ["rewrite_and_read", "tiny", "forward", "pallas", "–", "–", "–"]
    assert float(forward[8]) >= 1, "bytes moved"
    content = chart.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000
    width, height = struct.unpack(">II", content[16:24])
    assert 600 < width < 3000 and 200 < height < 2000


@needs_plots
def test_the_chart_of_a_whole_comparison(tmp_path):
    rows = [
        {
            "operation": what.operation,
            "shape": shape,
            "pass": what.direction,
            "implementation": name,
            "copy_fraction": None if shape == "wide" and name == "pallas" else 0.5,
        }
        for shape in ("small", "medium", "wide")
        for what in PASSES
        for name in ("xla", "pallas")
    ]
    report.plot_speed(rows, tmp_path / "a.png", "some card")
    report.plot_speed([{**found, "copy_fraction": None} for found in rows], tmp_path / "b.png", "some card")
    assert (tmp_path / "a.png").stat().st_size > (tmp_path / "b.png").stat().st_size > 5_000


def test_what_a_gpu_would_show(monkeypatch, capfd):
    def timed(programs):
        assert all(jnp.isfinite(result).all() for one in programs.values() for result in one.enqueue())
        return {name: number + 1.0 for number, name in enumerate(programs)}

    monkeypatch.setattr(command, "_on_gpu", lambda: True)
    monkeypatch.setattr(command, "IMPLEMENTATIONS", ("xla",))
    monkeypatch.setattr(timing, "median_seconds", timed)
    monkeypatch.setattr(timing, "CALLS", 2)
    monkeypatch.setattr(measure, "COPY", 2**20)
    monkeypatch.setattr(measure, "_copy", measure._copy.__wrapped__)
    assert command.main(["--shape", "tiny", "--operation", "rewrite", "--json"]) == 0
    output = capfd.readouterr()
    forward, backward = json.loads(output.out)
    assert forward["seconds"] == backward["seconds"] == 2.0
    assert forward["gigabytes_per_second"] == pytest.approx(Comparison(PASSES[0], "tiny").case.minimum_bytes / 2e9)
    assert "cpu: copies on the device at 0 to 0 GB/s" in output.err


def spoiled(array):
    return (array.astype(jnp.float32) * 1.01).astype(array.dtype)


@pytest.mark.parametrize("broken", ["xla", "pallas"])
def test_a_kernel_that_is_wrong_by_a_hundredth_is_seen(monkeypatch, capfd, broken):
    module = {"xla": xla, "pallas": mosaic_gpu}[broken]
    whole = module.forward
    monkeypatch.setattr(module, "forward", lambda *a, **k: tuple(map(spoiled, whole(*a, **k))))
    api._kernels.cache_clear()
    monkeypatch.setattr(command, "PASSES", PASSES[:1])
    assert command.main(["--json", "--shape", "tiny"]) == 1
    api._kernels.cache_clear()
    output = capfd.readouterr()
    errors = {found["implementation"]: found["relative_error"] for found in json.loads(output.out)}
    assert errors.pop(broken) == pytest.approx(0.01, rel=0.1)
    assert all(error < 0.003 for error in errors.values())
    assert f"rewrite forward tiny {broken}: relative error 1.0e-02; 3.9e-03 is allowed" in output.err


def test_one_that_fails_does_not_hide_the_other(monkeypatch, capfd):
    def fail(*_, **__):
        raise RuntimeError("no such instruction\nand a stack")

    monkeypatch.setattr(xla, "forward", fail)
    monkeypatch.setattr(command, "PASSES", PASSES[:1])
    assert command.main(["--json", "--shape", "tiny"]) == 1
    output = capfd.readouterr()
    assert [found["relative_error"] is None for found in json.loads(output.out)] == [True, False]
    assert "rewrite forward tiny xla: RuntimeError: no such instruction\n" in output.err


def test_stopped_it_prints_what_it_has(monkeypatch, capfd):
    def measured(comparison, implementations, **_):
        if comparison.what.direction == "backward":
            raise KeyboardInterrupt
        return {name: Outcome(relative_error=0.0) for name in implementations}

    monkeypatch.setattr(command, "measure", measured)
    assert command.main(["--json", "--shape", "tiny"]) == 3
    output = capfd.readouterr()
    assert len(json.loads(output.out)) == 2
    assert output.err.count(f"{console.STOPPED}\n") == 1


def test_stopped_before_the_first_there_is_no_chart(monkeypatch, capfd, tmp_path):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "require_plots", lambda: None)
    monkeypatch.setattr(command, "measure", stop)
    assert command.main(["--shape", "tiny", "--plot", str(tmp_path / "a.png")]) == 3
    assert capfd.readouterr().out.count("\n") == 2, "the heading and the titles"
    assert not any(tmp_path.iterdir())


def test_a_chart_that_cannot_be_saved_leaves_the_table(monkeypatch, capfd, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "require_plots", lambda: None)
    monkeypatch.setattr(report, "plot_moved", full)
    monkeypatch.setattr(compiled, "compiled", lambda *_: compiled.Compiled(None))
    monkeypatch.setattr(command, "measure", lambda *_, **__: {"xla": Outcome(relative_error=0.0)})
    monkeypatch.setattr(command, "PASSES", PASSES[:1])
    chart = tmp_path / "a.png"
    assert command.main(["--shape", "tiny", "--plot", str(chart)]) == 1
    output = capfd.readouterr()
    assert output.out.splitlines()[-1].startswith("rewrite")
    assert output.err.endswith(f"--plot {chart}: No space left on device\n")


def test_asking_whether_a_chart_can_be_written_changes_nothing(tmp_path):
    old, link = tmp_path / "old.png", tmp_path / "link.PNG"
    old.write_bytes(b"a chart")
    link.symlink_to("new.png")
    assert [command._unwritable(str(path)) for path in (old, link, tmp_path / "new.png")] == [None] * 3
    assert old.read_bytes() == b"a chart"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.PNG", "old.png"]


def test_stopped_where_there_is_nothing_to_print(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(console.signal, "signal", lambda *_: None)
    assert console.run(stop) == 3
    assert capsys.readouterr() == ("", f"{console.STOPPED}\n")


@pytest.mark.parametrize("length", [1, 100_000], ids=["at the end", "at once"])
def test_output_that_nobody_reads_is_no_failure(length):
    reader, writer = os.pipe()
    os.close(reader)
    program = f"import sys; from pallas_kernels.console import run; sys.exit(run(lambda: print('x' * {length}) or 1))"
    asked = [sys.executable, "-c", program]
    got = subprocess.run(asked, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (got.returncode, got.stderr) == (console.UNREAD, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--operation", "rewrit"], "no operation 'rewrit'; did you mean 'rewrite'? there are: reversible_rewrite"),
        (["--shape", "smal"], "no shape 'smal'; did you mean 'small'? there are: medium"),
        (["--operatoin", "rewrite"], "did you mean --operation?"),
        (["--plot"], "argument --plot: expected one argument\n"),
        (["--plot", "no/such/folder/a.png"], "there is no folder"),
        (["--plot", ""], "--plot: the name of the file is empty"),
        (["--plot", "."], "--plot .: is a folder"),
        (["--plot", "a.svg"], "--plot a.svg: charts are PNG: give a file that ends in .png"),
        (["--plot", f"{'a' * 300}.png"], "cannot be written: File name too long"),
    ],
)
def test_bad_arguments_end_in_one_line(capsys, words, message):
    assert command.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err


def test_missing_extras_are_named(monkeypatch, capfd, tmp_path):
    def missing(*_):
        raise MissingExtra("compiling for an H200 needs something: pip install -e '.[compile]'")

    monkeypatch.setattr(compiled, "compiled", missing)
    monkeypatch.setattr(command, "PASSES", PASSES[:1])
    assert command.main(["--shape", "tiny"]) == 0
    output = capfd.readouterr()
    assert output.err.count(".[compile]") == 1
    assert float(output.out.splitlines()[-1].split()[8]) >= 1, "the bytes moved are known without"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(["--plot", str(tmp_path / "a.png")]) == 2
    output = capfd.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert "pip install -e '.[plots]'" in output.err
