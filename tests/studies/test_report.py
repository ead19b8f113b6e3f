"""`ddl study report`: from study directories made by hand to numbers, tables, pictures and a page."""

import dataclasses
import importlib.util
import json
import re

import pytest

from ddl_jax.command_line import exit_code
from ddl_jax.studies import plots, reporting, tables
from ddl_jax.studies.analysis import summarize
from ddl_jax.studies.results import read_record
from ddl_jax.studies.summary import Summary, document
from tests.studies.study_directory import (
    COSTS,
    FLOPS,
    RATE,
    SECONDS,
    STEPS,
    TOKENS,
    TOKENS_PER_STEP,
    TUNED,
    add,
    begin,
    study,
)

PLAIN, DELTA, WIDE = (3.0, 3.2, 3.1), (2.9, 3.06, 3.04), (2.95, 3.1, 3.0)
STEPS_OF = {"plain": {"flops": 150, "seconds": 200}, "wide": {"flops": 50, "seconds": 125}}  # of delta: 100


def summary(folder):
    return summarize(read_record(folder))


def difference(reading, first, second):
    return next(one for one in reading.differences if (one.first, one.second) == (first, second))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Three readings, all of whose runs have finished. Not to be changed."""
    folder = begin(tmp_path_factory.mktemp("studies") / "complete", study(TOKENS, FLOPS, SECONDS))
    for arm, losses in (("plain", PLAIN), ("delta", DELTA), ("wide", WIDE)):
        for seed, loss in enumerate(losses):
            add(folder, arm, seed, loss)
            for budget, steps in STEPS_OF[arm].items() if arm in STEPS_OF else ():
                add(folder, arm, seed, loss - {"flops": 0.01, "seconds": 0.02}[budget], steps=steps)
    return folder


@pytest.fixture(scope="module")
def report(complete, tmp_path_factory):
    """The folder of its report. Not to be changed."""
    out = tmp_path_factory.mktemp("report")
    assert reporting.main([str(complete), "--out", str(out)]) == 0
    return out


def test_differences_are_taken_seed_by_seed(complete):
    one = difference(summary(complete).readings[0], "delta", "plain")
    assert one.by_seed == pytest.approx({0: -0.1, 1: -0.14, 2: -0.06})
    assert one.mean == pytest.approx(-0.1) and one.same_sign is True and one.n == 3
    # s = 0.04, t(0.975; 2) = 4.3027
    assert one.t_interval == pytest.approx((-0.1 - 4.3027 * 0.04 / 3**0.5, -0.1 + 4.3027 * 0.04 / 3**0.5), abs=1e-5)
    assert one.bootstrap_interval == pytest.approx((-0.14, -0.06))
    assert one.standard_deviation == pytest.approx(0.04)
    # Unpaired: plain's variance is 0.01, that of 2.9, 3.06, 3.04 is 0.0076.
    assert one.unpaired_standard_deviation == pytest.approx(0.0176**0.5)
    assert difference(summary(complete).readings[0], "delta", "wide").same_sign is False


def test_every_budget_has_its_own_steps(complete):
    for reading in summary(complete).readings[1:]:
        for arm, steps in STEPS_OF.items():
            found = reading.arms[arm]
            assert found.steps == steps[reading.budget] and found.tokens == found.steps * TOKENS_PER_STEP
            assert found.flops == found.tokens * COSTS[arm].flops_per_token
            assert found.relative_seconds == pytest.approx(found.steps * COSTS[arm].step_ratio / STEPS)
            assert found.losses[0] == pytest.approx(
                {"plain": 3.0, "wide": 2.95}[arm] - (0.01, 0.02)[reading.budget == "seconds"]
            )
        assert reading.arms["delta"].steps == STEPS


def test_the_noise_floor_is_the_baselines(complete):
    noise = summary(complete).readings[0].noise
    assert noise.n == 3 and noise.standard_deviation == pytest.approx(0.1)
    # (t(0.975; 4) + t(0.8; 4)) · 0.1 · sqrt(2/3) = (2.7764 + 0.9410) · 0.08165
    assert noise.detectable[3] == pytest.approx(3.7174 * 0.08165, abs=1e-4) and set(noise.detectable) == {3, 5, 10}


def test_p_values_are_adjusted_within_a_reading_and_within_the_study(complete):
    found = [one for reading in summary(complete).readings for one in reading.differences]
    assert len(found) == 9
    smallest = min(found, key=lambda one: one.p)
    assert smallest.p_holm == pytest.approx(3 * smallest.p) and smallest.p_holm_study == pytest.approx(9 * smallest.p)


def test_one_seed_gets_no_interval(tmp_path):
    folder = begin(tmp_path, study())
    for arm, loss in (("plain", 3.0), ("delta", 2.9)):
        add(folder, arm, 1, loss)
    reading = summary(folder).readings[0]
    one = difference(reading, "delta", "plain")
    assert one.n == 1 and one.mean == pytest.approx(-0.1)
    names = ("t_interval", "bootstrap_interval", "p", "p_holm", "same_sign", "standard_deviation")
    assert all(getattr(one, name) is None for name in names)
    row = next(row for row in tables.differences(reading).rows if row[0] == "delta − plain")
    assert row[1:] == ("1 of 3", "−0.1000", *["1 seed"] * 6)
    assert next(row for row in tables.arms(reading).rows if row[0] == "delta")[1:3] == ("2.9000 (of 1)", "1 seed")
    assert reading.noise.standard_deviation is None and reading.noise.detectable is None


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn, which takes long."""
    monkeypatch.setattr(plots, "png", lambda figure: b"png")


