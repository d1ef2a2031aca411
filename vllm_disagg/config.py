"""Connector settings, parsed once from vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from . import old_names
from .errors import ConfigError
from .setting_values import BYTES_BY_UNIT, SECONDS_BY_UNIT, did_you_mean, quantity

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 32)]
# No sender serves a larger piece. A piece is at least one block of one layer, and an SSM state is
# one block for a whole prompt: so the limit is far above the default of `piece_bytes`.
MAX_PIECE_BYTES = 64 << 20
# Old name of a setting -> its name; see `old_names.py`.
OLD_NAMES = {
    "silence": "peer_timeout",
    "retry": "keepalive_interval",
    "stall": "engine_stall_timeout",
    "piece": "piece_bytes",
    "window": "window_bytes",
}
# Setting of an earlier version that has no effect any more -> why.
REMOVED = {"gpu": "KV in GPU memory is served without a setting"}
# Names of transports; `kv_connectors/transports.py` has their modules.
TransportName = Literal["zmq", "tcp", "gloo", "nccl", "nixl"]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def plain(address: Address) -> Address:
    """Return an IPv4-mapped IPv6 address as IPv4; any other as given."""
    return getattr(address, "ipv4_mapped", None) or address


def unreachable(address: Address) -> str:
    """Return why no engine may have this address; empty if an engine may."""
    address = plain(address)
    for name in ("unspecified", "multicast", "link_local"):
        if getattr(address, f"is_{name}"):
            return f"is {name.replace('_', '-')}"
    if address.version == 4 and (address.is_reserved or address.packed[0] == 0):
        return "is reserved"
    return ""


def is_http_url(text: str) -> bool:
    """Return whether a text is http(s)://HOST[:PORT], which a path may follow."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # a port that is no number, or no IPv6 address in brackets
        return False
    # An empty port is no number either, and `urlsplit` accepts it.
    if parts.scheme not in ("http", "https") or parts.netloc.endswith(":"):
        return False
    return bool(parts.hostname) and port != 0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Connector settings.  The comment of each field is its entry in docs/reference/settings.md."""

    # address that other engines connect to; never a wildcard
    host: str = "127.0.0.1"
    # file with the fleet key; without one only an insecure engine starts
    key_file: str = ""
    # no key: every client of this engine can write, read and control its KV; loopback only
    insecure: bool = False
    # http://HOST:PORT of a proxy (several: with commas) with which this engine registers
    register: str = ""
    # with `register`: http://HOST:PORT under which that proxy reaches this engine's API server
    advertise: str = ""
    # moves KV bytes; ZMQ is the fallback
    transport: Literal["auto", TransportName] = "auto"
    # CURVE on KV bytes too: private on any network, about a fifth of the speed
    encrypt_data: bool = False
    # bf16 KV as fp8 on the wire: half the bytes, and answers are NOT exact any more
    compress: Literal["off", "fp8"] = "off"
    # P keeps blocks so long for a D that sends no keep-alive
    lease: Seconds = 10.0
    # between D's keep-alives, or a third of P's lease if less; more often costs messages
    keepalive_interval: Seconds = 0.5
    # D gives P up after so long without a message; a false alarm costs a recompute
    peer_timeout: Seconds = 2.0
    # D gives P up when P's vLLM makes no step for so long; longer than any step, which may compile
    engine_stall_timeout: Seconds = 30.0
    # bytes of one piece, up to 64 MiB, as by NIXL; larger ones cost less CPU and overlap less
    piece_bytes: Bytes = 4 << 20
    # P offers KV every few layers, each chunk, or once
    overlap: Literal["layer", "chunk", "off"] = "layer"
    # bytes in flight to D at a time, a small piece as 1/64 of it; null: 32 MiB, on GPUs 256 MiB
    window_bytes: Bytes | None = None

    @property
    def proxies(self) -> list[str]:
        """URLs of the proxies with which to register."""
        return [url.strip() for url in self.register.split(",") if url.strip()]

    def validate(self) -> None:
        """Raise ConfigError, with the setting and a remedy, if settings contradict each other."""
        self._validate_transport()
        for name in ("peer_timeout", "lease"):
            seconds = getattr(self, name)
            if seconds < 3 * self.keepalive_interval:
                raise ConfigError(
                    f"{name} ({seconds} s) must be at least three times keepalive_interval"
                    f" ({self.keepalive_interval} s)"
                )
        if self.piece_bytes > MAX_PIECE_BYTES:
            raise ConfigError(
                f"piece_bytes ({self.piece_bytes}) must be at most {MAX_PIECE_BYTES} (64 MiB):"
                " P sends no larger piece"
            )
        if bool(self.register) != bool(self.advertise):
            raise ConfigError(
                "register (a proxy's URL) and advertise (this engine's own URL) need each other"
            )
        if self.register and not self.key_file:
            raise ConfigError(
                "register needs key_file: only the holder of the fleet key is a member of the fleet"
            )
        for url in (*self.proxies, *filter(None, [self.advertise])):
            if not is_http_url(url):
                raise ConfigError(
                    f"register and advertise: {url!r} is not a URL; it looks like http://HOST:PORT"
                )
        self._validate_host()

    def _validate_host(self) -> None:
        """Check the address, and that without a fleet key only loopback is served."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"host {self.host!r} is not an IP address; name the one other engines connect to"
            ) from None
        if address.is_unspecified:
            raise ConfigError(
                f"host {self.host} is a wildcard; name the one address other engines connect to"
            )
        if problem := unreachable(address):
            raise ConfigError(
                f"host {self.host} {problem}, and no engine connects to such an address; "
                "name another address of this machine"
            )
        if not address.is_loopback and not self.key_file:
            raise ConfigError(
                f"host {self.host} is not loopback, so key_file must be set; "
                "make one with: vllm-disagg key FILE"
            )
        if self.key_file and self.insecure:
            raise ConfigError("key_file and insecure exclude each other: leave insecure out")
        if not self.key_file and not self.insecure:
            raise ConfigError(
                "no fleet key: set key_file (make one with: vllm-disagg key FILE),"
                ' or "insecure": true to accept grants of every client, on loopback'
            )

    def _validate_transport(self) -> None:
        if self.encrypt_data and self.transport not in ("auto", "zmq"):
            raise ConfigError(
                f"encrypt_data: only ZMQ encrypts KV bytes, and transport is {self.transport}"
            )
        if self.compress != "off" and self.transport not in ("auto", "zmq"):
            raise ConfigError(
                f"compress: only ZMQ compresses KV, and transport is {self.transport}"
            )


