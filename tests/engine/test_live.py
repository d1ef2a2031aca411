"""`vllm-disagg plan --live`: real engines under load, compared with its own measurements."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
from asking import body, repeating, tokens
from conftest import Main
from engines import ADMIN, CHUNK, ROOT

from vllm_disagg import cli
from vllm_disagg.fleet import keys

PROMPT, ANSWER = 300, 12  # tokens
WINDOW = 12  # seconds
PROMPTS = (60, 150, 240)  # tokens, of one step each: different ones show what a token takes
OWN_WINDOW = 30  # seconds, for enough steps of each kind
EACH = 0.4  # seconds between two requests of a client; two clients


def stream(url: str, prompt: list[int]) -> tuple[float, float]:
    """Returns the seconds to the first token, and of each later one, at the client."""
    asked = body(
        prompt, ANSWER, ignore_eos=True, stream=True, stream_options={"include_usage": True}
    )
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        began = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
        )
        times = [
            time.monotonic() - began
            for line in connection.getresponse()
            if line.startswith(b'data: {"id"')
        ]
        return times[0], (times[-1] - times[0]) / (ANSWER - 1)
    finally:
        connection.close()


def load(
    url: str, seen: list[tuple[float, float, float]], prompts: Sequence[int] = (PROMPT,)
) -> AbstractContextManager[None]:
    """Runs two clients with prompts of these lengths in turn.

    Notes when each answer ended, and its times to first and later tokens.
    """
    lengths = [cycle(prompts) for _ in range(2)]

    def send(name: int) -> None:
        prompt = tokens(next(lengths[name]), (name, time.monotonic()))
        first, later = stream(url, prompt)
        seen.append((time.monotonic(), first, later))
        time.sleep(EACH)

    return repeating([partial(send, name) for name in range(2)])


@pytest.mark.wide
def test_a_pair_under_load_is_judged(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.ADMIN_KEY, ADMIN)
    points = str(tmp_path / "points.json")
    words = ["--output", points, "--seconds", "10", "--max-num-batched-tokens", str(CHUNK)]
    assert cli.main(["profile", main.plain.url, *words]) == 0
    capsys.readouterr()
    seen: list[tuple[float, float, float]] = []
    words = [
        "--profile",
        points,
        "--model",
        str(ROOT / ".cache/models/dense"),
        "--window",
        str(WINDOW),
        "--ttft",
        "5",
        "--tpot",
        "0.5",
        "--seeds",
        "2",
        "--jobs",
        "1",
    ]
    with load(main.proxy.url, seen):
        while not seen:
            time.sleep(0.1)
        began = time.monotonic()
        status = cli.main(["plan", "--live", main.proxy.url, *words, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads(out)
    traffic = found["traffic"]
    assert (traffic["prompt"], traffic["output"]) == pytest.approx(
        (PROMPT, ANSWER), rel=0.1
    )  # at the window's ends
    inside = [
        times for ended, *times in seen if began <= ended <= began + WINDOW
    ]  # the load goes on while it simulates
    assert traffic["requests"] == pytest.approx(len(inside), abs=6)
    assert traffic["rate"] == pytest.approx(traffic["requests"] / traffic["seconds"])
    first, later = (sum(times) / len(inside) for times in zip(*inside, strict=True))
    assert traffic["ttft"] == pytest.approx(first, rel=0.3) and traffic["tpot"] == pytest.approx(
        later, rel=0.3
    )
    assert (found["present"]["prefill"], found["present"]["decode"]) == (1, 1)
    assert (
        found["right"] and found["headroom"] > 1
    )  # objectives far above what two clients see; there is no other split
    assert found["one_more"]["prefill"]["goodput"] >= 0.9 * found["present"]["goodput"]


@pytest.mark.wide
def test_a_pair_under_load_is_judged_by_its_own_step_times(
    main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No source of step times is given: each engine measures its own."""
    monkeypatch.setenv(keys.ADMIN_KEY, ADMIN)
    seen: list[tuple[float, float, float]] = []
    words = ["--window", str(OWN_WINDOW), "--ttft", "5", "--tpot", "0.5", "--seeds", "2"]
    words += ["--jobs", "1", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "128"]
    with load(main.proxy.url, seen, PROMPTS):
        while not seen:
            time.sleep(0.1)
        status = cli.main(["plan", "--live", main.proxy.url, *words, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads(out)
    traffic = found["traffic"]
    assert traffic["prompt"] == pytest.approx(sum(PROMPTS) / len(PROMPTS), rel=0.15)
    assert traffic["output"] == pytest.approx(ANSWER, rel=0.1)
    engines = found["engines"]
    prefill = engines["prefill"]
    decode = engines["decode"]
    # Both roles are one engine, so none is slower than the others of its role.
    assert prefill["slow"] == decode["slow"] == {}
    assert prefill["steps"] == pytest.approx(traffic["requests"], rel=0.3)
    assert decode["steps"] >= traffic["requests"]
    for role in (prefill, decode):
        assert all(value >= 0 for value in role["coefficients"]) and 0 < role["busy"] <= 1
    # The parts of a first token, and a token of an answer.
    assert 0 < prefill["seconds"] < traffic["ttft"] and 0 < decode["seconds"] < traffic["ttft"]
    assert 0 < engines["handoff"] < traffic["ttft"] and 0 <= engines["path"] < traffic["ttft"]
    assert decode["seconds"] == pytest.approx(traffic["tpot"], rel=0.5)
    # The only split of two engines is theirs. A crowded machine may leave too much open.
    assert found["verdict"] in ("keep", "cannot tell"), found["why"]
    if found["verdict"] == "cannot tell":
        assert found["why"]
        return
    assert found["right"] and found["assumed"] == {}
    assert found["setting"]["latency"]["decode"] == "the engines' own steps"
    for name in ("ttft", "tpot"):
        assert found["simulated"][name] == pytest.approx(traffic[name], rel=0.25)
