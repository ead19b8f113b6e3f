"""The token read: specification, XLA and interpreted kernels against a float64 oracle, and what must not leak."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_read
from pallas_kernels.token_read import reference, shapes, xla

BFLOAT16 = 2.0**-8  # half a unit in the last place: what storing a number in bfloat16 costs
# Bounds are relative to the sum of the absolute values of the terms: float32 rounds each of at most 64 products and
# 126 tokens at 6e-8 of its size, and roundings partly cancel.
TOLERANCE = 3e-6


class Case(NamedTuple):
    batch: int
    tokens: int
    channels: int
    width: int
    taps: int
    dtype: str
    multiprocessors: int  # of the machine the plan is made for: few make long runs


CASES = [
    Case(2, 72, 4, 128, 4, "float32", 4),  # groups divide sequences; every slot is filled three times
    Case(3, 21, 1, 384, 2, "bfloat16", 132),  # several strips; runs, groups and sequences end at different tokens
    Case(1, 1, 3, 128, 8, "float32", 132),  # taps past the sequence, and no full group
    Case(1, 63, 8, 128, 2, "bfloat16", 132),
    Case(2, 63, 1, 512, 8, "float32", 4),
    Case(9, 6, 3, 128, 8, "float32", 132),  # a window longer than a sequence, sequences shorter than runs
    Case(1, 63, 2, 1024, 1, "bfloat16", 132),
]


def plan(case, *, backward):
    taps, tokens = min(case.taps, case.tokens), case.batch * case.tokens
    return shapes.plan(tokens, case.channels, case.width, taps, case.dtype, backward=backward)


def draw(case, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    state = jnp.asarray(normal(case.batch, case.tokens, case.channels, case.width), case.dtype)
    d_read = jnp.asarray(normal(case.batch, case.tokens, case.width), case.dtype)
    return state, normal(case.taps, case.channels, case.width), d_read


def oracle(state, weights, d_read):
    """x, dX, da term by term in float64."""
    X, a, dx = (np.asarray(array, np.float64) for array in (state, weights, d_read))
    x, dX, da = np.zeros_like(dx), np.zeros_like(X), np.zeros_like(a)
    for b, t, s in itertools.product(range(X.shape[0]), range(X.shape[1]), range(len(a))):
        if t - s >= 0:
            x[b, t] += sum(a[s, j] * X[b, t - s, j] for j in range(X.shape[2]))
            dX[b, t - s] += a[s] * dx[b, t]
            da[s] += X[b, t - s] * dx[b, t]
    return x, dX, da


@functools.cache
def expected(case):
    """The oracle's results, and the sums of the absolute values of what they add up."""
    arguments = draw(case)
    return oracle(*arguments), oracle(*(np.abs(np.asarray(a, np.float64)) for a in arguments))


def assert_close(actual, case):
    storage = BFLOAT16 if case.dtype == "bfloat16" else 0.0
    # The gradient of the weights stays in float32.
    for name, got, target, terms, stored in zip(
        ("read", "dX", "da"), actual, *expected(case), (storage, storage, 0.0), strict=True
    ):
        error = np.abs(np.asarray(got, np.float64) - target) - stored * np.abs(target)
        assert got.shape == target.shape and np.all(error <= TOLERANCE * terms), f"{name}: {np.nanmax(error):.1e}"


@functools.cache
def differentiated(case, implementation):
    """x, dX, da by the public operation, compiled once for each case."""

    @jax.jit
    def values(state, weights, d_read):
        read, vjp = jax.vjp(lambda *a: token_read(*a, implementation=implementation), state, weights)
        return read, *vjp(d_read)

    return values


@functools.cache
def results(case, implementation):
    return differentiated(case, implementation)(*draw(case))


