"""Checks the links, anchors, files and commands in the Markdown of this tree.

    python scripts/check_docs.py       print one line for each fault; exit status 1 if there is one

* A relative link leads to a file of the tree, and its anchor to a heading there.
* A path in backticks that begins with a folder of the tree exists; so does a bare `name.py`, and
  the function in `path.py::name`.
* A `vllm-disagg ...` command of a code block is accepted by that command's parser, a `make ...`
  command has a target.
* A page of docs/ that code or the Makefile names exists, and each page is linked from an index.

The script runs no command, and reads no file outside the tree.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_disagg import cli  # noqa: E402

DOCS = ROOT / "docs"
HISTORY = ("CHANGELOG.md",)  # names files as they once were
SOURCES = (".py", ".toml", ".sh", ".yaml", "Makefile")
FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PAGE = re.compile(r"\bdocs/[\w./-]+\.(?:md|json|png)\b")


def main() -> int:
    """Prints all faults. Returns the exit status."""
    faults = [fault for path in tracked() if path.suffix == ".md" for fault in check(path)]
    for path in tracked():
        if path.name.endswith(SOURCES):
            faults += [f"{name(path)}: no page {page}" for page in _missing_pages(path)]
    faults += [f"{name(page)}: linked from no index.md" for page in unlisted()]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


def check(path: Path) -> Iterator[str]:
    """Yields the faults of one Markdown file."""
    text = path.read_text()
    prose = FENCE.sub("", text)
    for target in LINK.findall(prose):
        if fault := link_fault(path, target):
            yield f"{name(path)}: {fault}"
    if path.name not in HISTORY:
        for code in CODE.findall(prose):
            if fault := path_fault(code):
                yield f"{name(path)}: {fault}"
    for _, block in FENCE.findall(text):
        for command in commands(block):
            if fault := command_fault(command):
                yield f"{name(path)}: {fault}"


def link_fault(path: Path, target: str) -> str:
    """Returns the fault of a link; empty if it is right or leaves the tree."""
    if re.match(r"[a-z]+:", target):
        return ""
    file, _, anchor = target.partition("#")
    to = (path.parent / file).resolve() if file else path
    if to not in tracked() and not to.is_dir():
        return f"link to {target}: no such file"
    if anchor and anchor not in anchors(to):
        return f"link to {target}: no such heading"
    return ""


def unlisted() -> list[Path]:
    """Returns the pages of docs/ that no index.md links to."""
    indexes = [path for path in tracked() if path.name == "index.md"]
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in indexes
        for target in LINK.findall(path.read_text())
    }
    pages = [path for path in tracked() if path.suffix == ".md" and path.is_relative_to(DOCS)]
    return [page for page in pages if page not in linked and page != DOCS / "index.md"]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, in GitHub's form."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", FENCE.sub("", path.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def path_fault(code: str) -> str:
    """Returns the fault of a path in backticks; empty for other code."""
    for word in code.split():
        if named := re.fullmatch(r"([\w./-]+\.py)::(\w+)", word):
            if not _has_function(ROOT / named[1], named[2]):
                return f"`{word}`: no such test"
        elif re.fullmatch(r"[\w.-]+/[\w./-]+", word) and word.split("/")[0] in folders():
            if not (ROOT / word).exists():
                return f"`{word}`: no such path"
        elif re.fullmatch(r"\w+\.py", word) and word not in {path.name for path in tracked()}:
            return f"`{word}`: no such module"
    return ""


def _has_function(path: Path, function: str) -> bool:
    """Returns whether a file exists and defines a function."""
    return path.is_file() and bool(
        re.search(rf"^(?:async )?def {function}\(", path.read_text(), re.MULTILINE)
    )


def commands(block: str) -> Iterator[list[str]]:
    """Yields the words of each command in a code block.

    A command continues on the next line inside quotes and after a backslash.
    """
    text = ""
    for line in block.splitlines():
        text += line.strip().removesuffix("\\") + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # no closing quotation yet
            continue
        text = ""
        if words:
            yield words


def command_fault(words: list[str]) -> str:
    """Returns the fault of a command; empty if it is right or of another program."""
    shown = " ".join(words)
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in targets()]
        return f"{shown}: no target {unknown[0]}" if unknown else ""
    if words[0] == "vllm-disagg":
        return _parser_fault(words[1:], shown)
    missing = [word for word in words[1:] if word.endswith(".py") and not (ROOT / word).exists()]
    return f"{shown}: no file {missing[0]}" if words[0] == "python" and missing else ""


def _parser_fault(words: list[str], shown: str) -> str:
    end = words.index("--") if "--" in words else len(words)
    parser = cli._parser(words[0] if words[0] in cli.COMMANDS else "")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words[:end])
    except SystemExit:
        return f"{shown}: {said.getvalue().strip()}"
    return ""


def _missing_pages(path: Path) -> list[str]:
    return [page for page in PAGE.findall(path.read_text()) if not (ROOT / page).exists()]


@cache
def targets() -> frozenset[str]:
    """Returns the targets of the Makefile."""
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def folders() -> frozenset[str]:
    """Returns the folders at the tree's root."""
    return frozenset(name(path).split("/")[0] for path in tracked() if path.parent != ROOT)


@cache
def tracked() -> tuple[Path, ...]:
    """Returns the files of the tree, with new ones, without ignored ones."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for line in names.splitlines() if (path := ROOT / line).is_file())


def name(path: Path) -> str:
    """Returns a file's path from the root."""
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
