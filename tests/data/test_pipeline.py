import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from ddl_jax.data import train_batches, validation_batches
from ddl_jax.data.stored import StoredTokens, Stretch
from ddl_jax.data.windows import Windows

LENGTH = 5
SEEDS = st.integers(0, 2**32 - 1)


def text(windows: int, rest: int = 0) -> np.ndarray:
    """Tokens of that many windows; a window is known by its first token."""
    return np.arange(windows * LENGTH + 1 + rest, dtype=np.uint16)


def batches(
    count: int, windows: int, batch_size: int, seed: int = 0, start_step: int = 0, workers: int = 0, part=(0, 1)
):
    tokens = text(windows, rest=LENGTH - 1)
    with train_batches(tokens, LENGTH, batch_size, seed, start_step, workers, part=part) as stream:
        return list(itertools.islice(stream, count))


def order(count: int, windows: int, batch_size: int, seed: int = 0, start_step: int = 0) -> list[int]:
    """Which windows, one batch after another."""
    found = batches(count, windows, batch_size, seed, start_step)
    return [int(first) // LENGTH for batch in found for first in batch["tokens"][:, 0]]


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == {"tokens", "targets"}
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_labels_are_shifted_by_one():
    for batch in batches(3, windows=10, batch_size=4):
        for array in batch.values():
            assert array.shape == (4, LENGTH)
            assert array.dtype == np.int32
        np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)  # the text counts upwards
        assert (batch["tokens"][:, 0] % LENGTH == 0).all()


def test_the_order_is_shuffled_not_sequential():
    first = order(10, windows=40, batch_size=4)
    assert first != sorted(first)
    assert sum(b == a + 1 for a, b in itertools.pairwise(first)) < 10
    assert first != order(10, windows=40, batch_size=4, seed=1)


@pytest.mark.parametrize("windows", [12, 10])  # an epoch that ends with a batch, and one that ends within
def test_exact_replay_from_every_step(windows):
    straight = batches(9, windows, batch_size=4, seed=3)
    for start in range(9):
        assert_equal(batches(9 - start, windows, 4, seed=3, start_step=start), straight[start:])


def test_every_epoch_has_every_window_once_in_an_order_of_its_own():
    # 10 windows in batches of 4: the third batch holds the end of one epoch and the beginning of the next.
    windows = order(10, windows=10, batch_size=4)
    epochs = [windows[start : start + 10] for start in range(0, 40, 10)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert len(set(map(tuple, epochs))) == 4


def test_shuffle_is_not_rebuilt_at_epoch_0():
    straight = order(9, windows=12, batch_size=4)
    restarted = order(3, windows=12, batch_size=4, start_step=6)
    assert restarted == straight[24:]
    assert restarted != straight[:12]


def test_checkpoint_at_the_epoch_boundary_does_not_skip_the_next_epoch():
    straight = order(9, windows=12, batch_size=4)
    assert order(3, windows=12, batch_size=4, start_step=3) == straight[12:24]
    assert sorted(straight[12:24]) == list(range(12))


@pytest.mark.parametrize("windows", [1, 3])
def test_a_batch_may_be_larger_than_an_epoch(windows):
    found = order(2, windows, batch_size=6)
    assert sorted(found) == sorted(list(range(windows)) * (12 // windows))


def test_neighbouring_seeds_do_not_share_epochs():
    epochs = [
        tuple(order(3, windows=12, batch_size=4, seed=seed, start_step=3 * epoch))
        for seed in (0, 1, 2, 2**32 - 1)
        for epoch in range(3)
    ]
    assert len(set(epochs)) == len(epochs)


def test_workers_change_no_batch_and_are_gone_afterwards():
    straight = batches(9, windows=10, batch_size=4, seed=5)
    worked = batches(7, windows=10, batch_size=4, seed=5, start_step=2, workers=2)
    assert not multiprocessing.active_children()
    assert_equal(worked, straight[2:])
    for batch in worked:
        for array in batch.values():
            assert type(array) is np.ndarray
            assert array.flags.owndata  # not the workers' shared memory


def test_a_text_reaches_workers_as_the_name_of_its_file(tmp_path):
    tokens = text(10_000)
    tokens.tofile(tmp_path / "tokens")
    windows = Windows(StoredTokens((Stretch(str(tmp_path / "tokens"), "<u2", 0, len(tokens)),), 2**16), LENGTH)
    data = pickle.dumps(windows)
    assert len(data) < 1000
    assert_equal([pickle.loads(data)(np.array([7, 2]))], [windows(np.array([7, 2]))])


PROGRAM = """
import multiprocessing, signal, sys
import numpy as np
from ddl_jax.data import train_batches

if __name__ == "__main__":
    stopped = []
    if sys.argv[1] == "until asked":
        signal.signal(signal.SIGTERM, lambda *arguments: stopped.append(True))
    with train_batches(np.arange(1000), 5, 4, seed=0, workers=2) as stream:
        for _ in range(3):
            batch = next(stream)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        while sys.argv[1] != "three" and not stopped:
            batch = next(stream)
        for _ in range(20):
            batch = next(stream)
"""


@pytest.fixture
def start(tmp_path, room_alone):
    """Starts the program with an argument; returns it and its workers' process ids."""
    # A job in the background of a shell is started with Ctrl-C ignored, and all that it starts.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "program.py").write_text(heard + room_alone + PROGRAM)
    (tmp_path / "temporary").mkdir()
    return functools.partial(_start, tmp_path)


def _start(tmp_path, argument: str) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), argument],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers


def finish(process: subprocess.Popen) -> str:
    """What it wrote to stderr. The workers hold that pipe too, so this ends only when they have ended."""
    try:
        return process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("a worker outlived its parent")


def assert_nothing_left(tmp_path, workers: list[int]):
    assert not list((tmp_path / "temporary").iterdir())
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_leaving_early_leaves_nothing_behind(tmp_path, start):
    process, workers = start("three")
    assert finish(process) == ""
    assert process.returncode == 0
    assert_nothing_left(tmp_path, workers)


def test_ctrl_c_leaves_nothing_behind(tmp_path, start):
    process, workers = start("for ever")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    errors = finish(process)
    assert errors.count("Traceback") == 1  # the program's own
    assert errors.endswith("KeyboardInterrupt\n")
    assert "resource_tracker" not in errors
    assert_nothing_left(tmp_path, workers)


def test_a_request_to_stop_leaves_the_workers_to_the_program(tmp_path, start):
    process, workers = start("until asked")
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler may do: the workers get it too
    assert finish(process) == ""
    assert process.returncode == 0
    assert_nothing_left(tmp_path, workers)


def test_workers_end_with_a_parent_that_was_killed(start):
    process, _ = start("for ever")
    process.kill()
    finish(process)


def test_validation_is_always_the_same_and_spread_over_the_text():
    found = validation_batches(text(100, rest=3), LENGTH, batch_size=4, batches=5)
    assert_equal(found, validation_batches(text(100, rest=3), LENGTH, batch_size=4, batches=5))
    assert len(found) == 5
    chosen = np.concatenate([batch["tokens"][:, 0] for batch in found]) // LENGTH
    assert chosen.tolist() == list(range(0, 100, 5))
    for batch in found:
        assert all(array.shape == (4, LENGTH) and array.dtype == np.int32 for array in batch.values())
        np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)


