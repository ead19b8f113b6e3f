"""Arms are paired: per seed, the same batches, and the same initial parameters wherever two arms have them."""

import dataclasses
import functools
from pathlib import Path

from flax import nnx
import jax
import numpy as np
import pytest

from ddl_jax.config import Config
from ddl_jax.config.study import StudyConfig, arm_config, load_experiment, load_study
from ddl_jax.data import train_batches
from ddl_jax.transformer import Transformer

STUDIES = sorted(Path("configs/studies").glob("*.yaml"))
STUDIES = [file for file in STUDIES if "question:" in file.read_text()]
TINY = {
    "model": {"layers": 1, "width": 8, "heads": 2, "head_dim": 4, "context_length": 8, "vocab_size": 64},
    "training": {"unroll": 1},
}


def configs_of(study: StudyConfig, experiment: str) -> dict[str, Config]:
    settings = load_experiment([study.experiments[experiment]], TINY)
    return {arm: arm_config(study, settings, arm) for arm in study.arms}


@functools.cache
def parameters(config: Config) -> dict[str, np.ndarray]:
    """By path and shape."""
    # A shape tells two of the same name apart. Most of the time is compilation, of programs that are the same.
    model = Transformer(config.model, rngs=nnx.Rngs(params=config.seed))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    return {f"{jax.tree_util.keystr(path)} {leaf.shape}": np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_arms_start_from_the_same_parameters_wherever_their_structures_coincide(file):
    study = load_study(file)
    configs = configs_of(study, "laptop")
    for seed in study.seeds[:2]:
        arms = {arm: parameters(dataclasses.replace(config, seed=seed)) for arm, config in configs.items()}
        baseline = arms[study.baseline]
        for arm, own in arms.items():
            for other in arms.values():
                for name in own.keys() & other.keys():
                    if "gate" in name and "bias" in name:  # β₀, in which the arms of a study may differ
                        continue
                    np.testing.assert_array_equal(own[name], other[name], err_msg=f"{arm}: {name}, seed {seed}")
            assert any("attention" in name for name in own.keys() & baseline.keys())
    first, second = (parameters(dataclasses.replace(configs[study.baseline], seed=seed)) for seed in study.seeds[:2])
    assert any(np.any(first[name] != second[name]) for name in first)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_arms_get_the_same_batches_and_name_an_h200s_configuration(file):
    study = load_study(file)
    assert next(iter(study.experiments)) == "laptop" and "h200" in study.experiments
    for experiment in study.experiments:
        configs = list(configs_of(study, experiment).values())
        for config in configs[1:]:  # all that `train_batches` and `validation_batches` depend on
            assert config.data == configs[0].data and config.seed == configs[0].seed
            for name in ("batch_size", "evaluation_batches", "steps"):
                assert getattr(config.training, name) == getattr(configs[0].training, name)
            assert config.model.context_length == configs[0].model.context_length


def test_a_batch_depends_on_the_seed_and_the_step_alone():
    tokens = np.arange(400, dtype=np.uint16)
    streams = {}
    for name, seed, start in (("one arm", 3, 0), ("another", 3, 0), ("another seed", 4, 0)):
        with train_batches(tokens, 4, 2, seed, start) as batches:
            streams[name] = [next(batches)["tokens"] for _ in range(3)]
    np.testing.assert_array_equal(streams["one arm"], streams["another"])
    assert np.any(np.asarray(streams["one arm"]) != np.asarray(streams["another seed"]))
