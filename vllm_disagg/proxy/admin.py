"""The admin API: who may change the fleet over HTTP, and how.

    POST   /disagg/instances        {"url": ..., "role": "prefill" | "decode"}   add; also ends a drain
    POST   /disagg/instances/drain  {"url": ...}                                 no new requests; it stays listed
    DELETE /disagg/instances        {"url": ..., "now": false}                   drain, then remove; now: cut what runs
    POST   /disagg/register         an engine makes itself known (`vllm_disagg.registration`)

The first three are for whoever has the admin key.  Without one they are for this machine only: the peer's address and
the Host field must be loopback and nothing may have forwarded the request, so that neither a reverse proxy nor a web
page in a local browser (which would also have to send JSON, and is stopped by CORS) gets through.  Registrations carry
their own proof.  URLs are http or https to a host and port, nothing more.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
from typing import Literal

import msgspec

from ..errors import BadGrant, ConfigError
from ..registration import PATH as REGISTER
from .crew import Crew
from .headers import find
from .members import Change, Members
from .registry import Registry
from .server import JSON, Connection, Request, error_body
from .upstream import check_url

log = logging.getLogger(__name__)

INSTANCES = "/disagg/instances"
DRAIN = "/disagg/instances/drain"
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin")


class _Add(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    role: Literal["prefill", "decode"]


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class _Remove(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    now: bool = False


class Admin:
    """Answers what changes the fleet."""

    def __init__(
        self, members: Members, registry: Registry | None, crew: Crew | None, admin_key: str, api_keys: list[str]
    ) -> None:
        self._members = members
        self._registry = registry
        self._crew = crew
        self._keys = [key.encode() for key in ([admin_key] if admin_key else api_keys)]
        self._local_only = not admin_key

    def handle(self, request: Request, client: Connection) -> bool:
        """Answer a request if it is one of ours; whether it was."""
        what = (request.method, request.path)
        if what == ("POST", REGISTER) and self._registry:
            self._register(self._registry, request, client)
        elif what in (("POST", INSTANCES), ("DELETE", INSTANCES), ("POST", DRAIN)):
            if self._may(request, client):
                self._change(request, client)
        else:
            return False
        return True

    def _may(self, request: Request, client: Connection) -> bool:
        scheme, _, given = find(request.headers, b"authorization").partition(b" ")
        known = scheme.lower() == b"bearer" and any(hmac.compare_digest(given, key) for key in self._keys)
        if self._keys and not known:
            client.answer(401, [JSON], b'{"error":"Unauthorized"}')
        elif self._local_only and not _is_local(request, client):
            _refuse(client, 403, "only this machine may change the fleet, as long as no --admin-key is set")
        elif find(request.headers, b"content-type").partition(b";")[0].strip().lower() != JSON[1]:
            _refuse(client, 415, "content-type must be application/json")
        else:
            return True
        return False

    def _change(self, request: Request, client: Connection) -> None:
        try:
            if request.method == "DELETE":
                url = self._remove(msgspec.json.decode(request.body, type=_Remove))
            elif request.path == DRAIN:
                url = self._drain(msgspec.json.decode(request.body, type=_Drain))
            else:
                url = self._add(msgspec.json.decode(request.body, type=_Add))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            _refuse(client, 400, str(error))
        except KeyError as error:
            _refuse(client, 404, f"no instance has the URL {error.args[0]}")
        except _Conflict as error:
            _refuse(client, 409, str(error))
        else:
            facts = {"url": url, "sources": self._members.sources(url), "drained": self._members.is_drained(url)}
            client.answer(200, [JSON], json.dumps(facts).encode())

    def _add(self, body: _Add) -> str:
        url = check_url(body.url, "url")
        if (role := self._members.role(url)) not in (None, body.role):
            raise _Conflict(f"{url} is a {role} instance")
        return self._apply(Change("add", url, body.role))

    def _drain(self, body: _Drain) -> str:
        return self._apply(Change("drain", self._known(body.url)))

    def _remove(self, body: _Remove) -> str:
        url = self._apply(Change("remove", self._known(body.url)))
        if self._members.is_drained(url):  # said in so many words, for a worker that starts later and hears of it first
            self._apply(Change("drain", url))
        return self._apply(Change("cut", url)) if body.now else url

    def _apply(self, change: Change) -> str:
        log.info("admin: %s %s", change.kind, change.url)
        self._members.apply(change)
        if self._crew:
            self._crew.changed(change)
        return change.url

    def _known(self, url: str) -> str:
        url = url.rstrip("/")
        if self._members.role(url) is None and not self._members.sources(url):
            raise KeyError(url)
        return url

    def _register(self, registry: Registry, request: Request, client: Connection) -> None:
        now = asyncio.get_running_loop().time()
        try:
            said = registry.tell(request.body, now)
        except BadGrant as error:
            log.warning("a registration from %s was refused: %s", client.peer, error)
            _refuse(client, 403, str(error))
            return
        if said == "again":
            client.answer(409, [JSON], json.dumps({"challenge": registry.challenge}).encode())
            return
        self._members.set("registration", registry.members(now))
        if self._crew:
            self._crew.noted(request.body, registry.last)
        client.answer(200, [JSON], b"{}")


class _Conflict(Exception):
    """What is asked for contradicts what is."""


def _refuse(client: Connection, status: int, message: str) -> None:
    client.answer(status, [JSON], error_body(status, message))


def _is_local(request: Request, client: Connection) -> bool:
    host = find(request.headers, b"host").decode("latin-1")
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    return (
        is_loopback(client.peer)
        and (name == "localhost" or is_loopback(name))
        and not any(find(request.headers, field) for field in FORWARDED)
    )


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
