"""What the manifests, units and images say agrees with the code and among themselves.

`make operator-proof` renders and validates them with the tools of operators.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from vllm import envs
from vllm.platforms.interface import Platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_release import IS_BEFORE_032

import chart_values
from kv_connectors import fingerprint
from pods import VARIABLE
from vllm_disagg import __version__, cli, config, drain
from vllm_disagg.fleet.conventions import KV_ROLES, QUIET_ACCESS_LOG_FLAG
from vllm_disagg.fleet.keys import ADMIN_KEY
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
ENGINES = ("prefill", "decode")


def deployment(name: str) -> Any:
    documents = yaml.safe_load_all((BASE / f"{name}.yaml").read_text())
    return next(d for d in documents if d["kind"] == "Deployment")


def container(name: str) -> Any:
    (found,) = deployment(name)["spec"]["template"]["spec"]["containers"]
    return found


def parse(words: list[str]) -> Any:
    """Parses a command of vllm-disagg; SystemExit for a wrong flag."""
    parser = cli._parser(words[0])
    return parser.parse_args(words)


def expanded(words: list[str]) -> list[str]:
    return [VARIABLE.sub("10.0.0.1", word) for word in words]


def test_the_proxys_flags_are_flags() -> None:
    found = container("proxy")
    assert found["command"] == ["python3", "-m", "vllm_disagg", "proxy"]
    args = parse(["proxy", *expanded(found["args"])])
    assert args.service_discovery and args.port == found["ports"][0]["containerPort"]
    # The chart has its flags of the user behind this one: they are the last, which count.
    assert found["args"][-1] == "--log-format=json"
    for role, selector in (("prefill", args.prefill_selector), ("decode", args.decode_selector)):
        labels = deployment(role)["spec"]["template"]["metadata"]["labels"]
        assert dict(label.split("=") for label in selector) == labels


def proxy_commands() -> list[list[str]]:
    """Returns the words of each command that starts a proxy; test_ray.py has Ray's."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    unit = (DEPLOY / "systemd" / "vllm-disagg-proxy.service").read_text()
    command = re.search(r"^ExecStart=\S+vllm-disagg (.*)$", unit, re.MULTILINE)
    assert command
    pod = ["proxy", *expanded(container("proxy")["args"])]
    return [compose["services"]["proxy"]["command"], pod, command[1].split()]


@pytest.mark.parametrize("words", proxy_commands())
def test_the_proxys_log_has_each_request(words: list[str]) -> None:
    """Without an access log a request that succeeds leaves no line with its id."""
    assert parse(words).access_log == "-"


