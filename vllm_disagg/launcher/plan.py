"""Plans the commands of all children, from flags and machine facts; pure."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from ..errors import ConfigError
from ..fleet import keys
from ..fleet.conventions import KV_ROLES, QUIET_ACCESS_LOG_FLAG
from .machine import MachineFacts

# Flags of vLLM that the launcher sets, and the alternative of each.
REFUSED_FLAGS = {
    "--kv-transfer-config": "this command sets it",
    "--model": "give it before --",
    "--host": "instances listen on loopback only",
    "--port": "instances listen on free ports; --port before -- is the proxy's",
    "--tensor-parallel-size": "give it before --",
    "-tp": "give --tensor-parallel-size before --",
}
# A rank with so many cores leaves one to threads that are not OpenMP's.
MIN_CORES_TO_SPARE_ONE = 4
PROXY = "proxy"  # name of its child
OVERHEAD_GIB = 2  # of a worker, besides weights and KV cache


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `up`."""

    model: str
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel: int = 1
    api_keys: list[str] = []
    no_api_key: bool = False
    extra: list[str] = []  # arguments for `vllm serve`, passed on unchanged
    role_extra: dict[str, list[str]] = {}  # more of them, by role
    proxy_args: list[str] = []  # flags for the proxy, passed on unchanged
    client_key: str = ""  # a client's key as a word of a shell; empty if clients need none
    is_https: bool = False  # the proxy serves https
    changes_roles: bool = False  # each engine can take both roles
    has_http_proxy: bool = False  # the environment names one, which curl would ask


class ChildCommand(msgspec.Struct, frozen=True):
    """Command line of one child process."""

    name: str  # prefill-0, decode-0, proxy
    argv: list[str]
    env: dict[str, str]  # besides the launcher's own environment
    host: str
    port: int
    ready: str  # path that answers 200 once the child can serve
    is_https: bool = False

    @property
    def url(self) -> str:
        """Base URL of the child."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "https" if self.is_https else "http"
        return f"{scheme}://{host}:{self.port}"

    def shell(self) -> str:
        """Formats the command for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


class LaunchPlan(msgspec.Struct, frozen=True):
    """Commands of all children, with notes and warnings for the user."""

    engines: list[ChildCommand]
    proxy: ChildCommand
    notes: list[str]
    warnings: list[str]
    curl: list[str]  # the beginning of a command for the proxy


def make(options: UpOptions, machine: MachineFacts, ports: list[int], key_file: str) -> LaunchPlan:
    """Plans all children; `ports` are those of the engines.

    Raises ConfigError if the plan cannot work.
    """
    _refuse_own_flags(options.extra, "after --")
    for role, extra in options.role_extra.items():
        _refuse_own_flags(extra, f"in --{role}-args")
    names = [f"prefill-{n}" for n in range(options.prefill)]
    names += [f"decode-{n}" for n in range(options.decode)]
    warnings = list(machine.warnings)
    if machine.gpus is None:
        envs, notes = _cpu(names, options.tensor_parallel, machine, warnings)
    else:
        envs, notes = _gpu(names, options.tensor_parallel, machine.gpus)
    engines = []
    for name, port, env in zip(names, ports, envs, strict=True):
        argv = engine_argv(options, machine.vllm, role_of(name), ("127.0.0.1", port), key_file)
        engines.append(ChildCommand(name, argv, env, "127.0.0.1", port, "/health"))
    proxy = _proxy(options, machine, engines, key_file)
    return LaunchPlan(engines, proxy, notes, warnings, _curl(options))


def by_hand(plan: LaunchPlan, machine: MachineFacts, key_file: str) -> str:
    """Formats the equivalent shell commands, one a line."""
    key = shlex.join([machine.ours, "key", key_file])
    engines = [f"{engine.shell()} &" for engine in plan.engines]
    return "\n".join([key, *engines, plan.proxy.shell()])


def example(options: UpOptions, plan: LaunchPlan) -> str:
    """Formats an example request."""
    body = json.dumps(
        {"model": _served_name(options), "prompt": "Once upon a time", "max_tokens": 32}
    )
    words = [shlex.join(plan.curl), shlex.quote(f"{plan.proxy.url}/v1/completions")]
    words += ["-H", shlex.quote("Content-Type: application/json")]
    if options.client_key:
        # The shell joins two words without a space: a quoted text, and the key.
        words += ["-H", f"'Authorization: Bearer '{options.client_key}"]
    return " ".join([*words, "-d", shlex.quote(body)])


def fleet_commands(plan: LaunchPlan, admin_key_file: str) -> list[str]:
    """Formats commands that list the instances and drain one.

    The admin key is read from its file, else from the environment.
    """
    key = f"$(cat {shlex.quote(admin_key_file)})" if admin_key_file else f"${keys.ADMIN_KEY}"
    url = shlex.quote(f"{plan.proxy.url}/disagg/instances")
    curl = shlex.join(plan.curl)
    show = f'{curl} {url} -H "Authorization: Bearer {key}"'
    drain = f'{curl} {url}/drain -H "Authorization: Bearer {key}"'
    body = shlex.quote(json.dumps({"url": plan.engines[0].url}))
    return [show, f"{drain} -H 'Content-Type: application/json' -d {body}"]


def _curl(options: UpOptions) -> list[str]:
    words = ["curl"]
    if options.has_http_proxy:
        words += ["--noproxy", "*"]
    if options.is_https:
        # The certificate is for the name that clients use, hardly for this address.
        words.append("--insecure")
    return words


