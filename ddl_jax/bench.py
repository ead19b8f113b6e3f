"""`ddl bench`: what a training step costs, or making a token, of several configurations in one run; or their input."""

import dataclasses
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING

from ddl_jax.command_line import config_parser, parse, read_configs
from ddl_jax.config import Config
from ddl_jax.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

WARMUP = 2  # rounds that are not counted: first touches of memory, threads starting


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = config_parser(
        "ddl bench",
        "Times the training step and the forward pass on random tokens, or with --decode the making of tokens. Several "
        "configurations take turns, step by step, so that their ratio holds while the machine's speed drifts.",
        several=True,
    )
    parser.add_argument(
        "--input", action="store_true", help="time how fast the training batches are read, instead of training on them"
    )
    parser.add_argument(
        "--decode", action="store_true", help="time the making of tokens, by batch, context and length, on one device"
    )
    for name, default, of in (
        ("batch", "1,8", "rows"),
        ("context", "128", "tokens of each row's prompt"),
        ("generated", "64", "tokens made"),
    ):
        add = parser.add_argument
        add(f"--{name}", default=default, metavar="INT,...", help=f"with --decode: {of} [default: {default}]")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument(
        "--rounds",
        metavar="INT",
        help="timed steps, or rounds of batches, of each [default: 20]; or, with --decode, texts [default: 3]",
    )
    options = parse(parser, arguments)
    if options.input and options.decode:
        raise InputError("--input and --decode are two measurements; ask for one at a time")
    rounds = _rounds(("3" if options.decode else "20") if options.rounds is None else options.rounds)
    sizes = {name: _sizes(name, getattr(options, name)) for name in ("batch", "context", "generated")}
    configs = read_configs(options)
    if options.decode:
        results = _decode([(name, _with_vocabulary(config)) for name, config in configs], sizes, rounds)
    elif options.input:
        from ddl_jax.data.throughput import measure_input

        results = [{"config": name, **measure_input(config, rounds)} for name, config in configs]
    else:
        results = measure([(name, _with_vocabulary(config)) for name, config in configs], rounds)
    if options.json:
        sys.stdout.write(json.dumps(results if len(results) > 1 else results[0], indent=2) + "\n")
    else:
        (_show_input if options.input else _show_decode if options.decode else _show)(results)
    return 0


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise InputError(f"--rounds {text!r} must be a whole number from 1 to 999999; nearest: 1")
    return int(text)


def _sizes(name: str, text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and 0 < int(number) < 10**6 for number in numbers):
        raise InputError(f"--{name} {text!r} must be whole numbers from 1 to 999999, e.g. 1,8")
    return tuple(sorted({int(number) for number in numbers}))


def _decode(configs: list[tuple[str, Config]], sizes: dict[str, tuple[int, ...]], rounds: int) -> list[dict]:
    from rich.console import Console
    from rich.progress import Progress

    from ddl_jax.inference.speed import Sizes, measure_decode

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        total = len(sizes["batch"]) * len(sizes["context"]) * rounds
        task = progress.add_task("generating", total=total)
        return measure_decode(configs, Sizes(**sizes), rounds, lambda: progress.advance(task))


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None:
        return config
    return dataclasses.replace(config, model=config.model.with_vocabulary(config.data.tokenizer_size()))


