"""Registration by an engine: settings, and a proxy that cannot be reached."""

import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

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
    made = Registration("http://proxies", FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
    for _ in range(8):
        assert sent.acquire(timeout=60)
    made.close()
    assert caplog.text.count("http://proxies/disagg/register answers with another challenge") == 1


def test_no_pause_follows_a_note_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of two workers of the proxy frozen, a healthy engine left the fleet."""
    begun: list[float] = []
    has_begun = threading.Semaphore(0)

    def post(self: Registration, data: bytes) -> tuple[int, dict[str, object]]:
        begun.append(time.monotonic())
        has_begun.release()
        time.sleep(2.0 if len(begun) == 1 else 0.0)
        return 200, {}

    monkeypatch.setattr(Registration, "_post", post)
    monkeypatch.setattr(vllm_disagg.fleet.registration, "REGISTER_SECONDS", 1.9)
    made = Registration("http://proxy", FleetKey(b"k" * 32), "i", "decode", "http://engine:8000")
    for _ in range(3):
        assert has_begun.acquire(timeout=60)
    made.close()
    assert begun[1] - begun[0] < 3.8, "the note and a pause behind it"
    assert begun[2] - begun[1] > 1.8, "a pause behind a quick note"


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