@pytest.fixture
def machine(request, monkeypatch):
    """Plans for the machine that the case names."""
    case = request.node.callspec.params["case"]
    monkeypatch.setattr(shapes, "MULTIPROCESSORS", case.multiprocessors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_specification_equals_the_oracle(case):
    state, weights, d_read = draw(case)
    read, vjp = jax.vjp(reference.token_read, state, weights)
    # Autodiff of the specification rounds dX to the state's dtype once, as the others do.
    assert_close((read, *vjp(d_read)), case)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_values_and_cotangents_equal_the_oracle(machine, implementation, case):
    actual = results(case, implementation)
    assert [array.dtype for array in actual] == [case.dtype, case.dtype, np.float32]
    assert_close(actual, case)  # the interpreter fills outputs with NaN: none stays unwritten


def test_the_cases_reach_what_kernels_do_differently(monkeypatch):
    seen = set()
    for case, backward in itertools.product(CASES, (False, True)):
        monkeypatch.setattr(shapes, "MULTIPROCESSORS", case.multiprocessors)
        cut = plan(case, backward=backward)
        groups = case.batch * case.tokens // cut.group
        seen |= {f"{cut.group} tokens", f"{cut.tiles} × {cut.lanes}"}
        seen |= {name for name, found in {
            "many runs": cut.runs >= 3,
            "several strips": cut.strips > 1 and cut.runs > 1,
            "a slot used three times": groups // cut.runs > 2 * cut.slots and cut.runs > 1,
            "unequal runs": groups % cut.runs,
            "a tail after runs": cut.tail and cut.runs > 1,
            "a tail alone": groups == 0,
            "groups divide sequences": case.tokens % cut.group == 0,
            "sequences end inside groups": case.tokens % cut.group and case.batch > 1,
        }.items() if found}  # fmt: skip
    assert seen >= {
        "2 tokens", "4 tokens", "16 tokens", "1 × 128", "1 × 256", "2 × 256", "many runs", "several strips",
        "a slot used three times", "unequal runs", "a tail after runs", "a tail alone", "groups divide sequences",
        "sequences end inside groups",
    }  # fmt: skip


# Two of the cases: where groups divide sequences and where they do not.
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_nan_stays_within_its_window_and_its_sequence(machine, implementation, case):
    """In the last token of the first sequence, the first token of the last, and where the kernel's first run ends."""
    state, weights, d_read = draw(case)
    cut, K = plan(case, backward=False), case.taps
    edge = -(-(case.batch * case.tokens // cut.group) // cut.runs) * cut.group - 1
    tokens = {(0, case.tokens - 1), (case.batch - 1, 0), divmod(edge, case.tokens)}
    after, before = np.zeros((2, case.batch, case.tokens), bool)
    for b, t in tokens:
        state, d_read = state.at[b, t].set(np.nan), d_read.at[b, t].set(np.nan)
        after[b, t : t + K] = True
        before[b, max(t - K + 1, 0) : t + 1] = True
    clean, dirty = results(case, implementation), differentiated(case, implementation)(state, weights, d_read)
    for left, right, touched in zip(clean[:2], dirty[:2], (after, before), strict=True):
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        assert np.isnan(right[touched]).all()
        np.testing.assert_array_equal(left[~touched], right[~touched])


@pytest.mark.parametrize("case", [CASES[5]], ids=str)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_causality_is_exact(machine, implementation, case):
    state, weights, d_read = draw(case)
    t = case.tokens // 2 + 1
    before = results(case, implementation)[0]
    after = differentiated(case, implementation)(state.at[:, t:].multiply(-3), weights, d_read)[0]
    np.testing.assert_array_equal(before[:, :t], after[:, :t])
    changed = np.any(np.asarray(before != after), axis=-1)
    assert changed[:, t:].all()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_any_leading_axes_also_under_vmap(implementation):
    state, weights, _ = draw(Case(4, 17, 2, 128, 2, "float32", 132))
    read = functools.partial(token_read, implementation=implementation)
    expected = reference.token_read(state, weights)
    several = read(state.reshape(2, 2, 17, 2, 128), weights)
    np.testing.assert_allclose(several.reshape(expected.shape), expected, atol=1e-5)
    np.testing.assert_allclose(read(state[0], weights), expected[0], atol=1e-5)
    mapped = jax.jit(jax.vmap(read, in_axes=(0, None)))(state[:2], weights)
    np.testing.assert_allclose(mapped, expected[:2], atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_gradients_flow_through_a_scan(implementation):
    """Layers scanned under jit, as the model runs them."""
    state, weights, _ = draw(Case(1, 9, 1, 128, 3, "float32", 132))
    layers = np.stack([weights, weights[::-1]])

    def loss(operation, layers):
        return jnp.sum(jax.lax.scan(lambda X, a: (jnp.tanh(operation(X, a))[:, :, None], None), state, layers)[0] ** 2)

    public = functools.partial(token_read, implementation=implementation)
    gradient = jax.jit(jax.grad(functools.partial(loss, public)))(layers)
    expected = jax.grad(functools.partial(loss, reference.token_read))(layers)
    np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.max(np.abs(expected)))


def test_weights_keep_their_dtype_in_the_gradient():
    state, weights, d_read = draw(CASES[1])
    narrow = jnp.asarray(weights, jnp.bfloat16)
    _, vjp = jax.vjp(token_read, state, narrow)
    assert [g.dtype for g in vjp(d_read)] == [jnp.bfloat16, jnp.bfloat16]


def test_backward_keeps_one_array_of_the_states_size():
    state, weights, _ = draw(CASES[0])
    _, vjp = jax.vjp(token_read, state, weights)
    assert len([leaf for leaf in jax.tree.leaves(vjp) if jnp.size(leaf) >= state.size]) == 1


@pytest.mark.parametrize("wrong", [(4, 128), (4, 3, 128), (4, 4, 127), (0, 4, 128)])
def test_weights_that_do_not_belong_are_refused(wrong):
    state, *_ = draw(CASES[0])
    with pytest.raises(ValueError, match=r"weights has shape .* needs \(taps, 4, 128\)"):
        token_read(state, np.zeros(wrong, np.float32))


def test_a_state_without_tokens_and_an_unknown_implementation_are_refused():
    with pytest.raises(ValueError, match="needs .*tokens, channels, width"):
        token_read(jnp.zeros((4, 128)), jnp.zeros((2, 4, 128)))
    with pytest.raises(ValueError, match="'quantum' is not known"):
        token_read(jnp.zeros((3, 4, 128)), jnp.zeros((2, 4, 128)), implementation="quantum")


@pytest.mark.parametrize("shape, dtype, taps, reason", [
    ((2, 8, 4, 770), "float32", 4, "width 770 is not a multiple of 128; nearest: 768 and 896"),
    ((2, 8, 4, 96), "float32", 4, "width 96 is not a multiple of 128; nearest: 128"),
    ((2, 8, 9, 128), "float32", 4, "9 channels are outside 1 to 8; nearest: 8"),
    ((2, 8, 4, 128), "float32", 9, "9 taps are outside 1 to 8; nearest: 8"),
    ((2, 8, 4, 128), "float16", 4, "dtype float16 is not supported; use bfloat16 or float32"),
    ((0, 8, 4, 128), "float32", 4, "has no tokens"),
])  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused_with_the_reason(shape, dtype, taps, reason):
    assert reason in shapes.unsupported(shape, dtype, taps)
    with pytest.raises(ValueError, match=reason):
        token_read(jnp.zeros(shape, dtype), jnp.zeros((taps, *shape[2:])), implementation="pallas")
    assert shapes.unsupported((2, 8, 4, 768), dtype if taps == 9 else "bfloat16", 8) is None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", shapes.DTYPES)
def test_plans_move_few_extra_bytes_and_keep_enough_in_flight(dtype, backward):
    sizes = (range(1, 9), range(1, 9), (128, 256, 384, 768, 1024, 2048), (32768, 40001))
    for V, K, width, tokens in itertools.product(*sizes):
        cut = shapes.plan(tokens, V, width, K, dtype, backward=backward)
        least = shapes.minimum_bytes(tokens, V, width, K, dtype, backward=backward)
        # A single strip needs as many runs as there are multiprocessors.
        most = 1.05 if cut.strips > 1 else 1.09
        assert least <= shapes.moved_bytes(tokens, V, width, K, dtype, backward=backward) <= most * least
        assert cut.strips * cut.strip == width and cut.tail == tokens % cut.group
        loaded = cut.group * (V + backward) * cut.strip * jnp.dtype(dtype).itemsize
        assert cut.blocks_per_multiprocessor * (cut.slots - 1) * loaded >= 32 * 1024
        assert 132 <= cut.blocks <= 132 * cut.blocks_per_multiprocessor


def test_few_tokens_still_fill_the_machine():
    assert shapes.plan(2048, 4, 768, 4, "bfloat16", backward=False).blocks >= 132
    assert shapes.plan(1, 4, 768, 4, "bfloat16", backward=True).runs == 1


def test_the_form_for_xla_is_the_one_auto_runs():
    state, weights, _ = draw(CASES[1])
    np.testing.assert_array_equal(token_read(state, weights), xla.token_read(state, weights))
