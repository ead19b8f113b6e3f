"""`ddl bench`: fields of the contract, one document, several configurations in one run."""

import json

import numpy as np
import pytest

from ddl_jax import bench
from ddl_jax.errors import InputError

TINY = ["--model.layers", "1", "--model.width", "8", "--model.context_length", "16", "--training.unroll", "1"]
FIELDS = {"config", "train_step_seconds", "forward_seconds", "tokens_per_second", "compile_seconds"}


def run(capsys, *arguments: str):
    assert bench.main([*arguments, *TINY, "--rounds", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_configuration_is_one_object(capsys):
    result = run(capsys, "--config", "configs/quickstart.yaml", "--model.heads", "2")
    assert result.keys() >= FIELDS
    assert result["config"] == "configs/quickstart.yaml" and result["train_step_ratio"] == 1.0
    assert result["tokens_per_second"] == pytest.approx(8 * 16 / result["train_step_seconds"])
    assert all(result[name] > 0 for name in FIELDS - {"config"})


def test_several_are_compared_with_the_first(capsys):
    files = ["configs/bench/baseline.yaml", "configs/bench/cc.yaml"]
    results = run(capsys, *files, "--model.head_dim", "4", "--model.vocab_size", "64")
    assert [result["config"] for result in results] == files
    assert results[1]["parameters"] > results[0]["parameters"]
    assert results[0]["kernels"] == "" and results[1]["kernels"].startswith("XLA: width 8 is not a multiple of 128")
    ratio = results[1]["train_step_seconds"] / results[0]["train_step_seconds"]
    assert results[1]["train_step_ratio"] == pytest.approx(ratio)


def test_the_table_names_every_configuration(capsys):
    assert bench.main(["--config", "configs/quickstart.yaml", *TINY, "--rounds", "1"]) == 0
    assert "configs/quickstart.yaml" in capsys.readouterr().out


def test_the_input_of_a_corpus_is_timed_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_Contender", None)  # nothing is compiled
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1000
    (tmp_path / "0.bin").write_bytes(header.tobytes() + bytes(2000))
    shards = ["--data.corpus", "shards", "--data.paths", str(tmp_path / "0.bin"), "--training.batch_size", "3"]
    result = run(capsys, "--input", *shards)
    assert result["workers"] == 0 and result["train_tokens"] == 900
    assert result["input_tokens_per_second"] == pytest.approx(3 * 16 / result["batch_seconds"])
    assert bench.main(["--input", *shards, *TINY, "--rounds", "1"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["configuration", "tokens/s"]


def test_the_making_of_tokens_is_timed_by_batch_context_and_length(capsys):
    files = ["configs/bench/baseline.yaml", "configs/bench/cc.yaml"]
    settings = ["--model.head_dim", "4", "--model.vocab_size", "64"]
    sizes = ["--decode", "--batch", "3,1", "--context", "5", "--generated", "2,16"]  # up to 24: past the context of 16
    first, second = run(capsys, *files, *settings, *sizes)
    assert [(row["batch"], row["context"], row["generated"]) for row in second["decode"]] == [
        (1, 5, 2), (1, 5, 16), (3, 5, 2), (3, 5, 16),
    ]  # fmt: skip
    for plain, row in zip(first["decode"], second["decode"], strict=True):
        assert row["decode_tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["milliseconds_per_token"])
        assert row["decode_ratio"] == pytest.approx(plain["milliseconds_per_token"] / row["milliseconds_per_token"])
        assert plain["decode_ratio"] == 1 and row["prompt_seconds"] > 0
    assert second["milliseconds_per_token"]["3"]["5"] == second["decode"][-1]["milliseconds_per_token"]
    assert second["decode_tokens_per_second"]["1"]["5"] == second["decode"][1]["decode_tokens_per_second"]
    assert bench.main(["--config", files[1], *TINY, *settings, "--decode", "--generated", "1", "--rounds", "1"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["configuration", "batch", "context", "generated"]


@pytest.mark.parametrize("arguments, message", [
    (["--decode", "--batch", "0"], "--batch '0' must be whole numbers"),
    (["--decode", "--context", "8,x"], "--context '8,x' must be whole numbers"),
    (["--decode", "--input"], "--input and --decode are two measurements"),
])  # fmt: skip
def test_what_cannot_be_timed_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        bench.main(arguments)


@pytest.mark.parametrize("rounds", ["0", "-1", "2.5", "many", ""])
def test_rounds_must_be_a_count(rounds):
    with pytest.raises(InputError, match="--rounds .* nearest: 1"):
        bench.main(["--rounds", rounds])


def test_a_tokenizer_file_needs_the_vocabulary_size():
    with pytest.raises(InputError, match="model.vocab_size must be given"):
        bench.main(["--data.tokenizer", "somewhere.json"])
