"""Plans the commands to run, from flags and machine facts; pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from ..errors import ConfigError
from ..fleet import keys
from .machine import MachineFacts

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
REFUSED_FLAGS = {  # what vLLM is told by us, and the flag of ours that sets it
    "--kv-transfer-config": "it is what this command is about",
    "--model": "give it before --",
    "--host": "instances listen on loopback only",
    "--port": "instances listen on free ports; --port before -- is the proxy's",
    "--tensor-parallel-size": "give it before --",
    "-tp": "give --tensor-parallel-size before --",
}
MIN_CORES_TO_SPARE_ONE = 4  # cores of a rank from which on one is left to what is not OpenMP
# of which the proxy asks four times a second
QUIET_ACCESS_LOG_FLAG = "--disable-access-log-for-endpoints=/health,/metrics"
OVERHEAD_GIB = 2  # GiB that an instance takes besides weights and KV cache


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
    extra: list[str] = []  # for `vllm serve`, as they are


class ChildCommand(msgspec.Struct, frozen=True):
    """Command line of one child process."""

    name: str  # prefill-0, decode-0, proxy
    argv: list[str]
    env: dict[str, str]  # besides what we have ourselves
    host: str
    port: int
    ready: str  # path that answers 200 once the child can serve

    @property
    def url(self) -> str:
        """Base URL of the child."""
        return (
            f"http://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"http://{self.host}:{self.port}"
        )

    def shell(self) -> str:
        """Formats the command for a shell."""
        return " ".join(
            [
                *(f"{name}={shlex.quote(value)}" for name, value in self.env.items()),
                shlex.join(self.argv),
            ]
        )


class LaunchPlan(msgspec.Struct, frozen=True):
    """Commands of all children, with notes and warnings for the user."""

    engines: list[ChildCommand]
    proxy: ChildCommand
    notes: list[str]
    warnings: list[str]


def make(options: UpOptions, machine: MachineFacts, ports: list[int], key_file: str) -> LaunchPlan:
    """Plans all children; `ports` are those of the engines. Raises ConfigError if the plan cannot
    work.
    """
    _refuse_ours(options.extra)
    names = [
        f"{role}-{n}"
        for role, count in (("prefill", options.prefill), ("decode", options.decode))
        for n in range(count)
    ]
    warnings = list(machine.warnings)
    if machine.gpus is None:
        envs, notes = _cpu(names, options.tensor_parallel, machine, warnings)
    else:
        envs, notes = _gpu(names, options.tensor_parallel, machine.gpus)
    engines = [
        ChildCommand(
            name, _serve(options, machine, name, port, key_file), env, "127.0.0.1", port, "/health"
        )
        for name, port, env in zip(names, ports, envs, strict=True)
    ]
    return LaunchPlan(engines, _proxy(options, machine, engines, key_file), notes, warnings)


def by_hand(plan: LaunchPlan, machine: MachineFacts, key_file: str) -> str:
    """Formats the equivalent shell commands, one a line."""
    key = shlex.join([machine.ours, "key", key_file])
    return "\n".join([key, *(f"{engine.shell()} &" for engine in plan.engines), plan.proxy.shell()])


def example(options: UpOptions, plan: LaunchPlan) -> str:
    """Formats an example request."""
    body = json.dumps(
        {"model": _served_name(options), "prompt": "Once upon a time", "max_tokens": 32}
    )
    headers = [
        "Content-Type: application/json",
        *(f"Authorization: Bearer {key}" for key in options.api_keys[:1]),
    ]
    return shlex.join(
        [
            "curl",
            f"{plan.proxy.url}/v1/completions",
            *(w for h in headers for w in ("-H", h)),
            "-d",
            body,
        ]
    )


def fleet_commands(plan: LaunchPlan, admin_key_file: str) -> list[str]:
    """Formats commands that list the instances and drain one.

    The admin key is read from its file, else from the environment.
    """
    key = f"$(cat {shlex.quote(admin_key_file)})" if admin_key_file else f"${keys.ADMIN_KEY}"
    url = shlex.quote(f"{plan.proxy.url}/disagg/instances")
    seen = f'curl {url} -H "Authorization: Bearer {key}"'
    drain = f'curl {url}/drain -H "Authorization: Bearer {key}"'
    body = shlex.quote(json.dumps({"url": plan.engines[0].url}))
    return [seen, f"{drain} -H 'Content-Type: application/json' -d {body}"]


def _serve(
    options: UpOptions, machine: MachineFacts, name: str, port: int, key_file: str
) -> list[str]:
    transfer = {
        "kv_connector": "DisaggConnector",
        "kv_role": ROLES[name.partition("-")[0]],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"key_file": key_file},
    }
    parallel = (
        ["--tensor-parallel-size", str(options.tensor_parallel)]
        if options.tensor_parallel > 1
        else []
    )
    where = ["--host", "127.0.0.1", "--port", str(port)]
    config = ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    return [
        machine.vllm,
        "serve",
        options.model,
        *where,
        *parallel,
        *config,
        QUIET_ACCESS_LOG_FLAG,
        *options.extra,
    ]


def _proxy(
    options: UpOptions, machine: MachineFacts, engines: list[ChildCommand], key_file: str
) -> ChildCommand:
    argv = [
        machine.ours,
        "proxy",
        "--host",
        options.host,
        "--port",
        str(options.port),
        "--key-file",
        key_file,
    ]
    for engine in engines:
        argv += [f"--{engine.name.partition('-')[0]}", engine.url]
    for key in options.api_keys:
        argv += ["--api-key", key]
    if options.no_api_key:
        argv.append("--no-api-key")
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    return ChildCommand("proxy", argv, {}, reachable, options.port, "/readiness")


def _refuse_ours(extra: list[str]) -> None:
    for word in extra:
        flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if flag in REFUSED_FLAGS:
            raise ConfigError(f"{flag} cannot be given after --: {REFUSED_FLAGS[flag]}")


def _served_name(options: UpOptions) -> str:
    for word, following in pairwise([*options.extra, ""]):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == "--served-model-name":
            return value or following or options.model
    return options.model


def _cpu(
    names: list[str], ranks: int, machine: MachineFacts, warnings: list[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Assigns cores to each rank of each instance, so that OpenMP threads of instances do not
    compete.
    """
    total = len(names) * ranks
    if len(machine.cores) < total:
        few = _count(len(machine.cores), "core")
        many = _count(total, "worker")
        warnings.append(
            f"{few} for {many}: they share, so this shows that it works, not how fast it is"
        )
    space = machine.kv_space or str(max(1, min(16, int(machine.memory / 4 / total))))
    if not space.isdecimal():
        raise ConfigError(
            f"VLLM_CPU_KVCACHE_SPACE={space} is not a whole number of GiB: set it to one, or unset it"
        )
    if machine.memory < (needed := total * (int(space) + OVERHEAD_GIB)):
        workers = _count(total, "worker")
        warnings.append(
            f"{machine.memory:.0f} GiB of memory are free; {workers} may take {needed} GiB and their weights"
        )
    shares = _shares(machine.cores, total)
    envs = []
    places = []
    for name in names:
        bound = "|".join(_ranges(next(shares)) for _ in range(ranks))
        envs.append({"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": space})
        places.append(f"{name} on {bound}")
    setter = (
        "as VLLM_CPU_KVCACHE_SPACE says"
        if machine.kv_space
        else "set VLLM_CPU_KVCACHE_SPACE for more or less"
    )
    return envs, [
        f"cores: {', '.join(places)}",
        f"KV cache: {space} GiB for each worker ({setter})",
    ]


def _shares(cores: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    size = len(cores) // count
    for n in range(count):
        if not size:
            yield (cores[n % len(cores)],)
        else:
            yield cores[n * size : (n + 1) * size - (size >= MIN_CORES_TO_SPARE_ONE)]


def _ranges(cores: tuple[int, ...]) -> str:
    """As vLLM reads them: 0-3,8."""
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
    needed = len(names) * ranks
    if len(gpus) < needed:
        have = _count(len(gpus), "GPU") if gpus else "no GPU"
        what = f"{_count(len(names), 'instance')} with tensor parallel size {ranks}"
        raise ConfigError(
            f"{what} need {_count(needed, 'GPU')}, and {have} can be used here: ask for fewer, or install vLLM for CPUs"
        )
    devices = [",".join(gpus[n * ranks : (n + 1) * ranks]) for n in range(len(names))]
    places = ", ".join(f"{name} on {device}" for name, device in zip(names, devices, strict=True))
    return [{"CUDA_VISIBLE_DEVICES": device} for device in devices], [f"GPUs: {places}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
