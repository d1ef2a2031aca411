"""Registration by an engine: settings, and a proxy that cannot be reached."""

import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import msgspec
import pytest

import vllm_disagg.fleet.registration
from vllm_disagg.config import parse
from vllm_disagg.errors import BadGrant, ConfigError
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.registration import (
    Registration,
    RegistrationNote,
    read,
    register_all,
    sign,
)

WHERE = {
    "register": "http://127.0.0.1:9, http://127.0.0.1:10",
    "advertise": "http://127.0.0.1:8100",
}


@pytest.mark.parametrize(
    "extra",
    [
        {"register": WHERE["register"], "key_file": "k"},
        {"advertise": WHERE["advertise"], "key_file": "k"},
        WHERE,
        {**WHERE, "key_file": "k", "register": "127.0.0.1:9"},
        {**WHERE, "key_file": "k", "advertise": "127.0.0.1:8100"},
    ],
)
def test_settings_that_cannot_work(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="register"):
        parse(extra)


def test_an_engine_without_settings_registers_nowhere() -> None:
    assert register_all(parse({"insecure": True}), FleetKey(None), "i", "both") == []


def test_a_data_parallel_rank_registers_as_an_instance_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        vllm_disagg.fleet.registration, "Registration", lambda *args: told.append(args[-1])
    )
    config = parse(
        {
            **WHERE,
            "key_file": "k",
            "register": "http://127.0.0.1:9",
            "advertise": "http://127.0.0.1:8100/",
        }
    )
    for rank in (None, 0, 1):
        register_all(config, FleetKey(b"k" * 32), "i", "prefill", rank)
    assert told == ["http://127.0.0.1:8100/", "http://127.0.0.1:8100@0", "http://127.0.0.1:8100@1"]


def test_a_proxy_that_is_not_there_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    made = register_all(parse({**WHERE, "key_file": "k"}), FleetKey(b"k" * 32), "i", "prefill")
    assert time.monotonic() - began < 5 and len(made) == 2
    for registration in made:
        registration.close()
    assert time.monotonic() - began < 20 and "is not reached" in caplog.text


def test_an_http_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no address of a fleet: engines of such a machine never joined."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        made = object.__new__(Registration)
        made._register_url = f"http://127.0.0.1:{server.server_port}/disagg/register"
        try:
            assert made._post(b"{}") == (200, {})
        finally:
            server.shutdown()


def test_proxies_behind_one_balancer_are_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proxy has a challenge of its own, so the engine joined and left without a word."""
    sent = threading.Semaphore(0)
    challenges = iter(range(1000))

    def post(self: Registration, data: bytes) -> tuple[int, dict[str, object]]:
        sent.release()
        return 409, {"challenge": str(next(challenges))}

    monkeypatch.setattr(Registration, "_post", post)
    monkeypatch.setattr(vllm_disagg.fleet.registration, "REGISTER_SECONDS", 0.001)
    monkeypatch.setattr(vllm_disagg.fleet.registration, "NEXT_NOTE_SECONDS", 0.001)
    made = Registration("http://proxies", FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
    for _ in range(8):
        assert sent.acquire(timeout=60)
    made.close()
    assert caplog.text.count("http://proxies/disagg/register answers with another challenge") == 1


class FrozenOnce(BaseHTTPRequestHandler):
    """A proxy of several workers, of which the first one that is asked answers nothing."""

    thaw = threading.Event()
    asked = threading.Semaphore(0)
    answered = threading.Semaphore(0)
    is_first = iter([True])

    def do_POST(self) -> None:
        self.asked.release()
        if next(self.is_first, False):
            self.thaw.wait(60)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
        self.answered.release()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_no_note_waits_behind_one_that_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of two workers of the proxy frozen, a healthy engine left the fleet."""
    monkeypatch.setattr(vllm_disagg.fleet.registration, "TIMEOUT_SECONDS", 60.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), FrozenOnce) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        proxy = f"http://127.0.0.1:{server.server_port}"
        made = Registration(proxy, FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
        try:
            for _ in range(2):
                assert FrozenOnce.answered.acquire(timeout=30)
            made.close()
            assert FrozenOnce.answered.acquire(timeout=30), "the shutdown is announced"
        finally:
            FrozenOnce.thaw.set()
            server.shutdown()


class Posts:
    """Takes the place of `_post`; the notes of the first `silent` calls are never answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
        self.notes: list[RegistrationNote] = []
        self.has_begun = threading.Semaphore(0)
        self.over = threading.Event()
        self._silent = iter(range(silent))
        monkeypatch.setattr(Registration, "_post", lambda _, data: self.post(data))

    def post(self, data: bytes) -> tuple[int, dict[str, object]]:
        self.notes.append(read(FleetKey(b"k" * 32), data))
        self.has_begun.release()
        if next(self._silent, None) is not None:
            self.over.wait(60)
        return 200, {}


def test_few_notes_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_disagg.fleet.registration, "NEXT_NOTE_SECONDS", 0.01)
    monkeypatch.setattr(vllm_disagg.fleet.registration, "REGISTER_SECONDS", 0.01)
    before = set(threading.enumerate())
    posts = Posts(monkeypatch, silent=3)
    made = Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
    for _ in range(3):
        assert posts.has_begun.acquire(timeout=60)
    assert not posts.has_begun.acquire(timeout=0.3), "as many as there are threads"
    posts.over.set()
    assert posts.has_begun.acquire(timeout=60)
    threads = set(threading.enumerate()) - before
    made.close()
    for thread in threads:
        thread.join(60)
    assert len({note.number for note in posts.notes}) == len(posts.notes), "none is a replay"
    assert [note.leaving for note in posts.notes].count(True) == 1


def test_a_pause_follows_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other threads could send the next note."""
    monkeypatch.setattr(vllm_disagg.fleet.registration, "REGISTER_SECONDS", 60.0)
    posts = Posts(monkeypatch, silent=0)
    made = Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
    assert posts.has_begun.acquire(timeout=60)
    assert not posts.has_begun.acquire(timeout=1.5)
    made.close()


@pytest.mark.parametrize("started", [0, 1, 2])
def test_an_engine_without_threads_registers_by_fewer(
    started: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter(range(started))
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Registration, "_post", lambda *_: (200, {}))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_some)
        if not started:
            with pytest.raises(RuntimeError):
                Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://d")
            return
        made = Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://d")
    assert f"no more than {started} threads: can't start new thread" in caplog.text
    made.close()
    assert made._has_left.is_set()


