"""The settings of one engine's connector, parsed once from vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

import msgspec

from .errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 32)]


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def plain(address: Address) -> Address:
    """An IPv4 address written as an IPv6 one, as IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def unreachable(address: Address) -> str:
    """Why no engine may have this address, in words; empty when one may."""
    address = plain(address)
    for name in ("unspecified", "multicast", "link_local"):
        if getattr(address, f"is_{name}"):
            return f"is {name.replace('_', '-')}"
    if address.version == 4 and (address.is_reserved or address.packed[0] == 0):
        return "is reserved"
    return ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each field says what more and less of it costs."""

    host: str = "127.0.0.1"  # address that other engines reach this one under; never a wildcard
    key_file: str = ""  # the fleet's key; without one no engine starts, except an insecure one
    insecure: bool = (
        False  # no key: every client of this engine may feed, read and steer it; loopback only
    )
    # http://HOST:PORT of a proxy (several: with commas) to which this engine makes itself known
    register: str = ""
    # with `register`: http://HOST:PORT under which that proxy reaches this engine's API server
    advertise: str = ""
    transport: Literal["auto", "zmq", "tcp", "gloo", "nccl", "nixl"] = (
        "auto"  # moves KV bytes; ZMQ is the fallback
    )
    gpu: bool = False  # serve KV in GPU memory; never yet run on a GPU
    encrypt_data: bool = (
        False  # CURVE on KV bytes too: private on any network, about a fifth of the speed
    )
    compress: Literal["off", "fp8"] = (
        "off"  # bf16 KV as fp8 on the wire: half the bytes, and answers are NOT exact any more
    )
    lease: Seconds = 10.0  # P keeps blocks so long for a reader that gives no sign of life
    retry: Seconds = 0.5  # between D's signs of life; more often costs messages
    silence: Seconds = (
        2.0  # D gives P up after so long without a word; a false alarm costs a recompute
    )
    # D gives P up when P's vLLM makes no step for so long; longer than any step, which may compile
    stall: Seconds = 30.0
    piece: Bytes = (
        4 << 20
    )  # bytes moved per request to P; larger ones cost less CPU and overlap less
    overlap: Literal["layer", "chunk", "off"] = (
        "layer"  # P offers KV every few layers, each chunk, or once
    )
    window: Bytes = 32 << 20  # bytes on their way to D at a time; bounds memory on both sides

    @property
    def proxies(self) -> list[str]:
        """Where to register."""
        return [url.strip() for url in self.register.split(",") if url.strip()]

    def validate(self) -> None:
        self._validate_transport()
        if self.silence < 3 * self.retry:
            raise ConfigError(
                f"silence ({self.silence} s) must be at least three times retry ({self.retry} s)"
            )
        if self.lease < 3 * self.retry:
            raise ConfigError(
                f"lease ({self.lease} s) must be at least three times retry ({self.retry} s)"
            )
        if bool(self.register) != bool(self.advertise):
            raise ConfigError(
                "register (a proxy's URL) and advertise (this engine's own URL) need each other"
            )
        if self.register and not self.key_file:
            raise ConfigError(
                "register needs key_file: the fleet key is what tells members from others"
            )
        for url in (*self.proxies, *filter(None, [self.advertise])):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"register and advertise: {url!r} is not a URL; it looks like http://HOST:PORT"
                )
        self._validate_host()

    def _validate_host(self) -> None:
        """And that only those who have the fleet key are believed."""
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
        if words := unreachable(address):
            raise ConfigError(
                f"host {self.host} {words}, and no engine connects to such; name another address of this machine"
            )
        if not address.is_loopback and not self.key_file:
            raise ConfigError(
                f"host {self.host} is not loopback, so key_file must be set; make one with: vllm-disagg key FILE"
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
        if self.compress != "off" and (self.transport not in ("auto", "zmq") or self.gpu):
            why = "gpu is set" if self.gpu else f"transport is {self.transport}"
            raise ConfigError(
                f"compress: only ZMQ compresses KV, and only in host memory, and {why}"
            )


def parse(extra: dict[str, Any]) -> Config:
    try:
        config = msgspec.convert(extra, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    config.validate()
    return config
