"""The admin API: shows and changes the fleet over HTTP, for those who may.

    GET    /disagg/instances        the state of each instance (answered by `api.py`)
    GET    /disagg/status           the whole status; with /stream once a second (likewise)
    POST   /disagg/instances        add an instance, or end its drain
                                    {"url": ..., "role": "prefill" | "decode" | "both"}
    POST   /disagg/instances/drain  send it no new requests; it stays listed until the drain ends
                                    {"url": ..., "end": false}
    DELETE /disagg/instances        drain, then remove unless a source names it; with "now", abort
                                    its running requests
                                    {"url": ..., "now": false}
    POST   /disagg/register         an engine registers itself (`vllm_disagg.fleet.registration`)

Changes always need the admin key: a reverse proxy on this machine makes every client look local.
Instances are shown to holders of the admin key or of a client's key, the last requests only to
those of the admin key. Without any key, only this machine sees them: the peer's address and the
Host field must be loopback, the request HTTP/1.1 and not forwarded. Registrations carry their own
proof. URLs are http or https to a host and port, nothing more, within `AllowedNetworks`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec

from ...errors import BadGrant, ConfigError
from ...fleet.keys import ADMIN_KEY
from ...fleet.registration import REGISTER_PATH as REGISTER
from ..http import bearer
from ..http.addresses import AllowedNetworks, check_url, split_rank
from ..http.connection import Connection
from ..http.headers import Headers
from ..http.request import HttpRequest
from ..http.response import JSON, error_body
from ..http.routes import FLEET_VIEWS
from ..membership.members import Members, MembershipChange
from ..membership.registry import Registered, Registry
from ..routing.fleet import Role
from ..telemetry.logs import RefusedRegistrationLog

log = logging.getLogger(__name__)

INSTANCES_PATH = "/disagg/instances"
DRAIN_PATH = "/disagg/instances/drain"
CHANGES = (("POST", INSTANCES_PATH), ("DELETE", INSTANCES_PATH), ("POST", DRAIN_PATH))
FORWARDED = (b"forwarded", b"x-real-ip", b"true-client-ip", b"cf-connecting-ip", b"via", b"origin")
FORWARDED_PREFIXES = (b"x-forwarded-", b"x-envoy-", b"x-original-")
CHANGES_ARE_OFF = (
    "changes over HTTP are off: start the proxy with --admin-key,"
    f" or with {ADMIN_KEY} in its environment"
)
REGISTRATION_IS_OFF = (
    "engines cannot register themselves here: start the proxy with --allow-registration"
)
BOTH_NEEDS_AUTO = (
    'role "both" needs a proxy with --roles auto: name the role in which the instance is to serve,'
    " prefill or decode"
)
LOCAL_ONLY = (
    "only this machine may see the instances,"
    " as long as the proxy has no --admin-key and no --api-key"
)


class _AddInstance(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    role: Literal["prefill", "decode", "both"]  # both: the load decides, with `--roles auto`


class _DrainInstance(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    end: bool = False


class _RemoveInstance(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    now: bool = False


class Admin:
    """Answers requests that change the fleet, and refuses those that may not see or change it."""

    def __init__(
        self,
        members: Members,
        registry: Registry | None,
        broadcast: Callable[[MembershipChange | Registered], None] | None,
        networks: AllowedNetworks,
        keys: bearer.AcceptedKeys,
        *,
        roles_follow_load: bool,
    ) -> None:
        self._members = members
        self._registry = registry
        self._broadcast = broadcast  # to the other proxy workers; None without any
        self._networks = networks
        self._keys = keys
        self._roles_follow_load = roles_follow_load
        self._refused_registrations = RefusedRegistrationLog()

    def handle(self, request: HttpRequest, client: Connection) -> bool:
        """Answers a request that changes the fleet; returns whether it was one."""
        endpoint = (request.method, request.path)
        if refused := self.refusal(request, client):
            client.answer(*refused)
        elif endpoint == ("POST", REGISTER):
            if self._registry:
                self._register(self._registry, request, client)
            else:
                _refuse(client, 404, REGISTRATION_IS_OFF)
        elif endpoint in CHANGES:
            self._change(request, client)
        else:
            return False
        return True

    def refusal(
        self, request: HttpRequest, client: Connection
    ) -> tuple[int, Headers, bytes] | None:
        """Returns (status, headers, body) for a request that may not see or change the fleet.

        Judges by the request's head alone; None for any other request.
        """
        endpoint = (request.method, request.path)
        if endpoint in CHANGES:
            if not self._keys.admins:
                return _error(request, 403, CHANGES_ARE_OFF)
            if not bearer.has_key(request, self._keys.admins):
                return bearer.unauthorized(request)
            if request.header(b"content-type").partition(b";")[0].strip().lower() != JSON[1]:
                return _error(request, 415, "content-type must be application/json")
        elif request.method == "GET" and request.path in FLEET_VIEWS:
            keys = self._keys.admins + self._keys.clients
            if keys and not bearer.has_key(request, keys):
                return bearer.unauthorized(request)
            # The peer is read only here, since it takes a system call.
            if not keys and not _is_local(request, client.peer):
                return _error(request, 403, LOCAL_ONLY)
        return None

    def sees_requests(self, request: HttpRequest) -> bool:
        """Whether a request that may see the fleet may see other clients' requests too.

        Those are for holders of the admin key. Without any key the only reader is this machine.
        """
        if self._keys.admins:
            return bearer.has_key(request, self._keys.admins)
        return not self._keys.clients

    def _change(self, request: HttpRequest, client: Connection) -> None:
        try:
            if request.method == "DELETE":
                urls = self._remove(msgspec.json.decode(request.body, type=_RemoveInstance))
            elif request.path == DRAIN_PATH:
                urls = self._drain(msgspec.json.decode(request.body, type=_DrainInstance))
            else:
                urls = [self._add(msgspec.json.decode(request.body, type=_AddInstance))]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            _refuse(client, 400, str(error))
        except KeyError as error:
            _refuse(client, 404, f"no instance has the URL {error.args[0]}")
        except _Conflict as error:
            _refuse(client, 409, str(error))
        else:
            facts = {
                "url": urls[0] if len(urls) == 1 else split_rank(urls[0])[0],
                "sources": sorted({s for url in urls for s in self._members.sources(url)}),
                "drained": all(map(self._members.is_drained, urls)),
            }
            client.answer(200, [JSON], json.dumps(facts).encode())

    def _add(self, body: _AddInstance) -> str:
        url = check_url(body.url, "url")
        if not self._members.is_named(url):
            self._networks.check(url, "url")
        if any(other != url for other in self._members.instances_of(url)):
            raise _Conflict(f"{url} has several data parallel ranks: name one, as {url}@0")
        named = self._members.role(url)
        if body.role == "both":
            if not self._roles_follow_load:
                raise ConfigError(BOTH_NEEDS_AUTO)
            # As an engine of both roles that registers; one that is named keeps its role.
            role: Role = named or "decode"
        else:
            role = body.role
        if named not in (None, role):
            raise _Conflict(f"{url} is a {named} instance")
        return self._apply(MembershipChange("add", url, role))

    def _drain(self, body: _DrainInstance) -> list[str]:
        kind: Literal["drain", "resume"] = "resume" if body.end else "drain"
        return [self._apply(MembershipChange(kind, url)) for url in self._known(body.url)]

    def _remove(self, body: _RemoveInstance) -> list[str]:
        urls = self._known(body.url)
        for url in urls:
            self._apply(MembershipChange("remove", url))
            # Repeated for a proxy worker that starts later and gets this change first.
            if self._members.is_drained(url):
                self._apply(MembershipChange("drain", url))
            if body.now:
                self._apply(MembershipChange("cut", url))
        return urls

    def _apply(self, change: MembershipChange) -> str:
        log.info("admin: membership change by HTTP: %s %s", change.kind, change.url)
        self._members.apply(change)
        if self._broadcast:
            self._broadcast(change)
        return change.url

    def _known(self, url: str) -> list[str]:
        """Returns the instances of a URL: itself, or all ranks of a server. Raises KeyError."""
        with suppress(ConfigError):  # no instance has such a URL
            if urls := self._members.instances_of(check_url(url, "url")):
                return urls
        raise KeyError(url.rstrip("/"))

    def _register(self, registry: Registry, request: HttpRequest, client: Connection) -> None:
        now = asyncio.get_running_loop().time()
        try:
            verdict = registry.register(request.body, now)
        except BadGrant as error:
            self._refused_registrations.write(client.peer, str(error))
            _refuse(client, 403, str(error))
            return
        if verdict == "again":
            client.answer(409, [JSON], json.dumps({"challenge": registry.challenge}).encode())
            return
        self._members.set("registration", registry.members)
        if self._broadcast:
            self._broadcast(Registered(request.body, registry.last_numbers))
        client.answer(200, [JSON], b"{}")


class _Conflict(Exception):
    """A change contradicts the present state; answered with 409."""


def _refuse(client: Connection, status: int, message: str) -> None:
    client.answer(*_error(client.response.request, status, message))


def _error(request: HttpRequest, status: int, message: str) -> tuple[int, Headers, bytes]:
    return status, [JSON], error_body(status, message, request_id=request.request_id)


def _is_local(request: HttpRequest, peer: str) -> bool:
    """Whether a request comes from this machine, as far as its head shows.

    Forwarders that add no field for it speak HTTP/1.0, as nginx does by default, or keep the Host
    field of the client.
    """
    host = request.header(b"host").decode("latin-1")
    name = host.partition(":")[0]
    if host.startswith("["):  # IPv6
        name = host.partition("]")[0].strip("[")
    return (
        is_loopback(peer)
        and (name == "localhost" or is_loopback(name))
        and request.chunked_ok  # HTTP/1.1
        and not any(
            field in FORWARDED or field.startswith(FORWARDED_PREFIXES)
            for field, _ in request.headers
        )
    )


def is_loopback(address: str) -> bool:
    """Whether a text is an IP address of this machine's loopback interface."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
