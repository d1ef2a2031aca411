"""Reads settings as operators write them: values with units, names that are nearly right, and texts
that a variable of the shell was to give.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

SECONDS_BY_UNIT: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES_BY_UNIT: Mapping[str, float] = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word that is nearest; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Returns the number that a text as "10s" or "4MiB" has; None without a number and unit."""
    match = _QUANTITY.fullmatch(text)
    if not match or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


class GivenText(argparse.Action):
    """Stores a text. An empty one is refused: a variable of the shell that is not set.

    The command would do something else than was asked for, without a word.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Handles one occurrence on the command line."""
        if not values:
            raise argparse.ArgumentError(self, "an empty text names nothing; leave the flag out")
        setattr(namespace, self.dest, str(values))
