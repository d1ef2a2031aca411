"""Measures the words, the density and the rooms of this tree: `make house`.

    python scripts/house.py [--undocumented] [ROOT]

Counts what git tracks: Python files of the packages, their docstrings, and Markdown in the root and
in docs/. Prints a table with the targets, then all figures as one line of JSON. ROOT may be another
checkout, for a comparison.

Terms: a *code line* holds at least one token that is no comment and no docstring. A *room* is a
direct child, module or folder, of a package; at the top level `kv_connectors` is one room. An
*arrow* is one room that imports another. A *circle* is a group of rooms that can reach each other.
*Relative words* are those of RELATIVE: pronouns without a noun, and verbs that make persons of
programs.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

CORE = "vllm_disagg"
PLUGIN = "kv_connectors"
COMMENTED_FOLDERS = (f"{CORE}/protocol/", f"{CORE}/transports/")
MAX_COLUMNS = 100

RELATIVE = re.compile(
    r"\b(whoever|whom|whose|nobody|somebody|anybody|whatever|who is|what is|what was"
    r"|is to be|are to|shall|perhaps|of its own|of our own|by itself|as it is|at all|besides?"
    r"|likewise|let go|lets go|lies?|stands?|stood|words"
    r"|told|tells|hears?|heard|says?|said|speaks?|knows?|wants?|asks?|life|lives)\b",
    re.IGNORECASE,
)
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`]*`")

NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

TARGETS = {
    "circles": 0,
    "tokens_per_line": 8,
    "tuple_assignments_per_1000": 3,
    "lines_over_100": 0,
    "public_without_docstring": 0,
    "class_names_with_several_meanings": 0,
    "relative_words_per_1000_docstrings": 8,
    "relative_words_per_1000_docs": 8,
    "comments_per_100_protocol_and_transports": 15,  # at least; all others are at most
}


@dataclass
class Density:
    """Counts of one file, or the sum of several."""

    code_lines: int = 0
    tokens: int = 0
    comments: int = 0
    long_lines: int = 0
    tuple_assignments: int = 0
    conditional_expressions: int = 0
    comprehensions: int = 0
    public_names: int = 0
    undocumented: list[str] = field(default_factory=list)
    docstrings: list[str] = field(default_factory=list)

    def add(self, other: Density) -> None:
        """Adds the counts of another file."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def per_line(self, count: int, lines: int) -> float:
        """Returns how many there are in so many lines of code."""
        return round(count * lines / max(self.code_lines, 1), 1)


def measure_file(path: str, source: str) -> Density:
    """Returns the counts of one Python file."""
    tree = ast.parse(source)
    found = Density()
    found.long_lines = sum(len(line) > MAX_COLUMNS for line in source.split("\n"))
    count_tokens(found, tree, source)
    for node in ast.walk(tree):
        found.conditional_expressions += isinstance(node, ast.IfExp)
        found.comprehensions += isinstance(node, Comprehension)
        found.tuple_assignments += is_tuple_assignment(node)
        if isinstance(node, Definition | ast.Module):
            docstring = ast.get_docstring(node)
            if docstring:
                found.docstrings.append(docstring)
    for name, definition in public_definitions(tree):
        found.public_names += 1
        if not ast.get_docstring(definition):
            found.undocumented.append(f"{path}:{definition.lineno} {name}")
    return found


def count_tokens(found: Density, tree: ast.Module, source: str) -> None:
    """Counts code lines, tokens and comments; a string that is a statement is no code."""
    quoted: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and is_string(node.value):
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens_of_line: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        found.comments += token.type == tokenize.COMMENT
        if token.type not in NO_CODE and line not in quoted:
            tokens_of_line[line] += 1
    found.tokens = tokens_of_line.total()
    found.code_lines = len(tokens_of_line)


def is_string(node: ast.expr) -> bool:
    """Returns whether the expression is a literal string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_tuple_assignment(node: ast.AST) -> bool:
    """Returns whether the statement is `a, b = x, y`, with at least two values."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple) and len(node.value.elts) > 1


def public_definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yields public classes, functions and methods, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition) or child.name.startswith("_"):
            continue
        name = prefix + child.name
        yield name, child
        if not isinstance(child, Function):
            yield from public_definitions(child, f"{name}.")


def shared_class_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the names that several files give to a class, with these files."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def relative_words(text: str) -> float:
    """Returns the rate of relative words in 1,000 words."""
    return round(1000 * len(RELATIVE.findall(text)) / max(len(text.split()), 1), 1)


def prose(markdown: str) -> str:
    """Returns Markdown without code blocks, tables and code spans."""
    for pattern in (CODE_BLOCK, TABLE_ROW, CODE_SPAN):
        markdown = pattern.sub(" ", markdown)
    return markdown


def module_name(path: str) -> str:
    """Returns the dotted name of a Python file: `a/b/__init__.py` is `a.b`."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imported_modules(path: str, source: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yields each module of ours that a file imports, wherever in the file."""
    package = module_name(f"{PurePosixPath(path).parent}/__init__.py")
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = import_base(node, package)
            for alias in node.names:
                member = f"{base}.{alias.name}"
                names.append(member if member in modules else base)
        yield from (name for name in names if name in modules)


