"""Tests `vllm-disagg profile` over real sockets, against an engine with steps of known duration.

tests/engine profiles a real engine.
"""

from __future__ import annotations

import json
import os
import queue
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_disagg import cli
from vllm_disagg.bench import handoff, instance, neighbours, profile, steps
from vllm_disagg.bench.steps import DecodeProbe, MixedProbe, PrefillProbe, Probe, StepSample
from vllm_disagg.errors import ConfigError
from vllm_disagg.product_sums import HANDOFF_QUANTITIES, ProductSums

INFO = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="20"} 1.0\n'
STEP = 0.003  # seconds of any step
TOKEN = 5e-5  # seconds more for each token of a prompt in the step
LONGEST_PROFILE_SECONDS = 60.0


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """Returns the prompts of a completion, which has one or a list of them."""
    prompts: list[Any] = body["prompt"]
    return [prompts] if isinstance(prompts[0], int) else prompts


class Scripted(BaseHTTPRequestHandler):
    """Engine that computes the first prompt of a request alone, then the others together.

    Then it computes one token for each in every step.
    """

    protocol_version = "HTTP/1.1"
    pages: dict[str, object]
    refuse: str
    fingerprint: str | None = "vllm-0.32.0+cpu-tp2-pp2-0123abcd"
    asked: list[int]  # of each request, the tokens of its first prompt
    is_list: list[bool]  # of each request, whether it has a list of prompts

    def do_GET(self) -> None:
        page = self.pages.get(self.path)
        page = page() if callable(page) else page
        self._answer(
            404 if page is None else 200, page if isinstance(page, str) else json.dumps(page)
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            self._answer(200, json.dumps({"system_fingerprint": self.fingerprint}))
            return
        self.is_list.append(not isinstance(body["prompt"][0], int))
        prompts = prompts_of(body)
        self.asked.append(len(prompts[0]))
        if self.refuse:
            self._answer(400, json.dumps({"error": {"message": self.refuse}}))
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for group in (range(1), range(1, len(prompts))):
            if group:
                time.sleep(STEP + TOKEN * sum(len(prompts[at]) for at in group))
                self._tokens(group)
        for _ in range(body["max_tokens"] - 1):
            time.sleep(STEP)
            self._tokens(range(len(prompts)))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _tokens(self, indices: range) -> None:
        for index in indices:
            choice = {"index": index, "text": "x", "token_ids": [7]}
            self._chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[str, type[Scripted]]]:
    pages = {
        "/v1/models": {"data": [{"id": "tiny", "root": "/tiny", "max_model_len": 96}]},
        "/version": {"version": "0.32.0"},
        "/metrics": INFO,
    }
    engine = type(
        "Serving", (Scripted,), {"pages": pages, "refuse": "", "asked": [], "is_list": []}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), engine)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", engine
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine() -> Iterator[tuple[str, type[Scripted]]]:
    with serving() as found:
        yield found


@pytest.fixture
def neighbour() -> Iterator[tuple[str, type[Scripted]]]:
    with serving() as found:
        yield found


def measure_until(monkeypatch: pytest.MonkeyPatch, enough: Callable[[], bool]) -> None:
    """Makes a profile end once each point was measured and `enough` holds.

    Its own limit is a time, within which a slow machine measures too few points.
    """
    rounds = profile._rounds

    def patient_rounds(
        plan: Sequence[Probe],
        measure: Callable[[Probe], StepSample | None],
        seconds: float,
        clock: Callable[[], float],
    ) -> profile.ProfileSamples:
        missing = set(plan)
        latest_end = clock() + LONGEST_PROFILE_SECONDS

        def measure_and_count(probe: Probe) -> StepSample | None:
            step = measure(probe)
            if step:
                missing.discard(probe)
            return step

        def scripted_clock() -> float:
            is_over = (not missing and enough()) or clock() > latest_end
            return seconds if is_over else 0.0

        return rounds(plan, measure_and_count, seconds, scripted_clock)

    monkeypatch.setattr(profile, "_rounds", patient_rounds)


