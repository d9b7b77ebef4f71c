"""Writing a directory completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory next to `target` that becomes `target` if the block succeeds.

    After an error nothing is left of it. `target` may exist as long as it is empty.

    Raises:
      FileNotFoundError: the parent of `target` does not exist.
      ValueError: `target` is a file or has contents.
    """
    target = target.resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such directory")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: exists already and is not an empty directory")
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            target.rmdir()
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
