"""The time that a device takes, by the host's clock.

An event on the device would be the obvious clock, but JAX shows none, and reading a profiler's traces depends on files
that change between releases. So programs are enqueued many at a time, faster than the device can do them, and the host
waits for the last one. Of that time a constant part is not the device's: the first launch, and noticing the end. It is
the same for few programs and for many, so the difference between the two is the device's time and nothing else:

    seconds per call = (t(few + many) − t(few)) / (many · calls per program)

Launching from Python takes some 30 microseconds, which is as long as the shortest kernels run; so a program holds
several calls, each on arrays of its own. They are enough arrays that nothing is found in the cache when its turn comes
again. Results are written over those of the program before (donated), which keeps the programs in order and the memory
they need constant. The compiled programs hold no copies besides the calls (seen in their HLO for an H200).

What is compared takes turns within each round, and medians are over rounds: clocks and temperature drift, but for all
alike.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

ROUNDS = 15
WARMUP = 3  # rounds that are not counted: compiling, clocks rising
FEW = 2  # programs
LONG = 10e-3  # seconds: what many programs should take at least; a thousand times what the host's clock is worth
CALLS = 16  # most calls in a program
CACHE = 60 * 2**20  # bytes: the L2 of an H200, as its driver reports it
ROTATED = 2 * 10**9  # bytes that the calls of a program should touch together


@dataclasses.dataclass
class Program:
    """Calls of one function in one program.

    Attributes:
        enqueue: enqueues the program once and returns what to wait for.
        calls: how many calls it holds.
    """

    enqueue: Callable[[], Any]
    calls: int


def calls_for(nbytes: int) -> int:
    """How many calls a program should hold, of a function that moves so many bytes."""
    return min(CALLS, max(2, math.ceil(ROTATED / nbytes)))


def uncached(nbytes: int) -> bool:
    """Whether the calls of a program touch so much that the cache is no help, if each moves so many bytes."""
    return calls_for(nbytes) * nbytes >= 4 * CACHE


def batch(function: Callable, tree: jax.tree_util.PyTreeDef) -> Callable:
    """Calls a function on each of the calls that `tree` makes of arrays, and writes over earlier results.

    Returns:
        Of flat results and flat arrays, new flat results.
    """
    return jax.jit(
        lambda results, arrays: jax.tree.leaves([function(*call) for call in tree.unflatten(arrays)]),
        donate_argnums=0,
        keep_unused=True,  # the results of before are only there to be written over
    )


def program(function: Callable, calls: Sequence[tuple]) -> Program:
    """A program that calls a function on each of some arguments.

    Args:
        function: returns a tuple of arrays.
        calls: the arguments of each call.
    """
    # Flat, so that the host spends no time on what holds the arrays: for backward, that is a VJP.
    arrays, tree = jax.tree.flatten(list(calls))
    run = batch(function, tree)
    results = [jnp.zeros(result.shape, result.dtype) for result in jax.eval_shape(run, [], arrays)]

    def enqueue():
        nonlocal results
        results = run(results, arrays)
        return results

    return Program(enqueue, len(calls))


def copy(nbytes: int) -> Program:
    """A program that copies arrays of so many bytes, each once from one place to another on the device."""
    calls = [(jnp.full(nbytes // 4, call, jnp.float32),) for call in range(calls_for(2 * nbytes))]
    return program(lambda x: (jnp.copy(x),), calls)


def median_seconds(
    programs: Mapping[str, Program],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> dict[str, float]:
    """Times programs in turns.

    Args:
        programs: by name.
        rounds: how many times each is timed.
        clock: in seconds.
        wait: returns when what `enqueue` gave has been done.

    Returns:
        Seconds per call: medians over the rounds.
    """

    def elapsed(one: Program, times: int) -> float:
        begun = clock()
        for _ in range(times):
            last = one.enqueue()
        wait(last)
        return clock() - begun

    for one in programs.values():
        elapsed(one, 1)  # compiles
    many = {}
    for name, one in programs.items():
        each = elapsed(one, FEW + 1) / (FEW + 1)
        many[name] = min(1000, max(FEW, math.ceil(LONG / max(each, 1e-9))))
    seconds = {name: [] for name in programs}
    for number in range(WARMUP + rounds):
        for name, one in programs.items():
            difference = elapsed(one, FEW + many[name]) - elapsed(one, FEW)
            if number >= WARMUP:
                seconds[name].append(difference / (many[name] * one.calls))
    return {name: statistics.median(values) for name, values in seconds.items()}
