"""The rewrite, alone and with a read: against a float64 oracle, its finite differences, and the paper's algebra."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rewrite, rewrite_and_read
from pallas_kernels.rewrite import reference
from tests.pallas_kernels.oracle import (
    BFLOAT16,
    EPSILON,
    NAMES,
    TOLERANCE,
    analytic_gradients,
    assert_within,
    draw,
    oracle,
    oracle_gradients,
    scales,
)

# (leading axes, V, d): every rank of leading axes, odd widths, token counts that are no power of two.
SHAPES = [((), 1, 3), ((63,), 4, 72), ((2, 5), 2, 72), ((2, 1, 3, 2), 3, 3), ((4,), 8, 16)]


@functools.partial(jax.jit, static_argnames=("fused", "erase", "operations"))
def values_and_gradients(arguments, cotangents, *, fused, erase, operations="public"):
    """Outputs and the VJP of every argument, by the public operations or by autodiff of the reference."""
    single, both = (
        (rewrite, rewrite_and_read) if operations == "public" else (reference.rewrite, reference.rewrite_and_read)
    )
    if fused:
        outputs, vjp = jax.vjp(lambda *a: both(*a, epsilon=EPSILON, erase=erase), *arguments)
        return outputs, vjp(tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True)))
    output, vjp = jax.vjp(lambda *a: single(*a, epsilon=EPSILON, erase=erase), *arguments[:4])
    return (output,), vjp(cotangents[0].astype(output.dtype))


def check(arguments, cotangents, fused, erase, *, storage=0.0):
    """Values and all gradients against the oracle; `storage` is the rounding of the state's dtype."""
    d_new, d_read = cotangents if fused else (cotangents[0], np.zeros_like(cotangents[1]))
    outputs, gradients = values_and_gradients(arguments, cotangents, fused=fused, erase=erase)
    new_scale, read_scale, gradient_scales, weights_scale = scales(*arguments, d_new, d_read)
    new, read = oracle(*arguments, erase)
    assert_within(outputs[0], new, new_scale, TOLERANCE + storage, "state'")
    if fused:
        assert_within(outputs[1], read, read_scale, TOLERANCE + 2 * storage, "read")
    expected = oracle_gradients(*arguments, d_new, d_read, erase)
    # With a narrow state the incoming cotangents are rounded to it as well.
    for name, actual, target, scale in zip(NAMES, gradients, expected, (*gradient_scales, weights_scale), strict=False):
        assert_within(actual, target, scale, TOLERANCE + 2 * storage, f"gradient of {name}")


@pytest.mark.parametrize("branch", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("erase", [True, False])
def test_the_gradients_of_the_design_equal_finite_differences(erase, branch):
    arguments, cotangents = draw(np.random.default_rng(20), (5,), 3, 24, branch=branch)
    differences = oracle_gradients(*arguments, *cotangents, erase)
    *_, gradient_scales, weights_scale = scales(*arguments, *cotangents)
    written = analytic_gradients(*arguments, *cotangents, erase)
    for name, actual, target, scale in zip(NAMES, written, differences, (*gradient_scales, weights_scale), strict=True):
        assert_within(actual, target, scale, 1e-8, f"gradient of {name}")


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle_in_values_and_gradients(shape, fused, erase):
    check(*draw(np.random.default_rng(0), *shape), fused, erase)


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    state=st.floats(-3, 3),
    branch=st.floats(-8, 3),
    value=st.floats(-3, 3),
    gate=st.one_of(st.sampled_from([0.0, 1e-6, 1 - 1e-6, 1.0, 1 + 1e-6, 2 - 1e-6, 2.0]), st.floats(1e-6, 2)),
)
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_oracle_at_any_size_of_the_arguments(fused, erase, seed, state, branch, value, gate):
    sizes = {"state": 10**state, "branch": 10**branch, "value": 10**value, "gate": gate}
    check(*draw(np.random.default_rng(seed), (2, 5), 2, 72, **sizes), fused, erase)


