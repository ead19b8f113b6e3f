"""`ddl study run`, with workers that compute nothing: what is run, recorded, refused, stopped and gone on with."""

import json
import os
from pathlib import Path
import signal
import sys
import threading
import time

import pytest
from rich.console import Console
import yaml

from ddl_jax import study
from ddl_jax.errors import InputError
from ddl_jax.studies import folder, jobs, places
from ddl_jax.studies.design import PlannedRun
from ddl_jax.studies.schedule import Progress
from ddl_jax.studies.table import Display, Row, shown_rows

WORKER = Path(__file__).with_name("fake_worker.py")
EXPERIMENT = {
    "model": {"layers": 1, "width": 16, "heads": 2, "context_length": 16},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
    "training": {"steps": 6, "batch_size": 2},
}
PLAIN, DELTA = {"model": {"residual": {"kind": "additive"}}}, {"model": {"residual": {"kind": "delta"}}}
STUDY = {
    "question": "Does it work?",
    "experiments": {"tiny": "tiny.yaml", "other": "tiny.yaml"},
    "baseline": "plain",
    "reference": "delta",
    "seeds": [0, 1],
    "learning_rate_factors": [1, 2],
    "tuning_seeds": [9],
    "readings": [{"budget": "tokens", "seeds": 2}],
    "arms": {"plain": PLAIN, "delta": DELTA},
}


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """(changes to the study, *arguments) → exit code of the command."""
    monkeypatch.setattr(places, "command", lambda arguments: [sys.executable, "-S", *path, str(WORKER), *arguments])
    path = ["-c", f"import sys, runpy; sys.path += {sys.path!r}; runpy.run_path(sys.argv.pop(1), run_name='__main__')"]
    monkeypatch.setattr(jobs, "POLL", 0.02)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(EXPERIMENT))

    def begin(changes: dict, *arguments: str) -> int:
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump(STUDY | {"run_dir": str(tmp_path / "out")} | changes, sort_keys=False))
        return study.main(["run", str(file), *arguments])

    return begin


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def starts(out: Path) -> dict[str, int]:
    """How often each run was begun."""
    return {
        f"{file.parts[-3]}/{file.parts[-2]}": len(file.read_text().splitlines()) for file in out.glob("runs/*/*/starts")
    }


def arms(*names: str) -> dict:
    return {"arms": STUDY["arms"] | dict.fromkeys(names, DELTA)}


def test_everything_is_measured_and_run_once(begin, out, capsys):
    wide = {"arms": STUDY["arms"] | {"wide": PLAIN | {"widened_to": "delta"}}}
    readings = {"readings": [{"budget": "tokens", "seeds": 2}, {"budget": "seconds", "seeds": 1}]}
    assert begin(wide | readings) == 0
    measured = json.loads((out / "measured.json").read_text())
    assert {arm: cost["step_ratio"] for arm, cost in measured["arms"].items()} == pytest.approx(
        {"delta": 1.0, "plain": 2 / 3, "wide": 1.0}
    )
    assert measured["widened"]["wide"]["width"] == measured["arms"]["wide"]["width"] == 24
    assert measured["device"] == "fake" and measured["cores"] == 1 and measured["widened"]["wide"]["tried"]
    assert yaml.safe_load((out / "arms" / "wide.yaml").read_text())["model"]["head_dim"] == 12
    assert json.loads((out / "initial.json").read_text()).keys() == measured["arms"].keys()
    recorded = json.loads((out / "study.json").read_text())
    assert recorded["experiment"]["training"]["steps"] == 6 and recorded["study"]["question"] == "Does it work?"
    begun = starts(out)
    assert set(begun.values()) == {1}
    assert {name for name in begun if "plain" in name} == {
        f"plain/{name}" for name in ("steps6_lr0.001_seed0", "steps6_lr0.001_seed1", "steps9_lr0.001_seed0")
    }
    assert len(begun) == 7  # two seeds of three arms, and plain at equal seconds
    assert "7 of 7 runs done" in capsys.readouterr().out
    assert begin(wide | readings) == 0 and starts(out) == begun
    assert json.loads((out / "measured.json").read_text()) == measured


