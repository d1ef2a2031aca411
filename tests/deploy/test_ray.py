"""The fleet under Ray Serve, without Ray: settings, commands, scaling, members and processes.

`test_ray_lifecycle.py` has the command with a scripted Ray.

`python tests/deploy/operator_proof.py ray` runs it with Ray and engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fleet
import msgspec
import pytest
import yaml

import fleet_commands
import fleet_members
import fleet_process
import fleet_scaling
import fleet_settings
from fleet_members import EXPIRY_SECONDS, FleetMembers
from fleet_process import ProcessFailed, ReplicaProcess
from fleet_settings import FleetSettings
from vllm_disagg import cli, drain
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.launcher import guard, plan
from vllm_disagg.launcher.machine import MachineFacts, free_ports
from vllm_disagg.launcher.plan import ChildCommand, UpOptions

APP = Path(fleet.__file__).parent
SCRAPES = Path(__file__).parent / "scrapes"


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """Settings with which the fleet could start."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    keys.create(str(tmp_path / "fleet.key"))
    (tmp_path / "api.key").write_text("secret\n")
    (tmp_path / "api.key").chmod(0o600)
    return {"model": str(tmp_path / "model"), "key_file": str(tmp_path / "fleet.key")}


def settings(fields: dict[str, Any]) -> FleetSettings:
    return msgspec.convert(fields, FleetSettings)


# Settings -----------------------------------------------------------------------------------------


def test_the_shipped_settings_are_settings() -> None:
    shipped = settings(yaml.safe_load((APP / "fleet.yaml").read_text()))
    assert shipped == FleetSettings(
        model="Qwen/Qwen3-8B",
        key_file="/etc/vllm-disagg/fleet.key",
        cpus=4,
        prefill=fleet_settings.RoleSettings(max_replicas=4),
        decode=fleet_settings.RoleSettings(max_replicas=4),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/folder"}, "/no/such/folder: no such folder"),
        ({"model": 3}, "fleet.yaml: model is 3, but must be a text\n"),
        ({"key_file": "/no/such.key"}, "make one with: vllm-disagg key /no/such.key"),
        ({"key_file": ""}, "key_file is empty"),
        ({"key_file": "{tmp}/api.key"}, "not 64 hexadecimal digits"),
        ({"api_key_file": "/no/api.key"}, "api_key_file /no/api.key: No such file"),
        ({"api_key_file": "{tmp}/two.key"}, "2 keys, must be one"),
        ({"modell": "x"}, "fleet.yaml: no setting is named 'modell'; did you mean model?\n"),
        ({"gpu": 1}, "fleet.yaml: no setting is named 'gpu'; did you mean gpus?\n"),
        ({"zzz": 1}, "(settings: model, key_file, api_key_file, port, gpus, "),
        ({"decode": {"arg": []}}, "no setting is named 'decode.arg'; did you mean decode.args?"),
        ({"port": 0}, "port is 0, but must be a whole number of at least 1\n"),
        ({"port": 70000}, "port is 70000, but must be a whole number of at most 65535\n"),
        ({"cpus": 0}, "cpus is 0, but must be a number of more than 0\n"),
        ({"cluster_autoscales": 2}, "cluster_autoscales is 2, but must be true or false\n"),
        ({"decode": {"max_replicas": "x"}}, "decode.max_replicas is 'x', but must be a whole num"),
        ({"decode": 3}, "decode is 3, but must be a mapping of settings to values\n"),
        ({"args": [1]}, "args is [1], but must be a list of texts\n"),
        ({"args": "a"}, "args is 'a', but must be a list of texts\n"),
        ({"decode": {"min_replicas": 2}}, "decode: max_replicas is less than min_replicas"),
        ({"args": ["--port=1"]}, "--port cannot be given in args"),
        ({"prefill": {"args": ["-tp", "2"]}}, "-tp cannot be given in args"),
        ({"proxy_args": ["--no-api-key"]}, "unrecognized arguments: --no-api-key"),
        ({"proxy_args": ["--roles", "auto"]}, "unrecognized arguments: --roles auto"),
        ({"proxy_args": ["--queue-size=-1"]}, "--queue-size must not be less than 0"),
    ],
)
def test_bad_settings_are_one_line(
    good: dict[str, Any],
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "two.key").write_text("one\ntwo\n")
    (tmp_path / "two.key").chmod(0o600)
    fields = json.loads(json.dumps({**good, **change}).replace("{tmp}", str(tmp_path)))
    status, error = run_command(yaml.safe_dump(fields), tmp_path, monkeypatch, capsys)
    assert status == 2 and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "fleet.yaml: "),
        ("- 1", "not a mapping of settings to values"),
        ("port: 1", "model is missing"),
    ],
)
def test_a_file_that_is_no_yaml_is_one_line(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, error = run_command(text, tmp_path, monkeypatch, capsys)
    assert status == 2 and error.count("\n") == 1 and message in error


def test_a_python_without_ray_is_one_line(
    good: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fleet_app", raising=False)
    status, error = run_command(yaml.safe_dump(good), tmp_path, monkeypatch, capsys)
    assert status == 2 and error.count("\n") == 1 and "pip install 'ray[serve]==2.60.0'" in error


def run_command(
    text: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """Runs fleet.py with these settings; returns its exit status and standard error."""
    path = folder / "fleet.yaml"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["fleet.py", str(path)])
    try:
        status = fleet.main()
    except SystemExit as exit_:
        status = int(str(exit_.code))
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "nodes", "message"),
    [
        ({"gpus": 1, "cpus": 4}, [{"CPU": 8.0, "GPU": 2.0}], ""),
        ({"gpus": 1, "cpus": 4}, [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}], ""),
        ({"gpus": 0, "cpus": 0.1}, [{"CPU": 0.3}], ""),
        ({"gpus": 1, "cpus": 4}, [{"CPU": 64.0}], "room for 0 engines with 1 GPUs and 4 CPUs"),
        ({"gpus": 2, "cpus": 1}, [{"CPU": 8.0, "GPU": 1.0}] * 4, "room for 0 engines"),
        ({"gpus": 0, "decode": {"min_replicas": 2, "max_replicas": 2}}, [{"CPU": 2.0}], "up to 3"),
        ({"gpus": 1, "cluster_autoscales": True}, [{"CPU": 4.0}], ""),
    ],
)
def test_a_fleet_without_room_is_refused(
    good: dict[str, Any], fields: dict[str, Any], nodes: list[dict[str, float]], message: str
) -> None:
    """Serve would wait for room for ever."""
    refused = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refused:
        fleet_settings.check_room(settings({**good, **fields}), nodes)


