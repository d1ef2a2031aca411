"""Records which instances have seen the beginning of a prompt.  Pure, and bounded.

A prompt is hashed as the bytes that the client sent, without a tokenizer: equal bytes are equal
tokens, and a chat's next turn begins with the bytes of its last one. Hashed are growing prefixes
(of 128 and 512 bytes, then an eighth longer each time), so a prompt of 400 KB has about 60 hashes.
The inputs that an engine mixes into its own cache keys (`cache_salt`, the model, the tools) go in
first.

An instance that has answered a prompt has more cached: the answer, which is part of the next turn's
prompt. That is noted at the prompt's longest prefix. A longer prompt that continues it has perhaps
that answer in it, perhaps another.

An instance is represented by its `cache_identity`, an object that a restart replaces. The instance
may have evicted a prefix that is noted here: such a wrong guess costs as much as no guess.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

import xxhash

SHORT_PREFIX_BYTES = 128  # the first prefix, so that a short question is recorded too
FIRST_PREFIX_BYTES = 512
GROWTH_DIVISOR = 8  # each prefix is longer than the last by 1/8
MAX_PREFIX_BYTES = 1 << 40  # longer than any body
MAX_PREFIXES = 65536  # remembered prefixes, 41 MiB when full
MAX_HOLDERS = 64  # remembered caches of each prefix, the latest


def _prefix_lengths() -> Iterator[int]:
    """Yields the lengths of the prefixes that are hashed, in bytes."""
    yield SHORT_PREFIX_BYTES
    length = FIRST_PREFIX_BYTES
    while length <= MAX_PREFIX_BYTES:
        yield length
        length += max(FIRST_PREFIX_BYTES, length // GROWTH_DIVISOR)


_PREFIX_LENGTHS = tuple(_prefix_lengths())


class PromptPrefix:
    """The hashes of a prompt's prefixes: (length in bytes, hash), shortest first."""

    __slots__ = ("hashes",)

    def __init__(self, prompt: bytes | memoryview, salt: bytes = b"") -> None:
        """`salt`: bytes that come before the prompt in an engine's cache keys."""
        self.hashes: list[tuple[int, int]] = []
        prefix_hash = xxhash.xxh3_64_intdigest(salt)
        size = len(prompt)
        begin = 0
        for end in _PREFIX_LENGTHS:
            if end > size:
                return
            # Each hash seeds the next one, so it stands for all bytes before.
            prefix_hash = xxhash.xxh3_64_intdigest(prompt[begin:end], prefix_hash)
            self.hashes.append((end, prefix_hash))
            begin = end


class PrefixIndex:
    """Maps prefix hashes to the caches that hold them, with the least recently used evicted."""

    def __init__(self, entries: int = MAX_PREFIXES) -> None:
        self._max_entries = entries
        # By hash, least recently used first.
        self._holders: OrderedDict[int, tuple[object, ...]] = OrderedDict()
        # By hash of the longest prefix: (cache that has the answer, bytes of the prompt).
        self._answered: OrderedDict[int, tuple[object, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record_prompt(self, prefix: PromptPrefix, caches: Sequence[object]) -> None:
        """Notes that instances got a prompt."""
        holders = self._holders
        held_before: tuple[object, ...] = ()
        holding = tuple(caches)
        for _, prefix_hash in prefix.hashes:
            held = holders.get(prefix_hash, ())
            if held is not held_before:  # most prefixes of a prompt share one tuple
                others = [cache for cache in held if cache not in caches]
                holding = (*others, *caches)[-MAX_HOLDERS:]
                held_before = held
            holders[prefix_hash] = holding
            holders.move_to_end(prefix_hash)
        while len(holders) > self._max_entries:
            holders.popitem(last=False)

    def record_answer(self, prefix: PromptPrefix, prompt_bytes: int, cache: object) -> None:
        """Notes that an instance has answered a prompt."""
        if not prefix.hashes:
            return
        longest_hash = prefix.hashes[-1][1]
        self._answered[longest_hash] = (cache, prompt_bytes)
        self._answered.move_to_end(longest_hash)
        if len(self._answered) > self._max_entries:
            self._answered.popitem(last=False)

    def bytes_after_answer(self, prefix: PromptPrefix, prompt_bytes: int, cache: object) -> int:
        """Returns how many bytes a prompt adds to the longest prompt in it that was answered.

        0 if none was answered, or if another instance did.
        """
        for _, prefix_hash in reversed(prefix.hashes):
            answered = self._answered.get(prefix_hash)
            if answered:
                answering_cache, answered_bytes = answered
                return max(0, prompt_bytes - answered_bytes) if answering_cache is cache else 0
        return 0

    def longest_prefixes(
        self, prefix: PromptPrefix, caches: Collection[object]
    ) -> dict[object, int]:
        """Returns how many bytes of a prompt each of these caches has seen, without zeros."""
        found: dict[object, int] = {}
        holders_before: tuple[object, ...] = ()
        for length, prefix_hash in reversed(prefix.hashes):
            holders = self._holders.get(prefix_hash, ())
            if holders == holders_before:
                continue  # these hold a longer prefix too
            holders_before = holders
            for cache in holders:
                if cache in caches:
                    found.setdefault(cache, length)
            if len(found) == len(caches):
                break
        return found