def test_vllm_takes_no_variable_of_ours_for_a_misspelt_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It warns of each VLLM_ that it does not know, or ends: --fail-on-environ-validation."""
    names = {variable["name"] for role in ENGINES for variable in container(role)["env"]}
    environment_file = (DEPLOY / "systemd" / "prefill.env").read_text()
    names |= set(re.findall(r"^(\w+)=", environment_file, re.MULTILINE))
    model = SimpleNamespace(model="/models/m", hf_config=SimpleNamespace(architectures=["M"]))
    files = fingerprint._variable(SimpleNamespace(model_config=model, speculative_config=None))
    config = fingerprint._config_variable(model, False)
    names |= {ADMIN_KEY, files, config}  # of `up` and Ray; of the processes that an engine starts
    assert drain.URL in names
    for name in names:
        monkeypatch.setenv(name, "1")
    check = envs.validate_environ if IS_BEFORE_032 else Platform.validate_environ
    check(hard_fail=True)


def grace_seconds(name: str) -> int:
    return int(deployment(name)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


@pytest.mark.parametrize("name", ENGINES)
def test_the_drain_ends_before_the_pod_is_killed(name: str) -> None:
    command = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    args = parse(command[command.index("drain") :])
    shutdown = shutdown_timeout(container(name)["args"])
    assert args.notice + args.timeout + shutdown < grace_seconds(name)
    # The hook's command is not expanded, so the server's address comes from the environment.
    urls = [e["value"] for e in container(name)["env"] if e["name"] == "DISAGG_URL"]
    assert urls == [f"http://$(POD_IP):{container(name)['ports'][0]['containerPort']}"]


def test_a_proxy_pod_ends_its_connections_within_its_grace() -> None:
    """Clients that keep their connections send requests until SIGTERM: a drain would not end."""
    command = container("proxy")["lifecycle"]["preStop"]["exec"]["command"]
    python, flag, program = command
    assert (python, flag) == ("python3", "-c")
    pause = re.fullmatch(r"import time; time\.sleep\((\d+)\)", program)
    assert pause
    args = parse(["proxy", *expanded(container("proxy")["args"])])
    # An answer may take minutes. What runs longer is cut by the proxy, not by the kubelet.
    assert 600 <= args.shutdown_timeout < grace_seconds("proxy") - int(pause[1])


def test_a_full_proxy_is_not_restarted() -> None:
    """Beyond --max-connections each answer is 503; a restart would cut all streams."""
    probe = container("proxy")["livenessProbe"]
    assert probe["timeoutSeconds"] > 10  # the program waits 5 s twice
    python, flag, program = probe["exec"]["command"]
    assert (python, flag) == ("python3", "-c")

    async def exit_status(port: int) -> int:
        command = [sys.executable, "-c", program.replace(" 8000)", f" {port})")]
        environment = {**os.environ, "POD_IP": "127.0.0.1"}
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait()

    async def answer(request: HttpRequest, client: Connection) -> None:
        client.answer(200, [], b"")

    async def statuses() -> tuple[bytes, int, int]:
        server = Server(answer, Limits(connections=1))
        port = await server.start("127.0.0.1", 0)
        _, holder = await asyncio.open_connection("127.0.0.1", port)
        reader, client = await asyncio.open_connection("127.0.0.1", port)
        refusal = await reader.readuntil(b"\r\n")
        full = await exit_status(port)
        holder.close()
        client.close()
        await server.stop(0)
        return refusal, full, await exit_status(port)

    assert asyncio.run(statuses()) == (b"HTTP/1.1 503 Service Unavailable\r\n", 0, 1)


def test_the_bodies_of_a_proxy_fit_into_its_pod() -> None:
    """The kernel kills a pod above its memory limit, with all its streams."""
    args = parse(["proxy", *expanded(container("proxy")["args"])])
    limit = container("proxy")["resources"]["limits"]["memory"]
    gib = int(limit.removesuffix("Gi"))
    # Held once, and once more for each of two legs: docs/how-to/limit-load.md.
    assert 3 * args.max_all_bodies_bytes + 2**29 <= gib * 2**30


@pytest.mark.parametrize("role", ENGINES)
def test_a_rollout_has_time_for_a_drain_and_a_start(role: str) -> None:
    """Beyond its deadline `kubectl rollout status` fails, although the roll-out goes on."""
    probe = container(role)["startupProbe"]
    start_seconds = probe["periodSeconds"] * probe["failureThreshold"]
    deadline = deployment(role)["spec"]["progressDeadlineSeconds"]
    assert deadline >= grace_seconds(role) + start_seconds + 600  # and to pull the image


def shutdown_timeout(words: list[str]) -> int:
    """Returns the seconds that vLLM gives running requests, and P's KV, after SIGTERM."""
    text = " ".join(words)
    found = re.search(r"--shutdown-timeout[= ](\d+)", text)
    assert found, text
    return int(found[1])


