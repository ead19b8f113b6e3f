"""`ddl plan`: the documents and tables, the refusals, and the paper's small models compiled for H200s."""

import contextlib
import io
import json

import jax
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from ddl_jax import plan
from ddl_jax.config import Config, TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.plan import measure, program
from pallas_kernels import h200, hopper
from pallas_kernels.hopper import UnknownCustomCall, target
from tests.h200 import needs_compiler
from tests.quick import QUICK

CONTRACT = {
    "parameters", "flops_per_token", "peak_bytes_per_device", "hbm_bytes_per_step", "collective_bytes_per_step",
    "roofline_seconds", "bound", "largest_microbatch", "fits", "state_bytes", "cache_bytes", "config",
}  # fmt: skip
TINY = [
    "--model.layers", "2", "--model.width", "128", "--model.heads", "2", "--model.context_length", "64",
    "--model.vocab_size", "256", "--training.unroll", "1", "--training.batch_size", "8",
]  # fmt: skip
CC = ["--config", "configs/quickstart.yaml", *TINY]
FILES = ["configs/small/baseline.yaml", "configs/small/cc.yaml"]
EIGHT = ["--training.batch_size", "8", "--training.microbatch_size", "8"]


def run(capsys, *arguments: str) -> str:
    assert plan.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def small():
    """The paper's small baseline and CC, at eight sequences per GPU, compiled in one call."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert plan.main([*FILES, *EIGHT, "--json"]) == 0
    return json.loads(output.getvalue())


@needs_compiler
def test_the_papers_small_models(small):
    baseline, cc = small
    assert [result["config"] for result in small] == FILES
    assert all(result.keys() >= CONTRACT for result in small)
    # By hand: embedding 50304·768; a layer's 4·768² + 3·768·2048 and gains 2·768 + 2·128; the last gain.
    assert baseline["parameters"] == 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768 + 2 * 128) + 768
    # Per sublayer CC has a value 4·768, a gate 768 + 1 and a reader 4·768; one reader more, and the expansion 4·4·768.
    assert cc["parameters"] - baseline["parameters"] == 24 * (9 * 768 + 1) + 4 * 768 + 16 * 768
    for result in small:
        assert result["fits"] and result["bound"] == "memory"
        # float32: the parameters once, the optimiser's moments twice (and its step counts).
        assert result["peak_bytes_by_kind"]["parameters"] == 4 * result["parameters"]
        assert result["peak_bytes_by_kind"]["optimizer"] == pytest.approx(8 * result["parameters"], rel=1e-6)
        assert sum(result["peak_bytes_by_kind"].values()) == result["peak_bytes_per_device"]
        assert all(part > 0 for part in result["peak_bytes_by_kind"].values())
        assert sum(result["hbm_bytes_by_kind"].values()) == result["hbm_bytes_per_step"]
        assert result["roofline_seconds"] == pytest.approx(result["hbm_bytes_per_step"] / 4.8e12)
        assert result["collective_bytes_per_step"] == 0
        assert result["state_bytes"] == 8 * 1024 * 768 * 2 * (1 if result is baseline else 4)
        # The formula counts the causal half of the scores and the stream; the program all its products, and no more.
        assert 0.95 < result["executed_flops_per_token"] / result["flops_per_token"] < 1.1
    # Backward walks the state back: no stack of states is kept.
    assert cc["backward"] == "reversible" and not any("[12,8,1024,4,768]" in array for array in cc["saved_arrays"])
    assert all(sum(r["saved_arrays"].values()) == r["peak_bytes_by_kind"]["saved"] for r in small)
    # The kernels' floor is the least that the edits can move: 2V + 2 features a token forward, 4V + 3 backward.
    floor = 24 * (10 + 19) * 8 * 1024 * 768 * 2
    kernels = sum(moved for kind, moved in cc["hbm_bytes_by_kind"].items() if kind.startswith("kernel"))
    assert floor <= kernels < 1.1 * floor
    assert (cc["attention"], cc["kernels"]) == ("cuDNN", "Pallas (Hopper)")
    assert cc["published"]["memory_factor"] == 1.05


@needs_compiler
def test_four_channels_cost_no_memory_and_a_quarter_of_the_bytes(small, capsys):
    """What the project promises of the small CC model beside a plain one, of the same norms, loss and remat."""
    branch, saved = (
        json.loads(run(capsys, FILES[1], *EIGHT, *setting, "--json"))
        for setting in (["--model.remat", "branch"], ["--model.residual.backward", "saved"])
    )
    walked = small[1]["baseline_ratio"]
    assert walked["peak_bytes_per_device"] <= 1.08
    assert branch["baseline_ratio"]["peak_bytes_per_device"] <= 1.0 < saved["baseline_ratio"]["peak_bytes_per_device"]
    assert 1 < walked["hbm_bytes_per_step"] < saved["baseline_ratio"]["hbm_bytes_per_step"] <= 1.25
    # For it, `branch` computes the output projections again: 2·(768 + 2048)·768 a layer and token.
    again = 12 * 2 * (768 + 2048) * 768
    assert branch["executed_flops_per_token"] - small[1]["executed_flops_per_token"] == pytest.approx(again, rel=0.02)
    # What every policy keeps: those compiled, as the program has it (but for what takes less than a hundredth).
    kept = {(p["remat"], p["backward"], p["state_dtype"]): p["kept_bytes"] for p in branch["policies"]}
    for remat, backward, result in (
        ("elementwise", "reversible", small[1]), ("branch", "reversible", branch), ("elementwise", "saved", saved),
    ):  # fmt: skip
        compiled = result["peak_bytes_by_kind"]["saved"]
        assert kept[remat, backward, "bfloat16"] == pytest.approx(compiled, rel=0.01)
    assert [(p["remat"], p["backward"]) for p in branch["policies"] if p["chosen"]] == [("branch", "reversible")]
    assert kept["layer", "reversible", "bfloat16"] < kept["branch", "reversible", "bfloat16"] / 4
    assert all((p["again"] > 0) == (p["remat"] in ("branch", "layer")) for p in branch["policies"])
    (share,) = {p["again"] for p in branch["policies"] if p["remat"] == "branch"}
    assert share == pytest.approx(again / branch["flops_per_token"])
    layers = {p["backward"]: p["again"] for p in branch["policies"] if p["remat"] == "layer"}
    assert layers["saved"] - layers["reversible"] == pytest.approx(share)  # which keeps the outputs


@needs_compiler
def test_one_configuration_is_one_object_beside_its_baseline(capsys):
    result = json.loads(run(capsys, *CC, "--devices", "4", "--training.microbatch_size", "2", "--json"))
    assert result.keys() >= CONTRACT
    assert result["config"] == "configs/quickstart.yaml"
    # Each of four devices sends 3/4 of its gradients twice, those of bfloat16 products perhaps as bfloat16; loss, count
    # and norms are a few numbers.
    sent = 2 * 3 / 4 * 4 * result["parameters"]
    assert sent / 2 <= result["collective_bytes_per_step"] <= 1.001 * sent
    assert result["seconds_by_limit"]["network"] == result["collective_bytes_per_step"] / h200.NVLINK
    assert result["baseline_ratio"]["parameters"] > 1
    assert (result["batch_size"], result["microbatch_size"], result["devices"]) == (8, 2, 4)


@needs_compiler
def test_tables(small, capsys):
    """Of what is compiled already."""
    detail = run(capsys, "--config", FILES[1], *EIGHT, "--verbose")
    assert "Kept for backward with remat: elementwise, residual.backward: reversible: " in detail
    assert next(iter(small[1]["saved_arrays"])) in " ".join(detail.split())
    assert f"{small[1]['parameters'] / 1e6:.2f} M" in detail and f"{small[0]['parameters'] / 1e6:.2f} M" in detail
    assert "kernel rewrite_and_read_reverse" in detail and "the baseline's memory at 0.77 of its speed" in detail
    table = run(capsys, *FILES, *EIGHT)
    names = [line.split()[0] for line in table.splitlines() if line.startswith(("baseline ", "cc "))]
    assert names == ["baseline", "cc"]
    assert max(map(len, (detail + table).splitlines())) <= 100
    markdown = run(capsys, *FILES, *EIGHT, "--markdown").splitlines()
    assert [line.count("|") for line in markdown[:4]] == [9] * 4
    assert markdown[3].startswith("| cc | 123.8 M | ") and markdown[3].endswith(" | 1.05 / 0.77 |")


@needs_compiler
def test_fit_is_checked_by_a_compilation(capsys, monkeypatch):
    monkeypatch.setattr("ddl_jax.plan.memory.MEMORY", 40e6)  # a dozen of these sequences
    monkeypatch.setattr("ddl_jax.plan.memory.ATTEMPTS", 1)
    monkeypatch.setattr(program, "OPTIONS", program.OPTIONS | QUICK)
    plain = ["configs/bench/baseline.yaml", *TINY, "--model.head_dim", "64", "--training.microbatch_size", "4"]
    result = json.loads(run(capsys, *plain, "--fit", "--json"))
    (a, first), (b, second), (third, peak) = result["fit"]["peaks"]
    each = (second - first) / (b - a)
    assert (a, b, third) == (2, 4, int((40e6 - first + 2 * each) // each))
    assert result["largest_microbatch"] == (third if peak <= 40e6 else 4)
    assert result["fit"]["predicted_peak_bytes"] == pytest.approx(first + (result["largest_microbatch"] - 2) * each)
    # So small a program's memory is no straight line: not all that it takes grows with the micro-batch.
    assert peak == pytest.approx(40e6, rel=0.5)


@needs_compiler
def test_a_call_that_cannot_be_counted_gives_no_totals(capsys, monkeypatch):
    def compiled_step(config, devices):
        raise UnknownCustomCall("the program calls 'strange' (call.7), whose bytes are not known")

    monkeypatch.setattr(program, "compiled_step", compiled_step)
    assert plan.main(CC) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "no totals: the program calls 'strange' (call.7), whose bytes are not known\n"


@pytest.mark.parametrize("arguments, message", [
    (["--devices", "0"], "--devices '0' must be a whole number from 1 to 4096; nearest: 1"),
    (["--devices", "x"], "--devices 'x' must be a whole number"),
    (["--devices", "12"], "--devices 12 does not fill hosts of 8 GPUs; nearest: 8, 16"),
    (["--device", "a100"], "--device 'a100' is not known; known: h200"),
    (["--device", "h20"], "did you mean 'h200'"),
    (["--json", "--markdown"], "--json and --markdown exclude each other"),
    (["--data.tokenizer", "somewhere.json"], "model.vocab_size must be given"),
    ([*CC, "--devices", "3"], "does not divide"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_one_line(arguments, message):
    if "--devices" in arguments or "--data.tokenizer" in arguments:
        pytest.importorskip("jax_plugins.xla_cuda13")
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as refused:
        plan.main(arguments)
    assert "\n" not in str(refused.value)


@needs_compiler
def test_of_several_files_the_refused_one_is_named(tmp_path):
    file = tmp_path / "odd.yaml"
    file.write_text("training: {batch_size: 6}\n")
    with pytest.raises(InputError, match=f"{file}: training.batch_size 6 does not divide"):
        plan.main([FILES[0], str(file), "--devices", "8"])


def test_a_ratio_to_nothing_is_none():
    nothing = dict.fromkeys(measure.COMPARED, 1) | {"executed_flops_per_token": 0}
    assert measure.ratios(nothing, nothing) == dict.fromkeys(measure.COMPARED, 1) | {"executed_flops_per_token": None}


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(target, "PLUGIN", "jax_plugins.of_another_planet")
    target._devices.cache_clear()
    with pytest.raises(InputError, match=r"needs jax's CUDA 13 plugin: pip install -e '\.\[compile\]'"):
        plan.main(CC)


@needs_compiler
def test_of_what_is_divided_a_device_counts_its_part():
    mesh = hopper.mesh({"fsdp": 4})
    divided, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    tree = [jax.ShapeDtypeStruct((8, 3), "float32", sharding=sharding) for sharding in (divided, whole)]
    assert program._bytes_on_one(tree) == 2 * 3 * 4 + 8 * 3 * 4


def test_planning_leaves_dtypes_to_the_gpu():
    settled = program.settled(Config(model=TransformerConfig(state_dtype="float32")).resolve())
    assert (settled.model.compute_dtype, settled.model.state_dtype) == ("bfloat16", "float32")
    assert settled.model.vocab_size == 320  # 257 of the bytes, rounded up
