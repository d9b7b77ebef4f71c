"""Checkpoints from the Hugging Face Hub, where `huggingface_hub` is installed."""

from __future__ import annotations

import re
from pathlib import Path

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ["*.safetensors", "*.json", "*.jinja"]  # never Python code or pickles


def is_repository(name: str) -> bool:
    """Whether `name` looks like `organisation/name`."""
    return _REPOSITORY.fullmatch(name) is not None


def download(repository: str, revision: str | None) -> Path:
    """Fetches weights, JSON files and chat templates of one commit into the Hub's cache.

    Args:
      repository: `organisation/name`.
      revision: a full commit hash. Branches and tags can move, so they are not accepted.

    Returns:
      The directory of that commit in the cache.

    Raises:
      ValueError: no full commit hash, `huggingface_hub` is not installed, or the download
        fails.
    """
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ValueError(
            f"revision must be the hash of a commit, 40 hex digits, got {revision!r}: "
            f"{repository} is taken for a Hub id, as there is no such local directory"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{repository}: downloading it needs huggingface_hub: pip install -e '.[hub]'"
        ) from None
    try:
        directory = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_FILES
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{repository}: cannot be downloaded at {revision}: {error!s:.500}"
        ) from error
    return Path(directory)
