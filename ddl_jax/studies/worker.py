"""A process that works for `ddl study run`, and ends with it: `python -m ddl_jax.studies.worker COMMAND …`.

Its standard input is a pipe that nothing is written to. The other end closes when the study's process ends, by whatever
way, and then so does this one: nothing trains on that nobody waits for.
"""

import importlib
import json
import os
import sys
import threading

from ddl_jax.stop import StopRequest


def main(arguments: list[str]) -> int:
    """Runs a command: `train` as train.py does, `bench`, `initial` or `devices`; returns its exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from ddl_jax.command_line import exit_code

    command, *rest = arguments
    if command != "train":
        module = {"bench": "ddl_jax.bench", "initial": "ddl_jax.studies.initial"}
        run = _devices if command == "devices" else lambda: importlib.import_module(module[command]).main(rest)
        return exit_code(run)
    with StopRequest() as stop:
        return exit_code(lambda: _train(rest, stop))


def _train(arguments: list[str], stop: StopRequest) -> int:
    from ddl_jax.command_line import config_parser, parse, read_config

    config = read_config(parse(config_parser("ddl_jax.studies.worker train", "Trains."), arguments))
    from ddl_jax.training import train

    return train(config, stop)


def _devices() -> int:
    import jax

    print(json.dumps({"platform": jax.default_backend(), "count": jax.device_count()}))
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    if code == 1:
        os._exit(code)  # after a failed save, threads of the storage may wait forever
    sys.exit(code)
