"""Symbolic KV: each element of memory is a number that identifies the token, layer and head.

The KV of a token depends on all tokens before it. So the symbol of an element is made of a hash of
the tokens up to its own, the layer and the head. The hash begins with the files of the request's
adapter. Attention that reads any other symbol reads KV of another prompt, adapter, layer, head or
position, or memory that was never written.

The model is a function too: the next token follows from the hash of all tokens before it. So each
request has one right sequence of tokens, known when it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

SYMBOL_BYTES = 8
VOCABULARY = 50  # tokens that the model generates
OTHER_TOKEN = VOCABULARY + 1  # in prompts that differ between two engines
EMPTY = np.uint64(0)  # never written, or cleared
POISON = np.uint64(1)  # computed from KV that was not the request's own
_FULL_FORMAT = np.uint64(1 << 63)
_MASK = (1 << 64) - 1
_LAYER_FACTOR = 0x9E3779B97F4A7C15
_HEAD_STEP = 0xC2B2AE3D27D4EB4F


def extend_hash(prefix_hash: int, token: int) -> int:
    """Returns the hash of a prefix with one more token."""
    mixed = (prefix_hash * 0xD1342543DE82EF95 + token + 0x2545F4914F6CDD1D) & _MASK
    return mixed ^ (mixed >> 29)


class TokenStory:
    """The one right sequence of a request: its prompt, and the tokens that the model generates."""

    def __init__(self, prompt: Sequence[int], generated: int, adapter_files: int = 0) -> None:
        """Computes the sequence with `generated` tokens after the prompt."""
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        hashes = [adapter_files]  # by number of tokens
        for token in prompt:
            hashes.append(extend_hash(hashes[-1], token))
        for _ in range(generated):
            token = hashes[-1] % VOCABULARY + 1
            self.tokens.append(token)
            hashes.append(extend_hash(hashes[-1], token))
        self.hashes: Symbols = np.array(hashes, dtype=np.uint64)

    def next_token(self, tokens: int) -> int:
        """Returns the token that the model generates after so many tokens."""
        return int(self.hashes[tokens]) % VOCABULARY + 1


def layer_factor(layer: int) -> np.uint64:
    """Returns the factor that identifies a layer of the model in a symbol."""
    return np.uint64((_LAYER_FACTOR * (2 * layer + 1)) & _MASK)


def head_terms(first: int, count: int) -> Symbols:
    """Returns the terms that identify these heads of the model in a symbol."""
    terms = [(_HEAD_STEP * (head + 1)) & _MASK for head in range(first, first + count)]
    return np.array(terms, dtype=np.uint64)


def symbols_of(hashes: Symbols, factor: np.uint64, heads: Symbols) -> Symbols:
    """Returns the right symbols of shape (tokens, heads), for the hashes of their prefixes."""
    return hashes[:, None] * factor + heads[None, :]


def in_format(symbols: Symbols, is_full: bool) -> Symbols:
    """Returns the symbols in the format of a layer of full attention, or of another one."""
    return symbols | _FULL_FORMAT if is_full else symbols & ~_FULL_FORMAT


def has_other_format(symbols: Symbols, is_full: bool) -> npt.NDArray[np.bool_]:
    """Returns which symbols a layer of the other format has written."""
    written = (symbols != EMPTY) & (symbols != POISON)
    return written & (((symbols & _FULL_FORMAT) != 0) != is_full)


def describe_symbol(
    symbol: Any, stories: Sequence[tuple[str, TokenStory]], layers: int, heads: int
) -> str:
    """Returns a readable description of a symbol, by trial of all known elements."""
    if symbol == EMPTY:
        return "never written"
    if symbol == POISON:
        return "computed from wrong KV"
    for layer in range(layers):
        factor = layer_factor(layer)
        for name, story in stories:
            known = symbols_of(story.hashes, factor, head_terms(0, heads))
            found = np.argwhere((known | _FULL_FORMAT) == (symbol | _FULL_FORMAT))
            if len(found):
                tokens, head = found[0]
                return f"{name}: layer {layer}, head {head}, prefix of {tokens} tokens"
    return f"unknown ({symbol})"
