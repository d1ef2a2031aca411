"""Which instances have seen the beginning of a prompt.  Pure, and bounded.

A prompt is hashed as the bytes that the client sent, no tokenizer needed: equal bytes are equal
tokens, and a chat's next turn begins with the bytes of its last one. The hashes are those of
growing prefixes (128 and 512 bytes, then an eighth more each time), so a prompt of 400 KB has about
60 of them. What an engine mixes into its own cache keys (`cache_salt`, the model, the tools) goes
in first.

Who has answered a prompt has more: the answer, which the next turn's prompt has in it. That is
noted at the prompt's last beginning; a longer prompt that goes on from there has perhaps that
answer in it, perhaps another.

An instance stands here as its *cache*, an object that is another one after each restart. It may
have evicted what is noted here: then a guess was wrong, and cost what no guess would have cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import xxhash

SHORT_PREFIX_BYTES = 128  # bytes: the first of all, so that a short question is known too
FIRST_PREFIX_BYTES = 512  # bytes
GROWTH_DIVISOR = 8  # each prefix is longer than the last by 1/8
MAX_PREFIXES = 65536  # prefixes remembered, 41 MiB when full
MAX_HOLDERS = 64  # caches remembered for each, the latest


class PromptPrefix:
    """A prompt's beginnings: (length in bytes, hash), shortest first."""

    __slots__ = ("marks",)

    def __init__(self, prompt: bytes | memoryview, salt: bytes = b"") -> None:
        self.marks: list[tuple[int, int]] = []
        state = xxhash.xxh3_64(salt)
        begin, end = 0, SHORT_PREFIX_BYTES
        while end <= len(prompt):
            state.update(prompt[begin:end])
            self.marks.append((end, state.intdigest()))
            begin, end = (
                end,
                end + max(FIRST_PREFIX_BYTES, end // GROWTH_DIVISOR)
                if end >= FIRST_PREFIX_BYTES
                else FIRST_PREFIX_BYTES,
            )


class PrefixIndex:
    """The memory."""

    def __init__(self, entries: int = MAX_PREFIXES) -> None:
        self._entries = entries
        self._seen: OrderedDict[int, tuple[object, ...]] = (
            OrderedDict()
        )  # by hash, least recently used first
        self._answered: OrderedDict[int, tuple[object, int]] = (
            OrderedDict()
        )  # by hash of the last prefix: (by whom, bytes)

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, prefix: PromptPrefix, *caches: object) -> None:
        """Instances got a prompt."""
        seen = self._seen
        for _, mark in prefix.marks:
            held = seen.get(mark, ())
            if held != caches:
                others = [cache for cache in held if cache not in caches]
                seen[mark] = (*others, *caches)[-MAX_HOLDERS:]
            seen.move_to_end(mark)
        while len(seen) > self._entries:
            seen.popitem(last=False)

    def answered(self, prefix: PromptPrefix, size: int, cache: object) -> None:
        """An instance has answered a prompt of so many bytes."""
        if prefix.marks:
            mark = prefix.marks[-1][1]
            self._answered[mark] = cache, size
            self._answered.move_to_end(mark)
            if len(self._answered) > self._entries:
                self._answered.popitem(last=False)

    def goes_on(self, prefix: PromptPrefix, size: int, cache: object) -> int:
        """By how many bytes a prompt goes on from the last in it that was answered, if by this
        instance.
        """
        found = next(
            (self._answered[mark] for _, mark in reversed(prefix.marks) if mark in self._answered),
            None,
        )
        return max(0, size - found[1]) if found and found[0] is cache else 0

    def longest(self, prefix: PromptPrefix, caches: Collection[object]) -> dict[object, int]:
        """Of these, how many bytes of a prompt each one has seen; who saw none is left out."""
        found: dict[object, int] = {}
        for length, mark in reversed(prefix.marks):
            for cache in self._seen.get(mark, ()):
                if cache in caches:
                    found.setdefault(cache, length)
            if len(found) == len(caches):
                break
        return found