def transfer_config(words: list[str]) -> Any:
    return json.loads(words[words.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("role", ENGINES)
def test_the_connectors_settings_are_settings(role: str) -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    found = [container(role)["args"], compose["services"][role]["command"]]
    for words in found:
        transfer = transfer_config(words)
        assert transfer["kv_role"] == KV_ROLES[role]
        assert transfer["kv_load_failure_policy"] == "recompute"
        settings = transfer["kv_connector_extra_config"]
        known = {field.name for field in msgspec.structs.fields(config.Config)}
        assert settings.keys() <= known and "key_file" in settings


def test_the_unit_of_an_engine_has_the_same_settings() -> None:
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    assert command
    transfer = transfer_config(shlex.split(command[1].replace("\\\n", " ")))
    pod = transfer_config(container("prefill")["args"])
    assert transfer.keys() == pod.keys()
    assert transfer["kv_connector_extra_config"].keys() == pod["kv_connector_extra_config"].keys()
    stop = re.search(r"^ExecStop=\S+vllm-disagg (.*)$", unit, re.MULTILINE)
    assert stop
    seconds = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert seconds
    shutdown = shutdown_timeout(shlex.split(command[1].replace("\\\n", " ")))
    stopped = parse(stop[1].replace(" $MORE_PROXIES", "").split())
    assert stopped.timeout + shutdown < int(seconds[1])
    assert re.search(r"^KillMode=mixed$", unit, re.MULTILINE), "workers outlive the first SIGTERM"


def test_an_engine_of_a_unit_has_a_home_that_it_may_write() -> None:
    """ProtectHome closes the user's own: vLLM compiles into ~/.cache/vllm, and would end."""
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    assert "\nProtectHome=yes\n" in unit and "\nProtectSystem=strict\n" in unit
    state = re.search(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
    home = re.search(r"^Environment=.*?\bHOME=(\S+)", unit, re.MULTILINE)
    assert state and home and home[1] == f"/var/lib/{state[1]}"
    assert "\nLimitMEMLOCK=infinity\n" in unit, "RDMA locks the KV cache"


@pytest.mark.parametrize("unit", ["vllm-disagg-engine@.service", "vllm-disagg-proxy.service"])
def test_units_find_their_keys_with_older_systemds(unit: str) -> None:
    """%d is the folder of credentials since systemd 251; Ubuntu 22.04 has 249."""
    text = (DEPLOY / "systemd" / unit).read_text()
    assert "LoadCredential=" in text and "${CREDENTIALS_DIRECTORY}/" in text
    assert set(re.findall(r"%\w", text)) <= {"%i"}


def test_the_start_of_an_engines_unit_ends_the_drain_of_its_stop() -> None:
    """Else an engine is without requests after each restart, until somebody looks."""
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    commands = {}
    # "-": a proxy that does not answer has forgotten its drains, and the engine shall run.
    for name, prefix in (("Stop", ""), ("StartPost", "-")):
        command = re.search(rf"^Exec{name}={prefix}/\S+/vllm-disagg (.*)$", unit, re.MULTILINE)
        assert command, name
        commands[name] = parse(command[1].replace(" $MORE_PROXIES", "").split())
    stop, start = commands["Stop"], commands["StartPost"]
    assert start.end and not stop.end
    assert (start.url, start.proxy) == (stop.url, stop.proxy)


def test_a_stop_drains_an_engine_at_each_proxy() -> None:
    """A proxy that is not told goes on to send it requests, and its stop waits for ten minutes."""
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    environment = (DEPLOY / "systemd" / "prefill.env").read_text()
    more = re.search(r"MORE_PROXIES=(--proxy \S+)$", environment, re.MULTILINE)
    assert more and "\nMORE_PROXIES=\n" in environment
    commands = re.findall(r"^ExecSt(?:op|artPost)=-?/\S+/vllm-disagg (.*)$", unit, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        # Without braces: systemd makes no word, one or several of it.
        assert parse(command.replace("$MORE_PROXIES", more[1]).split()).proxy == [
            "${PROXY}",
            more[1].split()[1],
        ]


def test_engines_of_one_machine_see_each_others_sockets() -> None:
    """Each unit has a /tmp of its own with PrivateTmp: KV and messages would go by TCP."""
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    assert "\nPrivateTmp=yes\n" in unit and "TMPDIR" not in unit
    joined = re.search(r"^JoinsNamespaceOf=(.*)$", unit, re.MULTILINE)
    assert joined
    assert joined[1].split() == [f"vllm-disagg-engine@{role}.service" for role in ENGINES]


@pytest.mark.parametrize("unit", ["vllm-disagg-engine@.service", "vllm-disagg-proxy.service"])
def test_systemd_starts_a_server_again_however_often_it_ends(unit: str) -> None:
    """By default five starts within 10 s are the last ones, until a person comes."""
    text = (DEPLOY / "systemd" / unit).read_text()
    pause = re.search(r"^RestartSec=(\d+)$", text, re.MULTILINE)
    assert pause and "\nRestart=on-failure\n" in text
    is_limited = "\nStartLimitIntervalSec=0\n" not in text.partition("[Service]")[0]
    assert not is_limited or 5 * int(pause[1]) > 10


@pytest.mark.parametrize("unit", ["vllm-disagg-engine@.service", "vllm-disagg-proxy.service"])
def test_the_journal_drops_no_line(unit: str) -> None:
    """By default those beyond 10,000 in 30 s: an access log is a line a request.

    0 of a unit would leave that default (systemd's `unit_export_log_ratelimit_interval`).
    """
    text = (DEPLOY / "systemd" / unit).read_text()
    assert "\nLogRateLimitIntervalSec=1s\nLogRateLimitBurst=1000000\n" in text


@pytest.mark.parametrize("folder", ["docker", "observability"])
def test_logs_of_containers_have_an_end(folder: str) -> None:
    """Docker's default keeps them for ever, on the disk that the models need."""
    compose = yaml.safe_load((DEPLOY / folder / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        options = service.get("logging", {}).get("options", {})
        assert options.keys() == {"max-size", "max-file"}, name


def test_the_proxys_container_sees_a_key_file_that_is_replaced() -> None:
    """A file that is mounted alone stays the old one when another takes its name."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    service = compose["services"]["proxy"]
    settings = parse(service["command"])
    folders = {os.path.dirname(path) for path in (settings.key_file, settings.api_key_file)}
    assert not service.keys() & {"secrets", "configs"}
    assert {volume["target"] for volume in service["volumes"]} == folders
    mounts = container("proxy")["volumeMounts"]
    assert not any("subPath" in mount for mount in mounts)


def test_prometheus_and_grafana_see_files_that_are_replaced() -> None:
    folder = DEPLOY / "observability"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    mounts = [mount for service in compose["services"].values() for mount in service["volumes"]]
    sources = [
        mount.replace("${TARGETS:-./targets}", "./targets").split(":")[0] for mount in mounts
    ]
    here = [source for source in sources if source.startswith(".")]
    assert len(here) == 4 and all((folder / source).is_dir() for source in here)


def test_containers_are_killed_behind_the_shutdown_timeout() -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    for role in ENGINES:
        service = compose["services"][role]
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert 0 < shutdown_timeout(service["command"]) < grace


def test_the_unit_of_the_proxy_has_flags() -> None:
    unit = (DEPLOY / "systemd" / "vllm-disagg-proxy.service").read_text()
    command = re.search(r"^ExecStart=\S+vllm-disagg (.*)$", unit, re.MULTILINE)
    assert command and parse(command[1].split()).fleet_file == "/etc/vllm-disagg/fleet.yaml"


def test_images_have_this_version_everywhere() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "vllm-disagg" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = [path.read_text() for path in files]
    tags = {tag for text in texts for tag in re.findall(r"vllm-disagg-\w+:(\d[\w.]*)", text)}
    assert tags == {__version__}


def test_every_key_of_the_secret_is_named_in_the_guide() -> None:
    guide = (ROOT / "docs" / "how-to" / "deploy-on-kubernetes.md").read_text()
    created = set(re.findall(r"--from-file=(\S+)", guide))
    rotating = (ROOT / "docs" / "how-to" / "secure-a-fleet.md").read_text()
    assert created == set(re.findall(r"--from-file=(\S+)", rotating))
    texts = " ".join(path.read_text() for path in BASE.glob("*.yaml"))
    used = set(re.findall(r"\b(\w+\.key|engine-keys\.yaml)\b", texts))
    assert used == created


@pytest.mark.parametrize("clients", [["0123abcd"], ["0123abcd", "00045678"]])
def test_engines_get_the_clients_keys_of_the_guides(clients: list[str], tmp_path: Path) -> None:
    """A key of digits stays a text, with its zeros."""
    made = []
    for guide in ("docs/how-to/deploy-on-kubernetes.md", "docs/how-to/secure-a-fleet.md"):
        found = re.search(r"^\(echo api-key.*$", (ROOT / guide).read_text(), re.MULTILINE)
        assert found
        made.append(found[0])
    compose = (DEPLOY / "docker" / "compose.yaml").read_text()
    assert made[0] == made[1]
    assert f"#   {made[0]}\n" in compose.replace("deploy/docker/keys/", "")
    (tmp_path / "api.key").write_text("".join(f"{key}\n" for key in clients))
    subprocess.run(["sh", "-ec", made[0]], cwd=tmp_path, check=True)
    read = FlexibleArgumentParser().load_config_file(str(tmp_path / "engine-keys.yaml"))
    assert read == ["--api-key", *clients]


def engine_commands() -> list[list[str]]:
    """Returns the words of each command that starts an engine; Ray's are the launcher's."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    commands = [compose["services"][role]["command"] for role in ENGINES]
    commands += [container(role)["args"] for role in ENGINES]
    return [*commands, unit.split()]


@pytest.mark.parametrize("words", engine_commands())
def test_no_engine_logs_the_proxys_health_checks(words: list[str]) -> None:
    """They are four a second."""
    assert QUIET_ACCESS_LOG_FLAG in words


@pytest.mark.parametrize("guide", ["README.md", "docs/how-to/start-by-hand.md"])
def test_typed_engines_are_as_quiet(guide: str) -> None:
    text = (ROOT / guide).read_text()
    assert text.count("\nvllm serve ") == text.count(f"' {QUIET_ACCESS_LOG_FLAG}\n") == 2


def test_every_engine_reads_the_clients_keys() -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    unit = (DEPLOY / "systemd" / "vllm-disagg-engine@.service").read_text()
    places = [words[words.index("--config") + 1].rpartition("/") for words in engine_commands()]
    names = {name for _, _, name in places}
    assert names == {"engine-keys.yaml"}
    assert {folder for folder, _, _ in places} == {
        "/run/secrets",
        "/etc/vllm-disagg",
        "${CREDENTIALS_DIRECTORY}",
    }
    assert "LoadCredential=engine-keys.yaml:" in unit
    for role in ENGINES:
        assert names <= set(compose["services"][role]["secrets"])
        (keys,) = (
            v for v in deployment(role)["spec"]["template"]["spec"]["volumes"] if "secret" in v
        )
        assert names <= {item["path"] for item in keys["secret"]["items"]}


def leaves(value: Any, path: str = "") -> set[str]:
    """Returns the paths of values beneath a map, as `.prefill.args`; lists have none."""
    if not isinstance(value, dict) or not value:
        return {path}
    return {leaf for name, part in value.items() for leaf in leaves(part, f"{path}.{name}")}


def test_each_value_of_the_chart_is_in_its_schema_and_its_templates() -> None:
    chart = DEPLOY / "helm" / "vllm-disagg"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())

    def properties(part: Any) -> Any:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        return {name: properties(each) for name, each in part.get("properties", {}).items()}

    text = "".join(path.read_text() for path in (chart / "templates").glob("*.yaml"))
    used = set(re.findall(r"\.Values((?:\.\w+)+)", text))
    in_schema = leaves(properties(schema)) - {".global"}  # Helm's own
    assert used == in_schema
    for role in ENGINES:  # a map that goes into the pods as it is
        assert values[role].pop("resources")
        in_schema.remove(f".{role}.resources")
    assert leaves(values) == in_schema


def test_the_example_of_values_has_values_of_the_chart() -> None:
    """`operator_proof.py manifests` renders it."""
    text = (DEPLOY / "helm" / "vllm-disagg" / "values.yaml").read_text()
    example = chart_values.example()
    for name, part in example.items():
        known = yaml.safe_load(text)[name]
        assert not isinstance(part, dict) or part.keys() <= known.keys()
    assert example["prefill"] == example["decode"]


def test_scalers_name_deployments() -> None:
    scalers = DEPLOY / "kubernetes" / "components" / "autoscaling" / "scaled-objects.yaml"
    names = [d["spec"]["scaleTargetRef"]["name"] for d in yaml.safe_load_all(scalers.read_text())]
    assert names == [deployment(name)["metadata"]["name"] for name in ENGINES]


def test_scalers_leave_an_instance_while_one_is_replaced() -> None:
    """An idle fleet has the fewest. A roll-out and a drained node end one before the next runs."""
    scalers = DEPLOY / "kubernetes" / "components" / "autoscaling" / "scaled-objects.yaml"
    values = yaml.safe_load((DEPLOY / "helm" / "vllm-disagg" / "values.yaml").read_text())
    least = [d["spec"]["minReplicaCount"] for d in yaml.safe_load_all(scalers.read_text())]
    for role, number in zip(ENGINES, least, strict=True):
        update = deployment(role)["spec"]["strategy"]["rollingUpdate"]
        assert update["maxSurge"] == 0 and number > update["maxUnavailable"]
        assert values["autoscaling"]["min"] == number


def test_scalers_keep_the_number_without_their_signal() -> None:
    """KEDA takes a query without a result for 0: without scrapes it would end all but the least."""
    scalers = DEPLOY / "kubernetes" / "components" / "autoscaling" / "scaled-objects.yaml"
    triggers = [t for d in yaml.safe_load_all(scalers.read_text()) for t in d["spec"]["triggers"]]
    assert [t["metadata"].get("ignoreNullValues") for t in triggers] == ["false"] * 3
