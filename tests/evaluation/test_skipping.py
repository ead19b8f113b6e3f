"""What leaving out edits costs, against the models themselves."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax import evaluate
from ddl_jax.data import held_out
from ddl_jax.errors import InputError
from ddl_jax.evaluation.held_out_text import held_out_tokens
from ddl_jax.inference import skipping
from ddl_jax.run import load_run


@pytest.mark.parametrize("below, skipped", [(1e-9, 0.0), (1.0, None), (2.0, 1.0)])
def test_the_cost_is_that_of_the_model_without_the_edits(run_of_eight, capsys, below, skipped):
    assert evaluate.main(["--run", str(run_of_eight), "--skip-below", str(below), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = load_run(run_of_eight)
    (batch,) = held_out(held_out_tokens(run.config), 16, 6, 6)
    models = (run.model, skipping(run.model, below))
    logits = [np.asarray(jax.jit(lambda tokens, model=model: model(tokens))(batch["tokens"])) for model in models]
    nats = [-jnp.take_along_axis(jax.nn.log_softmax(each), batch["targets"][..., None], axis=-1) for each in logits]
    assert found["skipping"]["skip_below"] == below
    # The mean of 96 differences of float32 numbers of about 5.
    change = np.mean(np.float64(nats[1]) - np.float64(nats[0]))
    assert found["skipping"]["loss_change"] == pytest.approx(change, abs=2e-6)
    same = float(np.mean(np.argmax(logits[0], axis=-1) == np.argmax(logits[1], axis=-1)))
    assert found["skipping"]["agreement"] == pytest.approx(same, abs=1e-6)
    share = found["skipping"]["skipped_share"]
    assert share == pytest.approx(skipped) if skipped is not None else 0 < share < 1
    if skipped:
        assert abs(change) > 1e-3 and same < 1
    assert found["skipping"]["milliseconds_per_token"] > 0 < found["skipping"]["skipping_milliseconds_per_token"]
    assert evaluate.main(["--run", str(run_of_eight), "--skip-below", str(below)]) == 0
    assert f"gate is below {below}: {found['skipping']['loss_change']:+.4f} nats/token" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--skip-below", "3"], "skip_below 3.0 must lie in"),
    (["--skip-below", "0.1", "--no-validation"], "--skip-below is measured on the held-out text"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(run_of_eight, arguments, message):
    with pytest.raises(InputError, match=message):
        evaluate.main(["--run", str(run_of_eight), *arguments])