def import_base(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute module of `from ... import`."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, *filter(None, [node.module])])


@dataclass
class Rooms:
    """Rooms of one package, or of the whole house, and who imports whom."""

    names: set[str] = field(default_factory=set)
    arrows: set[tuple[str, str]] = field(default_factory=set)

    def circles(self) -> list[list[str]]:
        """Returns each group of rooms that can reach each other."""
        reach = {name: self.reachable(name) for name in self.names}
        groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in self.names}
        return sorted(sorted(group) for group in groups if group)

    def reachable(self, start: str) -> set[str]:
        """Returns the rooms that can be reached from one over at least one arrow."""
        found: set[str] = set()
        edge = {start}
        while edge:
            edge = {there for here, there in self.arrows if here in edge} - found
            found |= edge
        return found


def house_room(module: str) -> str:
    """Returns a module's room at the top level."""
    if module.startswith(PLUGIN):
        return PLUGIN
    return ".".join(module.split(".")[:2])


def find_rooms(sources: Mapping[str, str]) -> dict[str, Rooms]:
    """Returns the rooms of the house, under "", and those inside each package."""
    modules = {module_name(path): path for path in sources}
    packages = [module_name(path) for path in sources if path.endswith("__init__.py")]
    found = {"": Rooms(names={house_room(module) for module in modules})}
    for package in packages:
        if package != CORE:
            found[package] = Rooms({child_of(package, m) for m in modules if is_inside(package, m)})
    for module, path in modules.items():
        for target in imported_modules(path, sources[path], modules):
            add_arrow(found[""], house_room(module), house_room(target))
            for package in packages:
                if package != CORE and is_inside(package, module) and is_inside(package, target):
                    add_arrow(found[package], child_of(package, module), child_of(package, target))
    return found


def is_inside(package: str, module: str) -> bool:
    """Returns whether the module is the package or a part of it."""
    return f"{module}.".startswith(f"{package}.")


def child_of(package: str, module: str) -> str:
    """Returns the direct child of the package that holds the module."""
    return ".".join(module.split(".")[: package.count(".") + 2])


def add_arrow(rooms: Rooms, start: str, end: str) -> None:
    """Adds an arrow, unless both ends are the same room."""
    if start != end:
        rooms.arrows.add((start, end))


def measure(sources: Mapping[str, str], documents: Mapping[str, str]) -> dict[str, object]:
    """Returns all figures of Python sources and Markdown documents, both by path."""
    whole = Density()
    commented = Density()
    for path, source in sources.items():
        file = measure_file(path, source)
        whole.add(file)
        if path.startswith(COMMENTED_FOLDERS):
            commented.add(file)
    rooms = find_rooms(sources)
    circles = [circle for group in rooms.values() for circle in group.circles()]
    return {
        "rooms": len(rooms[""].names),
        "arrows": len(rooms[""].arrows),
        "circles": len(circles),
        "circle_members": circles,
        "rooms_and_arrows_inside": {
            package: [len(inner.names), len(inner.arrows)]
            for package, inner in rooms.items()
            if package
        },
        "code_lines": whole.code_lines,
        "tokens_per_line": round(whole.tokens / max(whole.code_lines, 1), 2),
        "tuple_assignments_per_1000": whole.per_line(whole.tuple_assignments, 1000),
        "conditional_expressions_per_1000": whole.per_line(whole.conditional_expressions, 1000),
        "comprehensions_per_1000": whole.per_line(whole.comprehensions, 1000),
        "lines_over_100": whole.long_lines,
        "comments_per_100": whole.per_line(whole.comments, 100),
        "comments_per_100_protocol_and_transports": commented.per_line(commented.comments, 100),
        "public_names": whole.public_names,
        "public_without_docstring": len(whole.undocumented),
        "class_names_with_several_meanings": sorted(shared_class_names(sources)),
        "relative_words_per_1000_docstrings": relative_words(" ".join(whole.docstrings)),
        "relative_words_per_1000_docs": relative_words(prose("\n".join(documents.values()))),
    }


def read_tree(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the tracked Python sources of the packages, and the tracked documents, by path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    sources: dict[str, str] = {}
    documents: dict[str, str] = {}
    for path in listed.stdout.decode().split("\0"):
        folder = path.partition("/")[0]
        if not (root / path).is_file():  # deleted, but not yet committed
            continue
        if path.endswith(".py") and folder in (CORE, PLUGIN):
            sources[path] = (root / path).read_text()
        elif path.endswith(".md") and folder in ("docs", path):
            documents[path] = (root / path).read_text()
    return sources, documents


def print_table(figures: Mapping[str, object]) -> None:
    """Prints one figure a line, with its target."""
    for name, value in figures.items():
        target = ""
        if name in TARGETS:
            bound = "at least" if name.startswith("comments") else "at most"
            target = f"{bound} {TARGETS[name]}"
        if isinstance(value, list):
            print(f"{name:42} {len(value):>8}  {target:14} {' '.join(map(str, value))}".rstrip())
        elif isinstance(value, dict):
            shown = ", ".join(
                f"{package} {inner[0]} {inner[1]}" for package, inner in value.items()
            )
            print(f"{name:42} {shown}")
        else:
            print(f"{name:42} {value!s:>8}  {target}".rstrip())


def main() -> None:
    """Prints the figures of a tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument(
        "--undocumented", action="store_true", help="list the public names without a docstring"
    )
    args = parser.parse_args()
    sources, documents = read_tree(args.root)
    if args.undocumented:
        for path, source in sources.items():
            for name in measure_file(path, source).undocumented:
                print(name)
        return
    figures = measure(sources, documents)
    print_table(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
