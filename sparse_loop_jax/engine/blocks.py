"""Which pages belong to whom, on the host.

All loops of a request hold the same tokens, so pages are handed out a *block* at a time: one
page a loop, for the same `page_size` tokens. Block b is the pages b * loops + depth.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator

import numpy as np


class BlockPool:
    """Free blocks, blocks with counted owners, and full prompt blocks kept for reuse.

    A block is free, owned by at least one request, or kept: owned by nobody, with the hash
    of the prompt that it holds, until a request with that prompt takes it or the room is
    needed, least recently used first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def in_use(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.available

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Blocks kept for their contents alone."""
        return len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None and no change if there are fewer."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if not self._free:
                oldest, _ = self._kept.popitem(last=False)
                del self._by_hash[self._hash_of.pop(oldest)]
                self._free.append(oldest)
            block = self._free.pop()
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that is owned or kept."""
        self._kept.pop(block, None)
        self._owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner less for each. The last one leaves a published block kept.

        In reverse, so that the tail of a prompt is forgotten before what it builds on.
        """
        for block in reversed(blocks):
            if self._owners[block] < 1:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._hash_of:
                self._kept[block] = None
            else:
                self._free.append(block)

    def find(self, hashes: list[bytes]) -> list[int]:
        """Blocks that hold the longest known beginning of `hashes`; takes nothing."""
        found = []
        for digest in hashes:
            if digest not in self._by_hash:
                break
            found.append(self._by_hash[digest])
        return found

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def publish(self, block: int, digest: bytes) -> None:
        """Lets others find an owned, fully written block. The first of equals stays."""
        if digest not in self._by_hash and block not in self._hash_of:
            self._by_hash[digest] = block
            self._hash_of[block] = digest

    def forget(self) -> None:
        """Drops what is kept: its contents are gone."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._by_hash.clear()
        self._hash_of.clear()


def prompt_hashes(prompt: np.ndarray, page_size: int) -> list[bytes]:
    """A hash for each full page of a prompt, of all tokens up to its end."""
    return list(_chain(np.ascontiguousarray(prompt, np.int32), page_size))


def _chain(prompt: np.ndarray, page_size: int) -> Iterator[bytes]:
    digest = b""
    for end in range(page_size, len(prompt) + 1, page_size):
        page = prompt[end - page_size : end].tobytes()
        digest = hashlib.blake2b(digest + page, digest_size=32).digest()
        yield digest
