"""A study's report as sections of text, table and picture: what its page and its Markdown both show."""

from typing import NamedTuple

from ddl_jax.config.study import Budget
from ddl_jax.studies import tables
from ddl_jax.studies.page import Section, Table
from ddl_jax.studies.plots import curves
from ddl_jax.studies.summary import ReadingResult, Summary

GIVEN: dict[Budget, str] = {
    "tokens": "Every arm takes the same number of steps, with the same seed on the same batches.",
    "flops": "Every arm takes as many steps as cost the FLOPs of the reference arm's training, by formula.",
    "seconds": "Every arm takes as many steps as take the time of the reference arm's training. The ratio of step "
    "times was measured once, in turns, and fixed.",
}
INTERVALS = """A difference is taken seed by seed: both runs have the same data order and, wherever their structures
coincide, the same initial parameters, so that what the seed does to both cancels. One seed tells nothing of a spread,
so it gets no interval.

The t interval holds 95 % of the time if the differences are drawn from a normal distribution. The bootstrap assumes no
distribution but is narrow for few seeds: of 3 it is the smallest and the largest difference, which holds the true mean
of normally distributed differences 76 % of the time, with 5 seeds 84 %, with 10 seeds 90 % (simulated). Where the two
disagree, believe the wider one.

p is that of the paired t test. The more differences are looked at, the likelier one of them is small by chance: Holm's
adjusted p values allow for as many as there are, in the table or in the whole study. "Same sign" says whether every
seed says the same; with 3 seeds that happens by chance one time in 4, with 5 one time in 16."""
PAIRS = """Standard deviation over seeds of the difference of two arms, as found pair by pair, and as it would be if the
arms' seeds had nothing in common. The smaller the first beside the second, the more comparing pair by pair is worth."""
COSTS = """The step times were measured on {device}, in turns, and are relative to {reference}'s. FLOPs are of training
and by formula; norms and the optimiser are left out."""
NOISE = """How far runs of {baseline} lie apart that differ in nothing but the seed. "Seen with n seeds" is the
difference of two arms' mean losses that an unpaired t test at 5 % would find with a probability of 80 % at this spread,
with n seeds of each arm. A smaller one can be seen here only because the runs are compared in pairs."""
FRONTIER = """Left is faster, down is better. The grey line joins what no other arm beats at once in loss and in time,
at equal tokens. Hollow marks, drawn a little to the right: every arm trained for as many seconds as the reference arm,
so that a fast arm has had more steps. Intervals above are of the mean loss, over seeds; those below are of the paired
differences, and tell more."""
CURVES = """Above, the loss late in training; below, the difference to {baseline} with the same seed. Every run has a
schedule of its own that ends with its budget: only the ends of the curves compare finished models. What a curve shows
before its end is a model whose learning rate has not come down yet."""
INTERPOLATED = """Where the arms were evaluated at different places, the baseline is interpolated."""
UPDATES = """On the first batch, before any step: the norm of what a sublayer adds to the state, over the state's norm
(root mean square over tokens), and the mean gate β. Arms whose first updates differ much in size begin differently,
whatever the rest of the comparison holds fixed."""
SWEEPS = """Final validation loss at equal tokens for each learning rate, with seeds that no comparison uses. A choice
at the edge of what was tried may have a better one beyond."""


class Part(NamedTuple):
    """Attributes: `title`; `text`, paragraphs separated by an empty line; `picture`, a name; `table`."""

    title: str
    text: str
    picture: str | None = None
    table: Table | None = None


