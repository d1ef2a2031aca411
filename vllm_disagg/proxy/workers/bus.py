"""Connects one proxy worker with the others, through the hub of their supervisor.

Each worker follows the fleet file, DNS and Kubernetes, and probes instances, without the others.
Two things reach only one worker and are passed on: changes over the admin API, and registrations.
The first worker decides the roles that follow the load. Loads are in shared memory
(`shared_load.py`).

Messages between a worker and the hub:

    ready             worker -> hub           the worker serves; the hub sends what it missed
    change, note      worker -> hub -> others a change of the fleet; a registration
    roles             worker -> hub -> others all roles that differ from the named ones
    challenge         hub -> workers          the challenge for registrations, of all workers
    ask               worker -> hub           the worker needs the texts of all on a topic
    render            hub -> workers          send your text
    rendered          worker -> hub           this worker's text
    texts             hub -> worker           the texts of all, of metrics one with their sums
    ping, pong        hub -> workers -> hub   a worker that does not answer is frozen

A text is a worker's metrics, or its share of the status page.

A message is JSON behind its length in 8 bytes. Lines would not do: the metrics of a large fleet are
longer than the line limit of a stream reader.

A supervisor that is frozen reads nothing, and its workers serve on. What they keep for it is
bounded. Registrations and roles are repeated every 2 s, so they are dropped behind
MAX_BACKLOG_BYTES. One `ask` a topic is open at a time. Changes are never dropped: each is an
operator's, or follows one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import msgspec

from ...errors import BadGrant, ConfigError
from ...warning_limit import WarningLimit
from ..membership.members import Members, MembershipChange
from ..membership.registry import Registered, Registry
from ..routing.fleet import Fleet, Role
from .shared_load import SharedLoad

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.02  # between two exchanges of loads
SYNC_PAUSE_FACTOR = 19  # times the last exchange: in large fleets they take 5 % of a core
MAX_SYNC_SECONDS = 0.2
TEXTS_TIMEOUT_SECONDS = 2.0  # for the other workers' texts
MAX_MESSAGE_BYTES = 1 << 30  # above the metrics of any proxy
MAX_BACKLOG_BYTES = 1 << 20  # that the hub has not read, behind which a repeated message is dropped

Topic = Literal["metrics", "status"]
TOPICS: tuple[Topic, ...] = get_args(Topic)


class BusMessage(msgspec.Struct, omit_defaults=True):
    """Carries one message between a worker and the hub; `kind` decides which fields are set."""

    kind: Literal[
        "ready",
        "change",
        "note",
        "roles",
        "challenge",
        "ask",
        "render",
        "rendered",
        "texts",
        "ping",
        "pong",
    ]
    change: MembershipChange | None = None
    roles: dict[str, Role] = {}  # by URL
    topic: Topic = "metrics"  # of texts
    text: str = ""  # a registration's, a challenge, or one of a topic
    numbers: dict[str, int] = {}  # of registrations, by incarnation
    texts: list[str] = []


class WorkerPlace(msgspec.Struct, frozen=True):
    """Describes one worker among the others; the supervisor passes it on the command line."""

    index: int
    count: int
    hub: int  # file descriptor of a socket to the hub
    table: int  # file descriptor of the table of loads
    port: int
    challenge: str  # for registrations, the same for all workers
    restarted: bool = False  # an earlier process of this worker has served


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BusMessage).decode


def frame(message: BusMessage) -> bytes:
    """Returns a message with its length in front."""
    data = encode(message)
    return len(data).to_bytes(8) + data


async def receive(reader: asyncio.StreamReader) -> BusMessage | None:
    """Returns the next message, or None at the end; raises ValueError for an invalid one."""
    try:
        size = int.from_bytes(await reader.readexactly(8))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return _decode(await reader.readexactly(size))
    except asyncio.IncompleteReadError:
        return None


def parse_place(text: str) -> WorkerPlace:
    """Returns the place in the value of --worker; raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=WorkerPlace)
    except msgspec.DecodeError:
        raise ConfigError("--worker is for the supervisor's own use; give --workers") from None


