"""Which instances have seen the beginning of a prompt.  Pure, and bounded.

A prompt is hashed as the bytes that the client sent, no tokenizer needed: equal bytes are equal tokens, and a chat's
next turn begins with the bytes of its last one.  The hashes are those of growing prefixes (512 bytes, then an eighth
more each time), so a prompt of 400 KB has about 60 of them.  What an engine mixes into its own cache keys
(`cache_salt`, the model, the tools) goes in first.

An instance stands here as its *cache*, an object that is another one after each restart.  It may have evicted what is
noted here: then a guess was wrong, and cost what no guess would have cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import xxhash

FIRST = 512  # bytes
GROWTH = 8  # each prefix is longer than the last by 1/8
ENTRIES = 65536  # prefixes remembered, about 10 MB
HOLDERS = 64  # caches remembered for each, the latest


class Prefix:
    """A prompt's beginnings: (length in bytes, hash), shortest first."""

    __slots__ = ("marks",)

    def __init__(self, prompt: bytes | memoryview, salt: bytes = b"") -> None:
        self.marks: list[tuple[int, int]] = []
        state = xxhash.xxh3_64(salt)
        begin, end = 0, FIRST
        while end <= len(prompt):
            state.update(prompt[begin:end])
            self.marks.append((end, state.intdigest()))
            begin, end = end, end + max(FIRST, end // GROWTH)


class Prefixes:
    """The memory."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._seen: OrderedDict[int, tuple[object, ...]] = OrderedDict()  # by hash, least recently used first

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, prefix: Prefix, *caches: object) -> None:
        """Instances got a prompt."""
        seen = self._seen
        for _, mark in prefix.marks:
            held = seen.get(mark, ())
            if held != caches:
                others = [cache for cache in held if cache not in caches]
                seen[mark] = (*others, *caches)[-HOLDERS:]
            seen.move_to_end(mark)
        while len(seen) > self._entries:
            seen.popitem(last=False)

    def longest(self, prefix: Prefix, caches: Collection[object]) -> dict[object, int]:
        """Of these, how many bytes of a prompt each one has seen; who saw none is left out."""
        found: dict[object, int] = {}
        for length, mark in reversed(prefix.marks):
            for cache in self._seen.get(mark, ()):
                if cache in caches:
                    found.setdefault(cache, length)
            if len(found) == len(caches):
                break
        return found
