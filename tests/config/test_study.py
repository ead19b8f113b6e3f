"""The settings of a study: what a file may say, what follows from it, and what is refused in one line."""

from pathlib import Path

import pytest
import yaml

from ddl_jax.config.study import arm_config, load_experiment, load_study
from ddl_jax.errors import InputError

FOLDER = Path(__file__).parents[2] / "configs" / "studies"
STUDIES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "laptop")
STUDY = {
    "question": "Which?",
    "run_dir": "runs/which",
    "experiments": {"here": "here.yaml"},
    "baseline": "plain",
    "reference": "delta",
    "arms": {
        "plain": {"model": {"residual": {"kind": "additive"}}},
        "wide": {"widened_to": "delta", "model": {"residual": {"kind": "additive"}}},
        "delta": {"model": {"residual": {"kind": "delta"}}},
    },
    "readings": [{"budget": "tokens", "seeds": 3}, {"budget": "seconds", "seeds": 2, "learning_rate": "tuned"}],
}


@pytest.fixture
def load(tmp_path):
    def load(**changes):
        tree = {key: value for key, value in (STUDY | changes).items() if value is not None}
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
        (tmp_path / "here.yaml").write_text("model: {width: 24, heads: 2, vocab_size: 9}\n")
        return load_study(tmp_path / "study.yaml")

    return load


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_has_arms_that_can_be_trained(path):
    study = load_study(path)
    for file in study.experiments.values():
        experiment = load_experiment([file], {})
        made = {arm: arm_config(study, experiment, arm) for arm in study.arms}
        assert len({str(config.data) for config in made.values()}) == 1
        differ = [str(config.model) for arm, config in made.items() if study.arms[arm].widened_to is None]
        assert len(set(differ)) == len(differ)  # no arm is another once more


def test_experiments_lie_beside_the_file(load, tmp_path):
    assert load().experiments == {"here": str(tmp_path / "here.yaml")}


def test_differences_come_before_those_to_the_baseline_and_none_twice(load):
    study = load(differences=["delta - wide", "delta - plain"])
    assert study.pairs() == [("delta", "wide"), ("delta", "plain"), ("wide", "plain")]


def test_readings_have_names(load):
    assert [reading.name for reading in load().readings] == ["equal tokens", "equal seconds, tuned learning rates"]


def test_a_widened_arm_has_wider_heads_and_no_more_of_them(load, tmp_path):
    study = load()
    experiment = load_experiment([str(tmp_path / "here.yaml")], {})
    model = arm_config(study, experiment, "wide", width=36).model
    assert (model.width, model.heads, model.head_dim) == (36, 2, 18)
    assert arm_config(study, experiment, "delta").model.width == 24


def arms(**changes):
    return {"arms": STUDY["arms"] | changes}


REFUSED = {
    "no question": ({"question": None}, "question is missing"),
    "empty question": ({"question": " "}, "question ' ' must not be empty"),
    "unknown key": ({"seed": [1]}, "seed is not a setting"),
    "no arm of that name": ({"baseline": "plan"}, "baseline 'plan' is not an arm; did you mean 'plain'?"),
    "one arm": ({"arms": {"plain": {}}}, "arms must hold at least two arms"),
    "a name for no folder": (arms(**{"a/b": {}}), "arms.a/b: a name has letters"),
    "another seed in an arm": (arms(more={"seed": 3}), "arms.more: seed is the same for all arms"),
    "other data in an arm": (arms(more={"data": {"corpus": "stdlib"}}), "arms.more: data is the same for all arms"),
    "more steps in an arm": (arms(more={"training": {"steps": 3}}), "arms.more: training.steps is the same for all"),
    "a typing error in an arm": (arms(more={"model": {"widht": 3}}), "arms.more: model.widht is not a setting"),
    "widened to nothing": (arms(more={"widened_to": "dleta"}), "arms.more.widened_to 'dleta' is not an arm"),
    "widened twice": (arms(more={"widened_to": "wide"}), "arms.more.widened_to 'wide' is itself widened"),
    "two widths": (
        arms(more={"widened_to": "delta", "model": {"width": 8}}),
        "arms.more.model.width follows from widened_to; remove one of them",
    ),
    "a difference of one": ({"differences": ["delta"]}, "differences: 'delta' must be two arms"),
    "a difference to itself": ({"differences": ["delta - delta"]}, "'delta - delta' is one arm, twice"),
    "a seed twice": ({"seeds": [1, 1]}, "seeds [1, 1] must differ from each other"),
    "a seed too large": ({"seeds": [0, 1, 2**32]}, "must lie in [0, 2**32)"),
    "tuned with a seed compared": ({"tuning_seeds": [2]}, "tuning_seeds [2] must not be among seeds"),
    "no matched rate": ({"learning_rate_factors": [0.5, 2]}, "must hold 1, the matched rate"),
    "no readings": ({"readings": []}, "readings must hold at least one"),
    "more seeds than there are": (
        {"readings": [{"budget": "tokens", "seeds": 4}]},
        "readings.0.seeds 4 are more than the 3 seeds; nearest: 3",
    ),
    "a budget of money": ({"readings": [{"budget": "euros", "seeds": 1}]}, "readings.0.budget 'euros' must be one of"),
    "a reading twice": ({"readings": [{"budget": "tokens", "seeds": n} for n in (1, 2)]}, "two have the same budget"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(load, case):
    changes, expected = REFUSED[case]
    with pytest.raises(InputError) as refused:
        load(**changes)
    assert expected in str(refused.value) and "study.yaml: " in str(refused.value)
    assert "\n" not in str(refused.value)