def test_a_diverged_run_is_told_and_its_pair_left_out(tmp_path, undrawn):
    folder = begin(tmp_path / "study", study())
    for seed in range(3):
        add(folder, "plain", seed, PLAIN[seed])
    add(folder, "delta", 0, 2.9)
    add(folder, "delta", 1, 2.0, until=60, failure=(4, "step 61: loss is nan;\nlikely cause: bad luck"))
    add(folder, "delta", 2, 3.0)
    add(folder, "wide", 0, 9.0, until=30)
    add(folder, "wide", 2, 9.0, until=20, failure=(1, "out of memory"))
    found = summary(folder)
    one = difference(found.readings[0], "delta", "plain")
    assert one.by_seed == pytest.approx({0: -0.1, 2: -0.1}) and one.left_out == {1: "delta diverged"}
    assert found.readings[0].arms["delta"].mean == pytest.approx(2.95)
    states = {(run.arm, run.seed): (run.state, run.step, run.reason) for run in found.missing}
    assert states == {
        ("delta", 1): ("diverged", 60, "step 61: loss is nan; likely cause: bad luck"),
        ("wide", 0): ("half-done", 30, ""),
        ("wide", 1): ("not begun", 0, ""),
        ("wide", 2): ("failed", 20, "out of memory"),
    }
    assert (found.runs_finished, found.runs_planned) == (5, 9)
    assert reporting.main([str(folder)]) == 0
    for name in ("report.md", "index.html"):
        text = (folder / "report" / name).read_text()
        assert "DIVERGED: delta (seed 1, learning rate 0.002)" in text and "LEFT OUT" in text
        assert "FAILED: wide (seed 2" in text and "step 61: loss is nan; likely cause: bad luck" in text
        assert "5 of 9 runs have finished. THE STUDY IS INCOMPLETE" in text


def test_a_finished_run_counts_whatever_was_said_before(tmp_path):
    folder = begin(tmp_path, study())
    add(folder, "plain", 0, 3.0, failure=(-9, "killed"))
    assert summary(folder).readings[0].arms["plain"].losses == {0: 3.0}


