"""`python -m ddl_jax COMMAND …`, also installed as `ddl`: hands the arguments to the command's module."""

import importlib
import sys

from ddl_jax.command_line import exit_code
from ddl_jax.errors import InputError, did_you_mean

# Each name is a module of ddl_jax with a `main(arguments) -> int`.
COMMANDS = {
    "prepare": "text to token shards: Parquet, JSON lines or text files, any tokenizer",
    "plan": "what a run will need on H200s: memory, bytes, FLOPs, the least time; no GPU needed",
    "bench": "times the training step and the forward pass of one or several configurations, or their input",
    "generate": "continues prompts with a trained run's model",
    "evaluate": "how good a trained run is: loss on its held-out text, and tasks of lm-evaluation-harness",
    "study": "compares arms over seeds: study run trains them in pairs, study report says what was found",
    "convert": "official PyTorch weights into a run directory, and back",
}


def usage() -> str:
    """The help: every command, one line each."""
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: ddl COMMAND [--help] ...", "", "commands:", *lines])


def dispatch(arguments: list[str]) -> int:
    """Runs the command named first; raises InputError if there is none of that name."""
    if not arguments:
        raise InputError(f"a command is missing; known: {', '.join(COMMANDS)}")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        raise InputError(f"{name!r} is not a command{did_you_mean(name, COMMANDS)}")
    return importlib.import_module(f"ddl_jax.{name}").main(rest)


def main() -> int:
    """The entry point of `ddl`."""
    return exit_code(lambda: dispatch(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
