"""The training run: prepare, step, log, evaluate, save, and end in good order."""

import contextlib
import dataclasses
import functools
import sys
import time

import jax
from rich.console import Console

from ddl_jax.config import Config
from ddl_jax.data import prepare, train_batches, validation_batches
from ddl_jax.errors import Diverged, RunError
from ddl_jax.evaluation import padded_byte_lengths, validate
from ddl_jax.residual.kernels import explain
from ddl_jax.stop import StopRequest
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.clock import Clock
from ddl_jax.training.display import Display, SteadyConsole, duration
from ddl_jax.training.distributed import FAILED as SAVE_FAILED
from ddl_jax.training.distributed import (
    GO_ON,
    STOP,
    Agreement,
    anywhere,
    first_then_others,
    join,
    require_same_settings,
    together,
    writes,
)
from ddl_jax.training.health import Health
from ddl_jax.training.metrics import MetricsLog
from ddl_jax.training.run_directory import RunDirectory, RunFolder
from ddl_jax.training.sharding import first_state, make_mesh, place_batch, place_rows, placed_batch, placed_state, rows
from ddl_jax.training.step import Batch, TrainState, make_evaluation_step, make_train_step, model_graph
from ddl_jax.transformer.auto import explain_attention, with_dtypes
from ddl_jax.transformer.costs import flops_per_token

DONE, FAILED, STOPPED, DIVERGED = 0, 1, 3, 4  # exit codes (2, bad input, is the command line's)


def train(config: Config, stop: StopRequest | None = None) -> int:
    """Trains, or resumes, the run in `config.run_dir`.

    Args:
        config: need not be resolved.
        stop: a request that is already being listened for; without one, this function listens itself.

    Returns:
        The exit code: 0 done, 1 failed, 3 stopped on request after saving, 4 diverged.

    Raises:
        InputError: something in the configuration, the run directory or the corpus cannot be used.
    """
    config = config.resolve()
    try:
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopRequest()) if stop is None else stop
            join(config.distributed)
            require_same_settings(config)
            folder = RunDirectory if writes() else RunFolder
            run = first_then_others(lambda: stack.enter_context(folder(config)))
            console = SteadyConsole(highlight=False, soft_wrap=True, quiet=not writes())
            return _Run(config, run, stop, console).train()
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return DIVERGED
    except (RunError, OSError) as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            if jax.process_count() == 1:
                raise
            print(f"failed: another process may have ended; see what it said ({reason})", file=sys.stderr)
            return FAILED
        print(f"failed: out of memory; try a smaller training.microbatch_size ({reason})", file=sys.stderr)
        return FAILED