def test_missing_runs_of_a_kind_share_a_row(tmp_path, capsys, undrawn):
    folder = begin(tmp_path, study(TOKENS, SECONDS))
    add(folder, "delta", 0, 9.0, until=30)
    rows = tables.missing(summary(folder)).rows
    assert rows[0] == ("delta", "half-done", "0", "30 of 100", "0.002", "equal tokens; equal seconds", "")
    assert ("delta", "not begun", "1, 2", "0 of 100", "0.002", "equal tokens; equal seconds", "") in rows
    assert ("plain", "not begun", "0, 1, 2", "0 of 200", "0.002", "equal seconds", "") in rows
    assert reporting.main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "HALF-DONE, left out: delta seed 0\n" in printed
    assert "NOT BEGUN, left out: plain seed 0 (2 runs), plain seed 1 (2 runs), plain seed 2 (2 runs)" in printed


def test_a_tuned_reading_takes_the_best_rate_of_the_sweep(tmp_path):
    folder = begin(tmp_path, study(TOKENS, TUNED))
    for arm in COSTS:
        losses = {0.5: 3.3, 1.0: 3.2, 2.0: 3.1} if arm == "delta" else {0.5: 3.3, 1.0: 3.1, 2.0: 3.2}
        for factor, loss in losses.items():
            if arm == "wide" and factor == 2.0:
                continue
            add(folder, arm, 1000, loss, rate=RATE * factor)
    add(folder, "delta", 0, 2.5, rate=2 * RATE)
    add(folder, "delta", 0, 2.9)
    add(folder, "plain", 0, 3.0)
    found = summary(folder)
    matched, tuned = found.readings
    assert found.arms["delta"].tuning.chosen == 2 * RATE and found.arms["delta"].tuning.at_edge
    assert found.arms["plain"].tuning.chosen == RATE and not found.arms["plain"].tuning.at_edge
    assert [one.mean for one in found.arms["delta"].tuning.rates] == pytest.approx([3.3, 3.2, 3.1])
    assert difference(matched, "delta", "plain").by_seed == pytest.approx({0: -0.1})
    assert difference(tuned, "delta", "plain").by_seed == pytest.approx({0: -0.5})
    assert tuned.arms["delta"].learning_rate == 2 * RATE and tuned.arms["wide"].steps is None
    assert {run.reason for run in found.missing if run.arm == "wide" and run.learning_rate is None} == {
        "its learning rate is not chosen yet"
    }
    rows = {row[0]: row[1:] for row in tables.tuning(found).rows}
    assert rows["delta"] == ("3.3000", "3.2000", "3.1000 (chosen)", "0.004", "yes")
    assert rows["wide"] == ("3.3000", "3.1000", "not begun", "–", "")
    assert next(run for run in found.missing if run.arm == "plain" and run.seed == 1).readings == (
        "equal tokens",
        "equal tokens, tuned learning rates",
    )


def test_a_rate_that_diverged_is_not_chosen(tmp_path):
    folder = begin(tmp_path, study(TUNED))
    for arm, ends in (("plain", {0.5: None, 1.0: None, 2.0: 50}), ("delta", {0.5: 50, 1.0: 50, 2.0: 50})):
        for factor, until in ends.items():
            failure = None if until is None else (4, "loss is nan")
            add(folder, arm, 1000, 3.0 - factor, rate=RATE * factor, until=until, failure=failure)
    found = summary(folder)
    assert found.arms["plain"].tuning.chosen == RATE and found.arms["delta"].tuning.chosen is None
    reasons = {run.reason for run in found.missing if run.arm == "delta" and run.learning_rate is None}
    assert reasons == {"every learning rate of its sweep diverged"}


def test_an_arm_that_is_not_measured_yet_is_missing(tmp_path, undrawn):
    folder = begin(tmp_path / "study", study(), {arm: cost for arm, cost in COSTS.items() if arm != "plain"})
    add(folder, "delta", 0, 2.9)
    found = summary(folder)
    assert {(run.seed, run.reason) for run in found.missing if run.arm == "plain"} == {
        (seed, "the arm is not measured yet") for seed in range(3)
    }
    assert reporting.main([str(folder)]) == 0