def engine_argv(
    options: UpOptions, vllm: str, role: str, address: tuple[str, int], key_file: str
) -> list[str]:
    """Returns the `vllm serve` command of one instance.

    `vllm`: its command. `address`: host and port; the host is where other engines reach it too.
    """
    host, port = address
    settings = {"key_file": key_file}
    if not ipaddress.ip_address(host).is_loopback:
        settings["host"] = host
    transfer = {
        "kv_connector": "DisaggConnector",
        "kv_role": KV_ROLES["both" if options.changes_roles else role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    parallel = []
    if options.tensor_parallel > 1:
        parallel = ["--tensor-parallel-size", str(options.tensor_parallel)]
    return [
        vllm,
        "serve",
        options.model,
        *["--host", host, "--port", str(port)],
        *parallel,
        *["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))],
        QUIET_ACCESS_LOG_FLAG,
        *options.extra,
        *options.role_extra.get(role, []),
    ]


def role_of(name: str) -> str:
    """Returns the role of an instance: of prefill-0, prefill."""
    return name.partition("-")[0]


def _proxy(
    options: UpOptions, machine: MachineFacts, engines: list[ChildCommand], key_file: str
) -> ChildCommand:
    """Returns the command of the proxy in front of these instances."""
    listen = ["--host", options.host, "--port", str(options.port)]
    argv = [machine.ours, "proxy", *listen, "--key-file", key_file]
    for engine in engines:
        argv += [f"--{role_of(engine.name)}", engine.url]
    argv += [f"--api-key={key}" for key in options.api_keys]
    if options.no_api_key:
        argv.append("--no-api-key")
    argv += options.proxy_args
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    ready = "/readiness?mode=pair"
    return ChildCommand(PROXY, argv, {}, reachable, options.port, ready, options.is_https)


def own_flags(extra: list[str]) -> list[str]:
    """Returns those flags among arguments of `vllm serve` that the launcher sets itself."""
    words = [word.partition("=")[0].partition(".")[0].replace("_", "-") for word in extra]
    return [flag for word in words for flag in REFUSED_FLAGS if _means(word, flag)]


def _means(word: str, flag: str) -> bool:
    """Returns whether vLLM reads a word as a flag: it takes a beginning of the flag's name.

    The value of a short flag may follow at once.
    """
    is_short = not flag.startswith("--")
    is_beginning = flag.startswith(word) and bool(word.strip("-"))
    return is_beginning or (is_short and word.startswith(flag))


def _refuse_own_flags(extra: list[str], where: str) -> None:
    """Raises ConfigError for an extra argument that the launcher sets itself."""
    for flag in own_flags(extra):
        raise ConfigError(f"{flag} cannot be given {where}: {REFUSED_FLAGS[flag]}")


def _served_name(options: UpOptions) -> str:
    """Returns the model name that requests must use."""
    for word, following in pairwise([*options.extra, ""]):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == "--served-model-name":
            return value or following or options.model
    return options.model


def _cpu(
    names: list[str], ranks: int, machine: MachineFacts, warnings: list[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the environment of each instance, and notes.

    Each rank of each instance has cores of its own, so that OpenMP threads do not compete.
    """
    total = len(names) * ranks
    if len(machine.cores) < total:
        cores = _count(len(machine.cores), "core")
        warnings.append(
            f"{cores} for {_count(total, 'worker')}: workers share cores,"
            " so the deployment works but is slow"
        )
    space = machine.kv_space or str(max(1, min(16, int(machine.memory / 4 / total))))
    if not space.isdecimal():
        raise ConfigError(
            f"VLLM_CPU_KVCACHE_SPACE={space} is not a whole number of GiB:"
            " set it to one, or unset it"
        )
    needed = total * (int(space) + OVERHEAD_GIB)
    if machine.memory < needed:
        warnings.append(
            f"{machine.memory:.0f} GiB of memory are free;"
            f" {_count(total, 'worker')} may take {needed} GiB and their weights"
        )
    shares = _shares(machine.cores, total)
    envs = []
    places = []
    for name in names:
        bound = "|".join(_ranges(next(shares)) for _ in range(ranks))
        envs.append({"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": space})
        places.append(f"{name} on {bound}")
    setter = "set VLLM_CPU_KVCACHE_SPACE for more or less"
    if machine.kv_space:
        setter = "from VLLM_CPU_KVCACHE_SPACE"
    return envs, [
        f"cores: {', '.join(places)}",
        f"KV cache: {space} GiB for each worker ({setter})",
    ]


def _shares(cores: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yields the cores of each of `count` ranks; with fewer cores than ranks, ranks share them."""
    size = len(cores) // count
    for n in range(count):
        if not size:
            yield (cores[n % len(cores)],)
            continue
        end = (n + 1) * size
        if size >= MIN_CORES_TO_SPARE_ONE:
            end -= 1
        yield cores[n * size : end]


def _ranges(cores: tuple[int, ...]) -> str:
    """Formats cores as vLLM parses them: 0-3,8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gpu(
    names: list[str], ranks: int, gpus: tuple[str, ...]
) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the environment of each instance with GPUs of its own, and a note."""
    needed = len(names) * ranks
    if len(gpus) < needed:
        available = _count(len(gpus), "GPU") if gpus else "no GPU"
        instances = f"{_count(len(names), 'instance')} with tensor parallel size {ranks}"
        raise ConfigError(
            f"{instances} need {_count(needed, 'GPU')}, and {available} can be used here:"
            " ask for fewer, or install vLLM for CPUs"
        )
    devices = [",".join(gpus[n * ranks : (n + 1) * ranks]) for n in range(len(names))]
    places = ", ".join(f"{name} on {device}" for name, device in zip(names, devices, strict=True))
    return [{"CUDA_VISIBLE_DEVICES": device} for device in devices], [f"GPUs: {places}"]


def _count(number: int, noun: str) -> str:
    """Formats a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
