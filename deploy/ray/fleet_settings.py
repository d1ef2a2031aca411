"""Settings of a fleet under Ray Serve, read from a YAML file and checked before anything starts.

Imports no Ray: bad settings are reported where Ray is missing too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vllm_disagg.cli import Parser
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.launcher import flags, machine, model_check, plan
from vllm_disagg.setting_values import did_you_mean

# The application gives the keys itself, asks the proxy without TLS, and scales each role apart.
NOT_FOR_PROXY = {
    "--api-key-file",
    "--admin-key-file",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--roles",
}
# In msgspec's texts about a wrong value: its name, the type and the limits.
MISSING_PATTERN = re.compile(r"missing required field `(\w+)`")
PLACE_PATTERN = re.compile(r"at `\$\.([\w.]+)")
EXPECTATIONS = (
    ("Expected `int", "a whole number"),
    ("Expected `float", "a number"),
    ("Expected `str", "a text"),
    ("Expected `bool", "true or false"),
    ("Expected `object", "a mapping of settings to values"),
)
LIMITS = ((">=", "at least"), ("<=", "at most"), (">", "more than"))
ROUNDING = 1e-9  # 0.3 / 0.1 is less than 3

_Count = Annotated[int, msgspec.Meta(ge=1)]


class RoleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines of one role: Serve's autoscaler chooses their number within these bounds."""

    min_replicas: _Count = 1
    max_replicas: _Count = 1
    args: list[str] = []  # of `vllm serve`, behind those of both roles


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the application. Paths are valid on each node."""

    model: str
    key_file: str  # the fleet key
    api_key_file: str = ""  # the key of clients; without one all addresses are loopback
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000  # of the proxy
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 1  # of each engine; 0: vLLM is built for CPUs
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # of each engine
    cluster_autoscales: bool = False  # Ray adds machines: their room is not checked
    args: list[str] = []  # of each `vllm serve`
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    proxy_args: list[str] = []  # of `vllm-disagg proxy`

    def role(self, name: str) -> RoleSettings:
        """Returns the settings of "prefill" or "decode"."""
        return self.prefill if name == "prefill" else self.decode


def load(path: str) -> FleetSettings:
    """Reads and checks a file. Raises ConfigError with one line."""
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = msgspec.yaml.decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a mapping of settings to values, as `gpus: 1`")
    try:
        settings = msgspec.convert(found, FleetSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_mistake(found, str(error))}") from None
    check(settings)
    return settings


def _mistake(found: dict[Any, Any], error: str) -> str:
    """Describes a mistake in settings by their names; `error`: msgspec's text."""
    for prefix, section, kind in (
        ("", found, FleetSettings),
        ("prefill.", found.get("prefill"), RoleSettings),
        ("decode.", found.get("decode"), RoleSettings),
    ):
        names = [f"{prefix}{field.name}" for field in msgspec.structs.fields(kind)]
        given = section if isinstance(section, dict) else {}
        for name in [f"{prefix}{name}" for name in given]:
            if name not in names:
                hint = did_you_mean(name, names) or f" (settings: {', '.join(names)})"
                return f"no setting is named {name!r}{hint}"
    if missing := MISSING_PATTERN.search(error):
        return f"{missing[1]} is missing"
    place = PLACE_PATTERN.search(error)
    if not place:
        return " ".join(error.split())
    value: Any = found
    for name in place[1].split("."):
        value = value[name]
    expected = next((words for sign, words in EXPECTATIONS if sign in error), "of another kind")
    for sign, words in LIMITS:
        if limit := re.search(rf"{sign} (\d+)", error):
            expected += f" of {words} {limit[1]}"
    if isinstance(value, list) or "`array`" in error:
        expected = "a list of texts"
    return f"{place[1]} is {value!r}, but must be {expected}"


def check(settings: FleetSettings) -> None:
    """Raises ConfigError for a model, a key or arguments with which nothing can start."""
    model_check.check(settings.model, [*settings.args, *settings.prefill.args])
    if not settings.key_file:
        raise ConfigError("key_file is empty; make a key with: vllm-disagg key FILE")
    keys.load(settings.key_file)
    api_key(settings)
    for name in ("prefill", "decode"):
        role = settings.role(name)
        if role.max_replicas < role.min_replicas:
            raise ConfigError(f"{name}: max_replicas is less than min_replicas")
        for flag in plan.own_flags([*settings.args, *role.args]):
            raise ConfigError(f"{flag} cannot be given in args: this application sets it")
    _check_proxy_args(settings.proxy_args)


def api_key(settings: FleetSettings) -> str:
    """Returns the key of clients; empty without one. Raises ConfigError for a bad file."""
    if not settings.api_key_file:
        return ""
    found = keys.read_lines(settings.api_key_file, "api_key_file")
    if len(found) > 1:
        # The proxy passes a client's key on, and each engine accepts one.
        raise ConfigError(f"api_key_file {settings.api_key_file}: {len(found)} keys, must be one")
    return found[0]


def check_room(settings: FleetSettings, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError if the smallest fleet has no room; Serve would wait for ever.

    `nodes`: what each node of the cluster has, by Ray's names.
    """
    room = 0
    for node in nodes:
        engines = node.get("CPU", 0.0) / settings.cpus
        if settings.gpus:
            engines = min(engines, node.get("GPU", 0.0) / settings.gpus)
        room += int(engines + ROUNDING)
    needed = settings.prefill.min_replicas + settings.decode.min_replicas
    if room < needed and not settings.cluster_autoscales:
        raise ConfigError(
            f"the Ray cluster has room for {room} engines with {settings.gpus} GPUs and"
            f" {settings.cpus:g} CPUs each, and min_replicas add up to {needed}: add machines, or"
            " lower cpus, gpus or min_replicas, or set cluster_autoscales if Ray adds machines"
        )


def check_port(settings: FleetSettings, host: str) -> None:
    """Raises ConfigError if the proxy's port is taken."""
    machine.check_port(host, settings.port, "set another port in the file")


def _check_proxy_args(words: list[str]) -> None:
    """Exits with one line unless all words are flags that may be passed on to the proxy."""
    permitted = [flag for flag in flags.PROXY_FLAGS if flag.name not in NOT_FOR_PROXY]
    parser = Parser(prog="proxy_args", add_help=False)
    group = parser.add_argument_group()
    for flag in permitted:
        flag.add_to(group)
    args = parser.parse_args(words)
    for flag in permitted:
        flag.check(getattr(args, flag.dest))
