"""Stop strings in text that grows by tokens, wherever the tokens' borders are."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string of one text as it grows, looking at each character once.

    Args:
      stops: none of them empty. The text is cut before the one that ends first, so that it
        does not matter how many characters come at a time.
    """

    def __init__(self, stops: Sequence[str]):
        self._matchers = [_Matcher(stop) for stop in stops]
        self._seen = 0  # characters that the matchers have
        self._cut: int | None = None  # where the first stop string begins

    def cut(self, text: str, *, final: bool) -> tuple[str, bool]:
        """What of the text may be shown.

        Args:
          text: all of it so far; begins with what was given before.
          final: nothing follows, so that what could have become a stop string is shown.

        Returns:
          The text up to the first stop string, or without an end that may become one; and
          whether a stop string was found.
        """
        while self._matchers and self._cut is None and self._seen < len(text):
            character = text[self._seen]
            self._seen += 1
            ended = [m.length for m in self._matchers if m.follow(character)]
            if ended:
                self._cut = self._seen - max(ended)
        if self._cut is not None:
            return text[: self._cut], True
        undecided = 0 if final else max((m.matched for m in self._matchers), default=0)
        return text[: len(text) - undecided], False


class _Matcher:
    """Knuth, Morris and Pratt's search for one string.

    Attributes:
      matched: characters of the string that the text ends with, the most but all.
    """

    def __init__(self, string: str):
        self._string = string
        self.length = len(string)
        self.matched = 0
        # For each beginning of the string: the next shorter one that it ends with.
        self._shorter = [0, 0]
        for character in string[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def follow(self, character: str) -> bool:
        """Takes the next character; whether the string ends with it."""
        matched = self._longer(self.matched, character)
        found = matched == self.length
        self.matched = self._shorter[matched] if found else matched
        return found

    def _longer(self, matched: int, character: str) -> int:
        while matched and self._string[matched] != character:
            matched = self._shorter[matched]
        return matched + (self._string[matched] == character)