@pytest.mark.parametrize("windows", range(1, 10))
def test_a_small_validation_text_is_used_whole_and_padded(windows):
    found = validation_batches(text(windows), LENGTH, batch_size=4, batches=10)
    assert len(found) == -(-windows // 4)
    assert all(array.shape == (4, LENGTH) for batch in found for array in batch.values())
    tokens, targets = (np.concatenate([batch[name] for batch in found]) for name in ("tokens", "targets"))
    np.testing.assert_array_equal(targets[:windows].ravel(), np.arange(1, windows * LENGTH + 1))
    np.testing.assert_array_equal(tokens[:windows].ravel(), np.arange(windows * LENGTH))
    assert (targets[windows:] == -1).all()
    assert (tokens[windows:] == 0).all()  # a token of every vocabulary


class Recorder(np.ndarray):
    """A text that remembers which of its tokens were asked for."""

    def __getitem__(self, key):
        self.seen |= set(np.asarray(self.view(np.ndarray)[key]).ravel().tolist())
        return self.view(np.ndarray)[key]


def recorded(windows: int) -> Recorder:
    tokens = text(windows).view(Recorder)
    tokens.seen = set()
    return tokens


def stacked(parts: list[list[dict]]) -> list[dict]:
    """Whole batches from those of each part."""
    return [{name: np.concatenate([part[name] for part in row]) for name in row[0]} for row in zip(*parts, strict=True)]


@given(windows=st.integers(1, 40), rows=st.integers(1, 3), count=st.integers(1, 4), step=st.integers(0, 20), seed=SEEDS)
def test_the_parts_of_a_batch_are_the_batch_at_any_step(windows, rows, count, step, seed):
    whole = batches(step + 3, windows, rows * count, seed)[step:]
    parts = [batches(3, windows, rows * count, seed, step, part=(index, count)) for index in range(count)]
    assert all(len(batch["tokens"]) == rows for part in parts for batch in part)
    assert_equal(stacked(parts), whole)


@given(windows=st.integers(1, 40), rows=st.integers(1, 3), count=st.integers(1, 4), most=st.integers(1, 5))
def test_the_parts_of_the_validation_batches_are_those_batches(windows, rows, count, most):
    arguments = text(windows), LENGTH, rows * count, most
    parts = [validation_batches(*arguments, part=(index, count)) for index in range(count)]
    assert all(len(batch["tokens"]) == rows for part in parts for batch in part)
    assert_equal(stacked(parts), validation_batches(*arguments))


def test_no_window_of_another_part_is_read():
    tokens = recorded(windows=24)  # three batches of 8 are one epoch
    with train_batches(tokens, LENGTH, 8, seed=0, part=(1, 4)) as stream:
        found = list(itertools.islice(stream, 3))
    assert tokens.seen == {int(token) for batch in found for array in batch.values() for token in array.flat}
    assert len(tokens.seen) <= 6 * (LENGTH + 1)
    tokens = recorded(windows=24)
    found = validation_batches(tokens, LENGTH, 8, batches=3, part=(3, 4))
    assert tokens.seen == {int(token) for batch in found for array in batch.values() for token in array.flat}
    assert len(tokens.seen) <= 6 * (LENGTH + 1)