@pytest.mark.parametrize("branch", [0.0, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("erase", [True, False])
def test_equals_the_oracle_around_the_guard(branch, erase):
    check(*draw(np.random.default_rng(1), (4,), 8, 16, branch=branch), True, erase)


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_a_bfloat16_state_costs_its_rounding_and_no_more(fused, erase):
    arguments, cotangents = draw(np.random.default_rng(2), (2, 5), 2, 72, dtype=jnp.bfloat16)
    check(arguments, cotangents, fused, erase, storage=BFLOAT16)
    outputs, gradients = values_and_gradients(arguments, cotangents, fused=fused, erase=erase)
    assert all(output.dtype == jnp.bfloat16 for output in outputs)
    assert [g.dtype for g in gradients] == [a.dtype for a in arguments[: len(gradients)]]
    # The edit is computed in float32 and rounded once: within half a unit in the last place of the exact new state.
    new, _ = oracle(*arguments, erase)
    np.testing.assert_allclose(np.asarray(outputs[0], np.float64), new, rtol=1.01 * BFLOAT16, atol=1e-5)


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_written_backward_equals_autodiff_of_the_reference(shape, fused, erase):
    arguments, cotangents = draw(np.random.default_rng(3), *shape)
    _, written = values_and_gradients(arguments, cotangents, fused=fused, erase=erase)
    _, automatic = values_and_gradients(arguments, cotangents, fused=fused, erase=erase, operations="reference")
    d_read = cotangents[1] if fused else np.zeros_like(cotangents[1])
    *_, gradient_scales, weights_scale = scales(*arguments, cotangents[0], d_read)
    for name, actual, target, scale in zip(NAMES, written, automatic, (*gradient_scales, weights_scale), strict=False):
        assert_within(actual, target, scale, 2 * TOLERANCE, f"gradient of {name}")  # both sides round


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize("erase", [True, False])
def test_a_zero_branch_leaves_the_state_bit_for_bit_and_has_the_gradient_of_the_guard(erase, epsilon):
    (state, branch, value, gate, _), (d_new, _) = draw(np.random.default_rng(4), (5,), 4, 72, branch=0.0)
    new, vjp = jax.vjp(lambda h: rewrite(state, h, value, gate, epsilon=epsilon, erase=erase), jnp.asarray(branch))
    np.testing.assert_array_equal(new, state)
    (d_branch,) = vjp(jnp.asarray(d_new))
    # design 2: at h = 0, dh = β D w / ε with w = v.
    expected = np.einsum("t,tjd,tj->td", *(np.asarray(a, np.float64) for a in (gate, d_new, value))) / epsilon
    np.testing.assert_allclose(d_branch, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.parametrize("fused", [False, True])
def test_backward_keeps_one_array_of_the_states_size(fused):
    (state, branch, value, gate, weights), _ = draw(np.random.default_rng(5), (7,), 4, 72)
    operation = (lambda X: rewrite_and_read(X, branch, value, gate, weights)) if fused else (
        lambda X: rewrite(X, branch, value, gate))  # fmt: skip
    _, vjp = jax.vjp(operation, state)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if jnp.size(leaf) >= state.size]
    assert len(kept) == 1


@pytest.mark.parametrize("poisoned", NAMES[:4])
@pytest.mark.parametrize("erase", [True, False])
def test_a_nan_in_one_token_stays_in_that_token(erase, poisoned):
    clean, cotangents = draw(np.random.default_rng(6), (2, 5), 2, 72)
    dirty = [np.array(a) for a in clean]
    entry = dirty[NAMES.index(poisoned)]
    entry[(1, 2) + (0,) * (entry.ndim - 2)] = np.nan
    others = np.ones((2, 5), bool)
    others[1, 2] = False
    before = jax.tree.leaves(values_and_gradients(clean, cotangents, fused=True, erase=erase))
    after = jax.tree.leaves(values_and_gradients(tuple(dirty), cotangents, fused=True, erase=erase))
    # The last is the gradient of the weights, a sum over tokens.
    for left, right in zip(before[:-1], after[:-1], strict=True):
        np.testing.assert_array_equal(np.asarray(left)[others], np.asarray(right)[others])
    assert np.isnan(np.asarray(after[0])[1, 2]).any()


@pytest.mark.parametrize("name, wrong", [
    ("branch", (2, 5, 71)), ("branch", (5, 72)), ("value", (2, 5, 3)), ("value", (2, 5)),
    ("gate", (2, 5, 1)), ("gate", ()), ("weights", (72, 2)), ("weights", (2, 5, 2, 72)),
])  # fmt: skip
def test_shapes_that_do_not_belong_together_are_refused_by_name(name, wrong):
    arguments, _ = draw(np.random.default_rng(7), (2, 5), 2, 72)
    arguments = dict(zip(NAMES, arguments, strict=True)) | {name: np.zeros(wrong, np.float32)}
    with pytest.raises(ValueError, match=f"{name} has shape"):
        rewrite_and_read(**arguments)
    if name != "weights":
        del arguments["weights"]
        with pytest.raises(ValueError, match=f"{name} has shape"):
            rewrite(**arguments)


def test_an_unknown_implementation_is_refused():
    arguments, _ = draw(np.random.default_rng(8), (2,), 2, 8)
    with pytest.raises(ValueError, match="'quantum' is not known"):
        rewrite(*arguments[:4], implementation="quantum")
    with pytest.raises(ValueError, match="'quantum' is not known"):
        rewrite_and_read(*arguments, implementation="quantum")


# The algebra of design 2. Float32 results are compared relative to the size of the state.


def directions(branch, epsilon):
    """k and ρ = ‖k‖² in float64."""
    h = np.asarray(branch, np.float64)
    k = h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + epsilon**2)
    return k, np.sum(k * k, axis=-1)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5, 0.99])
