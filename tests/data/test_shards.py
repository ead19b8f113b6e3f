import itertools
from pathlib import Path
import pickle
import struct

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from ddl_jax.config import DataConfig
from ddl_jax.data import prepare, read_shards, train_batches
from ddl_jax.data.shards import BLOCK
from ddl_jax.data.stored import StoredTokens, Stretch
from ddl_jax.data.windows import Windows
from ddl_jax.errors import InputError


def shard(path: Path, tokens, magic: int = 20240520, version: int = 1, count: int | None = None) -> str:
    """A file in llm.c's layout, written from its description: 256 little-endian 32-bit words, then 16-bit tokens."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return str(path)


def values(tokens: StoredTokens) -> list[list[int]]:
    return [stretch.map().tolist() for stretch in tokens.stretches]


def config(folder: Path, **changes) -> DataConfig:
    return DataConfig(corpus="shards", paths=(str(folder / "*.bin"),), **changes).resolve()


def refusal(*arguments) -> str:
    with pytest.raises(InputError) as caught:
        read_shards(*arguments)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("data.paths")
    return message


def test_shards_named_for_validation_are_held_out(tmp_path):
    names = ["a_train_1.bin", "a_VAL_0.bin", "evaluation.bin", "valid_interval.bin", "z-validation.bin"]
    paths = [shard(tmp_path / name, [number, number + 1]) for number, name in enumerate(names)]
    train, validation, _ = read_shards(paths, 0.5, 10)
    assert values(train) == [[0, 1], [2, 3], [3, 4]]
    assert values(validation) == [[1, 2], [4, 5]]
    assert (len(train), len(validation)) == (6, 4)


def test_else_the_end_of_every_shard_is(tmp_path):
    paths = [shard(tmp_path / "0.bin", range(10)), shard(tmp_path / "1.bin", range(10, 14))]
    train, validation, _ = read_shards(paths, 0.2, 14)
    assert values(train) == [list(range(8)), [10, 11, 12]]
    assert values(validation) == [[8, 9], [13]]


def test_every_unusable_shard_is_refused_in_one_line(tmp_path):
    good = shard(tmp_path / "good.bin", [1, 2])
    (tmp_path / "text.bin").write_text("once upon a time " * 100)
    (tmp_path / "short.bin").write_bytes(Path(good).read_bytes()[:1000])
    (tmp_path / "cut.bin").write_bytes(Path(good).read_bytes()[:-2])
    found = {
        "text.bin' is not a token shard": str(tmp_path / "text.bin"),
        "short.bin' is not a token shard": str(tmp_path / "short.bin"),
        "magic.bin' is not a token shard": shard(tmp_path / "magic.bin", [1], magic=20240521),
        "new.bin' is a token shard of version 7; known: 1": shard(tmp_path / "new.bin", [1], version=7),
        "cut.bin' has 1,026 bytes, but its header counts 2 tokens, so 1,028 bytes": str(tmp_path / "cut.bin"),
        "count.bin' has 1,028 bytes, but": shard(tmp_path / "count.bin", [1, 2], count=-2),
        "empty.bin' holds no tokens; leave it out": shard(tmp_path / "empty.bin", []),
        "gone.bin' cannot be read: No such file or directory": str(tmp_path / "gone.bin"),
    }
    for message, path in found.items():
        assert message in refusal([good, path], 0.1, 10)
    only = shard(tmp_path / "fineweb_val_000000.bin", [1, 2])
    assert "all 1 shards are for validation, as 'val' in 'fineweb_val_000000.bin' says" in refusal([only], 0.1, 10)


@pytest.mark.parametrize("place", [0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_a_token_outside_the_vocabulary_is_found_at_either_end(tmp_path, place):
    tokens = np.zeros(3 * BLOCK, np.uint16)
    tokens[place] = 10
    path = shard(tmp_path / "0.bin", tokens)
    assert f"{path!r} holds token 10, outside data.tokenizer's vocabulary of 10;" in refusal([path], 0.1, 10)
    assert read_shards([path], 0.1, 11)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_outside_the_vocabulary_is_found_where_it_is_read(tmp_path, workers):
    wrong = np.zeros(3 * BLOCK, np.uint16)
    wrong[BLOCK : 2 * BLOCK] = 10
    paths = [shard(tmp_path / name, tokens) for name, tokens in (("0.bin", [0, 1]), ("1.bin", wrong), ("val.bin", [2]))]
    train, _, _ = read_shards(paths, 0.5, 10)
    with (
        pytest.raises(InputError, match=r"1.bin' holds token 10, outside"),
        train_batches(train, BLOCK // 2, 2, seed=0, workers=workers) as stream,
    ):
        list(itertools.islice(stream, 2))


def test_ids_past_32_bits_are_found_as_well(tmp_path):
    np.array([1, 2**32 - 1], "<u4").tofile(tmp_path / "tokens")
    windows = Windows(StoredTokens((Stretch(str(tmp_path / "tokens"), "<u4", 0, 2),), 100_000), 1)
    with pytest.raises(InputError, match=f"holds token {2**32 - 1}"):
        windows(np.array([0]))


def test_the_fingerprint_changes_with_names_sizes_and_both_ends(tmp_path):
    tokens = np.zeros(3 * BLOCK, np.uint16)
    path = tmp_path / "0.bin"

    def fingerprint(name: str = "0.bin", change: int | None = None, count: int = 3 * BLOCK) -> str:
        changed = tokens[:count].copy()
        if change is not None:
            changed[change] = 1
        return read_shards([shard(tmp_path / name, changed)], 0.1, 10)[2]

    assert fingerprint() == fingerprint()
    different = [fingerprint(), fingerprint("1.bin"), fingerprint(change=0), fingerprint(change=-1)]
    different += [fingerprint(count=len(tokens) - 1), read_shards([shard(path, tokens)] * 2, 0.1, 10)[2]]
    assert len(set(different)) == len(different)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(lengths=LENGTHS, context=st.integers(1, 8), rows=st.integers(1, 3), parts=st.integers(1, 3))
def test_an_epoch_has_every_window_once_and_none_straddles_two_shards(tmp_path_factory, lengths, context, rows, parts):
    folder = tmp_path_factory.mktemp("shards")
    begin = np.cumsum([0, *lengths]).tolist()
    train = [shard(folder / f"{i}.bin", range(*ends)) for i, ends in enumerate(itertools.pairwise(begin))]
    tokens, _, _ = read_shards([*train, shard(folder / "val.bin", [0])], 0.1, begin[-1])
    expected = [
        list(range(start, start + context + 1))
        for begin, end in itertools.pairwise(begin)
        for start in range(begin, end - context, context)
    ]
    if not expected:
        return
    batches = len(expected)  # of `rows * parts` windows each: as many epochs as a batch has rows
    seen = []
    with train_batches(tokens, context, rows * parts, seed=1) as stream:
        for batch in itertools.islice(stream, batches):
            seen += np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1).tolist()
            np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    for epoch in range(rows * parts):
        assert sorted(seen[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected
    for index in range(parts):
        with train_batches(tokens, context, rows * parts, seed=1, part=(index, parts)) as stream:
            for step, batch in enumerate(itertools.islice(stream, min(3, batches))):
                mine = seen[(step * parts + index) * rows :][:rows]
                assert batch["targets"].tolist() == [window[1:] for window in mine]


def test_workers_get_names_and_give_the_same_batches(tmp_path):
    paths = [shard(tmp_path / f"{i}.bin", range(1000 * i, 1000 * i + 1000)) for i in range(3)]
    train, _, _ = read_shards(paths, 0.1, 3000)
    assert len(pickle.dumps(Windows(train, 16))) < 1000
    found = []
    for workers in (0, 2):
        with train_batches(train, 16, 4, seed=2, start_step=1, workers=workers, part=(1, 2)) as stream:
            found.append([batch["targets"].tolist() for batch in itertools.islice(stream, 5)])
    assert found[0] == found[1]


def test_more_shards_than_may_be_open_at_once(tmp_path):
    import resource

    first = shard(tmp_path / "0.bin", [1, 2, 3])
    for number in range(1, 400):
        (tmp_path / f"{number}.bin").hardlink_to(first)
    train, _, _ = read_shards([str(tmp_path / f"{number}.bin") for number in range(400)], 0.1, 10)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (350, limits[1]))
    try:
        assert len(Windows(train, 1)(np.arange(400))["tokens"]) == 400
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_prepare_opens_shards(tmp_path):
    shard(tmp_path / "0.bin", range(100))
    corpus = prepare(config(tmp_path, validation_fraction=0.2), 19, tmp_path / "run")
    assert values(corpus.train) == [list(range(80))]
    assert corpus.record() == {
        "shards_fingerprint": read_shards([str(tmp_path / "0.bin")], 0.2, 257)[2],
        "train_shards": 1,
        "train_tokens": 80,
        "validation_shards": 1,
        "validation_tokens": 20,
    }
    with pytest.raises(InputError, match="20 exceeds the validation part of every shard .20 tokens.*nearest: 19"):
        prepare(config(tmp_path, validation_fraction=0.2), 20, tmp_path / "run")
    with pytest.raises(InputError, match="1 tokens, .*; name more data"):  # a context of 0 is not legal
        prepare(config(tmp_path, validation_fraction=0.01), 19, tmp_path / "run")
    with pytest.raises(InputError, match=r"data.paths\[0\] .* matches no file"):
        prepare(config(tmp_path / "nowhere"), 19, tmp_path / "run")