class _Run:
    def __init__(self, config: Config, run: RunFolder, stop: StopRequest, console: Console):
        self.run, self.stop, self.console = run, stop, console
        config = together(lambda: run.settle(config))
        self.mesh = make_mesh(config)
        config, devices = config.on(self.mesh.size), list(self.mesh.devices.flat)
        config = dataclasses.replace(config, model=with_dtypes(config.model, devices))
        self.attention = explain_attention(config.model, devices)
        self.kernels = explain(config.model.residual, config.model.width)
        # A tokenizer that is trained here is trained by process 0.
        self.corpus = first_then_others(lambda: prepare(config.data, config.model.context_length, run.path))
        model = config.model.with_vocabulary(self.corpus.tokenizer.vocab_size)
        self.config = dataclasses.replace(config, model=model)
        first_then_others(lambda: run.begin(self.config, self.corpus))

    def train(self) -> int:
        config, say = self.config, self.console.print
        if anywhere(bool(self.stop)):
            say("Stopped on request before the first step.")
            return STOPPED
        self.graph = model_graph(config, jax.devices())
        timeout = config.distributed.timeout
        with Checkpoints(self.run.checkpoints, say, timeout) as self.checkpoints:
            state = self.checkpoints.restore(placed_state(config, self.mesh))
            if state is None:
                state = first_state(config, self.mesh)
            start = int(state.step)
            self._greet(state, start)
            if start >= config.training.steps:
                say(f"This run is complete: {start} steps. Train again with another run_dir.")
                return DONE
            with MetricsLog(self.run, start) as self.log:
                if self.log.redone:
                    say(f"{self.log.redone} logged steps after step {start} are done again; see metrics_redone.jsonl.")
                code, step = self._loop(state, start)
            together(self.checkpoints.wait)
        if code == STOPPED:
            say(f"Stopped on request; step {step} is saved. The same command goes on from there.")
        else:
            self._farewell()
        return code

    def _loop(self, state: TrainState, start: int) -> tuple[int, int]:
        config, training, mesh = self.config, self.config.training, self.mesh
        validation = [
            Batch(**batch)
            for batch in validation_batches(
                self.corpus.validation, config.model.context_length, training.batch_size, training.evaluation_batches
            )
        ]
        with self.console.status("compiling the training step …"):
            begun = time.monotonic()
            train_step = jax.jit(make_train_step(self.graph, config, mesh), donate_argnums=0)
            train_step = train_step.lower(state, placed_batch(config, mesh)).compile()
        self.console.print(f"Compiled in {duration(time.monotonic() - begun)}.")
        evaluate = jax.jit(make_evaluation_step(self.graph, config, mesh))
        byte_lengths = padded_byte_lengths(self.corpus.tokenizer.byte_lengths, config.model.vocab_size)

        health = Health(kept=self._kept)
        batches = train_batches(
            self.corpus.train, config.model.context_length, training.batch_size, config.seed, start,
            config.data.workers, part=rows(config, mesh),
        )  # fmt: skip
        agree = Agreement(mesh)
        step = start

        def nats(parameters, batch: Batch):
            return evaluate(parameters, place_batch(batch, mesh))

        def save() -> None:
            health.settle()
            # Finite parameters can still give a loss that is not: such a state must not become the last good one.
            probe = float(nats(state.parameters, validation[0]))
            health.check_validation(step, probe, float(metrics["learning_rate"]) if step > start else 0.0)
            self.checkpoints.save(step, state)

        with batches as batches, Display(training.steps, start, self.console) as display:
            clock = Clock(config, start, list(mesh.devices.flat))
            while step < training.steps:
                said = agree(SAVE_FAILED if self.checkpoints.failed else STOP if self.stop else GO_ON)
                if said == SAVE_FAILED:
                    self.checkpoints.check()
                    raise RunError("another process could not save its part of a checkpoint; see what it said")
                if said == STOP:
                    break
                state, metrics = train_step(state, place_rows(Batch(**next(batches)), config, mesh))
                step += 1
                health.observe(step, metrics)
                display.advance(step)
                last = step == training.steps
                evaluates = last or step % training.evaluate_every == 0
                if evaluates or step % training.log_every == 0:
                    health.settle()
                    record = {"step": step, "tokens": step * clock.tokens_per_step}
                    record |= {name: float(value) for name, value in metrics.items()}
                    with clock.paused():
                        if evaluates:
                            nats_now = functools.partial(nats, state.parameters)
                            result = validate(nats_now, validation, byte_lengths)
                            health.check_validation(step, result.loss, record["learning_rate"])
                            record["validation_loss"] = result.loss
                            record["validation_bits_per_byte"] = result.bits_per_byte
                    record |= clock.lap(step)
                    self.log.write(record)
                    display.logged(record)
                if last or step % training.checkpoint_every == 0:
                    with clock.paused():
                        save()
            save()
        return (STOPPED if step < training.steps else DONE), step

    def _kept(self) -> str:
        newest = self.checkpoints.newest
        return "no checkpoint had been saved yet" if newest is None else f"the last good checkpoint is step {newest}"

    def _greet(self, state: TrainState, start: int) -> None:
        config, corpus, device, mesh = self.config, self.corpus, jax.devices()[0], self.config.mesh
        model, residual = config.model, config.model.residual
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
        local, count = jax.local_device_count(), jax.process_count()
        processes = f"\nProcess {jax.process_index()} of {count}, with {local} of {self.mesh.size} devices"
        processes = processes if count > 1 else ""
        kernels = f"Kernels: {self.kernels}\n" if self.kernels else ""
        shape = f"{model.layers} layers, width {model.width}, V = {residual.value_channels}"
        reader = "" if residual.reader in (None, "identity") else f", {residual.reader} reader"
        self.console.print(
            f"Model: {residual.kind} ({residual.preset} preset), {shape}{reader}; {parameters:,} parameters, "
            f"{flops_per_token(model) / 1e6:,.1f} MFLOP per token\n"
            f"Data: {config.data.corpus}, tokenizer {config.data.tokenizer}; {len(corpus.train):,} tokens in "
            f"{corpus.train_units:,} {corpus.unit}, {len(corpus.validation):,} tokens in "
            f"{corpus.validation_units:,} held out\n"
            f"Device: {device.device_kind}, compute {model.compute_dtype}, state {model.state_dtype}\n"
            f"Mesh: data {mesh.data} × fsdp {mesh.fsdp} × tensor {mesh.tensor}; {config.training.microbatch_size} "
            f"sequences at a time on each device{processes}\n"
            f"Attention: {self.attention}\n"
            f"{kernels}Run directory: {self.run.path}" + (f", resumed at step {start}" if start else "")
        )

    def _farewell(self) -> None:
        path = self.run.path
        self.console.print(
            f"\nDone. In {path}:\n"
            "  config.yaml     every setting, resolved\n"
            "  metrics.jsonl   loss, gradient norm, speed and validation of each logged step\n"
            "  checkpoints/    the newest states; the same command resumes from them\n"
            "Try next the same command with --run_dir runs/NAME and one of these, and compare the validation lines:\n"
            "  --model.residual.kind write_only        the same stream without the erase term\n"
            "  --model.residual.value_channels 2       fewer value channels\n"
            "  --model.residual.reader token           TC: the reader sees earlier tokens, too\n"
            "What a variant costs: python -m ddl_jax bench configs/bench/baseline.yaml configs/bench/cc.yaml"
        )