@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0, 1.7, 2.0])
def test_the_readout_error_contracts_by_one_minus_beta_rho(gate, epsilon):
    (state, branch, value, β, _), _ = draw(np.random.default_rng(9), (6,), 4, 16, branch=0.2, gate=gate)
    k, ρ = directions(branch, epsilon)
    new = np.asarray(rewrite(state, branch, value, β, epsilon=epsilon), np.float64)
    before = np.einsum("td,tjd->tj", k, np.asarray(state, np.float64)) - value
    after = np.einsum("td,tjd->tj", k, new) - value
    np.testing.assert_allclose(after, (1 - gate * ρ)[:, None] * before, atol=1e-5 * np.max(np.abs(before)))


@pytest.mark.parametrize("erase", [True, False])
def test_what_is_orthogonal_to_the_direction_is_untouched(erase):
    (state, branch, value, gate, _), _ = draw(np.random.default_rng(10), (6,), 4, 16)
    k, ρ = directions(branch, EPSILON)
    unit = k / np.sqrt(ρ)[:, None]
    change = np.asarray(rewrite(state, branch, value, gate, erase=erase), np.float64) - np.asarray(state, np.float64)
    along = np.einsum("td,tjd->tj", unit, change)[..., None] * unit[:, None]
    np.testing.assert_allclose(change, along, atol=1e-6 * np.max(np.abs(state)))
    assert np.max(np.abs(change)) > 0.1


def test_write_only_does_not_erase():
    (state, branch, value, gate, _), _ = draw(np.random.default_rng(11), (6,), 4, 16)
    k, ρ = directions(branch, EPSILON)
    new = rewrite(state, branch, value, gate, erase=False)
    expected = np.asarray(state, np.float64) + np.einsum("t,tj,td->tjd", gate, value, k)
    np.testing.assert_allclose(new, expected, atol=1e-6 * np.max(np.abs(expected)))
    # What had been stored along k is still there, under what was written.
    readout = np.einsum("td,tjd->tj", k, np.asarray(new, np.float64))
    stored = np.einsum("td,tjd->tj", k, np.asarray(state, np.float64))
    np.testing.assert_allclose(readout, stored + gate[:, None] * value * ρ[:, None], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rewrite(state, branch, np.zeros_like(value), gate, erase=False), state)


def test_beta_one_overwrites():
    (state, branch, value, gate, _), _ = draw(np.random.default_rng(12), (6,), 4, 16, gate=1.0)
    k, _ = directions(branch, 1e-12)
    readout = np.einsum("td,tjd->tj", k, np.asarray(rewrite(state, branch, value, gate, epsilon=1e-12), np.float64))
    np.testing.assert_allclose(readout, value, atol=1e-5)
    # Writing the same again changes nothing more: a projection.
    once = rewrite(state, branch, value, gate, epsilon=1e-12)
    np.testing.assert_allclose(rewrite(once, branch, value, gate, epsilon=1e-12), once, atol=1e-5)


def test_beta_two_with_value_zero_reflects():
    (state, branch, value, gate, _), _ = draw(np.random.default_rng(13), (6,), 4, 16, gate=2.0)
    zero = np.zeros_like(value)
    once = rewrite(state, branch, zero, gate, epsilon=1e-12)
    assert np.max(np.abs(once - state)) > 0.1
    np.testing.assert_allclose(rewrite(once, branch, zero, gate, epsilon=1e-12), state, atol=1e-5)

    def norm(X):
        return np.linalg.norm(np.asarray(X, np.float64), axis=-1)

    np.testing.assert_allclose(norm(once), norm(state), rtol=1e-5)
    # Towards a value, it is the involution around it.
    there = rewrite(state, branch, value, gate, epsilon=1e-12)
    np.testing.assert_allclose(rewrite(there, branch, value, gate, epsilon=1e-12), state, atol=1e-5)


def test_beta_zero_skips():
    (state, branch, value, gate, _), _ = draw(np.random.default_rng(14), (6,), 4, 16, gate=0.0)
    np.testing.assert_array_equal(rewrite(state, branch, value, gate), state)
