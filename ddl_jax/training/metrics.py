"""Where metrics go: always metrics.jsonl, TensorBoard event files too where tensorboardX is installed."""

import importlib.util

from ddl_jax.training.run_directory import RunFolder


class MetricsLog:
    """Writes records of numbers, one per logged step. For a `with` statement.

    Attributes:
        redone: lines of steps after `start_step` that an earlier start had logged, and that were set aside.
    """

    def __init__(self, run: RunFolder, start_step: int):
        self.redone = run.keep_metrics_up_to(start_step)
        self._run = run
        self._board = None
        if run.writes and importlib.util.find_spec("tensorboardX"):
            import tensorboardX

            self._board = tensorboardX.SummaryWriter(str(run.path / "tensorboard"), purge_step=start_step + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        if self._board:
            self._board.close()

    def write(self, record: dict) -> None:
        self._run.log(record)
        if self._board:
            for name in record.keys() - {"step"}:
                self._board.add_scalar(name, record[name], record["step"])
