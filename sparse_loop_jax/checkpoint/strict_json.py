"""JSON from files that may be hostile: one object, no surprises, bounded size.

And how a list of complaints about such files becomes an error message.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 4 * 2**20


def listed(problems: list[str], limit: int = 200) -> str:
    """Each problem on an indented line of its own; beyond `limit`, only their number."""
    more = len(problems) - limit
    tail = [f"and {more} more"] if more > 0 else []
    return "".join(f"\n  {line}" for line in problems[:limit] + tail)


def require_regular_file(path: Path) -> int:
    """Size of `path` in bytes.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is a directory, a pipe or a device: reading those may block for ever.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is not a regular file")
    return status.st_size


def read_json_object(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`, read with `parse_json_object`'s strictness.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is larger than `limit` bytes, or not one JSON object.
    """
    size = require_regular_file(path)
    if size > limit:
        raise ValueError(f"{path}: {size} bytes of JSON are more than the limit of {limit}")
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses one JSON object; keys must be unique and numbers finite.

    Args:
      data: UTF-8 text.
      where: what the errors name, a file for example.

    Raises:
      ValueError: anything else.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r:.200} occurs twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.50} is out of range")
    return value