def test_a_profile_finds_the_engines_times(
    engine: tuple[str, type[Scripted]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure_until(monkeypatch, lambda: True)
    path = tmp_path / "points.json"
    words = [
        "--output",
        str(path),
        "--max-num-batched-tokens",
        "128",
        "--machine",
        "a script",
    ]
    assert cli.main(["profile", engine[0], *words]) == 0
    points = json.loads(path.read_text())
    facts = [
        points[name]
        for name in ("version", "model", "vllm", "machine", "kv_tokens", "max_num_batched_tokens")
    ]
    assert facts == [2, "/tiny", "0.32.0", "a script", 320, 128]
    assert points["tensor_parallel_size"] == 2 and "gpu" in points
    for point in points["prefill"]:
        if len(point["tokens"]) == 1:  # more is not certain on a machine that has other work
            assert point["seconds"] > 0
    assert points["path"]["seconds"] >= 0 and points["path"]["seconds_per_token"] >= 0
    assert all(point["seconds"] > 0 for point in points["decode"])
    assert [16] in [point["tokens"] for point in points["prefill"]]
    assert max(len(point["contexts"]) for point in points["decode"]) == 4
    assert "points of prefill" in capsys.readouterr().out


def test_tensor_parallelism_is_that_of_the_fingerprint(
    engine: tuple[str, type[Scripted]],
) -> None:
    for fingerprint, size in (("vllm-0.32.0-0123abcd", 1), ("mine", None), (None, None)):
        engine[1].fingerprint = fingerprint
        assert instance.tensor_parallel_size(engine[0], "tiny") == size


def test_neighbours_work_meanwhile(
    engine: tuple[str, type[Scripted]],
    neighbour: tuple[str, type[Scripted]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour gets one request after the other for as long as the measurement takes."""
    asked = neighbour[1].asked
    measure_until(monkeypatch, lambda: len(asked) >= 3)
    path = tmp_path / "points.json"
    words = ["--output", str(path), "--beside", neighbour[0]]
    assert cli.main(["profile", engine[0], *words]) == 0
    assert json.loads(path.read_text())["beside"] == 1
    assert len(asked) >= 3 and set(asked) == {96 - neighbours.ANSWER_TOKENS}


def test_a_neighbour_that_fails_is_said(
    engine: tuple[str, type[Scripted]],
    neighbour: tuple[str, type[Scripted]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    neighbour[1].refuse = "no"
    words = ["--output", str(tmp_path / "x"), "--seconds", "0.2", "--beside", neighbour[0]]
    assert cli.main(["profile", engine[0], *words]) == 2
    assert f"the load on a neighbour stopped: {neighbour[0]} refused" in capsys.readouterr().err
    assert (
        cli.main(["profile", engine[0], "--output", str(tmp_path / "x"), "--beside", engine[0]])
        == 2
    )
    assert "is the measured instance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "content", "expected"),
    [
        ("/v1/models", {"data": []}, "serves no model"),
        ("/v1/models", {"models": 1}, "/v1/models: the answer is not that of vLLM"),
        ("/v1/models", {"data": [{"id": "tiny"}]}, "lacks max_model_len"),
        ("/v1/models", None, "/v1/models answered 404"),
        ("/version", "hello", "/version: the answer is not that of vLLM"),
        ("/metrics", "up 1\n", "give the address of an instance, not of a proxy"),
        ("/metrics", INFO * 2, "has 2 engines (data parallel)"),
        ("/metrics", INFO.replace('"20"', '"None"'), "lacks num_gpu_blocks"),
    ],
)
def test_what_it_cannot_use_it_refuses_in_one_line(
    engine: tuple[str, type[Scripted]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    page: str,
    content: object,
    expected: str,
) -> None:
    engine[1].pages[page] = content
    assert cli.main(["profile", engine[0], "--output", str(tmp_path / "x")]) == 2
    out, err = capsys.readouterr()
    assert (
        not out
        and err.startswith("vllm-disagg profile: ")
        and err.count("\n") == 1
        and expected in err
    )
    assert not (tmp_path / "x").exists()


def test_an_instance_that_refuses_a_prompt(
    engine: tuple[str, type[Scripted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine[1].refuse = "Token id 999 is out of vocabulary"
    assert cli.main(["profile", engine[0], "--output", str(tmp_path / "x")]) == 2
    assert "refused a request: 400: Token id 999 is out of vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nonsense", "--output", "x"], "URL: nonsense is not a URL"),
        (["http://127.0.0.1:9", "--output", "x"], "cannot reach http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--output", "/nowhere/x"], "--output /nowhere/x"),
        (["http://127.0.0.1:9", "--output", "x" * 300], "x: cannot write such a file"),
        (
            ["http://127.0.0.1:9", "--output", "x", "--seconds", "0"],
            "--seconds must be more than 0",
        ),
        (
            ["http://127.0.0.1:9", "--output", "x", "--max-num-batched-tokens", "0"],
            "must be 1 or more",
        ),
    ],
)
def test_bad_words(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *words]) == 2
    assert expected in capsys.readouterr().err


def test_an_old_file_that_cannot_be_written_is_found_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")
    access = os.access

    def denied(name: Path, mode: int) -> bool:  # root may write anything
        return name != path and access(name, mode)

    monkeypatch.setattr(os, "access", denied)
    assert cli.main(["profile", "http://127.0.0.1:9", "--output", str(path)]) == 2
    assert f"--output {path}: cannot write such a file" in capsys.readouterr().err


def test_rounds_end_in_time_and_say_what_they_had_no_time_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0

    def measure(what: Probe) -> StepSample:
        nonlocal now
        now += sum(what.prompts) if isinstance(what, PrefillProbe) else 0
        return StepSample((1,), 1.0)

    small = PrefillProbe((1,))
    large = PrefillProbe((50,))
    profile._rounds([small, large], measure, 60, lambda: now)
    assert now == 59  # the large one once, the small one for as long as there is time
    now = 0.0
    profile._rounds([small, large, PrefillProbe((2,))], measure, 20, lambda: now)
    assert "no time for 1 of 3 points" in capsys.readouterr().err


def test_the_path_to_the_engine_is_apart_from_the_steps() -> None:
    samples = profile.ProfileSamples()
    samples.add(PrefillProbe((32,)), StepSample((32,), 0.010))
    samples.add(PrefillProbe((64,)), StepSample((64,), 0.018))
    samples.add(PrefillProbe((32,), 64), StepSample((32,), 0.008))
    samples.add(PrefillProbe((32, 32), 64), StepSample((32, 32), 0.012))
    samples.add(
        PrefillProbe((32, 32), 64), StepSample((32,), 0.008)
    )  # the other one was in an earlier step
    assert samples.path() == {"seconds": 0.002, "seconds_per_token": 0.0}
    assert samples.prefill() == [
        {"tokens": [32], "seconds": 0.008},
        {"tokens": [64], "seconds": 0.016},
        {"tokens": [32, 32], "seconds": 0.012},
    ]


def test_a_path_grows_with_the_prompt() -> None:
    lengths = (32, 128, 512)
    fixed, per_token = steps.path_line([(n, 0.003 + 2e-5 * n) for n in lengths])
    assert (fixed, per_token) == pytest.approx((0.003, 2e-5))
    assert steps.path_line([(32, 0.004), (512, 0.002)]) == pytest.approx((0.003, 0.0))
    assert steps.path_line([(32, -0.001)]) == (0.0, 0.0) == steps.path_line([])
    assert steps.path_line([(100, 0.0), (200, 0.002)]) == (0.001, 0.0), "neither is negative"


class Fleet:
    """A proxy with a prefill and a decode instance, all at one address."""

    def __init__(self, url: str, engine: type[Scripted]) -> None:
        self.rows: list[dict[str, object]] = [
            {"url": url, "role": role, "usable": True} for role in ("prefill", "decode")
        ]
        self._asked = engine.asked
        self.counted = 1 << 20  # of the prompts: how many the decode instance loads
        engine.pages["/disagg/instances"] = lambda: self.rows
        engine.pages["/metrics"] = self.metrics

    def metrics(self) -> str:
        """Returns the sums over loads of 1 ms, and of 1 us for each of 100 bytes a token."""
        sums = ProductSums(HANDOFF_QUANTITIES)
        for tokens in list(self._asked)[: self.counted]:
            sums.add((1, 100 * tokens, 0.001 + 1e-6 * 100 * tokens))
        name = "vllm:disagg_handoff_sums_total"
        lines = [f'{name}{{product="{key}"}} {value!r}\n' for key, value in sums.take().items()]
        return "".join([INFO, *lines])


def test_a_handoff_is_measured_through_a_proxy(
    engine: tuple[str, type[Scripted]],
    neighbour: tuple[str, type[Scripted]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(*neighbour)
    measure_until(monkeypatch, lambda: True)
    monkeypatch.setattr(profile, "HANDOFF_SHARE", 1 / 60)  # of 120 s
    path = tmp_path / "points.json"
    words = ["--output", str(path), "--handoff", neighbour[0]]
    assert cli.main(["profile", engine[0], *words]) == 0
    found = json.loads(path.read_text())["handoff"]
    assert (found["seconds"], found["seconds_per_byte"]) == pytest.approx((0.001, 1e-6), rel=1e-3)
    assert found["mean"] == pytest.approx(
        0.001 + 1e-4 * statistics.mean(neighbour[1].asked), rel=0.1
    )
    assert set(neighbour[1].asked) == {94, 47, 24}, "prompts of several lengths, and 2 tokens more"
    assert set(neighbour[1].is_list) == {False}, "a proxy sends lists of prompts whole"
    assert "hand-off after the prefill: " in capsys.readouterr().out
    fleet.counted = handoff.MIN_HANDOFFS + len(neighbour[1].asked) - 1
    assert cli.main(["profile", engine[0], *words]) == 2
    told = capsys.readouterr().err
    assert re.search(r"loaded the KV of 9 of \d+ prompts, and 10 are needed", told)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"role": "decode"}, "can use no prefill instance now"),
        ({"usable": False}, "can use no prefill instance now"),
        ({"url": "http://127.0.0.1:1@3"}, "is a data parallel rank"),
        ({"url": 3}, "is not the answer of a vllm-disagg proxy"),
    ],
)
def test_proxies_that_hand_nothing_over_are_refused_before_the_measurement(
    engine: tuple[str, type[Scripted]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    expected: str,
) -> None:
    fleet = Fleet(*engine)
    fleet.rows = [row | change for row in fleet.rows]
    words = ["--output", str(tmp_path / "x"), "--handoff", engine[0]]
    assert cli.main(["profile", engine[0], *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("vllm-disagg profile: --handoff: ") and err.count("\n") == 1
    assert expected in err and not engine[1].asked


def test_few_prompts_take_longer_than_their_time(neighbour: tuple[str, type[Scripted]]) -> None:
    Fleet(*neighbour)
    found = handoff.measure(neighbour[0], [neighbour[0]], instance.model(neighbour[0]), 90, 0.0)
    assert found.mean > 0 and len(neighbour[1].asked) == handoff.LEAST_PROMPTS


def test_a_failed_request_of_a_handoff_is_told(
    neighbour: tuple[str, type[Scripted]],
) -> None:
    neighbour[1].refuse = "no"
    Fleet(*neighbour)
    with pytest.raises(ConfigError, match="refused a request: 400: no"):
        handoff.measure(neighbour[0], [neighbour[0]], instance.model(neighbour[0]), 90, 0.1)


class SteppingEngine:
    """Engine of one thread whose steps hold all waiting prompts and a token of each sequence."""

    def __init__(self, step: float) -> None:
        self._step = step  # seconds of any step
        self._arrived: queue.Queue[SteppedRequest] = queue.Queue()
        self.is_running = True
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompts: list[list[int]], answer: int) -> queue.Queue[list[int]]:
        """Starts a request. Returns the queue of its steps: the indices that got a token."""
        request = SteppedRequest([len(prompt) for prompt in prompts], answer, queue.Queue())
        self._arrived.put(request)
        return request.steps

    def _run(self) -> None:
        running: list[SteppedRequest] = []
        while self.is_running:
            while not self._arrived.empty():
                running.append(self._arrived.get())
            if not running:
                time.sleep(0.0005)
                continue
            computed = sum(sum(one.lengths) for one in running if not one.given)
            decoding = any(one.given for one in running)
            time.sleep(self._step + TOKEN * computed + (BESIDE if computed and decoding else 0.0))
            for one in running:
                one.given += 1
                one.steps.put(list(range(len(one.lengths))))
            running = [one for one in running if one.given < one.answer]


class SteppedRequest:
    """Prompts in a scripted engine."""

    def __init__(self, lengths: list[int], answer: int, steps: queue.Queue[list[int]]) -> None:
        self.lengths = lengths
        self.answer = answer
        self.steps = steps
        self.given = 0  # tokens


BESIDE = 0.02  # seconds more of a step with prompts and decodes


class Stepping(Scripted):
    """Server of an engine whose requests share steps."""

    engine: SteppingEngine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.refuse:
            self._answer(400, json.dumps({"error": {"message": self.refuse}}))
            return
        steps_of = self.engine.submit(prompts_of(body), body["max_tokens"])
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._tokens(range(len(steps_of.get())))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")


def stepping(engine: type[Scripted], step: float) -> SteppingEngine:
    found = SteppingEngine(step)
    engine.do_POST = Stepping.do_POST  # type: ignore[assignment, method-assign]
    engine.engine = found  # type: ignore[attr-defined]
    return found


def test_a_prompt_beside_decodes_is_measured_with_its_step(
    engine: tuple[str, type[Scripted]],
) -> None:
    url, kind = engine
    step = 0.05  # far longer than a crowded machine delays most tokens
    running = stepping(kind, step)
    profiler = profile.InstanceProfiler(url, "tiny")
    profiler.warm_up()
    probe = MixedProbe(DecodeProbe(4, 16, 16), 512)
    # The prompt arrives just behind a token. Since its arrival there are two steps.
    whole = step + TOKEN * 512 + BESIDE
    found = None
    latest_end = time.monotonic() + LONGEST_PROFILE_SECONDS
    while time.monotonic() < latest_end:
        found = profiler.measure(probe)
        if found and abs(found.seconds - whole) < step / 3:
            break
    running.is_running = False
    assert found
    assert found.seconds == pytest.approx(whole, abs=step / 3)
    assert len(found.lengths) == 4
    assert min(found.lengths) > 16


def test_an_engine_that_refuses_the_decodes_ends_the_wait(
    engine: tuple[str, type[Scripted]],
) -> None:
    url, kind = engine
    kind.refuse = "no room"
    with pytest.raises(ConfigError, match="no room"):
        profile.InstanceProfiler(url, "tiny").measure(MixedProbe(DecodeProbe(2, 16, 64), 32))


def test_a_mixed_point_is_the_median_of_its_probe() -> None:
    samples = profile.ProfileSamples()
    probe = MixedProbe(DecodeProbe(2, 16, 64), 32)
    for seconds in (0.03, 0.01, 0.02):
        samples.add(probe, StepSample((20, 21), seconds))
    assert samples.mixed() == [{"tokens": [32], "contexts": [20, 21], "seconds": 0.02}]
    assert samples.fewest() == 3
