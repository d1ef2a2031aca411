"""Standard streams of commands: those that were closed at the start, and one line of an error."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2


def open_closed() -> None:
    """Opens the standard streams that were closed when the process started, as by `2>&-`.

    Standard error becomes a copy of standard output; the others lead to the null device. The next
    file or socket would get the free number otherwise, and the texts of libraries and children.
    """
    for number in (STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(number)
        except OSError:
            # Each takes the lowest free number: this one.
            if number == STANDARD_ERROR:
                os.dup(STANDARD_OUTPUT)
            else:
                os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    # Python has None for a closed stream.
    if sys.stdout is None:
        sys.stdout = _text_of(STANDARD_OUTPUT)
    if sys.stderr is None:
        sys.stderr = _text_of(STANDARD_ERROR)


def write_any_text() -> None:
    """Has standard output show a character that its encoding lacks by its number.

    Names of files and models may have any, and the encoding is that of the locale.
    """
    # Of the locale C the handler is `surrogateescape`, which writes a name's bytes as they are.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _text_of(number: int) -> TextIO:
    return open(number, "w", buffering=1, errors="backslashreplace", closefd=False)


def write_error(line: str) -> None:
    """Writes a line to standard error, or to standard output if that has no room."""
    for stream in (sys.stderr, sys.stdout):
        with suppress(OSError, ValueError):
            print(line, file=stream, flush=True)
            return
