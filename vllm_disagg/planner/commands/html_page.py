"""HTML pages of reports: one file each, without scripts and without addresses of others."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ..cost.profile import LatencyFit

STYLE = (
    "body{font:15px/1.4 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.3em}img{max-width:100%}.wide{overflow-x:auto}"
    "td,th{padding:0 1em 0 0;text-align:left;white-space:nowrap}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere}li{overflow-wrap:anywhere}"
)
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>vllm-disagg plan</title>'


def check_folder(directory: str) -> None:
    """Makes the folder of a report. Raises ConfigError if no file can be written into it."""
    if not directory:  # a variable that is not set
        raise ConfigError("--report: an empty text names no folder; leave the flag out")
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--report: {directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"--report: {directory} cannot be written to")


def write(directory: str, parts: Sequence[str]) -> str:
    """Writes report.html with these parts of its body. Returns its path.

    Raises ConfigError if it cannot be written.
    """
    path = Path(directory) / "report.html"
    page = f"{HEAD}<style>{STYLE}</style>{''.join(parts)}</html>\n"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from None
    return str(path)


def bullet_list(lines: Sequence[str]) -> str:
    """Formats lines as an HTML list; empty without lines."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats an HTML table that scrolls by itself where the page is narrow."""
    names = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><tr>{names}</tr>{body}</table></div>'


def commands(lines: Sequence[str]) -> str:
    """Formats the commands of an answer; empty without commands."""
    text = html.escape("\n".join(lines))
    return f"<h2>Commands</h2><pre>{text}</pre>" if lines else ""


def residuals(fits: Sequence[tuple[str, LatencyFit]]) -> str:
    """Formats the residuals of all fits as an HTML table; empty without fits."""
    if not fits:
        return ""
    names = ("file", "phase", "sizes", "measured s", "fitted s", "error")
    rows = [
        (
            path,
            residual.phase,
            f"{len(residual.sizes)} x {max(residual.sizes)}",
            f"{residual.measured:.5f}",
            f"{residual.fitted:.5f}",
            f"{residual.error:+.1%}",
        )
        for path, fit in fits
        for residual in fit.residuals
    ]
    return f"<h2>Residuals of the fit</h2>{table(names, rows)}"
