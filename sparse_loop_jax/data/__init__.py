"""Files that come with the package."""

import importlib.resources
from importlib.resources.abc import Traversable


def tiny_ouro() -> Traversable:
    """The bundled model: a Hugging Face checkpoint with a text and tasks to try it on.

    `heldout.txt`, `recall.jsonl` and `hops.jsonl` are described in its README.md.
    """
    return importlib.resources.files(__name__) / "tiny-ouro"
