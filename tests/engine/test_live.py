"""`vllm-disagg plan --live`: real engines under load, compared with its own measurements."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from asking import body, repeating, tokens
from conftest import Main
from engines import ADMIN, CHUNK, ROOT

from vllm_disagg import cli
from vllm_disagg.fleet import keys

PROMPT, ANSWER = 300, 12  # tokens
WINDOW = 12  # seconds
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


def load(url: str, seen: list[tuple[float, float, float]]) -> AbstractContextManager[None]:
    """Runs two clients; notes when each answer ended, and its times to first and later tokens."""

    def send(name: int) -> None:
        first, later = stream(url, tokens(PROMPT, (name, time.monotonic())))
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
