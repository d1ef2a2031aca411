"""Writes the generated pages of docs/reference from the code: flags, settings, metrics and paths.

    python scripts/reference.py            write the pages
    python scripts/reference.py --check    print each page that differs; exit status 1 if one does

Every fact is taken from the code that uses it: argparse parsers, `Config`, live metric registries,
the route table.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import os
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_disagg import cli, config  # noqa: E402
from vllm_disagg.fleet import registration  # noqa: E402
from vllm_disagg.protocol.reasons import Reason, Uncompared  # noqa: E402
from vllm_disagg.proxy.http import routes  # noqa: E402
from vllm_disagg.proxy.requests import admin  # noqa: E402
from vllm_disagg.proxy.requests.failover import FALLBACK_REASONS, RUNGS  # noqa: E402
from vllm_disagg.proxy.routing.fleet import Fleet  # noqa: E402
from vllm_disagg.proxy.telemetry.file_metrics import COUNTED_LOGS, WATCHED_FILES  # noqa: E402
from vllm_disagg.proxy.telemetry.metrics import MODES, OUTCOMES, Metrics  # noqa: E402

CONNECTOR_METRICS = "kv_connectors.metrics"  # imported late: it imports vLLM
REFERENCE = ROOT / "docs" / "reference"
NOTE = (
    "<!-- Written by scripts/reference.py; do not edit. `make check` compares it with the code. -->"
)
HOW = {  # how the proxy serves a path
    "generate": "both legs",
    "forward": "one instance; another one if it fails",
    "look up": "the decode instance that knows the id",
    "models": "one instance, or one of each model",
    "session": "WebSocket, joined to one instance",
    "all": "every instance",
    "own": "the proxy",
}
# Labels of the proxy's metrics: the label and its metric, all values in the code, and the words.
LABELS = (
    (
        ("mode", "vllm_disagg_requests_total"),
        (*MODES, "passthrough", "refused"),
        {
            "disaggregated": "a prefill and a decode instance served it",
            "whole": "one decode instance served it",
            "passthrough": "no generation as above: models, embeddings, tokenizing, sessions",
            "refused": "no instance was asked",
        },
    ),
    (
        ("outcome", "vllm_disagg_requests_total"),
        OUTCOMES,
        {
            "ok": "a status below 400",
            "client_error": "4xx, also 429 of a full queue, or 501: no instance has the API",
            "upstream_error": "another 5xx, also 503 of a queue's time limit"
            " or of a proxy that stops, or an error event",
            "timeout": "not over within `--request-timeout`",
            "cancelled": "the client left",
        },
    ),
    (
        ("file", "vllm_disagg_file_ignored"),
        WATCHED_FILES,
        {
            "fleet": "`--fleet-file`, read after each change",
            "access_log": "`--access-log`; this one and all below are opened at SIGHUP",
            "certificate": "`--ssl-certfile` and `--ssl-keyfile`",
            "upstream_ca": "`--upstream-ca`",
            "keys": "`--api-key-file` and `--admin-key-file`",
        },
    ),
    (
        ("log", "vllm_disagg_lost_log_lines_total"),
        COUNTED_LOGS,
        {"access": "`--access-log`", "standard_error": "the proxy's own log"},
    ),
    (
        ("rung", "vllm_disagg_failovers_total"),
        RUNGS,
        {
            "pair": "two instances, at least one of them another one",
            "same_decode": "the same decode instance alone",
            "other_decode": "another decode instance alone",
            "none": "no attempt was left: the request failed",
        },
    ),
    (
        ("reason", "vllm_disagg_fallbacks_total"),
        FALLBACK_REASONS,
        {
            "no_pair": "no P and D that fit were up: D computed the prompt",
            "prefill_full": "with `--spill`: all P were full, D computed the prompt",
            "decode_failed": "D failed, or answered 429, before its first content",
            "decode_in_stream": "D failed behind it; the stream was continued",
            "prefill_refused": "P refused the connection",
            "prefill_no_connection": "the network had no route to P, or brought no answer",
            "prefill_reset": "P's connection broke",
            "prefill_died": "P's API server reported the death of its engine",
            "prefill_stopping": "P had got SIGTERM",
            "prefill_garbled": "P's answer was none of HTTP or of vLLM",
            "prefill_timeout": "P did not answer within `--prefill-timeout`",
            "prefill_5xx": "P answered 5xx",
            "prefill_busy": "P answered 429",
            "prefill_declined": "P answered another 4xx, and D served the request",
            "prefill_stalled": "P's engine made no steps",
            "prefill_stale": "another process than the known one answered at P's address",
            "prefill_diverged": "always 0: only a decode leg can diverge",
            "prefill_too_large": "always 0: such a request is not tried again",
            "prefill_local": "this proxy had no descriptor or port for the connection",
        },
    ),
)


def main() -> int:
    """Writes the pages, or compares them with the code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a page differs"
    )
    check = parser.parse_args().check
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the connector's metrics import vLLM
    different = []
    for name, render in PAGES.items():
        path = REFERENCE / name
        text = render()
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            different.append(
                f"{path.relative_to(ROOT)} differs from the code: run python scripts/reference.py"
            )
    print("\n".join(different), end="\n" if different else "")
    return 1 if different else 0


