"""One of several workers: what it tells the others and hears from them, through the hub of its
supervisor.

Each worker follows the file, DNS and Kubernetes and probes instances for itself. What reaches only
one of them is passed on: changes over the admin API, and registrations. Loads are in shared memory.
Messages are JSON, each after its length in 8 bytes, since metrics of a large fleet are longer than
any line that a reader would take.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Literal

import msgspec

from ...errors import BadGrant, ConfigError
from ..membership.members import Members, MembershipChange
from ..membership.registry import Registered, Registry
from ..routing.fleet import Fleet
from .shared_load import SharedLoad

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.02  # seconds between looks at the others' load
METRICS_TIMEOUT_SECONDS = 2.0  # seconds for the others' metrics
MAX_MESSAGE_BYTES = 1 << 30  # no proxy has so many metrics


class BusMessage(msgspec.Struct, omit_defaults=True):
    """Between a worker and the hub; `kind` says which fields matter."""

    kind: Literal["ready", "change", "note", "ask", "render", "rendered", "texts"]
    change: MembershipChange | None = None
    text: str = ""  # a registration's, or metrics
    numbers: dict[str, int] = {}  # of registrations, by incarnation
    texts: list[str] = []


class WorkerPlace(msgspec.Struct, frozen=True):
    """A worker's place in its crew, as its supervisor gives it on the command line."""

    index: int
    count: int
    hub: int  # file descriptors: a socket to the hub,
    table: int  # the table of loads
    port: int
    challenge: str  # for registrations, the same for all workers


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BusMessage).decode


def frame(message: BusMessage) -> bytes:
    """A message as it is written."""
    data = encode(message)
    return len(data).to_bytes(8) + data


async def receive(reader: asyncio.StreamReader) -> BusMessage | None:
    """The next message; None at the end.  ValueError when it makes no sense."""
    try:
        size = int.from_bytes(await reader.readexactly(8))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return _decode(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        return None


def parse_place(text: str) -> WorkerPlace:
    try:
        return msgspec.json.decode(text, type=WorkerPlace)
    except msgspec.DecodeError:
        raise ConfigError("--worker is for the supervisor's own use; give --workers") from None


class WorkerBus:
    """This worker's connection with the others."""

    def __init__(
        self,
        place: WorkerPlace,
        fleet: Fleet,
        render: Callable[[], bytes],
        wake: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._render = render
        self._wake = wake
        self._load = SharedLoad(place.table, place.index, place.count)
        self._socket = socket.socket(fileno=place.hub)
        self._writer: asyncio.StreamWriter | None = None
        self._unsaid: list[BusMessage] = []
        self._asked: list[asyncio.Future[list[str]]] = []

    async def sync(self) -> None:
        """Keep loads shared, for ever."""
        while True:
            if self._load.sync((*self._fleet.instances, *self._fleet.leaving)):
                self._wake()
            await asyncio.sleep(SYNC_SECONDS)

    async def listen(
        self, members: Members, registry: Registry | None, over: Callable[[], None]
    ) -> None:
        """Do what the others have done; `over` when the supervisor is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._say(BusMessage("ready"))
        for unsaid in self._unsaid:
            self._say(unsaid)
        while message := await receive(reader):
            if message.change:
                members.apply(message.change)
            elif message.kind == "note" and registry:
                if message.text:
                    self._note(message.text, members, registry)
                registry.knows(message.numbers)
            elif message.kind == "render":
                self._say(BusMessage("rendered", text=self._render().decode()))
            elif message.kind == "texts":
                asked, self._asked = self._asked, []
                for future in asked:
                    if not future.done():
                        future.set_result(message.texts)
        over()

    def broadcast(self, news: MembershipChange | Registered) -> None:
        """Tell the others of a change made here, or of a registration taken here."""
        if isinstance(news, MembershipChange):
            self._say(BusMessage("change", change=news))
        else:
            self._say(BusMessage("note", text=news.note.decode(), numbers=news.numbers))

    async def texts(self) -> list[str]:
        """The metrics of all workers that answer in time; ours alone if the hub does not."""
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._say(BusMessage("ask"))
        try:
            async with asyncio.timeout(2 * METRICS_TIMEOUT_SECONDS):
                return await future
        except TimeoutError:
            return [self._render().decode()]

    def _note(self, text: str, members: Members, registry: Registry) -> None:
        now = asyncio.get_running_loop().time()
        try:
            registry.tell(text.encode(), now)
        except BadGrant as error:
            log.warning("another worker took in a registration that this one refuses: %s", error)
        members.set("registration", registry.members(now))

    def _say(self, message: BusMessage) -> None:
        if self._writer:
            self._writer.write(frame(message))
        else:  # in the first moments
            self._unsaid.append(message)
