"""Keys of clients and administrators, which are sent as `Authorization: Bearer KEY`."""

from __future__ import annotations

import os

from .errors import ConfigError


def clean(key: str, source: str) -> str:
    """Returns a key without the spaces and line breaks around it.

    A Secret or a variable made with `echo` ends with a line break, which no client sends. Raises
    ConfigError, without the key, for one that no header can have. `source`: its flag or variable.
    """
    key = key.strip()
    if not key.isprintable():  # a line break inside, or bytes that are no UTF-8
        raise ConfigError(f"{source} has characters that no key can have; give it in one line")
    return key


def from_environment(*names: str) -> str:
    """Returns the first key among environment variables, or an empty text. Raises ConfigError."""
    for name in names:
        if key := clean(os.environ.get(name, ""), name):
            return key
    return ""