def test_failures_are_recorded_and_do_not_stop_the_others(begin, out, capsys):
    assert begin(arms("broken", "crash")) == 1
    said = capsys.readouterr().out
    assert "4 of 8 runs done, 2 diverged, 2 failed" in said and "failed: no space" in said and "--retry" in said
    failure = json.loads((out / "runs" / "crash" / "steps6_lr0.001_seed0.failed.json").read_text())
    assert failure == {"exit_code": 1, "message": "failed: no space"}
    assert json.loads(PlannedRun("broken", 6, 1e-3, 1).beside(out, "failed.json").read_text())["exit_code"] == 4
    assert begin(arms("broken", "crash")) == 1
    assert set(starts(out).values()) == {1}
    assert begin(arms("broken", "crash"), "--retry") == 1
    assert starts(out) == {name: 2 if name.startswith("crash") else 1 for name in starts(out)}
    assert begin(arms("broken"), "--arms", "broken") == 0, "a run that diverged is a result"


def test_the_tuned_rate_is_the_better_one(begin, out):
    """The workers' loss is least at 0.002, twice the experiment's rate."""
    tuned = {"readings": [{"budget": "tokens", "seeds": 1, "learning_rate": "tuned"}]}
    assert begin(tuned | arms("broken")) == 0
    assert {name for name in starts(out) if "seed0" in name} == {
        "plain/steps6_lr0.002_seed0", "delta/steps6_lr0.002_seed0",
    }  # fmt: skip
    assert {name for name in starts(out) if "delta" in name and "seed9" in name} == {
        "delta/steps6_lr0.001_seed9", "delta/steps6_lr0.002_seed9",
    }  # fmt: skip