def test_the_number_of_the_announcement_is_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note whose number was drawn later, and which finds the engine alive, would undo it."""
    monkeypatch.setattr(Registration, "_post", lambda *_: (200, {}))
    made = Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://d")
    made.close()
    sent: list[int] = []
    monkeypatch.setattr(Registration, "_post", lambda _, data: sent.append(len(data)) or (200, {}))

    class Numbers:
        """Closes the registration as a number is drawn."""

        def __next__(self) -> int:
            made._closing.set()
            return 9

    made._closing.clear()
    made._numbers = Numbers()  # type: ignore[assignment]
    made._register(leaving=False)
    assert not sent


def test_no_note_follows_the_announcement_of_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note that waits for its challenge then would register the engine that has left."""
    key = FleetKey(b"k" * 32)
    noted, answer = threading.Event(), threading.Event()
    sent: list[bool] = []  # whether each note announces the shutdown

    def post(self: Registration, data: bytes) -> tuple[int, dict[str, object]]:
        is_leaving = read(key, data).leaving
        sent.append(is_leaving)
        if is_leaving:
            return 200, {}
        noted.set()
        assert answer.wait(60)
        return 409, {"challenge": "c"}

    monkeypatch.setattr(Registration, "_post", post)
    monkeypatch.setattr(vllm_disagg.fleet.registration, "NEXT_NOTE_SECONDS", 60.0)
    before = set(threading.enumerate())
    made = Registration("http://proxy", key, "i", "decode", "http://engine:8000")
    threads = set(threading.enumerate()) - before
    assert noted.wait(60)
    made.close()
    answer.set()
    for thread in threads:
        thread.join(60)
    assert sent == [False, True]


def test_a_note_that_is_no_text_is_refused() -> None:
    """A worker of a proxy registered the engine, failed to tell the others, and cut the request."""
    note = RegistrationNote("challenge", "incarnation", 7, "prefill", "http://10.0.0.1:8100")
    data = sign(FleetKey(b"0" * 32), note)
    with pytest.raises(BadGrant, match="not a note of this version"):
        read(FleetKey(b"0" * 32), data[:-1] + b',"unknown":"\xff"}')


class LaterNote(RegistrationNote, frozen=True):
    """A note of a later release."""

    weight: int = 3


def test_an_engine_of_a_later_release_registers() -> None:
    """Its proxy was to be upgraded first: the fleet lost each engine that was replaced before."""
    key = FleetKey(b"0" * 32)
    note = RegistrationNote("challenge", "incarnation", 7, "prefill", "http://10.0.0.1:8100")
    later = LaterNote(*msgspec.structs.astuple(note))
    assert read(key, sign(key, later)) == note
    # What an older proxy must not take for something else is a value that it does not know.
    with pytest.raises(BadGrant, match=r"role"):
        read(key, sign(key, msgspec.structs.replace(later, role="encode")))
