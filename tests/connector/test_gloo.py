"""Gloo's links: what the other end sets reaches Gloo only in the form of this end's own value."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import pytest
from torch.distributed import ProcessGroupGloo

from kv_connectors.gloo import MAX_VALUES, ChannelStore, GlooLink, lengths
from vllm_disagg.transports.collective.channel import LinkBlob, LinkEvent, LinkFailed, LinkUp

SECONDS = 60.0  # until an event that must come


class LinkEnd:
    """One end of a link, and what it reports."""

    def __init__(self, rank: int) -> None:
        device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self._events: queue.Queue[LinkEvent] = queue.Queue()
        self.link = GlooLink(device, rank, self._events.put, 0)

    def next(self) -> LinkEvent:
        return self._events.get(timeout=SECONDS)

    def value(self) -> tuple[str, bytes]:
        """Returns what it sets."""
        blob = self.next()
        assert isinstance(blob, LinkBlob)
        return msgspec.msgpack.decode(blob.blob, type=tuple[str, bytes])


@pytest.fixture
def ends() -> Iterator[tuple[LinkEnd, LinkEnd]]:
    both = LinkEnd(0), LinkEnd(1)
    yield both
    for end in both:
        end.link.close()


def pass_on(value: tuple[str, bytes], end: LinkEnd) -> None:
    end.link.on_blob(msgspec.msgpack.encode(value))


def test_two_ends_connect(ends: tuple[LinkEnd, LinkEnd]) -> None:
    values = [end.value() for end in ends]
    assert lengths(values[0][1]) == lengths(values[1][1])
    for value, end in zip(values, reversed(ends), strict=True):
        pass_on(value, end)
    assert [end.next() for end in ends] == [LinkUp(0), LinkUp(0)]


HUGE = (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: b"", id="nothing"),
        pytest.param(lambda value: value[:20], id="no address"),
        pytest.param(lambda value: value[:-1], id="a part of an identifier"),
        pytest.param(lambda value: value[:-16], id="no identifiers"),
        pytest.param(lambda value: value + value[-8:], id="one identifier more"),
        pytest.param(lambda value: HUGE + value[8:], id="an endless name"),
        pytest.param(lambda value: value[:10] + HUGE + value[18:], id="an endless address"),
        pytest.param(lambda value: value[:10] + bytes(8) + value[154:], id="an empty address"),
    ],
)
def test_an_address_of_another_form_fails_its_link(
    ends: tuple[LinkEnd, LinkEnd], change: Callable[[bytes], bytes]
) -> None:
    """Gloo itself would read beyond it, and end the process."""
    ends[0].value()
    key, value = ends[1].value()
    assert value[10:18] == (136).to_bytes(8, "little"), "the form has changed with torch"
    pass_on((key, change(value)), ends[0])
    failed = ends[0].next()
    assert isinstance(failed, LinkFailed), failed
    assert "form" in failed.why or "cut off" in failed.why, failed.why


def test_random_values_are_of_the_own_form_or_refused() -> None:
    random = Random(7)
    store = ChannelStore(lambda blob: None)
    own = b"\x02" + bytes(7) + b"vm" + b"\x10" + bytes(7) + random.randbytes(32)
    store.set("0/0", own)
    taken = 0
    for _ in range(3000):
        value = bytearray(own)
        for _ in range(random.randrange(1, 4)):
            value[random.randrange(len(value))] = random.choice((0, 1, 2, 16, 255))
        value = value[: random.choice((len(value), random.randrange(len(value) + 1)))]
        store.receive_blob(msgspec.msgpack.encode(("0/1", bytes(value))))
        try:
            assert lengths(store.get("0/1")) == (16, 16)
        except ValueError:
            continue
        taken += 1
    assert 300 < taken < 2700


def test_values_of_the_other_end_are_bounded() -> None:
    store = ChannelStore(lambda blob: None)
    for number in range(MAX_VALUES):
        store.receive_blob(msgspec.msgpack.encode((str(number), b"")))
    store.receive_blob(msgspec.msgpack.encode(("0", b"again")))
    with pytest.raises(ValueError, match="more values"):
        store.receive_blob(msgspec.msgpack.encode(("9", b"")))
    with pytest.raises(msgspec.DecodeError):
        store.receive_blob(b"\xc1")
