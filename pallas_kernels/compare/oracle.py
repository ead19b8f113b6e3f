"""The operations and their gradients in float64 NumPy, after the equations of design 2: what both are compared with.

Written apart from `reference` and `xla`, so that an error in those is seen. Letters and shapes as there.
"""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-5
Arrays = tuple[np.ndarray, ...]


def rewrite(X, h, v, β, a=None) -> Arrays:
    """X', and given weights the next read x."""
    X, h, v, β = float64(X, h, v, β)
    k, _ = _direction(h)
    w = v - np.einsum("nd,njd->nj", k, X)
    new = X + np.einsum("n,nj,nd->njd", β, w, k)
    return (new,) if a is None else (new, np.einsum("jd,njd->nd", *float64(a), new))


def rewrite_gradients(X, h, v, β, a, d_new, d_read) -> Arrays:
    """dX, dh, dv, dβ and, given weights, da."""
    new, *_ = rewrite(X, h, v, β)
    X, h, v, β, D = float64(X, h, v, β, d_new)
    d_weights = ()
    if a is not None:
        a, dx = float64(a, d_read)
        D = D + a * dx[:, None]
        d_weights = (np.einsum("nd,njd->jd", dx, new),)
    k, length = _direction(h)
    w = v - np.einsum("nd,njd->nj", k, X)
    g = np.einsum("nd,njd->nj", k, D)
    dX = D - np.einsum("n,nj,nd->njd", β, g, k)
    dk = β[:, None] * (np.einsum("njd,nj->nd", D, w) - np.einsum("njd,nj->nd", X, g))
    dh = (dk - k * np.sum(k * dk, axis=-1, keepdims=True)) / length
    return dX, dh, β[:, None] * g, np.sum(g * w, axis=-1), *d_weights


def token_read(X, a) -> Arrays:
    """x of sequences X (S, T, V, d) with weights a (K, V, d)."""
    X, a = float64(X, a)
    x = np.zeros((*X.shape[:2], X.shape[3]))
    for s in range(min(len(a), X.shape[1])):
        x[:, s:] += np.einsum("jd,btjd->btd", a[s], X[:, : X.shape[1] - s])
    return (x,)


def token_read_gradients(X, a, d_read) -> Arrays:
    """dX and da."""
    X, a, dx = float64(X, a, d_read)
    dX, da = np.zeros_like(X), np.zeros_like(a)
    for s in range(min(len(a), X.shape[1])):
        until = X.shape[1] - s
        dX[:, :until] += np.einsum("jd,btd->btjd", a[s], dx[:, s:])
        da[s] = np.einsum("btd,btjd->jd", dx[:, s:], X[:, :until])
    return dX, da


def relative_error(actual: Sequence, expected: Sequence[np.ndarray]) -> float:
    """The largest error of any token in any output, relative to the token.

    An output (N, …) is N vectors. The norm of a vector's error is divided by the vector's norm, or by the root mean
    square of all N norms where that is larger: a number that happens to be near zero counts no more than the others.

    Args:
        actual: arrays in any dtype.
        expected: their float64 counterparts.

    Returns:
        NaN or infinity if there is one where none should be.
    """
    worst = 0.0
    for got, wanted in zip(actual, expected, strict=True):
        got, wanted = (np.asarray(array, np.float64).reshape(len(wanted), -1) for array in (got, wanted))
        sizes = np.linalg.norm(wanted, axis=-1)
        errors = np.linalg.norm(got - wanted, axis=-1) / np.maximum(sizes, np.sqrt(np.mean(sizes**2)))
        worst = np.maximum(worst, errors.max())  # which hands NaN on
    return float(worst)


def _direction(h) -> Arrays:
    length = np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + EPSILON**2)
    return h / length, length


def float64(*arrays) -> list[np.ndarray]:
    """The arrays in float64."""
    return [np.asarray(array, np.float64) for array in arrays]
