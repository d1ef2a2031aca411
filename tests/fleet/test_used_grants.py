"""Used grants: each use of a transfer id is accepted once, for as long as its grant is valid."""

from __future__ import annotations

import pytest

from vllm_disagg.errors import BadGrant
from vllm_disagg.fleet import used_grants
from vllm_disagg.fleet.grants import MAX_VALIDITY_SECONDS
from vllm_disagg.fleet.used_grants import RELEASED_SECONDS, UsedGrants


def is_accepted(used: UsedGrants, transfer: str, until: float, now: float) -> bool:
    try:
        used.use("load", transfer, until, now)
    except BadGrant:
        return False
    return True


def test_a_use_is_accepted_once_whatever_comes_since() -> None:
    used = UsedGrants(has_key=True)
    assert is_accepted(used, "t", 130.0, 100.0)
    assert all(is_accepted(used, str(at), 110.0, 100.0) for at in range(200))
    assert not is_accepted(used, "t", 130.0, 100.0)
    used.use("send", "t", 130.0, 100.0)  # the other direction


def test_uses_are_forgotten_when_their_grants_expire() -> None:
    used = UsedGrants(has_key=True)
    used.use("load", "long", 130.0, 100.0)
    used.use("load", "short", 110.0, 100.0)
    assert not is_accepted(used, "long", 130.0, 129.9) and len(used) == 1
    with pytest.raises(BadGrant, match=r"expired 0\.1 s ago"):
        used.use("load", "long", 130.0, 130.1)
    assert len(used) == 0


def test_no_grant_is_valid_for_too_long() -> None:
    used = UsedGrants(has_key=True)
    assert is_accepted(used, "t", 100.0 + MAX_VALIDITY_SECONDS, 100.0)
    with pytest.raises(BadGrant, match="too long"):
        used.use("load", "u", 101.0 + MAX_VALIDITY_SECONDS, 100.0)


def test_no_use_is_forgotten_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_grants, "MAX_USED_GRANTS", 2)
    used = UsedGrants(has_key=True)
    assert is_accepted(used, "a", 10.0, 0.0) and is_accepted(used, "b", 20.0, 0.0)
    assert not is_accepted(used, "c", 20.0, 0.0) and not is_accepted(used, "a", 10.0, 0.0)
    assert is_accepted(used, "c", 20.0, 10.1), "there is room when one has expired"


def test_without_a_key_a_used_grant_is_remembered_after_it_expires() -> None:
    """The transfer may still hold blocks when the grant has expired."""
    used = UsedGrants(has_key=False)
    used.use("send", "t", 100.3, 100.0)
    with pytest.raises(BadGrant, match="used before"):
        used.use("send", "t", 200.0, 110.0)


def test_without_a_key_there_is_room_for_the_requests_of_days() -> None:
    used = UsedGrants(has_key=False)
    for second in range(100_000):
        now = float(second)
        used.use("send", f"{second}", now + 180.0, now)
        used.use("load", f"{second}", now + 180.0, now)
    assert len(used) < used_grants.MAX_USED_GRANTS / 20


def test_used_handovers_leave_room_for_grants_and_grants_for_handovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(used_grants, "MAX_USED_GRANTS", 2)
    used = UsedGrants(has_key=True)
    used.hold("load", "a", 0.0)
    used.hold("load", "b", 0.0)
    with pytest.raises(BadGrant, match="too many other handovers"):
        used.hold("load", "c", 0.0)
    assert is_accepted(used, "d", 20.0, 0.0) and is_accepted(used, "e", 20.0, 0.0)
    assert not is_accepted(used, "f", 20.0, 0.0)
    with pytest.raises(BadGrant, match="used before"):
        used.use("load", "a", 20.0, 0.0)
    used.release("load", "a", 0.0)
    now = RELEASED_SECONDS + 1.0
    used.hold("load", "c", now)
    assert is_accepted(used, "f", now + 20.0, now)