def test_markdown_and_json_say_the_same(report):
    numbers, text = json.loads((report / "summary.json").read_text()), (report / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    for reading in numbers["readings"]:
        for one in reading["differences"]:
            name = f"{one['first']} − {one['second']}"
            bounds = [" … ".join(map(signed, one[of])) for of in ("t_interval", "bootstrap_interval")]
            chances = [f"{one[of]:.4f}" for of in ("p", "p_holm", "p_holm_study")]
            sign = "yes" if one["same_sign"] else "no"
            assert [name, "3 of 3", signed(one["mean"]), *bounds, sign, *chances] in rows
            assert [name, *map(signed, one["by_seed"].values())] in rows
        for arm, found in reading["arms"].items():
            losses = [f"{loss:.4f}" for loss in found["losses"].values()]
            assert any(row[0] == arm and row[3:6] == losses and row[6] == f"{found['steps']:,}" for row in rows)


def signed(value):
    return f"{value:+.4f}".replace("-", "−")


def test_the_initial_updates_are_shown(report):
    assert "| delta | 5.5000 | 0.500 | 0.250 | 0.375 | 0.500 | 0.250 | 1.500 |" in (report / "report.md").read_text()


def test_every_key_of_the_numbers_is_explained(report):
    numbers = json.loads((report / "summary.json").read_text())
    keys = numbers.pop("keys")
    assert set(numbers) == {field.name for field in dataclasses.fields(Summary)}
    assert keys["readings.*.differences.*.by_seed"].startswith("differences of final validation loss")
    nowhere_here = {key for key in keys if key.startswith(("arms.*.tuning.", "missing.*."))}  # no sweep, all complete
    assert set(paths(numbers, "", keys)) == set(keys) - nowhere_here


def paths(value, path, keys):
    """Every key of a document, dotted as its explanations are: names of arms, seeds and places in lists are a star."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}*.", keys)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in COSTS or key.isdecimal():
                yield from paths(item, f"{path}*.", keys)
            else:
                yield f"{path}{key}"
                yield from paths(item, f"{path}{key}.", keys)


def test_the_page_holds_every_picture_and_opens_nothing_else(report):
    names = {path.stem for path in report.glob("*.png")}
    assert names == {"differences", "frontier", "loss_tokens", "loss_flops", "loss_seconds"}
    page = (report / "index.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == len(names) and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|https?://|href=|url\(", page)
    text = (report / "report.md").read_text()
    assert {name for name in names if f"]({name}.png)" in text} == names


def test_the_curves_end_at_the_differences_of_the_table(complete):
    found = summary(complete)
    for reading in found.readings:
        upper, lower = plots.loss_figure(found, reading, reading.budget).axes
        ends = {line.get_color(): line.get_ydata()[-1] for line in lower.lines if line.get_marker() != "None"}
        wanted = {one.first: one.mean for one in reading.differences if one.second == "plain"}
        assert sorted(ends.values()) == pytest.approx(sorted(wanted.values()), abs=1e-9)
        drawn = [line for line in upper.lines if line.get_marker() == "None"]
        assert len(drawn) == 9
        bounds = upper.get_ylim()  # without the beginning, which is too far up to tell the ends apart
        assert all(upper.get_xlim()[0] > line.get_xdata()[0] for line in drawn)
        assert bounds[1] < max(line.get_ydata()[0] for line in drawn)
        assert all(bounds[0] < line.get_ydata()[-1] < bounds[1] for line in drawn)


def test_the_frontier_shows_both_budgets_and_what_nothing_beats(complete):
    found = summary(complete)
    upper, lower = plots.frontier_figure(found).axes
    filled = {line.get_ydata()[0] for line in upper.lines if line.get_marker() not in ("None", None, "")}
    means = [reading.arms[arm].mean for reading in (found.readings[0], found.readings[2]) for arm in COSTS]
    assert sorted(filled) == pytest.approx(sorted(set(means)))
    step = upper.lines[-1]
    assert list(step.get_xdata()) == [0.5, 0.8, 1.0] and list(step.get_ydata()) == pytest.approx(
        [found.readings[0].arms[arm].mean for arm in ("plain", "wide", "delta")]
    )
    assert lower.get_ylabel().startswith("final loss minus that of plain")


def test_each_reading_has_a_panel_of_differences(complete):
    panels = plots.differences_figure(summary(complete)).axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        f"equal {budget}, 3 seeds" for budget in ("tokens", "FLOPs", "seconds")
    ]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "delta − wide",
        "delta − plain",
        "wide − plain",
    ]


def test_without_readings_of_a_budget_the_curves_of_equal_tokens_are_drawn_against_it(tmp_path):
    found = plots.curves(summary(begin(tmp_path, study(TOKENS))))
    assert {name: budget for name, (_, budget) in found.items()} == {
        "loss_tokens": "tokens",
        "loss_flops": "flops",
        "loss_seconds": "seconds",
    }


def test_json_alone_goes_to_stdout(complete, tmp_path, capsys, undrawn):
    assert reporting.main([str(complete), "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "summary.json").read_text()
    assert json.loads(printed)["readings"] == json.loads(json.dumps(document(summary(complete))["readings"]))


def test_a_studys_file_names_its_folder(complete, tmp_path, capsys, undrawn):
    file = tmp_path / "study.yaml"
    file.write_text(
        f"question: Q\nrun_dir: {complete}\nexperiments: {{tiny: tiny.yaml}}\nbaseline: a\nreference: a\n"
        "arms: {a: {}, b: {}}\nreadings: [{budget: tokens, seeds: 1}]\n"
    )
    assert reporting.main([str(file), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "Is delta better?" in shown and "delta − plain" in shown and "−0.1000" in shown


def refused(capsys, *arguments):
    assert exit_code(lambda: reporting.main(list(arguments))) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    return captured.err


def test_what_cannot_be_reported_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    assert "a study is missing" in refused(capsys)
    assert "is not a folder" in refused(capsys, str(tmp_path / "none"))
    assert "no study" in refused(capsys, str(tmp_path))
    folder = begin(tmp_path / "study", study())
    (folder / "measured.json").unlink()
    assert "nothing is measured yet" in refused(capsys, str(folder))
    begin(folder, study(), {"plain": COSTS["plain"]})
    assert "lacks the reference arm delta" in refused(capsys, str(folder))
    begin(folder, study())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("mine")
    assert "holds something else" in refused(capsys, str(folder), "--out", str(tmp_path / "own"))
    tree = json.loads((folder / "study.json").read_text())
    for broken in ("{", "[]", json.dumps(tree | {"study": {}}), json.dumps(tree | {"experiment": {"training": 3}})):
        (folder / "study.json").write_text(broken)
        assert "restore it" in refused(capsys, str(folder))
    begin(folder, study())
    add(folder, "delta", 0, 2.9, until=3, failure=(1, "killed"))
    next(folder.glob("runs/delta/*.failed.json")).write_text("{}")
    assert "failed.json is damaged ('exit_code' is missing); restore or remove it" in refused(capsys, str(folder))
    (folder / "initial.json").write_text('{"delta": {"loss": 3}}')
    assert "initial.json is damaged" in refused(capsys, str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[plots]'" in refused(capsys, str(folder))


def test_a_report_is_written_over_the_one_before(tmp_path, undrawn):
    folder = begin(tmp_path / "study", study(TOKENS, SECONDS))
    add(folder, "delta", 0, 2.9)
    add(folder, "plain", 0, 3.0, steps=200)
    assert reporting.main([str(folder)]) == 0
    assert {path.stem for path in (folder / "report").glob("*.png")} >= {"loss_tokens", "loss_seconds"}
    begin(folder, study(SECONDS))
    assert reporting.main([str(folder)]) == 0
    assert {path.stem for path in (folder / "report").glob("*.png")} == {"differences", "loss_seconds"}
