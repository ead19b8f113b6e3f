import numpy as np

from ddl_jax.data import ByteTokenizer, encode_documents


class LargeTokenizer(ByteTokenizer):
    vocab_size = 2**16 + 1
    separator = 2**16


def test_a_separator_follows_every_document():
    tokens = encode_documents(["ab", "", "é"], ByteTokenizer())
    assert tokens.tolist() == [97, 98, 256, 256, 0xC3, 0xA9, 256]


def test_tokens_take_two_bytes_where_every_id_fits():
    assert encode_documents(["a"], ByteTokenizer()).dtype == np.uint16
    tokens = encode_documents(["a"], LargeTokenizer())
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [97, 2**16]
