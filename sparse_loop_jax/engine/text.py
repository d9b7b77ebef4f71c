"""Text of tokens that come a few at a time."""

from __future__ import annotations


class TextStream:
    """Decodes what is new, not everything again.

    New tokens are decoded together with the ones before them, because a tokenizer may join
    them differently at the start of a text. What ends in a replacement character may be the
    start of a character and waits.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""
        self._context = 0  # the first token that is decoded again
        self._shown = 0  # tokens whose text is in `_text`

    def add(self, ids: list[int]) -> None:
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        after = self._tokenizer.decode(self._ids[self._context :])
        if len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}"):
            self._text += after[len(before) :]
            self._context, self._shown = self._shown, len(self._ids)

    def text(self, *, final: bool) -> str:
        """The text so far; at the end the tokenizer's own of all tokens."""
        return self._tokenizer.decode(self._ids) if final else self._text