# -- flags -----------------------------------------------------------------------------------------
def flags() -> str:
    """Renders the flags of every subcommand."""
    index = [f"* [`{name}`](#{name}): {summary}" for name, (_, summary) in cli.COMMANDS.items()]
    parts = [
        NOTE,
        "# Command-line flags",
        f"`vllm-disagg COMMAND --help` prints the same. {len(cli.COMMANDS)} commands.",
        "\n".join(index),
    ]
    for name, (module, summary) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"vllm-disagg {name}")
        import_module(f"vllm_disagg.{module}").add_arguments(parser)
        parts += [f"## {name}", f"{summary[0].upper()}{summary[1:]}.", *_groups(parser)]
        if parser.epilog:
            parts.append(" ".join(parser.epilog.split()))
    return _page(parts)


def _groups(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Renders a table for each group with visible arguments."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not _hidden(action)]
        if actions:
            title = group.title or ""
            if title not in ("options", "positional arguments"):
                yield f"**{title[0].upper()}{title[1:]}**"
            yield _table(("flag", "default", "meaning"), [_flag(action) for action in actions])


def _hidden(action: argparse.Action) -> bool:
    return action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction)


def _flag(action: argparse.Action) -> tuple[str, str, str]:
    """Renders a row: the flag with its value, its default, its help without the default."""
    value = ""
    if action.metavar:
        value = str(action.metavar)
    elif action.choices:
        value = "|".join(map(str, action.choices))
    elif action.nargs != 0:
        value = action.dest.upper()
    names = ", ".join(action.option_strings) or value
    shown = f"{names} {value}" if action.option_strings and value else names
    words = " ".join((action.help or "").split())
    given = re.search(r"\(default: ([^()]*(?:\([^()]*\))?[^()]*)\)", words)
    words = re.sub(r"\s*\(default: ([^()]*(?:\([^()]*\))?[^()]*)\)", "", words) % {
        **vars(action),
        "prog": "",
    }
    default = given[1] % vars(action) if given else _default(action)
    return f"`{shown}`", default, words


def _default(action: argparse.Action) -> str:
    """Renders the default of a flag whose help text names none."""
    if action.required or not action.option_strings:
        return "required"
    if action.default in (None, "", [], False, 0) or action.default is argparse.SUPPRESS:
        return ""
    return f"`{action.default}`"


