"""Answers of `plan --live` as text, and the one that it cannot tell."""

from __future__ import annotations

from typing import Any

QUEUE_SHARE = 0.5  # of TTFT in the proxy's queue, from which a deployment is overloaded


def doubt(queue: float, ttft: float) -> str:
    """Returns why mean times do not show step times; empty if they do."""
    if queue <= QUEUE_SHARE * ttft:
        return ""
    return (
        f"the deployment is overloaded: of a TTFT of {ttft:.3g} s, {queue:.3g} s are the proxy's"
        " queue, so the means do not show how fast the engines are: leave --gpu, --profile and"
        " --coefficients out, so that the engines' own step times are taken"
    )


def cannot_tell(why: str, traffic: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer that no split can be judged. `why` names what would decide."""
    return {"verdict": "cannot tell", "right": False, "why": why, "traffic": traffic}


def text(document: dict[str, Any]) -> str:
    """Formats an answer for a terminal."""
    traffic = document["traffic"]
    lines = [
        f"{traffic['requests']} requests in {traffic['seconds']:.0f} s: {traffic['rate']:.3g}/s,"
        f" mean {traffic['prompt']:.0f} tokens in and {traffic['output']:.0f} out,"
        f" TTFT {traffic['ttft']:.3g} s, TPOT {traffic['tpot']:.3g} s"
    ]
    if "engines" in document:
        lines += _engines(document)
    elif "refit" in document:
        factors = document["refit"]
        lines.append(
            f"refitted: prefill x {factors['prefill']:.2f}, decode x {factors['decode']:.2f}"
        )
    if "present" in document:
        lines += _comparison(document)
    if document["why"]:
        lines.append(f"cannot tell: {document['why']}")
    lines += [f"note: {remark}" for remark in document.get("remarks", ())]
    return "\n".join(lines)


def _engines(document: dict[str, Any]) -> list[str]:
    """Formats what the engines measured of themselves."""
    engines = document["engines"]
    lines = []
    for role in ("prefill", "decode"):
        found = engines[role]
        lines.append(
            f"{role} step, as the engines measured: {1e3 * found['seconds']:.3g} ms"
            f" +- {found['error']:.0%} in the mean ({found['steps']} steps,"
            f" busy {found['busy']:.0%})"
        )
        for url, ratio in found["slow"].items():
            lines.append(f"slow: {url} takes {ratio:.2f} times the {role} engines' step times")
    handoff = engines["handoff"]
    lines.append(
        f"hand-off {1e3 * handoff:.3g} ms after the prefill; path of a request"
        f" {1e3 * engines['path']:.3g} ms"
    )
    if document.get("overloaded"):
        lines.append(
            f"overloaded: {engines['proxy_queue']:.3g} s of TTFT are the proxy's queue;"
            " the step times above are without it"
        )
    if document.get("assumed"):
        limits = " and ".join(f"{flag} {limit}" for flag, limit in document["assumed"].items())
        lines.append(f"assumed of each engine: {limits}; give its own")
    if "simulated" in document:
        simulated = document["simulated"]
        lines.append(
            f"simulated at this rate: TTFT {simulated['ttft']:.3g} s,"
            f" TPOT {simulated['tpot']:.3g} s"
        )
    return lines


def _comparison(document: dict[str, Any]) -> list[str]:
    """Formats the goodput of the splits, with the intervals."""
    present = document["present"]
    best = document["best"]
    lines = [f"now {_goodput(present)}"]
    if document["verdict"] == "keep":
        lines.append("no other split of these instances gains more than 10 %: keep it")
    elif document["verdict"] == "change":
        gain = "the present split meets the objective at no rate"
        if document["gain"]:
            interval = _interval(document["gain_ci"], ".2f")
            gain = f"{document['gain']:.2f} times that ({interval})"
        lines.append(f"change to {_goodput(best)}, {gain}")
    for role, found in document["one_more"].items():
        gain = f", {found['gain']:.2f} times that" if found["gain"] else ""
        lines.append(f"one more {role} instance: {_goodput(found)}{gain}")
    return lines


def _goodput(split: dict[str, Any]) -> str:
    """Formats a split with its goodput and its interval."""
    words = f"{split['prefill']}P{split['decode']}D: goodput {split['goodput']:.3g} requests/s"
    return f"{words} ({_interval(split['ci'], '.3g')})"


def _interval(ends: list[float | None] | None, form: str) -> str:
    """Formats an interval; an end of None is infinite, and one sample has no interval."""
    if not ends:
        return "one sample"
    low, high = ends
    return f"{low:{form}} to {high:{form}}" if high is not None else f"{low:{form}} or more"