def test_a_stop_request_ends_in_good_order_and_the_same_command_goes_on(begin, out, capsys):
    def ask():
        while not list(out.glob("runs/slow/*/waits")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begin(arms("slow"), "--arms", "slow", "--jobs", "1") == 3
    thread.join()
    assert "the same command goes on" in capsys.readouterr().out.lower()
    assert len(starts(out)) == 1 and not list(out.glob("runs/slow/*.failed.json"))
    for stopped in list(out.glob("runs/slow/*")):
        if stopped.is_dir():
            (out / "runs" / "slow" / "steps6_lr0.001_seed1").mkdir(exist_ok=True)
            (out / "runs" / "slow" / "steps6_lr0.001_seed1" / "stopped").touch()
    assert begin(arms("slow"), "--arms", "slow") == 0
    assert sorted(starts(out).values()) == [1, 2]


def test_each_run_has_its_share_of_the_cores(begin, out):
    cores = sorted(os.sched_getaffinity(0))
    assert begin({}, "--seeds", "0", "--jobs", "1") == 0
    assert {file.read_text().strip() for file in out.glob("runs/*/*/starts")} == {str(cores)}
    assert begin({}) == 0  # one on each core
    assert {file.read_text().strip() for file in out.glob("runs/*/*seed1/starts")} <= {f"[{core}]" for core in cores}
    assert sorted(os.sched_getaffinity(0)) == cores


def test_shares_of_the_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [place.devices for place in places.places("gpu", 4, 2)] == [("4", "5"), ("6", "7")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [place.devices for place in places.places("gpu", 4, None)] == [("0",), ("1",), ("2",), ("3",)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert [place.cores for place in places.places("cpu", 1, None)] == [(3,), (5,), (7,)]
    with pytest.raises(InputError, match="--jobs 4 is more than the 3 CPU cores here; nearest: 3"):
        places.places("cpu", 1, 4)


def test_arms_seeds_and_readings_may_be_added(begin, out):
    assert begin({}) == 0
    before = json.loads((out / "measured.json").read_text())
    added = arms("more") | {"seeds": [0, 1, 2], "readings": [{"budget": "tokens", "seeds": 3}]}
    assert begin(added, "--training.log_every", "3") == 0  # a cadence may change, too
    after = json.loads((out / "measured.json").read_text())
    assert after["arms"].items() >= before["arms"].items() and after["arms"]["more"]["step_ratio"] == 1.0
    assert len(starts(out)) == 9 and set(starts(out).values()) == {1}


def test_another_study_in_the_same_folder_is_refused(begin, out, monkeypatch):
    assert begin({}) == 0
    for changes, arguments, message in (
        ({}, ["--training.steps", "7"], "arm plain has another training.steps (was 6, now 7)"),
        ({"arms": {"plain": PLAIN, "delta": {"model": {"residual": {"kind": "write_only"}}}}}, [],
         "arm delta has another model.residual.kind (was 'delta', now 'write_only')"),
        ({"reference": "plain"}, [], "another reference (was delta, now plain)"),
        ({"arms": {"plain": PLAIN | {"widened_to": "delta"}, "delta": DELTA}}, [], "arm plain was widened to null"),
    ):  # fmt: skip
        for dry in ([], ["--dry-run"]):
            with pytest.raises(InputError) as error:
                begin(changes, *arguments, *dry)
            assert message in str(error.value)
    monkeypatch.setenv("FAKE_DEVICE", "another")
    with pytest.raises(InputError, match="measured on fake, not another"):
        begin(arms("more"))


def test_a_second_process_is_refused(begin, out):
    with folder.held(out), pytest.raises(InputError, match="is in use by another process"):
        begin({})


def test_a_dry_run_writes_nothing_and_says_what_is_known(begin, out, capsys):
    assert begin({}, "--dry-run") == 0
    assert not out.exists() and "Nothing is measured yet" in capsys.readouterr().out
    assert begin({}, "--seeds", "0") == 0
    capsys.readouterr()
    assert begin({}, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "2 of 4 runs done" in said and "left" in said and len(starts(out)) == 2


def test_another_experiment_has_a_folder_of_its_own(begin, tmp_path):
    assert begin({}, "--experiment", "other", "--arms", "plain", "--seeds", "1") == 0
    assert list(starts(tmp_path / "out-other")) == ["plain/steps6_lr0.001_seed1"]


@pytest.mark.parametrize("arguments, message", [
    (["--arms", "plane"], "--arms 'plane' is not an arm; did you mean 'plain'?"),
    (["--seeds", "5"], "--seeds '5' is not one of the study's; known: 0, 1"),
    (["--jobs", "0"], "--jobs '0' must be a whole number from 1"),
    (["--experiment", "tinny"], "did you mean 'tiny'?"),
    (["--seed", "1"], "--seed does not apply"),
    (["--model.residual.kind", "write_only"], "--model.residual.kind 'write_only' has no effect on arm plain"),
    (["--model.width", "15"], "arm plain: model.width 15 is not divisible by model.heads 2"),
    (["--resume"], "unknown option '--resume'"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_line(begin, out, arguments, message):
    with pytest.raises(InputError) as error:
        begin({}, *arguments)
    assert message in str(error.value) and not out.exists()


def test_the_words_of_the_command(capsys):
    assert study.main(["--help"]) == 0 and "report" in capsys.readouterr().out
    for arguments in ([], ["ran"]):
        with pytest.raises(InputError, match="run"):
            study.main(arguments)


def rows(*states: str) -> list[Row]:
    return [Row(PlannedRun("delta", 10, 0.1, seed), state, Progress(5, 1.5, 1.25), 60) for seed, state in
            enumerate(states)]  # fmt: skip


def test_a_table_that_does_not_fit_shows_what_runs_and_what_failed():
    many = rows(*["done"] * 5, "failed", "done", "running", "running", *["waiting"] * 6)
    assert [row.run.seed for row in shown_rows(many, 5)] == [5, 6, 7, 8, 9]
    assert shown_rows(many, 50) == many


def test_the_table_on_a_terminal():
    console = Console(force_terminal=True, width=100, height=12, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with Display("Does it pay?", console) as display:
        display.update(rows("done", "running", "waiting"), "1 of 3 runs done; 2 min left")
    said = console.export_text()
    assert "Does it pay?" in said and "1.250" in said and "1 of 3 runs done" in said and "running" in said
