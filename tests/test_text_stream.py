"""Text token by token, against the tokenizer's own of all tokens at once."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

import sparse_loop_jax as slj
from sparse_loop_jax.generation.text import TextStream

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer():
    return slj.load().tokenizer


class Bytes:
    """A tokenizer whose tokens are given pieces of bytes; it counts what it decodes."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def shown(tokenizer, ids: list[int]) -> list[str]:
    """The text after each token."""
    stream, texts = TextStream(tokenizer), []
    for token in ids:
        before = stream.text(final=False)
        assert before + stream.add([token]) == stream.text(final=False)
        texts.append(stream.text(final=False))
    assert stream.text(final=True) == tokenizer.decode(ids)
    return texts


def test_text_comes_a_character_at_a_time_at_least(tokenizer):
    ids = tokenizer.encode("naïve café — é—é").ids
    texts = shown(tokenizer, ids)
    assert not any(UNKNOWN in text for text in texts)
    assert texts[-1] == tokenizer.decode(ids)
    assert len(set(texts)) > 8


@hypothesis.given(st.text(max_size=30), st.data())
def test_no_part_of_a_character_is_shown_however_bytes_are_cut(text, data):
    text = text.replace(UNKNOWN, "")
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    texts = shown(Bytes(pieces), list(range(len(pieces))))
    assert all(text.startswith(part) for part in texts)
    assert texts[-1] == text
    # A character is shown with the token that ends it.
    ends, at = [], 0
    for piece in pieces:
        at += len(piece)
        ends.append(raw[:at].decode(errors="ignore"))
    assert texts == ends


@hypothesis.given(st.lists(st.binary(min_size=1, max_size=4), max_size=20))
def test_bytes_that_are_no_text_are_shown_as_such(pieces):
    whole = b"".join(pieces).decode(errors="replace")
    texts = shown(Bytes(pieces), list(range(len(pieces))))
    assert all(whole.startswith(part) for part in texts)
    assert not texts or len(whole) - len(texts[-1]) <= 3


def test_what_is_no_text_neither_waits_for_ever_nor_costs_ever_more():
    for pieces in ([b"\xff"] * 1000, ["é".encode()[:1]] * 1000, [b"a"] * 1000):
        tokenizer = Bytes(pieces)
        stream = TextStream(tokenizer)
        for token in range(1000):
            stream.add([token])
            assert len(stream.text(final=False)) >= token - 3
        assert tokenizer.decoded < 1000 * 2 * 66


def test_what_was_shown_of_bytes_that_are_no_text_stands():
    # The first two of three bytes of a character, which together are one replacement: more
    # often than the stream looks back, and an odd number of them.
    tokenizer = Bytes([b"\xe2", b"\x82", b"!"])
    ids = [0, 1] * 40 + [0]
    stream, shown = TextStream(tokenizer), ""
    for token in ids:
        shown += stream.add([token])
    assert stream.text(final=True).startswith(shown)
    shown += stream.add([2])
    assert stream.text(final=True) == shown
    assert shown.endswith("!")
