"""Fixtures of the tests between processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fake_gpu
import pytest
from nixl_pair import Sink, has_two_libnls
from peer import Peer

from vllm_disagg.transports.nixl import pairing

exit_status = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends as vLLM's workers do where NIXL's libraries would end this process by SIGSEGV."""
    if has_two_libnls() and exit_status in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[exit_status])


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    # A path that has failed is tried again only with the next load.
    monkeypatch.setattr(pairing, "PAIRING_SECONDS", 120.0)
    made: list[Peer | Sink] = []

    def make(kind: Callable[..., Peer | Sink], *args: Any, **settings: Any) -> Peer | Sink:
        made.append(kind(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop() if isinstance(one, Peer) else one.driver.close()
    if fake_gpu.IS_ON_GPU:
        # No copy of one test may run while another one frees, or the process ends.
        fake_gpu.own_gpu().prepare_thread()
        fake_gpu.call("cuCtxSynchronize")
        # The device of this process is the second one.
        assert fake_gpu.count("contexts", 0) == 0
