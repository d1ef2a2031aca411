"""Two releases of NIXL do not connect: one with 1.5.1 ended a sender with 1.3.0 by SIGSEGV."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest
from test_nixl_pieces import AGENT, RELEASE, FullAgent, receiving, source_of

from vllm_disagg.kv.memory import HostBuffer, MemoryPlace
from vllm_disagg.transports.nixl import notes, sender
from vllm_disagg.transports.nixl.paths import NixlSource, PathState

OTHERS = ("1.3.0", "")
TEST_REGION = (1 << 30, notes.TEST_REGION_BYTES)
INFO = notes.AgentInfo(AGENT, b"", [TEST_REGION], TEST_REGION, b"n" * notes.NONCE_BYTES)


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        ("1.5.1", "1.5.1", ""),
        ("1.3.0", "1.5.1", "NIXL 1.3.0 there, 1.5.1 here: install one version"),
        ("", "1.5.1", "NIXL of an unknown version there, 1.5.1 here: install one version"),
        ("1.5.1", "", "NIXL 1.5.1 there, of an unknown version here: install one version"),
        (
            "",
            "",
            "NIXL of an unknown version there, of an unknown version here: install one version",
        ),
    ],
)
def test_only_equal_releases_connect(there: str, here: str, why: str) -> None:
    assert notes.release_obstacle(there, here) == why


@pytest.mark.parametrize("theirs", [RELEASE, *OTHERS])
def test_a_receiver_adds_no_sender_of_another_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, theirs: str
) -> None:
    transport = receiving(monkeypatch)
    transport._paths.sources["p/0"] = NixlSource("p/0", PathState.ASKING, 1, math.inf, math.inf)
    [part] = notes.agent_info_notes(1, msgspec.structs.replace(INFO, nixl=theirs))
    transport.on_sender_note("p/0", part)
    is_equal = theirs == RELEASE
    assert source_of(transport).state is (PathState.ADDING if is_equal else PathState.DOWN)
    assert transport._pairing.is_adding == is_equal
    assert notes.release_obstacle(theirs, RELEASE) in caplog.text


@pytest.mark.parametrize("theirs", [RELEASE, *OTHERS])
def test_a_sender_tells_no_receiver_of_another_release_of_its_agent(
    monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    """It is the sender that would end, and an older receiver does not compare."""
    transport = receiving(monkeypatch)
    sent: list[bytes] = []
    transport._port.send_to_receiver = lambda receiver, data: sent.append(data)
    made = SimpleNamespace(is_over=True, started_at=0.0, error="", result=(FullAgent(), INFO))
    transport._sender._making = made  # type: ignore[assignment]
    transport.on_receiver_note("d/1", notes.encode(notes.NixlHello(3, theirs)))
    list(transport._sender.poll_events())
    [answer] = [notes.decode_sender_note(data) for data in sent]
    if theirs == RELEASE:
        assert isinstance(answer, notes.AgentInfoPart)
    else:
        assert answer == notes.NixlUnavailable(3, notes.release_obstacle(RELEASE, theirs))


def test_a_receiver_states_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = receiving(monkeypatch)
    sent: list[bytes] = []
    transport._port.send_to_sender = lambda sender, data: sent.append(data)
    transport._paths.sources["p/0"] = NixlSource("p/0", PathState.ASKING, 2, 0.0, math.inf)
    transport._pairing.advance(1.0)
    assert [notes.decode_receiver_note(data) for data in sent] == [notes.NixlHello(2, RELEASE)]


def test_a_sender_states_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(name: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            regions=FullAgent.regions,
            place=MemoryPlace(),
            buffer=HostBuffer,
            metadata=lambda: b"",
        )

    monkeypatch.setattr(sender, "Agent", agent)
    _, info = receiving(monkeypatch)._sender._make_agent()
    assert info.nixl == RELEASE
