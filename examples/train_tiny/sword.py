"""Readers of SWORD modules: the Bible, and commentaries on it.

Of a module, files such as `ot.bzs` list offset and size of each zlib block of `ot.bzz`: a book,
or a chapter. Their markup is OSIS or ThML.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from .extract import Document, blank_lines, the_folder


def blocks(folder: Path) -> Iterator[str]:
    """The blocks of a module, those of the Old Testament first."""
    for part in ("ot", "nt"):
        for index in sorted(folder.glob(f"{part}.?zs")):
            data = index.with_suffix(f".{index.suffix[1]}zz").read_bytes()
            for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
                if size:
                    raw = zlib.decompress(data[offset : offset + size])
                    yield raw.decode("utf-8", errors="replace")


def bible(root: Path) -> Iterator[Document]:
    """The World English Bible, a book at a time.

    Footnotes are dropped, verses run on, chapters part paragraphs where nothing else does.
    """
    for book in blocks(the_folder(root, "engWEB2015eb")):
        text = re.sub(r"<note\b.*?</note>|<title\b.*?</title>", " ", book, flags=re.DOTALL)
        text = re.sub(r"<(?:div|chapter|lg)\b[^>]*>|<l\b[^>]*/?>", "\n\n", text)
        yield blank_lines(re.sub(r"<[^>]+>", "", text))


def commentary(root: Path) -> Iterator[Document]:
    """Notes on verses, without their headings: of the module below the folder `zcom`."""
    (folder,) = (path for path in the_folder(root, "zcom").iterdir() if path.is_dir())
    for notes in blocks(folder):
        text = re.sub(r"<(title|table|note)\b.*?</\1>", "\n\n", notes, flags=re.DOTALL)
        text = re.sub(r"<(?:div|chapter|lg|l|list|item)\b[^>]*>", "\n\n", text)
        text = re.sub(r"<[^>]+>", "", text)
        # Blanks of the line alone: a heading's line end parts paragraphs.
        heading = r"(?m)^[ \t]*Verses? \d+(?:[-, ]+\d+)*[ \t]*"
        yield blank_lines(re.sub(heading, "", text))