class WorkerBus:
    """Sends this worker's messages to the hub, and applies those of the other workers."""

    def __init__(
        self,
        place: WorkerPlace,
        fleet: Fleet,
        render: Mapping[Topic, Callable[[], bytes]],
        wake: Callable[[], None],
    ) -> None:
        """`render` returns this worker's text; `wake` is called when load elsewhere falls."""
        self._fleet = fleet
        self._render = render
        self._wake = wake
        self._load = SharedLoad(place.table, place.index, place.count)
        self._socket = socket.socket(fileno=place.hub)
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[BusMessage] = []
        self._refused_notes = WarningLimit()
        self._pending_texts: dict[Topic, asyncio.Future[list[str]]] = {}  # that the hub was asked

    async def sync(self) -> None:
        """Keeps loads shared until cancelled."""
        while True:
            started = time.thread_time()  # of this thread alone: a pause of the process is none
            any_fell = self._load.sync((*self._fleet.instances, *self._fleet.leaving))
            spent = time.thread_time() - started
            if any_fell:
                self._wake()
            pause = max(SYNC_SECONDS, SYNC_PAUSE_FACTOR * spent)
            await asyncio.sleep(min(pause, MAX_SYNC_SECONDS))

    async def listen(
        self, members: Members, registry: Registry | None, on_end: Callable[[], None]
    ) -> None:
        """Applies the others' messages; calls `on_end` when the supervisor has ended.

        One that was killed, as for lack of memory, ends in an error if it left messages unread.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        members.on_own_change = self.broadcast  # a new worker gets it, too
        self._send(BusMessage("ready"))
        for unsent in self._unsent:
            self._send(unsent)
        try:
            while message := await receive(reader):
                self._apply(message, members, registry)
        except ConnectionError as error:
            log.error("proxy worker: the supervisor was killed, so this worker ends: %s", error)
        on_end()

    def _apply(self, message: BusMessage, members: Members, registry: Registry | None) -> None:
        if message.change:
            members.apply(message.change)
        elif message.kind == "note" and registry:
            if message.text:
                self._apply_registration(message.text, members, registry)
            registry.mark_used(message.numbers)
        elif message.kind == "challenge" and registry:
            registry.renew(message.text)
        elif message.kind == "roles":
            members.set_roles(message.roles)
        elif message.kind == "render":
            self._send(BusMessage("rendered", topic=message.topic, text=self._text(message.topic)))
        elif message.kind == "ping":
            self._send(BusMessage("pong"))
        elif message.kind == "texts" and message.topic in self._pending_texts:
            self._pending_texts.pop(message.topic).set_result(message.texts)

    def broadcast(self, event: MembershipChange | Registered) -> None:
        """Sends the other workers a change made here, or a registration accepted here."""
        if isinstance(event, MembershipChange):
            self._send(BusMessage("change", change=event))
        else:
            self._send_repeated(BusMessage("note", text=event.note.decode(), numbers=event.numbers))

    def broadcast_roles(self, roles: dict[str, Role]) -> None:
        """Sends the other workers all roles that differ from the named ones."""
        self._send_repeated(BusMessage("roles", roles=roles))

    async def texts(self, topic: Topic) -> list[str]:
        """Returns the texts of all workers that answer in time; none if the hub does not answer.

        A request that waits already is shared.
        """
        if topic not in self._pending_texts:
            self._pending_texts[topic] = asyncio.get_running_loop().create_future()
            self._send(BusMessage("ask", topic=topic))
        try:
            async with asyncio.timeout(2 * TEXTS_TIMEOUT_SECONDS):
                return await asyncio.shield(self._pending_texts[topic])
        except TimeoutError:
            return []

    def _text(self, topic: Topic) -> str:
        return self._render[topic]().decode()

    def _apply_registration(self, text: str, members: Members, registry: Registry) -> None:
        now = asyncio.get_running_loop().time()
        try:
            registry.register(text.encode(), now)
        except BadGrant as error:
            if count := self._refused_notes.note(now):
                log.warning(
                    "proxy worker: %d registrations that another worker accepted are refused here,"
                    " the last one: %s",
                    count,
                    error,
                )
        members.set("registration", registry.members)

    def _send_repeated(self, message: BusMessage) -> None:
        """Sends a message, or drops it while the hub does not read: it is repeated soon."""
        backlog = self._writer.transport.get_write_buffer_size() if self._writer else 0
        if backlog < MAX_BACKLOG_BYTES:
            self._send(message)

    def _send(self, message: BusMessage) -> None:
        if self._writer:
            self._writer.write(frame(message))
        else:  # before `listen` has connected
            self._unsent.append(message)