def measure(configs: list[tuple[str, Config]], rounds: int) -> list[dict]:
    """Times each configuration, interleaved.

    Args:
        configs: names and resolved configurations, model.vocab_size included.
        rounds: timed steps of each.

    Returns:
        For each: `config`, `train_step_seconds` and `forward_seconds` (medians), `tokens_per_second` of training,
        `compile_seconds` of the training step, `device` (its kind), `parameters`, `flops_per_token`, `kernels` (which
        implementation of the stream's operations ran, and why; empty where it has none), and `train_step_ratio` to the
        first.

    Raises:
        InputError: a configuration asks for kernels that do not run here, or does not divide over the devices.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(configs) * (WARMUP + rounds + 1))
        contenders = []
        for name, config in configs:
            contenders.append(_Contender(name, config))
            progress.advance(task)
        progress.update(task, description="timing")
        for round_number in range(WARMUP + rounds):
            for contender in contenders:
                contender.take_turn(counted=round_number >= WARMUP)
                progress.advance(task)
    results = [contender.result() for contender in contenders]
    for result in results:
        result["train_step_ratio"] = result["train_step_seconds"] / results[0]["train_step_seconds"]
    return results


class _Contender:
    """One compiled configuration with its state."""

    def __init__(self, name: str, config: Config):
        import jax

        from ddl_jax.residual.kernels import explain
        from ddl_jax.training.sharding import batch_sharding, first_state, make_mesh
        from ddl_jax.training.step import Batch, make_evaluation_step, make_train_step, model_graph

        mesh = make_mesh(config)
        self.name, self.config = name, config.on(mesh.size)
        self.kernels = explain(config.model.residual, config.model.width)
        graph = model_graph(config, jax.devices())
        self.state = first_state(config, mesh)
        shape = (config.training.batch_size, config.model.context_length)
        tokens = jax.random.randint(jax.random.key(config.seed), shape, 0, config.model.vocab_size)
        self.batch = jax.device_put(Batch(tokens, jax.numpy.roll(tokens, -1, axis=1)), batch_sharding(mesh))
        begun = time.perf_counter()
        step = jax.jit(make_train_step(graph, config, mesh), donate_argnums=0)
        self._step = step.lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - begun
        forward = jax.jit(make_evaluation_step(graph, config, mesh))
        self._forward = forward.lower(self.state.parameters, self.batch).compile()
        self.step_seconds, self.forward_seconds = [], []

    def take_turn(self, counted: bool) -> None:
        """One step and one forward pass, each waited for."""
        import jax

        begun = time.perf_counter()
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        between = time.perf_counter()
        jax.block_until_ready(self._forward(self.state.parameters, self.batch))
        if counted:
            self.step_seconds.append(between - begun)
            self.forward_seconds.append(time.perf_counter() - between)

    def result(self) -> dict:
        import jax

        from ddl_jax.transformer.costs import flops_per_token

        step = statistics.median(self.step_seconds)
        return {
            "config": self.name,
            "train_step_seconds": step,
            "forward_seconds": statistics.median(self.forward_seconds),
            "tokens_per_second": self.batch.tokens.size / step,
            "compile_seconds": self.compile_seconds,
            "device": jax.devices()[0].device_kind,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.state.parameters)),
            "flops_per_token": flops_per_token(self.config.model),
            "kernels": self.kernels,
        }


def _show_input(results: list[dict]) -> None:
    table = _table("tokens/s", "batch, ms", "workers", "training tokens")
    for result in results:
        table.add_row(
            result["config"],
            f"{result['input_tokens_per_second']:,.0f}",
            f"{1e3 * result['batch_seconds']:,.2f}",
            f"{result['workers']}",
            f"{result['train_tokens']:,}",
        )
    _print(table)


def _show_decode(results: list[dict]) -> None:
    table = _table("batch", "context", "generated", "token, ms", "tokens/s", "ratio", "prompt, ms")
    for rows in zip(*(result["decode"] for result in results), strict=True):
        for result, row in zip(results, rows, strict=True):
            table.add_row(
                result["config"],
                f"{row['batch']}",
                f"{row['context']}",
                f"{row['generated']}",
                f"{row['milliseconds_per_token']:,.2f}",
                f"{row['decode_tokens_per_second']:,.1f}",
                f"{row['decode_ratio']:.3f}",
                f"{1e3 * row['prompt_seconds']:,.1f}",
            )
    _print(table)


def _show(results: list[dict]) -> None:
    table = _table("step, ms", "ratio", "forward, ms", "tokens/s", "compile, s", "parameters")
    table.add_column("kernels", overflow="fold")
    for result in results:
        table.add_row(
            result["config"],
            f"{1e3 * result['train_step_seconds']:,.1f}",
            f"{result['train_step_ratio']:.3f}",
            f"{1e3 * result['forward_seconds']:,.1f}",
            f"{result['tokens_per_second']:,.0f}",
            f"{result['compile_seconds']:.1f}",
            f"{result['parameters']:,}",
            result["kernels"] or "none",
        )
    _print(table)


def _table(*numbers: str) -> "Table":
    from rich.table import Column, Table

    columns = [Column(title, justify="right") for title in numbers]
    return Table(Column("configuration", overflow="fold"), *columns, box=None, pad_edge=False)


def _print(table: "Table") -> None:
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 160  # a file does not wrap
    Console(width=wide).print(table)
