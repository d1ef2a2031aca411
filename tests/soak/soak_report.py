"""Writes what a soak has found as JSON and as a page of the documents.  Pure but for the files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = """\
# Soak: hours of load with a fault a minute

**Question.** While faults go on for hours: is an answer wrong, is an engine lost, does memory grow?

**Verdict.** {verdict}

## Set-up

| | |
|---|---|
| command | `make soak SECONDS={given_seconds:g} SEED={seed} ABORTS={given_aborts}` |
| date | {date} |
| machine | {cores} cores, no GPU, load average {load} at the end |
| engines | 2 prefill + 2 decode, vLLM, tiny model; only one P and one D are ever killed |
| proxy | two workers, access log |
| load | 16 clients; prompts of 20 to 1,800 tokens, answers of 1 to 120, temperature 0 |
| oracle | one plain vLLM, before |
| beside | a plain vLLM with 4 clients of the same kind, for its memory: {plain} |

An answer is exact (text, usage, finish reason), clean (an explicit error in time), cut (its proxy
worker was killed: neither exact nor clean), left (by its client, one in twelve; what it had got by
then began the right answer), wrong, or hung (no end in two minutes). The
fault `network cut` drops all packets to a P's KV address; each engine counts as a machine of its
own, so no UNIX socket is used. A cut of 4 s or more that no D has noticed is a failure.

## Result

| requests | exact | clean | cut | left | wrong | hung |
|---|---|---|---|---|---|---|
| {requests} | {exact} | {clean} | {cut} | {left} | {wrong} | {hung} |

Share of exact answers, of each 50 that were not left: first {first_share}, last {last_share}, least
{least_share}. Slowest answer {slowest_seconds} s. Of the clients that left {compared_of_left} had
got a text, which was compared.

| requests that began under | faults | exact | clean | cut | left | wrong | hung |
|---|---|---|---|---|---|---|---|
{by_fault}

{aborts}

{failures}

## Processes

Of those that lived for half of the run: memory (RSS), what malloc has given out, descriptors,
threads and asyncio tasks, first and last. First is ten minutes after the start of a process, or its
start if it lived for less. "-" for MiB an hour: it lived for less than twenty minutes, which show
no slope.

| server | process | hours | MiB | MiB an hour | allocated MiB | descriptors | threads | tasks |
|---|---|---|---|---|---|---|---|---|
{processes}

The plain vLLM has no connector, no peers and no faults; its requests are of the same kinds.

Metric series, first and last: {series}. Once a minute between: {pages}.
All KV blocks were free {rest}.
"""
VERDICTS = ("exact", "clean", "cut", "left", "wrong", "hung")
SECONDS_PER_HOUR = 3600
MAX_GROWTH_MIB_PER_HOUR = 1.0
PLAIN = "plain"  # the engine beside


def save(name: Path, found: dict[str, Any]) -> None:
    """Writes NAME.json and NAME.md."""
    name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    cores = len(os.sched_getaffinity(0))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    name.with_suffix(".md").write_text(page(found, date, cores, os.getloadavg()[1]))


def page(found: dict[str, Any], date: str, cores: int, load: float) -> str:
    """Returns the page for a run. `load`: the machine's load average."""
    shares = found["exact_share_per_50"]
    verdicts = {name: f"{found['verdicts'].get(name, 0):,}" for name in VERDICTS}
    return PAGE.format(
        verdict=verdict(found),
        given_seconds=found["given"]["seconds"],
        given_aborts=found["given"]["aborts"],
        seed=found["seed"],
        date=date,
        cores=cores,
        load=f"{load:.1f}",
        requests=f"{found['requests']:,}",
        **verdicts,
        first_share=percent(shares[:1]),
        last_share=percent(shares[-1:]),
        least_share=percent(sorted(shares)[:1]),
        slowest_seconds=found["slowest_seconds"],
        compared_of_left=f"{found['compared_of_left']:,}",
        by_fault="\n".join(fault_rows(found)),
        aborts=aborts_text(found.get("aborts")),
        failures=failures_text(found),
        processes="\n".join(process_row(one) for one in found["processes"]),
        series=series_text(found["series"]),
        pages=pages_text(found["pages"]),
        plain=counts_text(found["plain"]),
        rest="behind the load" if not found["failures"] else "or not: see above",
    )


def verdict(found: dict[str, Any]) -> str:
    """Returns the sentence at the head of the page."""
    counts = found["verdicts"]
    bad = counts.get("wrong", 0) + counts.get("hung", 0)
    faults = sum(found["faults"].values())
    hours = found["seconds"] / SECONDS_PER_HOUR
    text = (
        f"{bad} of {found['requests']:,} requests wrong or hung, {counts.get('exact', 0):,} exact,"
        f" {faults} faults in {hours:.2f} hours"
    )
    return (
        f"{text}; {len(found['failures'])} failures of engines or of healing;"
        f" {growth_text(found['processes'])}."
    )


