"""`ddl generate`: continues prompts with the model of a run."""

from collections.abc import Iterator
import json
import sys
import time

from ddl_jax.command_line import parse, plain_parser
from ddl_jax.errors import InputError


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = plain_parser(
        "ddl generate",
        "Continues prompts with the model of a run, by its newest checkpoint. The text goes to stdout as it comes "
        "(that of several prompts when all are done), the speed to stderr.",
        "--run DIR --prompt TEXT [--prompt TEXT ...] [--KEY VALUE ...]",
    )
    add = parser.add_argument
    add("--run", metavar="DIR", help="the run_dir of a run")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated; an empty one begins a document")
    add("--tokens", type=int, default=100, metavar="INT", help="at most this many for each prompt [default: 100]")
    add("--temperature", type=float, default=1.0, metavar="NUMBER", help="0 takes the likeliest token [default: 1.0]")
    add("--top-k", type=int, metavar="INT", help="draw from the k likeliest tokens only")
    add("--top-p", type=float, metavar="NUMBER", help="draw from the likeliest tokens with this probability together")
    add("--seed", type=int, default=0, metavar="INT", help="of the draws [default: 0]")
    add("--stop", action="append", metavar="TEXT", help="ends a text, and is no part of it; may be repeated")
    add(
        "--skip-below",
        type=float,
        metavar="NUMBER",
        help="leave out edits whose gate is below this, and their sublayers where no row needs them; "
        "ddl evaluate --skip-below measures what that costs [default: none]",
    )
    add("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    options = parse(parser, arguments)
    if options.run is None:
        raise InputError("--run is missing; name the run_dir of a run, e.g. --run runs/quickstart")
    if not options.prompt:
        raise InputError("--prompt is missing; give the text to continue, e.g. --prompt 'The '")
    if not 0 <= options.seed < 2**32:
        raise InputError(
            f"--seed {options.seed} must lie in [0, 2**32); nearest: {min(max(options.seed, 0), 2**32 - 1)}"
        )
    return _generate(options)


def _generate(options) -> int:
    from ddl_jax.inference import Sampling, skipping, stream
    from ddl_jax.run import load_checkpoint

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    sampling.validate()
    (model, tokenizer, _), step = load_checkpoint(options.run)
    if options.skip_below is not None:
        model = skipping(model, options.skip_below)
    pieces = stream(
        model, tokenizer, options.prompt,
        tokens=options.tokens, sampling=sampling, seed=options.seed, stop=options.stop or (),
    )  # fmt: skip
    timed = _Timed(pieces)
    if options.json or len(options.prompt) > 1:
        texts = _whole(timed, options.tokens, len(options.prompt))
    else:
        texts = [_as_it_comes(timed, options.prompt[0])]
    speed = timed.tokens_per_second(len(options.prompt))
    if options.json:
        results = [{"prompt": p, "text": t} for p, t in zip(options.prompt, texts, strict=True)]
        document = {"run": options.run, "step": step, "tokens_per_second": speed, "results": results}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    elif len(options.prompt) > 1:
        print("\n\n".join(f"[{n}] {p}{t}" for n, (p, t) in enumerate(zip(options.prompt, texts, strict=True), 1)))
    tokens = f"{timed.count} token{'s' if timed.count > 1 else ''}"
    each = f" for each of {len(options.prompt)} prompts" if len(options.prompt) > 1 else ""
    rate = "" if speed is None else f", {speed:,.1f} tokens/s"
    print(f"step {step} of {options.run}: {tokens}{each}{rate}", file=sys.stderr)
    return 0


class _Timed:
    """The pieces of a stream, timed."""

    def __init__(self, pieces: Iterator[list[str]]):
        self._pieces, self.count, self._since, self._until = pieces, 0, None, None

    def __iter__(self) -> Iterator[list[str]]:
        for piece in self._pieces:
            self._until = time.monotonic()
            self._since = self._since or self._until
            self.count += 1
            yield piece

    def tokens_per_second(self, rows: int) -> float | None:
        """Of all rows together, without the first token of each, before which all is compiled."""
        return rows * (self.count - 1) / (self._until - self._since) if self.count > 1 else None


def _as_it_comes(pieces: _Timed, prompt: str) -> str:
    text = ""
    sys.stdout.write(prompt)
    for (piece,) in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        text += piece
    sys.stdout.write("\n")
    return text


def _whole(pieces: _Timed, tokens: int, rows: int) -> list[str]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    texts = [""] * rows
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("generating", total=tokens)
        for piece in pieces:
            texts = [text + new for text, new in zip(texts, piece, strict=True)]
            progress.advance(task)
    return texts
