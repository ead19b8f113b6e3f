"""The rewrite in float64: an oracle for values and gradients, what float32 can promise, and arguments to try."""

import jax.numpy as jnp
import numpy as np

EPSILON = 1e-5
NAMES = ("state", "branch", "value", "gate", "weights")

# float32 rounds each product at 6e-8 of its size and a sum of 72 of them grows that by about 10; the bounds below are
# relative to the norms of what is multiplied and summed, the most that float32 can promise when terms cancel.
TOLERANCE = 5e-6
BFLOAT16 = 2.0**-8  # half a unit in the last place: what storing a number in bfloat16 costs


def token_edit(X, h, v, β, erase, epsilon=EPSILON):
    """X' − X of one token, float64, channel by channel. Leading axes hold perturbed copies of the token."""
    k = h / np.sqrt(np.sum(h * h, axis=-1) + epsilon**2)[..., None]
    channels = []
    for j in range(X.shape[-2]):
        readout = np.sum(k * X[..., j, :], axis=-1) if erase else 0.0
        channels.append((β * (v[..., j] - readout))[..., None] * k)
    return np.stack(channels, axis=-2)


def oracle(state, branch, value, gate, weights, erase, epsilon=EPSILON):
    """X' and x, token by token."""
    state, branch, value, gate, weights = (np.asarray(a, np.float64) for a in (state, branch, value, gate, weights))
    new, read = np.empty_like(state), np.empty_like(branch)
    for t in np.ndindex(gate.shape):
        new[t] = state[t] + token_edit(state[t], branch[t], value[t], gate[t], erase, epsilon)
        read[t] = sum(weights[j] * new[t][j] for j in range(len(weights)))
    return new, read


def oracle_gradients(state, branch, value, gate, weights, d_new, d_read, erase):
    """Central differences of <d_new, X'> + <d_read, x> in every entry of every argument, in float64.

    The loss is linear in X, v and β separately, so any step is exact for them; along h the step is far below the
    length sqrt(‖h‖² + ε²) on which k changes, so that its error is about 1e-10, at h = 0 too. Differences are taken
    of the edit X' − X, so that a small edit does not drown in the state.
    """
    arguments = [np.asarray(a, np.float64) for a in (state, branch, value, gate, weights)]
    state, branch, value, gate, weights = arguments
    gradients = [np.zeros_like(a) for a in arguments]
    for t in np.ndindex(gate.shape):
        D = d_new[t] + weights * d_read[t]
        token = [a[t] for a in arguments[:4]]
        for which in range(4):
            entry = token[which]
            step = 1e-6 * np.sqrt(np.sum(branch[t] ** 2) + EPSILON**2) if which == 1 else 1e-3
            shifts = step * np.eye(entry.size).reshape(entry.size, *entry.shape)
            losses = []
            for sign in (1, -1):
                moved = [np.broadcast_to(a, (entry.size, *np.shape(a))) for a in token]
                moved[which] = entry + sign * shifts
                losses.append(np.sum(D * token_edit(*moved, erase), axis=(-2, -1)))
            gradients[which][t] = ((losses[0] - losses[1]) / (2 * step)).reshape(entry.shape)
        gradients[0][t] += D
        gradients[4] += d_read[t] * (token[0] + token_edit(*token, erase))  # the read is linear in its weights
    return gradients


def analytic_gradients(state, branch, value, gate, weights, d_new, d_read, erase):
    """The gradients of design 2 for tokens (N, …), in float64: faster than differences, and tested against them."""
    X, h, v, β, a, D, dx = (np.asarray(x, np.float64) for x in (state, branch, value, gate, weights, d_new, d_read))
    D, β = D + a * dx[:, None], β[:, None]
    length = np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + EPSILON**2)
    k = h / length
    w = v - np.einsum("nd,njd->nj", k, X) if erase else v
    g = np.einsum("nd,njd->nj", k, D)
    dX, dk = D, β * np.einsum("njd,nj->nd", D, w)
    if erase:
        dX = D - (β * g)[..., None] * k[:, None]
        dk = dk - β * np.einsum("njd,nj->nd", X, g)
    dh = (dk - k * np.sum(k * dk, axis=-1, keepdims=True)) / length
    new = X + (β * w)[..., None] * k[:, None]
    return dX, dh, β * g, np.sum(g * w, axis=-1), np.einsum("nd,njd->jd", dx, new)


def scales(state, branch, value, gate, weights, d_new, d_read):
    """For X', x and the gradients: per token, the norms of the terms that float32 has to add up."""

    def norm(a, axes):
        return np.sqrt(np.sum(np.asarray(a, np.float64) ** 2, axis=axes))

    D = np.asarray(d_new) + np.asarray(weights) * np.asarray(d_read)[..., None, :]
    # D itself may cancel: its terms count, not it.
    X, v, D = norm(state, (-2, -1)), norm(value, -1), norm(np.abs(d_new) + np.abs(D), (-2, -1))
    length = np.sqrt(norm(branch, -1) ** 2 + EPSILON**2)
    β = np.asarray(gate, np.float64)
    new = X + β * (v + X)
    read = norm(weights, (-2, -1)) * new
    gradients = (D * (1 + β), β * D * (v + 2 * X) / length, β * D, D * (v + X))
    return new, read, gradients, np.sum(norm(d_read, -1) * new)


def draw(rng, leading, channels, width, *, state=1.0, branch=1.0, value=1.0, gate=None, dtype=np.float32):
    """Arguments and cotangents with the given sizes; β uniform in (0, 2) unless given."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arguments = (
        jnp.asarray(state * normal(*leading, channels, width), dtype),
        branch * normal(*leading, width),
        value * normal(*leading, channels),
        np.asarray(rng.uniform(0, 2, leading) if gate is None else np.full(leading, gate), np.float32),
        normal(channels, width),
    )
    return arguments, (normal(*leading, channels, width), normal(*leading, width))


def assert_within(actual, expected, scale, tolerance, name):
    """|actual − expected| ≤ tolerance · scale, the scale given per token."""
    error = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    scale = np.reshape(scale, np.shape(scale) + (1,) * (error.ndim - np.ndim(scale)))
    assert np.all(error <= tolerance * scale), f"{name}: error {np.max(error / (scale + 1e-300)):.1e} of its terms"
