"""Files that come with the package."""

import importlib.resources
from importlib.resources.abc import Traversable


def tiny_ouro() -> Traversable:
    """The bundled model: a Hugging Face checkpoint with two texts to try it on.

    `heldout.txt` and `recall.jsonl` are described in its README.md.
    """
    return importlib.resources.files(__name__) / "tiny-ouro"
