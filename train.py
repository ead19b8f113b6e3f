"""Trains one configuration: `python train.py --config configs/quickstart.yaml --model.residual.value_channels 2`."""

import os
import sys

from ddl_jax.stop import StopRequest


def main(arguments: list[str], stop: StopRequest) -> int:
    """Trains as the arguments say; returns the exit code (0 done, 3 stopped after saving, 4 diverged)."""
    from ddl_jax.command_line import config_parser, parse, read_config

    parser = config_parser(
        "train.py", "Trains a language model. The same command again, in the same run_dir, resumes the run."
    )
    config = read_config(parse(parser, arguments))
    from ddl_jax.training import train  # after parsing, so that a mistake is reported before jax is loaded

    return train(config, stop)


if __name__ == "__main__":
    with StopRequest() as stop:  # before anything slow is loaded, so that Ctrl-C is never lost
        from ddl_jax.command_line import exit_code

        code = exit_code(lambda: main(sys.argv[1:], stop))
    sys.stdout.flush()
    if code == 1:
        os._exit(code)  # after a failed save, threads of the storage may wait forever
    sys.exit(code)