# -- settings --------------------------------------------------------------------------------------
def settings() -> str:
    """Renders the settings of one engine's connector."""
    comments = _comments(config.Config)
    rows = [
        (f"`{field.name}`", _type(field.type), f"`{_json(field.default)}`", comments[field.name])
        for field in msgspec.structs.fields(config.Config)
    ]
    parts = [
        NOTE,
        "# Connector settings",
        "Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. An unknown key or a"
        " bad value stops vLLM at start with one line that names it. P is the engine that sends KV,"
        " D the engine that receives it. Seconds and bytes are numbers, or texts with a unit:"
        ' `"10s"`, `"500ms"`, `"4MiB"`.',
        _table(("setting", "type", "default", "meaning"), rows),
        'Set vLLM\'s own `"kv_load_failure_policy": "recompute"` with them; its default, `fail`,'
        " turns a failed transfer into a failed request.",
    ]
    return _page(parts)


def _comments(of: type) -> dict[str, str]:
    """Returns the comment of each field or member of a class.

    The comment is at the end of the field's lines, else in the lines above the field.
    """
    source = textwrap.dedent(inspect.getsource(of))
    trailing: dict[int, str] = {}  # by line
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments = alone if token.line.lstrip().startswith("#") else trailing
            comments[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
        words = [trailing[line] for line in lines if line in trailing]
        above = node.lineno - 1
        while above in alone and above - 1 in alone:
            above -= 1
        words = words or [alone[line] for line in range(above, node.lineno) if line in alone]
        found[ast.unparse(target)] = " ".join(words)
    return found


def _type(of: Any) -> str:
    """Renders a field's type, as an operator writes it in JSON."""
    if get_origin(of) is Literal:
        return " or ".join(get_args(of))
    if get_origin(of) in (Union, UnionType):
        return " or ".join(_type(one) for one in get_args(of))
    kind = get_args(of)[0] if get_origin(of) is Annotated else of
    names = {str: "text", bool: "true or false", float: "seconds", int: "bytes", NoneType: "null"}
    return names[kind]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# -- metrics ---------------------------------------------------------------------------------------
def metrics() -> str:
    """Renders every series of the proxy and of the connector."""
    proxy = sorted(_proxy_metrics())
    parts = [
        NOTE,
        "# Metrics",
        "How to use them: [monitor a fleet](../how-to/monitor.md).",
        "## Of the proxy",
        "On the proxy's `/metrics`. A histogram has the usual `_bucket`, `_sum` and `_count`.",
        _table(("metric", "type", "labels", "meaning"), proxy),
        *_label_tables(),
        "## Of the connector",
        "On each engine's `/metrics`, next to vLLM's own. vLLM's labels (`model_name`, `engine`)"
        " are on each of them.",
        _table(("metric", "type", "labels", "meaning"), _connector_metrics()),
        "## Reasons",
        "Values of the label `reason` of `vllm:disagg_failed_loads_total`. The receiving engine"
        " computes that prompt itself.",
        _table(
            ("reason", "meaning"),
            [(f"`{reason.value}`", text) for reason, text in _members(Reason)],
        ),
        "Values of the label `reason` of `vllm:disagg_uncompared_loads_total`, of loads that"
        " succeeded.",
        _table(
            ("reason", "meaning"),
            [(f"`{reason.value}`", text) for reason, text in _members(Uncompared)],
        ),
    ]
    return _page(parts)


def _proxy_metrics() -> Iterator[tuple[str, str, str, str]]:
    """Yields rows for the families of a proxy without traffic."""
    registry = Metrics(Fleet())._registry
    for collector in registry._collector_to_names:
        for family in collector.collect():
            labels: Iterable[str] = getattr(collector, "_labelnames", ()) or getattr(
                family, "_labelnames", ()
            )
            yield _row(family.name, family.type, labels, family.documentation)


def _label_tables() -> Iterator[str]:
    """Yields a table for each label of the proxy. Raises ValueError for values without words."""
    for (label, metric), values, words in LABELS:
        if set(values) != set(words):
            raise ValueError(f"{label}: give words for {set(values) ^ set(words)}")
        yield f"Values of the label `{label}` of `{metric}`."
        rows = [(f"`{value}`", _sentence(words[value])) for value in values]
        yield _table((label, "meaning"), rows)


class _Recorder:
    """Stand-in for a Prometheus class; records the metrics that are created."""

    def __init__(self, kind: str, rows: list[tuple[str, str, str, str]]) -> None:
        self._kind = kind
        self._rows = rows

    def __call__(
        self, name: str, documentation: str, labelnames: Iterable[str] = (), **_: object
    ) -> _Recorder:
        self._rows.append(_row(name, self._kind, labelnames, documentation))
        return self

    def labels(self, *_: object, **__: object) -> _Recorder:
        """Returns the metric itself."""
        return self


def _connector_metrics() -> list[tuple[str, str, str, str]]:
    """Returns rows for the metrics of the connector's class."""
    from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415 - as vLLM does

    rows: list[tuple[str, str, str, str]] = []
    kinds = {kind: _Recorder(kind.__name__.lower(), rows) for kind in (Counter, Gauge, Histogram)}
    import_module(CONNECTOR_METRICS).ConnectorPromMetrics(_NoConfig(), kinds, [], {0: []})
    return sorted(rows)


class _NoConfig:
    """Stand-in for vLLM's configuration; the metrics read no other field."""

    kv_transfer_config = None


def _row(name: str, kind: str, labels: Iterable[str], words: str) -> tuple[str, str, str, str]:
    suffix = "_total" if kind == "counter" and not name.endswith("_total") else ""
    return f"`{name}{suffix}`", kind, ", ".join(f"`{label}`" for label in labels), _sentence(words)


def _members(of: type[Enum]) -> Iterator[tuple[Any, str]]:
    """Yields each member of an enumeration with its comment."""
    comments = _comments(of)
    for member in of:
        yield member, _sentence(comments[member.name])


# -- paths -----------------------------------------------------------------------------------------
def paths() -> str:
    """Renders every path of the proxy, with the key that it needs."""
    served = [*routes.ROUTES.items(), *routes._BY_TEMPLATE.items()]
    rows = [
        (f"`{path}`", ", ".join(methods), HOW[how], "" if path in routes.UNGUARDED else _key(path))
        for path, (methods, how) in served
    ]
    changes = [(f"`{path}`", method, "admin key") for method, path in admin.CHANGES]
    changes.append((f"`{registration.REGISTER_PATH}`", "POST", "proof made with the fleet key"))
    refused: dict[str, list[str]] = {}
    for path, why in routes.REFUSED.items():
        refused.setdefault(why, []).append(path)
    parts = [
        NOTE,
        "# HTTP paths of the proxy",
        "How each one behaves: [paths and bodies](../explanation/routing.md#paths-and-bodies).",
        "## For clients",
        "*Key*: needed where the proxy has `--api-key`. Slashes behind a path, and more than one"
        " before it, are left out.",
        _table(("path", "methods", "answered by", "key"), rows),
        "## For operators",
        _table(("path", "method", "guard"), changes),
        "## Refused",
        "404 with the reason. Any path that is on no list of this page is a plain 404.",
        _table(
            ("paths", "reason"),
            [(", ".join(f"`{path}`" for path in found), why) for why, found in refused.items()],
        ),
    ]
    return _page(parts)


def _key(path: str) -> str:
    return "client's key" if routes.guarded(path) else "admin key or client's key"


# -- Markdown --------------------------------------------------------------------------------------
def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _sentence(words: str) -> str:
    words = " ".join(words.split())
    first = words[:1] if words.startswith("vLLM") else words[:1].upper()
    return first + words[1:].rstrip(".") + "." if words else ""


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags,
    "settings.md": settings,
    "metrics.md": metrics,
    "paths.md": paths,
}

if __name__ == "__main__":
    sys.exit(main())
