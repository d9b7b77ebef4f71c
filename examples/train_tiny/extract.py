"""The paragraphs of packages of several kinds, in the order of the text.

Every reader takes the folder a package was unpacked into and yields documents: lists of raw
paragraphs that belong together. `clean` makes prose of them.
"""

from __future__ import annotations

import html.parser
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Document = list[str]


def the_folder(root: Path, name: str) -> Path:
    """The one folder called `name` below `root`.

    Raises:
      ValueError: there is none, or several.
    """
    found = [path for path in sorted(root.rglob(name)) if path.is_dir()]
    if len(found) != 1:
        raise ValueError(f"{root} has {len(found)} folders called {name!r}, not one")
    return found[0]


def blank_lines(text: str) -> Document:
    """Paragraphs that are parted by empty lines."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def addresses(root: Path) -> Iterator[Document]:
    for file in sorted(the_folder(root, "speeches").glob("*.txt")):
        yield blank_lines(file.read_text("utf-8"))


def mobydick(root: Path) -> Iterator[Document]:
    files = the_folder(root, "moby-dick").glob("data/chapter_*.txt")
    for file in sorted(files, key=lambda f: int(f.stem.split("_")[1])):
        yield blank_lines(file.read_text("utf-8"))


def sawyer(root: Path) -> Iterator[Document]:
    files = root.rglob("Mark.Twain-Tom.Sawyer.txt")  # the package has a part of it as well
    text = max(files, key=lambda f: f.stat().st_size).read_text("utf-8", errors="replace")
    yield blank_lines(text[text.index("MOST of the adventures") :])


def austen(root: Path) -> Iterator[Document]:
    """An R lazy-load database: zlib blocks, each a serialised vector of lines.

    In R's XDR serialisation a string is the word 0x00040009 (of native encoding; 0x00008009
    and the like mark others), its length, and its bytes.
    """
    data = (the_folder(root, "janeaustenr") / "data" / "Rdata.rdb").read_bytes()
    at = 0
    while at < len(data):
        block = zlib.decompressobj()
        raw = block.decompress(data[at + 4 :])
        at = len(data) - len(block.unused_data)
        yield blank_lines("\n".join(r_strings(raw)))


def r_strings(raw: bytes) -> Iterator[str]:
    """The strings of a serialised R character vector."""
    at = raw.index(b"\x00\x00\x00\x10") + 8  # STRSXP and its length
    while at + 8 <= len(raw):
        flags, length = struct.unpack(">Ii", raw[at : at + 8])
        if flags & 0xFF != 9:  # not a CHARSXP: attributes follow the strings
            return
        at += 8
        if length >= 0:  # -1 is NA
            yield raw[at : at + length].decode("utf-8", errors="replace")
            at += length


def wordnet(root: Path) -> Iterator[Document]:
    """Glosses as sentences of a dictionary, shuffled: neighbours in the files are alike."""
    lines = []
    folder = the_folder(root, "wordnet")
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{kind}").read_text("utf-8").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            head, gloss = line.split(" | ", 1)
            word = head.split()[4].split("(")[0].replace("_", " ")
            lines.append(f"{word.capitalize()}: {gloss.strip().rstrip(';')}.")
    order = np.random.default_rng(0).permutation(len(lines))
    for start in range(0, len(order), 40):
        yield [lines[i] for i in order[start : start + 40]]


def html_manual(root: Path) -> Iterator[Document]:
    """The `<p>` elements of every page of a manual."""
    for file in sorted(root.rglob("*.html")):
        parser = Paragraphs()
        parser.feed(file.read_text("utf-8", errors="replace"))
        parser.close()
        if parser.paragraphs:
            yield parser.paragraphs


class Paragraphs(html.parser.HTMLParser):
    """Collects what `<p>` elements hold; listings, tables and scripts are left out."""

    ENDS = frozenset(["p", "div", "ul", "ol", "dl", "li", "h1", "h2", "h3", "blockquote"])
    SKIPPED = frozenset(["pre", "table", "script", "style", "svg"])

    def __init__(self):
        super().__init__()
        self.paragraphs: Document = []
        self._open = False
        self._skipping = 0
        self._text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag in self.SKIPPED:
            self._skipping += 1
        if tag in self.ENDS:
            self._finish()
            self._open = tag == "p"

    def handle_endtag(self, tag):
        if tag in self.SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        if tag in self.ENDS:
            self._finish()

    def handle_data(self, data):
        if self._open and not self._skipping:
            self._text.append(data)

    def close(self):
        super().close()
        self._finish()

    def _finish(self):
        text = " ".join("".join(self._text).split())
        if text:
            self.paragraphs.append(text)
        self._text, self._open = [], False


def factbook(root: Path) -> Iterator[Document]:
    """The long texts of each country's profile."""
    for file in sorted(root.rglob("*.json")):
        if file.name == "package.json":
            continue
        fields = json.loads(file.read_text("utf-8"))
        if isinstance(fields, dict):
            yield [text for text in texts(fields) if len(text) > 200]


def texts(value) -> Iterator[str]:
    """Every string below a JSON value, "++" parting paragraphs as the Factbook does."""
    if isinstance(value, str):
        yield from value.split(" ++ ")
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