def test_a_taken_port_is_named_by_the_setting(good: dict[str, Any], proxy: ScriptedProxy) -> None:
    taken = settings({**good, "port": proxy.server_port})
    with pytest.raises(ConfigError, match="set another port in the file"):
        fleet_settings.check_port(taken, "127.0.0.1")


# Commands -----------------------------------------------------------------------------------------


def test_an_engine_is_that_of_up(good: dict[str, Any]) -> None:
    """On the loopback the command differs from the launcher's by the shutdown timeout alone."""
    options = {"gpus": 2, "args": ["--dtype", "float32"], "decode": {"args": ["--seed", "1"]}}
    command = fleet_commands.engine(
        settings({**good, **options}), "decode", "vllm", ("127.0.0.1", 9101)
    )
    facts = MachineFacts((0, 1, 2, 3), tuple("0123"), 64.0, "vllm", "vllm-disagg")
    same = UpOptions(
        model=good["model"],
        tensor_parallel=2,
        extra=["--shutdown-timeout=30", "--dtype", "float32"],
        role_extra={"decode": ["--seed", "1"]},
    )
    assert command.argv == plan.make(same, facts, [9100, 9101], good["key_file"]).engines[1].argv
    assert (command.env, command.url, command.ready) == ({}, "http://127.0.0.1:9101", "/health")


def test_without_a_key_of_clients_all_is_loopback(good: dict[str, Any]) -> None:
    assert fleet_commands.host(settings(good), "192.0.2.7") == "127.0.0.1"
    words = fleet_commands.proxy(settings(good), "127.0.0.1", "admin").argv
    assert "--no-api-key" not in words and "--api-key-file" not in words
    assert "admin" not in words


