"""Findings of checks: their status, their line for people, their document for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata
from typing import Any

PACKAGES = ("vllm", "vllm-disagg", "torch", "triton", "nixl")
# Of a finding's text: other programs choose parts of it, such as a model's name.
MAX_TEXT_CHARACTERS = 1000


class Status(IntEnum):
    """Result of a check; the worst one is the exit status."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """Result of one check, in one line with what to do."""

    status: Status
    name: str
    text: str

    def line(self) -> str:
        """Formats the finding for people."""
        return f"{self.status.name:4} {self.name}: {self.text}"


class Report:
    """The findings of a run, in their order."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, status: Status, name: str, text: str) -> None:
        """Adds the result of a check."""
        self.findings.append(Finding(status, _printable(name), _printable(text)))

    def ok(self, name: str, text: str) -> None:
        """Adds a check without trouble."""
        self.add(Status.OK, name, text)

    def warn(self, name: str, problem: str, remedy: str) -> None:
        """Adds a problem beside which requests are served."""
        self.add(Status.WARN, name, f"{problem}; {remedy}")

    def fail(self, name: str, problem: str, remedy: str) -> None:
        """Adds a problem that must be mended."""
        self.add(Status.FAIL, name, f"{problem}; {remedy}")

    @property
    def status(self) -> Status:
        """The worst result."""
        return max((finding.status for finding in self.findings), default=Status.OK)

    def lines(self) -> Iterator[str]:
        """Yields the report for people."""
        for finding in self.findings:
            yield finding.line()
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        yield f"versions: {found}"

    def document(self) -> dict[str, Any]:
        """Returns the report for programs."""
        checks = [
            {"status": finding.status.name, "name": finding.name, "text": finding.text}
            for finding in self.findings
        ]
        return {"status": int(self.status), "checks": checks, "versions": versions()}


def versions() -> dict[str, str]:
    """Returns the versions of this project and of its dependencies."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _printable(text: str) -> str:
    """Returns a text as one line without control characters, which a terminal would obey."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    if len(shown) <= MAX_TEXT_CHARACTERS:
        return shown
    return f"{shown[:MAX_TEXT_CHARACTERS]}..."
