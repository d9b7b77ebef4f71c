"""Stop strings in text that grows by tokens, wherever the tokens' borders are."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string of one text as it grows.

    Args:
      stops: none of them empty. The text is cut before the one that ends first, so that it
        does not matter how many characters come at a time.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._searched = 0  # characters in which no stop string ends

    def cut(self, text: str, *, final: bool) -> tuple[str, bool]:
        """What of the text may be shown.

        Args:
          text: all of it so far; begins with what was given before.
          final: nothing follows, so that what could have become a stop string is shown.

        Returns:
          The text up to the first stop string, or without an end that may become one; and
          whether a stop string was found.
        """
        if not self._stops:
            return text, False
        first = max(0, self._searched - self._longest + 1)
        found = [
            (at + len(stop), at) for stop in self._stops if (at := text.find(stop, first)) >= 0
        ]
        if found:
            return text[: min(found)[1]], True
        self._searched = len(text)
        return text if final else text[: len(text) - self._undecided(text)], False

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
