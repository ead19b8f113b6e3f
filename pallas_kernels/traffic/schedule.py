"""How many bytes of loads a block keeps in flight while it computes, replayed from its copies and barriers."""

import collections
from collections.abc import Hashable, Sequence
import dataclasses
import statistics
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a warpgroup does, in its own order.

    Attributes:
        kind: `issue` a copy to shared memory that will arrive on a barrier, `arrive` on one, `wait` for one, or `read`
            shared memory, which is where it computes.
        barrier: which barrier; None for a read.
        size: of an issued copy, in bytes.
        arrivals: of a barrier, how many complete one phase.
    """

    kind: Literal["issue", "arrive", "wait", "read"]
    barrier: Hashable = None
    size: int = 0
    arrivals: int = 1


def bytes_in_flight(threads: Sequence[Sequence[Event]]) -> int:
    """Bytes that one block has asked for and not yet waited for, the median over its reads of shared memory.

    The warpgroups of the block run in turn, each until a barrier stops it, those that issue copies first: so a producer
    runs as far ahead as its barriers let it. A kernel that keeps N loads of b bytes in its ring, and asks for the next
    when it is done with the last, reads with (N − 1)·b in flight. Loads that bypass shared memory are not counted.

    Args:
        threads: the events of each warpgroup.

    Raises:
        ValueError: every warpgroup waits for a barrier that none will complete: on a GPU the block would hang.
    """
    position = [0] * len(threads)
    waits = [collections.Counter() for _ in threads]
    arrived, outstanding, samples = collections.Counter(), {}, []
    order = sorted(range(len(threads)), key=lambda t: not any(event.kind == "issue" for event in threads[t]))
    moved = True
    while moved:
        moved = False
        for thread in order:
            while position[thread] < len(threads[thread]):
                event = threads[thread][position[thread]]
                if event.kind == "wait":
                    if arrived[event.barrier] < event.arrivals * (waits[thread][event.barrier] + 1):
                        break
                    waits[thread][event.barrier] += 1
                    outstanding.pop(event.barrier, None)
                elif event.kind == "read":
                    samples.append(sum(outstanding.values()))
                else:
                    arrived[event.barrier] += 1
                    if event.kind == "issue":
                        outstanding[event.barrier] = outstanding.get(event.barrier, 0) + event.size
                position[thread] += 1
                moved = True
                if event.kind == "arrive" and thread != order[0]:
                    break  # a producer may have room again
    stuck = [events[at] for events, at in zip(threads, position, strict=True) if at < len(events)]
    if stuck:
        raise ValueError(f"the block hangs: {stuck[0].arrivals} arrivals complete {stuck[0].barrier}, and no more come")
    return int(statistics.median_low(samples)) if samples else 0
