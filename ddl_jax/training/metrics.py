"""Where metrics go: always metrics.jsonl, TensorBoard event files too where tensorboardX is installed."""

import importlib.util

import jax

from ddl_jax.training.run_directory import RunDirectory

# Dense bf16 peak in FLOP/s by jax's device kind, from the datasheets. Unknown devices get no MFU rather than a wrong one.
PEAK_FLOPS = {"NVIDIA H200": 989e12}


def model_flops_utilization(flops_per_second: float) -> dict[str, float]:
    """{"mfu": share of the devices' peak}, or {} where their peak is not known."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return {"mfu": flops_per_second / (peak * jax.device_count())} if peak else {}


class MetricsLog:
    """Writes records of numbers, one per logged step. For a `with` statement."""

    def __init__(self, run: RunDirectory, start_step: int):
        run.keep_metrics_up_to(start_step)
        self._run = run
        self._board = None
        if importlib.util.find_spec("tensorboardX"):
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