def parse(extra: dict[str, Any]) -> Config:
    """Return the settings of `kv_connector_extra_config`.  Raises ConfigError."""
    for old in _old_names_in(extra):
        if OLD_NAMES[old] in extra:
            raise ConfigError(f"{old} is the old name of {OLD_NAMES[old]}: leave {old} out")
    named = {OLD_NAMES.get(name, name): value for name, value in extra.items()}
    for removed in REMOVED:
        named.pop(removed, None)
    fields = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for name in named:
        if name not in fields:
            raise ConfigError(
                f"kv_connector_extra_config: no setting is named {name!r}"
                f"{did_you_mean(name, fields)} (settings: {', '.join(fields)})"
            )
    values = {name: _read_value(name, value, fields[name]) for name, value in named.items()}
    config = Config(**values)
    config.validate()
    return config


def _read_value(name: str, value: Any, kind: Any) -> Any:
    """Returns a setting's value, with its unit applied.  Raises ConfigError."""
    number: float | None = None
    if isinstance(value, str):
        number = quantity(value, _units(kind))
    if number is not None:
        is_whole = Bytes in _alternatives(kind) and number.is_integer()
        value = int(number) if is_whole else number
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        expected = _expectation(value, kind)
        raise ConfigError(
            f"kv_connector_extra_config: {name} is {value!r}, but must be {expected}"
        ) from None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Returns the types that a setting's value may have."""
    is_union = get_origin(kind) in (Union, UnionType)
    return get_args(kind) if is_union else (kind,)


def _units(kind: Any) -> Mapping[str, float]:
    alternatives = _alternatives(kind)
    if Seconds in alternatives:
        return SECONDS_BY_UNIT
    return BYTES_BY_UNIT if Bytes in alternatives else {}


def _expectation(value: Any, kind: Any) -> str:
    """Describes the values that a setting may have."""
    alternatives = _alternatives(kind)
    if Seconds in alternatives:
        units = ", ".join(SECONDS_BY_UNIT)
        return f'seconds, above 0 and at most 86400, or a text with a unit ({units}) as "10s"'
    if Bytes in alternatives:
        units = ", ".join(BYTES_BY_UNIT)
        return f'bytes, from 1024 to {1 << 32}, or a text with a unit ({units}) as "4MiB"'
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return f"one of {', '.join(names)}{did_you_mean(str(value), names)}"
    return "true or false" if kind is bool else "a text"


def old_names_warning(extra: dict[str, Any]) -> str:
    """Return a warning for the settings that have an old name; empty if none has."""
    warning = old_names.warning(_old_names_in(extra), OLD_NAMES)
    return f"kv_connector_extra_config: {warning}" if warning else ""


def removed_warning(extra: dict[str, Any]) -> str:
    """Return a warning for the settings that have no effect any more; empty if there is none."""
    found = [f"{name} has no effect ({why})" for name, why in REMOVED.items() if name in extra]
    return f"kv_connector_extra_config: {', '.join(found)}: leave it out" if found else ""


def _old_names_in(extra: dict[str, Any]) -> list[str]:
    return [name for name in OLD_NAMES if name in extra]
