"""The command `ddl plan`."""

import json
import sys
from typing import Any

from ddl_jax.command_line import config_parser, parse, read_configs
from ddl_jax.config import Config
from ddl_jax.errors import InputError, did_you_mean

DEVICES = ("h200",)
MOST_DEVICES = 4096
TOP = 20  # instructions that --verbose lists


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0, or 1 if the program calls something that cannot be counted."""
    parser = config_parser(
        "ddl plan",
        "Compiles the training step for H200s, on any machine, and says what it needs: memory, bytes, FLOPs, the least "
        "time, and each beside the same model with a plain residual stream. Needs the extra compile, no GPU.",
        several=True,
    )
    parser.add_argument("--devices", default="1", metavar="INT", help="GPUs of the run [default: 1]")
    parser.add_argument("--device", default="h200", metavar="NAME", help="their kind [default: h200]")
    parser.add_argument("--fit", action="store_true", help="find the largest micro-batch by compiling others")
    parser.add_argument("--verbose", action="store_true", help="say where the bytes go")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parse(parser, arguments)
    devices = _count(options.devices)
    if options.device not in DEVICES:
        raise InputError(f"--device {options.device!r} is not known{did_you_mean(options.device, DEVICES)}")
    if options.json and options.markdown:
        raise InputError("--json and --markdown exclude each other")
    configs = read_configs(options)

    import jax

    jax.config.update("jax_platforms", "cpu")  # a plugin that finds no GPU complains
    from pallas_kernels.hopper import UnknownCustomCall

    try:
        return _plan(configs, devices, options)
    except UnknownCustomCall as error:
        print(f"no totals: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MOST_DEVICES:
        raise InputError(f"--devices {text!r} must be a whole number from 1 to {MOST_DEVICES}; nearest: 1")
    return int(text)


def _is_additive(config: Config) -> bool:
    return config.model.residual.kind == "additive"


def _on_devices(file: str, config: Config, count: int) -> Config:
    from ddl_jax.plan.program import settled

    try:
        return settled(config).on(count)
    except InputError as error:  # of several configurations, say which one
        raise InputError(f"{file}: {error}" if file else str(error)) from None


def _plan(configs: list[tuple[str, Config]], count: int, options: Any) -> int:
    from rich.console import Console

    from ddl_jax.plan import report
    from ddl_jax.plan.measure import additive, measure, parts, ratios, unnamed
    from ddl_jax.plan.policies import policies
    from ddl_jax.plan.program import compiled_step, devices_for

    devices = devices_for(count)
    results, baselines = [], {}
    configs = [(name, _on_devices(name if options.files else "", config, count)) for name, config in configs]
    with Console(stderr=True).status("") as status:

        def measured(name, config, fitted):
            def compiled(config):
                status.update(f"compiling {name}, {config.training.microbatch_size} sequences at a time")
                return compiled_step(unnamed(config), devices)

            return measure(config, count, compiled, fitted)

        for name, config in configs:
            plain = additive(config)
            if plain not in baselines:  # another one's may be this one's, too
                fitted = options.fit and any(additive(other) == plain and _is_additive(other) for _, other in configs)
                baselines[plain] = measured(f"{name} with kind: additive", plain, fitted)
            result = baselines[plain] if _is_additive(config) else measured(name, config, options.fit)
            results.append({"config": name} | result | {"baseline_ratio": ratios(result, baselines[plain])})
    if len(results) == 1:
        results[0]["policies"] = policies(configs[0][1], devices)
    if options.json:
        sys.stdout.write(json.dumps(results if len(results) > 1 else results[0], indent=2) + "\n")
        return 0
    if options.markdown:
        sys.stdout.write(report.markdown(results))
        return 0
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    if len(results) == 1:
        report.show_one(results[0], baselines[additive(configs[0][1])], console)
    else:
        report.show_several(results, console)
    if options.verbose:
        for result, (_, config) in zip(results, configs, strict=True):
            report.show_moved(result, parts(compiled_step(unnamed(config), devices), TOP), console)
    return 0
