"""Settings of the connector: units, and mistakes that are named with what was meant."""

from __future__ import annotations

import pytest

from vllm_disagg import config
from vllm_disagg.errors import ConfigError
from vllm_disagg.setting_values import BYTES_BY_UNIT, SECONDS_BY_UNIT, did_you_mean, quantity

BASE = {"insecure": True}


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("10s", SECONDS_BY_UNIT, 10),
        ("1.5 min", SECONDS_BY_UNIT, 90),
        ("250ms", SECONDS_BY_UNIT, 0.25),
        ("4MiB", BYTES_BY_UNIT, 4 << 20),
        ("4MB", BYTES_BY_UNIT, None),
        ("10", SECONDS_BY_UNIT, None),
        ("s", SECONDS_BY_UNIT, None),
        ("-1s", SECONDS_BY_UNIT, None),
        ("10s", BYTES_BY_UNIT, None),
        ("\u0663s", SECONDS_BY_UNIT, None),
    ],
)
def test_quantities(text: str, units: dict[str, float], number: float | None) -> None:
    assert quantity(text, units) == number


def test_values_may_have_units() -> None:
    extra = {**BASE, "lease": "20s", "keepalive_interval": "250ms", "window_bytes": "64MiB"}
    found = config.parse({**extra, "piece_bytes": "512KiB"})
    assert (found.lease, found.keepalive_interval) == (20.0, 0.25)
    assert (found.window_bytes, found.piece_bytes) == (64 << 20, 512 << 10)
    assert isinstance(found.window_bytes, int)
    assert config.parse({**BASE, "lease": 20, "window_bytes": None}).lease == 20


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("transprot", "zmq", "no setting is named 'transprot'; did you mean transport? (settings:"),
        ("zzz", 1, "no setting is named 'zzz' (settings: host, key_file,"),
        (
            "transport",
            "nixxl",
            "must be one of auto, zmq, tcp, gloo, nccl, nixl; did you mean nixl?",
        ),
        ("lease", "10 s.", "lease is '10 s.', but must be seconds, above 0"),
        ("lease", "0s", "lease is 0.0, but must be seconds, above 0"),
        ("lease", True, "lease is True, but must be seconds"),
        ("piece_bytes", "1B", "piece_bytes is 1, but must be bytes, from 1024"),
        ("piece_bytes", "1024.5B", "piece_bytes is 1024.5, but must be bytes"),
        ("window_bytes", "4s", "window_bytes is '4s', but must be bytes"),
        ("host", 3, "host is 3, but must be a text"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.parse({**BASE, name: value})
    message = str(raised.value)
    assert message.startswith("kv_connector_extra_config: ")
    assert words in message and "\n" not in message


def test_a_piece_that_no_sender_serves_is_refused() -> None:
    assert config.parse({**BASE, "piece_bytes": "64MiB"}).piece_bytes == 64 << 20
    with pytest.raises(ConfigError, match=r"^piece_bytes \(67109888\) must be at most 67108864 "):
        config.parse({**BASE, "piece_bytes": (64 << 20) + 1024})


@pytest.mark.parametrize(
    ("register", "advertise", "wrong"),
    [
        ("http://:x", "http://10.0.0.1:8000", "http://:x"),
        ("http://proxy:8000", "http://", "http://"),
        ("http://proxy:8000, ftp://proxy", "http://e:1", "ftp://proxy"),
        ("http://proxy:", "http://e:1", "http://proxy:"),
        ("http://proxy:99999", "http://e:1", "http://proxy:99999"),
        ("http://[::1", "http://e:1", "http://[::1"),
        ("http://proxy:8000,https://proxy.example/", "http://[::1]:8000@1", ""),
    ],
)
def test_urls_have_a_host_and_a_port_that_is_one(register: str, advertise: str, wrong: str) -> None:
    extra = {"key_file": "k", "register": register, "advertise": advertise}
    if not wrong:
        config.parse(extra)
        return
    with pytest.raises(ConfigError) as raised:
        config.parse(extra)
    assert f"register and advertise: {wrong!r} is not a URL" in str(raised.value)


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("overlapp", ["lease", "overlap"]) == "; did you mean overlap?"
    assert did_you_mean("x", ["lease", "overlap"]) == ""