def test_with_a_key_engines_and_proxy_listen_at_the_node(
    good: dict[str, Any], tmp_path: Path
) -> None:
    keyed = settings({**good, "api_key_file": str(tmp_path / "api.key"), "gpus": 0})
    host = fleet_commands.host(keyed, "192.0.2.7")
    command = fleet_commands.engine(keyed, "prefill", "vllm", (host, 9100))
    config = json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_producer"
    assert config["kv_connector_extra_config"] == {"key_file": good["key_file"], "host": host}
    assert command.argv[command.argv.index("--host") + 1] == "192.0.2.7"
    assert command.env == {"VLLM_API_KEY": "secret", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert "secret" not in command.argv
    proxy = fleet_commands.proxy(keyed, host, "admin")
    assert proxy.argv[proxy.argv.index("--api-key-file") + 1] == str(tmp_path / "api.key")
    assert proxy.env == {keys.ADMIN_KEY: "admin"} and proxy.url == "http://192.0.2.7:8000"


@pytest.mark.parametrize(("given", "used"), [([], "-"), (["--access-log=/f"], "/f")])
def test_the_proxys_log_has_each_request(good: dict[str, Any], given: list[str], used: str) -> None:
    words = fleet_commands.proxy(settings({**good, "proxy_args": given}), "127.0.0.1", "admin").argv
    assert cli._parser("proxy").parse_args(words[3:]).access_log == used


# Scaling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "metrics", "wanted"),
    [
        ("prefill", {"prefill_backlog_seconds": {"a": 0.0}}, 0),
        ("prefill", {"prefill_backlog_seconds": {"a": 4.1, "b": 3.9}}, 3),  # all report the fleet's
        ("prefill", {}, 2),
        ("prefill", None, 2),
        ("decode", {"kv_cache_usage": {"a": 0.6, "b": 0.9}, "engine_waiting": {"a": 0.0}}, 3),
        ("decode", {"kv_cache_usage": {"a": 0.1}, "engine_waiting": {"a": 9.0, "b": 4.0}}, 4),
        ("decode", {"kv_cache_usage": {"a": 0.0}, "engine_waiting": {"a": 0.0}}, 0),
        ("decode", None, 2),
        ("decode", {"kv_cache_usage": {"a": 0.1}}, 2),  # those that wait are unknown
        ("decode", {"engine_waiting": {"a": 9.0}}, 2),
        ("decode", {"kv_cache_usage": dict.fromkeys("abcdef", 0.7), "engine_waiting": {"a": 1}}, 6),
    ],
)
def test_the_number_of_instances(
    policy: str, metrics: dict[str, dict[str, float]] | None, wanted: int
) -> None:
    policies = {
        "prefill": fleet_scaling.prefill_replicas,
        "decode": fleet_scaling.decode_replicas,
    }
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)
    assert policies[policy](context) == (wanted, {})


def test_the_thresholds_are_those_of_keda() -> None:
    path = APP.parent / "kubernetes" / "components" / "autoscaling" / "scaled-objects.yaml"
    objects = yaml.safe_load_all(path.read_text())
    triggers = [trigger for each in objects for trigger in each["spec"]["triggers"]]
    assert [float(trigger["metadata"]["threshold"]) for trigger in triggers] == [
        fleet_scaling.BACKLOG_SECONDS_EACH,
        fleet_scaling.KV_USAGE_EACH,
        fleet_scaling.WAITING_EACH,
    ]


# Members ------------------------------------------------------------------------------------------


