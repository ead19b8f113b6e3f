"""Trains one configuration: `python train.py --config configs/quickstart.yaml --model.residual.value_channels 2`."""

import sys

from ddl_jax.command_line import config_parser, exit_code, parse, read_config


def main(arguments: list[str]) -> int:
    """Trains as the arguments say; returns the exit code (0 done, 3 stopped after saving, 4 diverged)."""
    parser = config_parser(
        "train.py", "Trains a language model. The same command again, in the same run_dir, resumes the run."
    )
    config = read_config(parse(parser, arguments))
    from ddl_jax.training import train  # after parsing, so that a mistake is reported before jax is loaded

    return train(config)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
