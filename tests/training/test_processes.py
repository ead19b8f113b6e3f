"""Two processes with two devices each: they train as one does, stop together, and notice when one is gone."""

import os
from pathlib import Path
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from ddl_jax.config.files import dump_config
from tests.training.runs import ROOT, environment, exact_metrics, final_state, metrics, python, tiny_config

STEPS, TIMEOUT = 10, 10

FULL = 0  # instead of a signal: files can no longer be written, as on a full disk
# train.py, in which process VICTIM is sent a signal when step FATAL is logged.
TRAIN = """
import os, resource, runpy, sys
from ddl_jax.training.run_directory import RunDirectory, RunFolder
number, fatal, victim = map(int, sys.argv[1:4])
FULL = 0

def signalled(log):
    def log_and_signal(run, record):
        import jax
        log(run, record)
        if record["step"] == fatal and jax.process_index() == victim:
            if number == FULL:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            else:
                os.kill(os.getpid(), number)
    return log_and_signal

for folder in (RunFolder, RunDirectory):
    folder.log = signalled(vars(folder)["log"])
sys.argv = ["train.py", *sys.argv[4:]]
runpy.run_path("train.py", run_name="__main__")
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Ended:
    """What became of processes: exit codes, what they said, and seconds from the first to end until the last."""

    def __init__(self, processes: list[subprocess.Popen]):
        first = None
        while any(process.poll() is None for process in processes):
            if first is None and any(process.poll() is not None for process in processes):
                first = time.monotonic()
            time.sleep(0.05)
        self.seconds = time.monotonic() - (first or time.monotonic())
        said = [process.communicate() for process in processes]
        self.codes = [process.returncode for process in processes]
        self.out, self.errors = [out for out, _ in said], [error for _, error in said]


def launch(config, processes=2, devices=2, at=(signal.SIGTERM, -1, 0), options=(), each=((), ())) -> Ended:
    """Trains with so many processes; `at` is a signal, the step at which it is sent, and the process that gets it.

    `options` are for all, `each` for one process each.
    """
    file = Path(config.run_dir + ".yaml")
    file.write_text(dump_config(config))
    # Quick to compile, and the same program in every start.
    env = environment() | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    address = f"127.0.0.1:{free_port()}"
    started = []
    for index in range(processes):
        command = [sys.executable, "-c", TRAIN, *(str(int(number)) for number in at), "--config", str(file)]
        if processes > 1:
            command += ["--distributed.mode", "explicit", "--distributed.coordinator", address]
            command += ["--distributed.processes", str(processes), "--distributed.process_id", str(index)]
            command += ["--distributed.timeout", str(TIMEOUT)]
        command += [*options, *each[index]]
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        return Ended(started)
    finally:
        for process in started:
            process.kill()


def run(folder: Path, name: str):
    # Batches of four: a sequence for each device.
    return tiny_config(folder, name, steps=STEPS, checkpoint_every=3, evaluate_every=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def straight(folder):
    config = run(folder, "straight")
    ended = launch(config)
    assert ended.codes == [0, 0], ended.errors
    return config, ended


@pytest.fixture(scope="module")
def killed(folder):
    """Stopped at step 2, gone on with, and its second process killed at step 8."""
    config = run(folder, "killed")
    stopped = launch(config, at=(signal.SIGTERM, 2, 1))
    killed = launch(config, at=(signal.SIGKILL, 8, 1))
    shutil.copytree(config.run_dir, folder / "copy")
    return config, stopped, killed


def test_process_0_says_who_is_there_and_the_others_are_silent(straight):
    _, ended = straight
    assert "Process 0 of 2, with 2 of 4 devices\n" in ended.out[0]
    assert "Mesh: data 4 × fsdp 1 × tensor 1; 1 sequences at a time on each device\n" in ended.out[0]
    ours = [line for line in ended.out[1].splitlines() if not line.startswith("[Gloo]")]  # of the library for CPUs
    assert ours == [] and ended.errors == ["", ""]


def losses(config, first: int, last: int) -> list[float]:
    return [record["loss"] for record in metrics(config) if first <= record["step"] <= last]


def test_two_processes_train_as_one_with_one_device(straight, folder):
    config, _ = straight
    alone = run(folder, "alone")
    ended = launch(alone, processes=1, devices=1)
    assert ended.codes == [0], ended.errors
    # Sums in another order. Of the first steps: AdamW divides by tiny gradients, so that last digits grow into more.
    np.testing.assert_allclose(losses(alone, 1, 6), losses(config, 1, 6), rtol=1e-5)
    values = [[record["validation_loss"] for record in metrics(each)[4:5]] for each in (config, alone)]
    np.testing.assert_allclose(*values, rtol=1e-5)


def test_a_signal_to_one_stops_both_at_the_same_step(killed):
    _, stopped, _ = killed
    assert stopped.codes == [3, 3], stopped.errors
    # A process hears of the others' requests a step later.
    assert "step 3 is saved" in stopped.out[0] or "step 4 is saved" in stopped.out[0]


def test_when_one_is_killed_the_other_ends_with_the_reason_in_time(killed):
    _, _, ended = killed
    assert ended.codes == [1, -signal.SIGKILL], ended.errors
    last = ended.errors[0].splitlines()[-1]
    assert last.startswith("failed: another process has ended")
    assert ended.seconds < 3 * TIMEOUT  # noticed within the timeout, and some for a busy machine


def test_both_resume_bit_for_bit(straight, killed):
    (config, _), (resumed, *_) = straight, killed
    ended = launch(resumed)
    assert ended.codes == [0, 0] and "resumed at step" in ended.out[0], ended.errors
    assert exact_metrics(resumed) == exact_metrics(config)
    for one, other in zip(final_state(config), final_state(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_process_with_one_device_resumes_what_two_have_saved(straight, killed, folder):
    resumed = run(folder, "copy")
    ended = launch(resumed, processes=1, devices=1)
    assert ended.codes == [0], ended.errors
    start = int(re.search(r"resumed at step (\d+)", ended.out[0])[1])
    found, expected = (losses(config, start + 1, start + 3) for config in (resumed, straight[0]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # as above; on four devices, too, sums differ from gloo's


def test_a_save_that_fails_on_one_ends_both(folder):
    config = run(folder, "full")
    ended = launch(config, at=(FULL, 2, 1))
    assert ended.codes == [1, 1], ended.errors
    for error in ended.errors:  # the storage tells no process which of them it was
        assert error.splitlines()[-1].startswith("failed: saving a checkpoint in ")
    assert metrics(config)[-1]["step"] < STEPS


def test_what_process_0_refuses_ends_all(folder):
    config = run(folder, "foreign")
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "metrics.jsonl").write_text("mine\n")
    ended = launch(config)
    assert ended.codes == [2, 2]
    message = f"run_dir {config.run_dir!r} holds metrics.jsonl, but is no run of ours; use another run_dir\n"
    assert ended.errors == [f"error: {message}", f"error: process 0: {message}"]


def test_other_settings_in_one_process_end_both_before_anything_is_trained(folder):
    config = run(folder, "others")
    options = [(), ("--optimizer.learning_rate", "0.5", "--data.workers", "1")]  # workers may differ
    ended = launch(config, each=options)
    assert ended.codes == [2, 2]
    message = "optimizer.learning_rate is 0.5 here, but 0.01 in process 0; give all the same command\n"
    assert ended.errors == [f"error: process 1: {message}", f"error: {message}"]
    assert not os.path.exists(config.run_dir)


def alone_on(config, *options: str) -> tuple[int, str]:
    ended = launch(config, processes=1, options=options)
    return ended.codes[0], ended.errors[0].splitlines()[-1]


def test_a_coordinator_that_does_not_answer_is_said_in_time(folder):
    address = f"127.0.0.1:{free_port()}"
    options = ("--distributed.mode", "explicit", "--distributed.coordinator", address, "--distributed.processes", "2")
    code, line = alone_on(run(folder, "lost"), *options, "--distributed.process_id", "1", "--distributed.timeout", "2")
    expected = f"the processes did not all meet at distributed.coordinator '{address}' within distributed.timeout, 2 s"
    assert code == 1 and line.startswith(f"failed: {expected}")
    assert not os.path.exists(folder / "lost")


def test_a_port_that_is_taken_is_said(folder):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--distributed.mode", "explicit", "--distributed.coordinator", f"127.0.0.1:{port}")
        options += ("--distributed.processes", "2", "--distributed.process_id", "0")
        code, line = alone_on(run(folder, "taken"), *options)
    expected = f"error: distributed.coordinator '127.0.0.1:{port}': port {port} cannot be listened on here"
    assert code == 2 and line.startswith(expected)
    assert not os.path.exists(folder / "taken")


def test_no_cluster_is_said(folder):
    code, line = alone_on(run(folder, "auto"), "--distributed.mode", "auto")
    assert code == 2 and line.startswith("error: distributed.mode 'auto' finds no cluster here that jax knows")


JOIN = """
import jax
from ddl_jax.config import DistributedConfig
from ddl_jax.training.distributed import join
join(DistributedConfig(mode="auto", timeout=20))
print(jax.process_count(), jax.config.values["jax_cuda_visible_devices"])
"""


@pytest.mark.parametrize(("chosen", "visible"), [({}, "all"), ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, "2,3")])
def test_under_slurm_a_process_has_all_gpus_of_its_machine(monkeypatch, chosen, visible):
    """jax by itself takes it to have one, that of its number on the machine."""
    slurm = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "STEP_NUM_NODES": 1, "NTASKS": 1, "PROCID": 0, "LOCALID": 0}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for name, value in ({"JAX_COORDINATOR_PORT": str(free_port())} | chosen).items():
        monkeypatch.setenv(name, value)
    result = python(JOIN)
    assert result.stdout == f"1 {visible}\n", result.stderr