def growth_text(processes: list[dict[str, Any]]) -> str:
    """Returns how many processes grew; only those that lived for an hour can show it."""
    old = [one for one in processes if one["seconds"] >= SECONDS_PER_HOUR]
    if not old:
        return "no process lived for the hour that shows a growth of memory"
    ours = [one for one in old if one["name"] != PLAIN]
    plain = [one for one in old if one["name"] == PLAIN]
    text = (
        f"memory of {growing(ours)} of {len(ours)} processes grew by more than"
        f" {MAX_GROWTH_MIB_PER_HOUR:g} MiB an hour"
    )
    return f"{text}, of a plain vLLM's {growing(plain)} of {len(plain)}" if plain else text


def growing(processes: list[dict[str, Any]]) -> int:
    """Returns how many of these processes grew by more than the limit."""
    return sum(one["rss_mib_per_hour"] > MAX_GROWTH_MIB_PER_HOUR for one in processes)


def counts_text(verdicts: dict[str, int]) -> str:
    """Returns counts of verdicts as a text."""
    return ", ".join(f"{count:,} {name}" for name, count in verdicts.items()) or "no requests"


def pages_text(pages: list[dict[str, Any]]) -> str:
    """Returns the least and the most series of each server, and the most KV in use."""
    if not pages:
        return "no reading"
    counts: dict[str, list[int]] = {}
    shares: dict[str, list[float]] = {}
    for page in pages:
        for name, count in page["series"].items():
            counts.setdefault(name, []).append(count)
        for name, share in page["held_kv"].items():
            shares.setdefault(name, []).append(share)
    series = [f"{name} {min(taken)} to {max(taken)}" for name, taken in sorted(counts.items())]
    held = [
        f"{name} {100 * min(taken):.0f} to {100 * max(taken):.0f} %"
        for name, taken in sorted(shares.items())
    ]
    return f"{', '.join(series)}; KV blocks in use: {', '.join(held)}"


def fault_rows(found: dict[str, Any]) -> Iterable[str]:
    """Yields a row for each fault under which requests began."""
    for fault, counts in found["by_fault"].items():
        cells = " | ".join(str(counts.get(name, 0)) for name in VERDICTS)
        yield f"| {fault} | {found['faults'].get(fault, '-')} | {cells} |"


def aborts_text(aborts: dict[str, Any] | None) -> str:
    """Returns the sentence on clients that left in fast succession."""
    if aborts is None:
        return "No clients left in fast succession in this run."
    transfers = ", ".join(
        f"`{name}` {rise:.0f}" for name, rise in aborts["transfers"].items() if rise
    )
    return (
        f"Then {aborts['left']:,} clients left one pair in fast succession, spread over the time of"
        f" a whole answer: {aborts['before_first_byte']:,} before its first byte,"
        f" {aborts['in_answer']:,} in the answer; {aborts['compared']:,} texts were compared."
        f" What the engines counted meanwhile: {transfers or 'nothing'}."
    )


def failures_text(found: dict[str, Any]) -> str:
    """Returns the list of what was wrong, or that nothing was."""
    lines = [*found["failures"], *found["problems"]]
    if not lines:
        return "No engine died without a fault, every fault healed, and no answer was not exact."
    firsts = [line.splitlines()[0][:300].replace("|", "/") for line in lines[:20]]
    items = "\n".join(f"* {first}" for first in firsts)
    return f"All that was not exact (the first 20 of {len(lines)}):\n\n{items}"


def process_row(one: dict[str, Any]) -> str:
    """Returns a row of the table of processes."""
    cells = [
        one["name"],
        one["kind"],
        f"{one['seconds'] / SECONDS_PER_HOUR:.2f}",
        first_and_last(one["rss_mib"]),
        "-" if one["rss_mib_per_hour"] is None else f"{one['rss_mib_per_hour']:+.1f}",
        first_and_last(one.get("allocated_mib", [None, None])),
        first_and_last(one["descriptors"]),
        first_and_last(one["threads"]),
        first_and_last(one["tasks"]),
    ]
    return f"| {' | '.join(cells)} |"


def first_and_last(values: list[Any]) -> str:
    """Returns two values as a text."""
    return ", ".join("-" if value is None else str(value) for value in values)


def series_text(series: list[dict[str, int]]) -> str:
    """Returns the number of metric series of each server that runs to the end, first and last."""
    first = series[0]
    last = series[-1]
    return ", ".join(f"{name} {first[name]} and {last[name]}" for name in first if name in last)


def percent(shares: list[float]) -> str:
    """Returns the first share as a text; "-" without one."""
    return f"{100 * shares[0]:.0f} %" if shares else "-"
