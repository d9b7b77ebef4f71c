"""Text of tokens that come a few at a time."""

from __future__ import annotations

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Bytes of a character that may still become one. A tokenizer shows them as replacement
# characters, at most one for each.
_MOST_PARTIAL = 3
# Tokens that are decoded again at most. Only bytes that are no text come near.
_MOST_AGAIN = 64


class TextStream:
    """Decodes what is new, not everything again.

    New tokens are decoded together with some before them, from a place between two
    characters: a tokenizer may join them differently at the start of a text. What may be the
    first bytes of a character waits.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""
        self._start = 0  # the first token that is decoded again
        self._between = 0  # the last place seen to be between two characters
        self._gave_up = False  # on bytes that became no text; others follow them

    def add(self, ids: list[int]) -> str:
        """Takes further tokens; returns the text that they add."""
        before = _settled(self._tokenizer.decode(self._ids[self._start :]))
        self._ids += ids
        after = self._tokenizer.decode(self._ids[self._start :])
        clean = not after.endswith(_UNKNOWN)
        given_up = not clean and len(self._ids) - self._start > _MOST_AGAIN
        added = (after if clean or given_up else _settled(after))[len(before) :]
        self._text += added
        if given_up:
            self._gave_up = True
            self._start = self._between = len(self._ids)
        elif clean:
            self._start, self._between = self._between, len(self._ids)
        return added

    def text(self, *, final: bool) -> str:
        """The text so far; at the end the tokenizer's own of all tokens.

        Where bytes are no text, the tokenizer's own can be shorter than what was shown; then
        that stands.
        """
        if not final:
            return self._text
        if not self._gave_up:
            return self._tokenizer.decode(self._ids)
        rest = self._tokenizer.decode(self._ids[self._start :])
        return self._text + rest[len(_settled(rest)) :]


def _settled(text: str) -> str:
    """A text without what may be part of a character at its end."""
    least = max(0, len(text) - _MOST_PARTIAL)
    return text[:least] + text[least:].rstrip(_UNKNOWN)