def parts(summary: Summary, pictures: dict[str, bytes]) -> list[Part]:
    """The report.

    Args:
        summary: of the study.
        pictures: of `plots.pictures`; those that are not there are left out.
    """
    found = [Part("State of the study", _state(summary))]
    if summary.missing:
        found.append(Part("Missing runs", "", table=tables.missing(summary)))
    glance = "Small dots: seeds. Diamonds: their means, with 95 % t intervals."
    found += [Part("Differences at a glance", glance, "differences"), Part("Quality and cost", FRONTIER, "frontier")]
    drawn = curves(summary)
    for reading in summary.readings:
        names = [name for name, (one, _) in drawn.items() if one is reading]
        found += _reading(summary, reading, names)
    found.append(Part("Noise floor", NOISE.format(baseline=summary.baseline), table=tables.noise(summary)))
    pairing, tuning, initial = tables.pairing(summary), tables.tuning(summary), tables.initial(summary)
    costs = COSTS.format(device=summary.device, reference=summary.reference)
    found += [
        Part("What pairs are worth", PAIRS, table=pairing),
        Part("What the arms cost", costs, table=tables.costs(summary)),
        Part("Learning rates", SWEEPS, table=tuning),
        Part("Before training", UPDATES, table=initial),
    ]
    found = [part for part in found if part.table is None or part.table.rows]
    found = [part for part in found if part.picture is None or part.picture in pictures]
    return [*found, Part("How to read the differences", INTERVALS)]


def html_sections(found: list[Part], pictures: dict[str, bytes]) -> list[Section]:
    """The report as `page` takes it."""
    return [
        Section(part.title, _plain(part.text), None if part.picture is None else pictures[part.picture], part.table)
        for part in found
    ]


def markdown(title: str, found: list[Part]) -> str:
    """The report in Markdown, with pictures as files beside it."""
    blocks = [f"# {title}"]
    for part in found:
        blocks.append(f"## {part.title}")
        if part.picture is not None:
            blocks.append(f"![{part.title}]({part.picture}.png)")
        if part.text:
            blocks.append(_plain(part.text))
        if part.table is not None:
            blocks.append(tables.markdown(part.table))
    return "\n\n".join(blocks) + "\n"


def _plain(text: str) -> str:
    """Paragraphs, each on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _state(summary: Summary) -> str:
    planned, done = summary.runs_planned, summary.runs_finished
    complete = "" if done == planned else " THE STUDY IS INCOMPLETE: what follows is what there is."
    text = [
        f"{done} of {planned} runs have finished.{complete}",
        "Losses are validation losses after the last step, in nats per token: lower is better. A difference A − B "
        f"below zero says that A is better. The baseline is {summary.baseline}; the budgets are what "
        f"{summary.reference} uses in {summary.steps:,} steps of {summary.tokens_per_step:,} tokens.",
    ]
    without = "Having no final loss, they are LEFT OUT of means and differences"
    for state, so in (
        ("failed", f"{without}."),
        ("diverged", f"{without}, which flatters their arms; that they diverged is a result all the same."),
    ):
        runs = [run for run in summary.missing if run.state == state]
        if runs:
            named = ", ".join(f"{run.arm} (seed {run.seed}, learning rate {run.learning_rate:g})" for run in runs)
            text.insert(1, f"{state.upper()}: {named}. {so}")
    return "\n\n".join(text)


def _reading(summary: Summary, reading: ReadingResult, pictures: list[str]) -> list[Part]:
    title = reading.name[0].upper() + reading.name[1:]
    rate = "The learning rate is the same for all arms."
    if reading.learning_rate == "tuned":
        rate = "Each arm has the learning rate that was best for it in a sweep at equal tokens."
    left_out = sum(bool(one.left_out) for one in reading.differences)
    warning = "" if not left_out else (
        f"\n\n{left_out} of these {len(reading.differences)} differences LACK SEEDS: see the next table for why."
    )  # fmt: skip
    between = "" if reading.budget == "tokens" else " " + INTERPOLATED
    return [
        Part(title, f"{GIVEN[reading.budget]} {rate}{warning}", table=tables.differences(reading)),
        Part(f"{title}: each seed", "", table=tables.differences_by_seed(reading)),
        Part(f"{title}: the arms", "", table=tables.arms(reading)),
        *(Part(f"{title}: in the course of training", CURVES.format(baseline=summary.baseline) + between, name)
          for name in pictures),
    ]  # fmt: skip
