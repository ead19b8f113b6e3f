"""What the arms of a study cost: their training steps timed in turns, in one `bench` run, and how wide is as slow."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools

from ddl_jax.config import Config
from ddl_jax.config.files import Settings
from ddl_jax.config.study import StudyConfig, arm_config
from ddl_jax.errors import RunError
from ddl_jax.studies.design import Cost

Bench = Callable[[Mapping[str, Config], int], Mapping[str, dict]]  # (configurations by name, rounds) → results of each

COARSE, FINE, FINAL = 5, 20, 40  # rounds
SPREAD = (1.0, 1.2, 1.4, 1.7, 2.0)  # widths that are tried first, over that of the experiment
WIDEST = 8  # times that of the experiment, where the search gives up


def measure(
    study: StudyConfig,
    experiment: Settings,
    arms: Sequence[str],
    per_head: int,
    bench: Bench,
    say: Callable[[str], None],
) -> dict:
    """Measures arms against the reference arm.

    Args:
        study: valid.
        experiment: settings that the arms have in common.
        arms: which to measure.
        per_head: features of a head that is widened are a multiple of it.
        bench: times configurations in turns.
        say: called with a line of text about what is done.

    Returns:
        `arms`, the fields of each one's `Cost` and `train_step_seconds`, `forward_seconds`, `compile_seconds` (medians
        over the `rounds`); `device`, its kind; and of the arms that were widened (`widened`): `to` which arm, and what
        was `tried`, as of `nearest_width`.
    """
    config = functools.partial(arm_config, study, experiment)
    widths, widened = {}, {}
    for arm in arms:
        target = study.arms[arm].widened_to
        if target is not None:
            say(f"how wide {arm} has to be for its step to take as long as that of {target}")

            def ratios(widths: Sequence[int], rounds: int, arm=arm, target=target) -> dict[int, float]:
                named = {str(width): config(arm, width) for width in widths}
                seconds = _step_seconds(bench({target: config(target)} | named, rounds))
                return {width: seconds[str(width)] / seconds[target] for width in widths}

            model = config(arm).model
            widths[arm], tried = nearest_width(ratios, model.width, per_head * model.heads)
            widened[arm] = {"to": target, "width": widths[arm], "tried": tried}
    say("the arms' training steps, in turns")
    contenders = {arm: config(arm, widths.get(arm)) for arm in dict.fromkeys([study.reference, *arms])}
    results = bench(contenders, FINAL)
    reference = results[study.reference]
    raw = ("train_step_seconds", "forward_seconds", "compile_seconds")
    return {
        "arms": {
            arm: dataclasses.asdict(
                Cost(
                    step_ratio=result["train_step_seconds"] / reference["train_step_seconds"],
                    flops_per_token=result["flops_per_token"],
                    parameters=result["parameters"],
                    width=contenders[arm].model.width,
                )
            )
            | {name: result[name] for name in raw}
            for arm, result in results.items()
        },
        "device": reference["device"],
        "rounds": FINAL,
        "widened": widened,
    }


def _step_seconds(results: Mapping[str, dict]) -> dict[str, float]:
    return {name: result["train_step_seconds"] for name, result in results.items()}


def nearest_width(
    ratios: Callable[[Sequence[int], int], Mapping[int, float]], base: int, unit: int
) -> tuple[int, list[dict]]:
    """The width at which a training step takes as long as the target's.

    Widths far apart are timed first, then, over more rounds, those around where the ratio crosses 1; of these the one
    nearest to 1 is taken.

    Args:
        ratios: (widths, rounds) → each one's step time over the target's, all timed in turns.
        base: the least that is tried (rounded up to the unit).
        unit: widths are multiples of it.

    Returns:
        The width, and what was tried: `rounds` and the `ratios` by width of each measurement.

    Raises:
        RunError: no width up to `WIDEST` times the base is as slow.
    """
    least, tried = _multiple(base, unit), []

    def timed(widths: Sequence[int], rounds: int) -> Mapping[int, float]:
        found = ratios(sorted(set(widths)), rounds)
        tried.append({"rounds": rounds, "ratios": dict(found)})
        return found

    start, coarse = float(least), {}
    while not any(ratio >= 1 for ratio in coarse.values()):
        if start > WIDEST * base:
            raise RunError(f"no width up to {max(coarse)} takes as long for a step: {max(coarse.values()):.2f} of it")
        coarse |= timed([_multiple(start * factor, unit) for factor in SPREAD], COARSE)
        start *= SPREAD[-1]
    centre = _crossing(coarse)
    for _ in range(3):  # timing has noise: what was found coarsely may lie outside
        middle = max(least, round(centre / unit) * unit)
        fine = timed([width for i in range(-2, 3) if (width := middle + i * unit) >= least], FINE)
        centre = min(fine, key=lambda width: abs(fine[width] - 1))
        if min(fine) < centre < max(fine) or centre == least:
            break
    return int(centre), tried


def _multiple(width: float, unit: int) -> int:
    return -(-round(width) // unit) * unit


def _crossing(ratios: Mapping[int, float]) -> float:
    """Where straight lines between neighbouring widths cross 1, from below."""
    widths = sorted(ratios)
    above = next(i for i, width in enumerate(widths) if ratios[width] >= 1)
    if above == 0:
        return widths[0]
    low, high = widths[above - 1], widths[above]
    return low + (high - low) * (1 - ratios[low]) / (ratios[high] - ratios[low])
