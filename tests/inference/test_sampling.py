"""How tokens are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.errors import InputError
from ddl_jax.inference.sampling import Sampling, draw

SHARES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 4000


def shares(sampling, logits=None):
    """How often each token is drawn."""
    logits = np.log(SHARES) if logits is None else logits
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = draw(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits))), keys, sampling)
    return np.bincount(drawn, minlength=len(logits)) / DRAWS


def expected(kept, temperature=1.0):
    share = np.where(kept, SHARES ** (1 / temperature), 0)
    return share / share.sum()


@pytest.mark.parametrize("sampling, share", [
    (Sampling(), SHARES),
    (Sampling(0.5), expected(SHARES > 0, 0.5)),
    (Sampling(top_k=2), expected(SHARES >= 0.3)),
    (Sampling(top_k=50), SHARES),
    (Sampling(top_p=0.6), expected(SHARES >= 0.3)),
    (Sampling(top_p=0.75), expected(SHARES >= 0.15)),
    (Sampling(top_p=1.0), SHARES),
    (Sampling(top_k=3, top_p=0.5), expected(SHARES >= 0.3)),  # of 0.4 / 0.85 and 0.3 / 0.85
    (Sampling(2.0, top_p=0.5), expected(SHARES >= 0.3, 2.0)),
    (Sampling(top_p=1e-9), expected(SHARES >= 0.4)),
    (Sampling(0.0), expected(SHARES >= 0.4)),
    (Sampling(1e-6), expected(SHARES >= 0.4)),
    (Sampling(1e-300), expected(SHARES >= 0.4)),
    (Sampling(1e300), np.full(5, 0.2)),
    (Sampling(top_p=1e-300), expected(SHARES >= 0.4)),
])  # fmt: skip
def test_each_token_is_drawn_as_often_as_it_should(sampling, share):
    found = shares(sampling)
    # Four standard deviations of a share, at most 0.5 / sqrt(4000) = 0.008; and never what is left out.
    np.testing.assert_allclose(found, share, atol=0.032)
    assert not found[np.asarray(share) == 0].any()


def test_a_row_is_drawn_by_its_own_key():
    logits = jnp.zeros((3, 1000))
    keys = jax.random.split(jax.random.key(1), 3)
    drawn = draw(logits, keys, Sampling())
    assert len(set(drawn.tolist())) == 3
    assert draw(logits[:1], keys[2:], Sampling())[0] == drawn[2]


@pytest.mark.parametrize("sampling, message", [
    (Sampling(-1.0), "temperature -1.0 must be at least 0"),
    (Sampling(float("nan")), "temperature nan"),
    (Sampling(None), "temperature null must be a number"),
    (Sampling(top_k=1.5), "top_k 1.5 must be a whole number"),
    (Sampling(top_p="1e-1"), "top_p '1e-1' must be a number"),
    (Sampling(top_k=0), "top_k 0 must be at least 1; nearest: 1"),
    (Sampling(top_p=0.0), "top_p 0.0 must lie in"),
    (Sampling(top_p=1.5), "top_p 1.5 must lie in"),
])  # fmt: skip
def test_what_cannot_be_is_refused(sampling, message):
    with pytest.raises(InputError, match=message):
        sampling.validate()