class ScriptedProxy(ThreadingHTTPServer):
    """Records changes by the admin API, and shows a page of metrics."""

    def __init__(self, page: str) -> None:
        super().__init__(("127.0.0.1", 0), _ScriptedAnswer)
        self.page = page
        self.status = 200  # of the answers to changes
        self.changes: list[tuple[str, str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _ScriptedAnswer(BaseHTTPRequestHandler):
    server: ScriptedProxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_known = self.headers["authorization"] == "Bearer admin"
        self.server.changes.append((self.command, self.path, body))
        self._answer(self.server.status if is_known else 401, "{}")

    do_DELETE = do_POST

    def do_GET(self) -> None:
        self._answer(200, self.server.page)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def proxy() -> Iterator[ScriptedProxy]:
    server = ScriptedProxy((SCRAPES / "proxy.txt").read_text())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_instance_joins_once_and_leaves_once(proxy: ScriptedProxy) -> None:
    """A drain by an operator would end with a second POST."""
    members = FleetMembers(proxy.url, "admin")
    members.join("decode", "http://d", 0.0)
    members.join("decode", "http://d", 5.0)
    members.leave("http://d")
    members.leave("http://d")
    members.join("decode", "http://d", 9.0)
    joined = ("POST", "/disagg/instances", {"url": "http://d", "role": "decode"})
    left = ("DELETE", "/disagg/instances", {"url": "http://d"})
    assert proxy.changes == [joined, left, joined]


def test_an_instance_of_a_silent_replica_leaves(proxy: ScriptedProxy) -> None:
    members = FleetMembers(proxy.url, "admin")
    members.join("prefill", "http://p", 0.0)
    members.join("decode", "http://d", 0.0)
    members.join("decode", "http://d", EXPIRY_SECONDS)
    members.expire(EXPIRY_SECONDS)
    assert len(proxy.changes) == 2
    members.expire(EXPIRY_SECONDS + 1)
    assert proxy.changes[2:] == [("DELETE", "/disagg/instances", {"url": "http://p"})]


def test_a_failed_removal_is_repeated(proxy: ScriptedProxy) -> None:
    members = FleetMembers(proxy.url, "admin")
    members.join("decode", "http://d", 0.0)
    proxy.status = 503
    with pytest.raises(ConfigError, match="answered 503 to the removal of http://d"):
        members.leave("http://d")
    members.expire(0.0)  # without an error: the proxy would be started again
    proxy.status = 200
    members.expire(0.0)
    members.expire(EXPIRY_SECONDS * 9)
    assert [method for method, *_ in proxy.changes] == ["POST", "DELETE", "DELETE", "DELETE"]


def test_an_engine_joins_again_after_a_failed_removal(proxy: ScriptedProxy) -> None:
    """The proxy may have removed it, and only the answer was lost."""
    members = FleetMembers(proxy.url, "admin")
    members.join("decode", "http://d", 0.0)
    proxy.status = 503
    with pytest.raises(ConfigError):
        members.leave("http://d")
    proxy.status = 200
    members.join("decode", "http://d", 5.0)
    members.expire(5.0)
    assert [method for method, *_ in proxy.changes] == ["POST", "DELETE", "POST"]


def test_an_instance_that_the_proxy_has_lost_is_removed(proxy: ScriptedProxy) -> None:
    members = FleetMembers(proxy.url, "admin")
    members.join("decode", "http://d", 0.0)
    proxy.status = 404
    members.leave("http://d")
    members.leave("http://d")
    assert [method for method, *_ in proxy.changes] == ["POST", "DELETE"]


def test_a_refused_join_is_tried_again(proxy: ScriptedProxy) -> None:
    members = FleetMembers(proxy.url, "wrong")
    for _ in range(2):
        with pytest.raises(ConfigError, match="answered 401 to the join of http://d"):
            members.join("decode", "http://d", 0.0)
    assert len(proxy.changes) == 2


def test_the_signals_are_metrics_of_the_proxy(proxy: ScriptedProxy) -> None:
    proxy.page = (
        "vllm_disagg_prefill_backlog_seconds 1.5\n"
        'vllm_disagg_kv_cache_usage{url="http://d",role="decode"} 0.25\n'
        'vllm_disagg_kv_cache_usage{url="http://e",role="decode"} 0.5\n'
        'vllm_disagg_engine_waiting{url="http://d",role="decode"} 3\n'
    )
    members = FleetMembers(proxy.url, "admin")
    assert members.signals("prefill", "http://p") == {"prefill_backlog_seconds": 1.5}
    wanted = {"kv_cache_usage": 0.25, "engine_waiting": 3.0}
    assert members.signals("decode", "http://d") == wanted
    # No series of an engine with --disable-log-stats: nothing, which is not the same as idle.
    assert members.signals("decode", "http://f") == {}
    assert members.signals("decode", "http://e") == {"kv_cache_usage": 0.5}


def test_a_recorded_scrape_has_the_signals() -> None:
    page = (SCRAPES / "proxy.txt").read_text()
    for name in ("prefill_backlog_seconds", "kv_cache_usage", "engine_waiting"):
        assert f"\nvllm_disagg_{name}" in page


# Processes ----------------------------------------------------------------------------------------

# Has two requests until its metrics have been read five times.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
reads = []
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = ""
        if self.path == "/metrics":
            reads.append(self.path)
            count = 2 * (len(reads) <= 5)
            text = f"# TYPE vllm_disagg_waiting gauge\\nvllm_disagg_in_flight {count}\\n"
            print("requests:", count, flush=True)
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def scripted(program: str) -> ChildCommand:
    (port,) = free_ports(1)
    argv = [sys.executable, "-c", program, str(port)]
    return ChildCommand("decode", argv, {}, "127.0.0.1", port, "/health")


def leader(process: ReplicaProcess) -> int:
    return process._children.child("decode").process.pid


Start = Callable[[], ReplicaProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the server; ends what a failed test has left, frozen or not."""
    started: list[ReplicaProcess] = []

    def start_one() -> ReplicaProcess:
        started.append(asyncio.run(ReplicaProcess.start(scripted(SERVER))))
        return started[-1]

    yield start_one
    for process in started:
        if guard.members([leader(process)]):
            os.killpg(leader(process), signal.SIGCONT)
            process.end(0.0)


def test_a_process_is_ended_with_its_descendants(start: Start) -> None:
    process = start()
    process.check()
    group = leader(process)
    assert len(guard.members([group])) == 2
    process.end(10.0)
    assert guard.members([group]) == []


def test_a_process_is_idle_before_it_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A proxy cuts its requests 30 s after SIGTERM."""
    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.01)
    process = start()
    process.wait_idle(60.0)
    process.end(10.0)
    counts = re.findall(r"requests: (\d)", capfd.readouterr().err)
    assert counts == ["2"] * 5 + ["0"] * drain.IDLE_LOOKS


def test_a_busy_process_is_waited_for_within_its_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.01)
    process = start()
    process.wait_idle(0.0)
    os.kill(leader(process), signal.SIGKILL)
    process._children.child("decode").process.wait()
    process.wait_idle(60.0)  # no process listens there
    process.end(10.0)


def test_a_killed_process_is_not_healthy(start: Start) -> None:
    process = start()
    os.kill(leader(process), signal.SIGKILL)
    process._children.child("decode").process.wait()
    with pytest.raises(ProcessFailed, match="decode was ended by SIGKILL") as failed:
        process.check()
    assert pickle.loads(pickle.dumps(failed.value)).args == failed.value.args  # Serve sends it
    group = leader(process)
    process.end(10.0)
    assert guard.members([group]) == []


def test_a_frozen_process_is_not_healthy(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_process, "HEALTH_TIMEOUT_SECONDS", 0.2)
    process = start()
    os.kill(leader(process), signal.SIGSTOP)
    with pytest.raises(ProcessFailed, match="is not healthy: timed out"):
        process.check()
    os.kill(leader(process), signal.SIGCONT)
    process.end(10.0)


def test_a_process_that_ends_at_its_start_is_reported_with_its_reason() -> None:
    with pytest.raises(ProcessFailed, match="decode exited with code 1: ValueError: no weights"):
        asyncio.run(ReplicaProcess.start(scripted("raise ValueError('no weights')")))


def test_of_a_traceback_the_reason_is_shown() -> None:
    text = """Deploying application vllm-disagg failed: see logs
The deployment failed to start 2 times in a row. Error: Traceback (most recent call last):
  File "fleet_process.py", line 61, in check
    raise ProcessFailed(str(error)) from None
fleet_process.ProcessFailed: decode exited with code 1: ValueError: no weights
"""
    reason = "decode exited with code 1: ValueError: no weights"
    assert fleet_process.start_failure(text) == reason
    assert fleet_process.start_failure("two\nlines") == "two lines"


def test_modules_of_this_part_have_been_read() -> None:
    """All but the one that imports Ray."""
    read = {fleet, fleet_commands, fleet_members, fleet_process, fleet_scaling, fleet_settings}
    files = {Path(str(module.__file__)).name for module in read}
    assert files == {path.name for path in APP.glob("*.py")} - {"fleet_app.py"}
