"""`fleet.py` with a scripted Ray: a start, a fleet that runs already, and both ways to an end."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fleet
import pytest
import yaml

from vllm_disagg.fleet import keys
from vllm_disagg.launcher.machine import free_ports

MODULES = [
    "ray",
    "ray.exceptions",
    "ray.serve",
    "ray.serve.config",
    "ray.serve.exceptions",
    "ray.serve.handle",
    "ray.serve.schema",
]
URL = "http://127.0.0.1:8000"


class Status(StrEnum):
    """As Ray's `ApplicationStatus`."""

    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    DELETING = "DELETING"


class RayError(Exception):
    """As Ray's."""


class RayServeException(Exception):
    """As Ray Serve's."""


class ScriptedRay:
    """A cluster with one application at most; notes each call that changes something.

    A sleep is one step: a deletion begins at the first step after its call, and ends at the third.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_cluster = True
        self.status: Status | None = None
        self.deleted_after = 3  # steps
        self.run_error: Exception | None = None
        self.place_failures: list[Exception] = []
        self.status_failures: list[Exception] = []
        self.on_step: Callable[[], None] = lambda: None
        self.clock = 0.0
        self._steps_left: int | None = None

    def init(self, address: str, **_: Any) -> None:
        if address == "auto" and not self.has_cluster:
            raise ConnectionError
        self.calls.append(f"init {address}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def read_status(self) -> SimpleNamespace:
        if self.status_failures:
            raise self.status_failures.pop(0)
        found = SimpleNamespace(status=self.status, deployments={})
        return SimpleNamespace(applications={"vllm-disagg": found} if self.status else {})

    def run(self, *_: Any, **__: Any) -> None:
        self.calls.append("run")
        self.status = Status.DEPLOY_FAILED if self.run_error else Status.RUNNING
        if self.run_error:
            raise self.run_error

    def delete(self, *_: Any, **__: Any) -> None:
        self.calls.append("delete")
        self._steps_left = self.deleted_after

    def handle(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(place=self._method("place"), stop=self._method("stop"))

    def _method(self, name: str) -> SimpleNamespace:
        def result(timeout_s: float) -> Any:
            if self.place_failures:
                self.clock += timeout_s
                raise self.place_failures.pop(0)
            if name == "stop":
                self.calls.append("drain")
            return URL, "node"

        return SimpleNamespace(remote=lambda: SimpleNamespace(result=result))

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.on_step()
        if self._steps_left is not None:
            self._steps_left -= 1
            self.status = Status.DELETING if self._steps_left else None


class _Deployment:
    def options(self, **_: Any) -> _Deployment:
        return self

    def bind(self, *_: Any) -> str:
        return "application"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRay]:
    """Ray's modules as far as `fleet_app` imports them."""
    scripted = ScriptedRay()
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    root: Any = modules["ray"]
    root.init, root.shutdown = scripted.init, scripted.shutdown
    root.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}]
    root.util = SimpleNamespace(get_node_ip_address=lambda: "192.0.2.7")
    root.serve = serve = modules["ray.serve"]
    for name, value in {
        "start": lambda **_: scripted.calls.append("serve"),
        "status": scripted.read_status,
        "run": scripted.run,
        "delete": scripted.delete,
        "get_app_handle": scripted.handle,
        "deployment": lambda _: _Deployment(),
        "Application": object,
    }.items():
        setattr(serve, name, value)
    names: dict[str, dict[str, Any]] = {
        "ray.exceptions": {"RayError": RayError},
        "ray.serve.config": {"AutoscalingConfig": dict, "AutoscalingPolicy": dict},
        "ray.serve.exceptions": {"RayServeException": RayServeException},
        "ray.serve.handle": {"DeploymentHandle": object},
        "ray.serve.schema": {"ApplicationStatus": Status, "LoggingConfig": dict},
    }
    for module_name, members in names.items():
        for name, value in members.items():
            setattr(modules[module_name], name, value)
    # Imported anew, and forgotten at the end.
    monkeypatch.setitem(sys.modules, "fleet_app", ModuleType("fleet_app"))
    del sys.modules["fleet_app"]
    import fleet_app

    clock = SimpleNamespace(sleep=scripted.sleep, monotonic=lambda: scripted.clock)
    monkeypatch.setattr(fleet_app, "time", clock)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield scripted
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Settings with which the fleet could start."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    keys.create(str(tmp_path / "fleet.key"))
    fields = {"model": str(tmp_path / "model"), "key_file": str(tmp_path / "fleet.key"), "gpus": 0}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({**fields, "port": free_ports(1)[0]}))
    return path


def change(path: Path, **fields: Any) -> None:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **fields}))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs fleet.py with these arguments; returns its exit status."""

    def run_once(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["fleet.py", *map(str, words)])
        return fleet.main()

    return run_once


STARTED = ["init auto", "serve", "run"]
Run = Callable[..., int]
Output = pytest.CaptureFixture[str]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_once(ray: ScriptedRay) -> None:
    """Sends Ctrl-C at the next step."""

    def step() -> None:
        ray.on_step = lambda: None
        interrupt()

    ray.on_step = step


# A start ------------------------------------------------------------------------------------------


def test_a_fleet_is_served_until_ctrl_c(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    interrupt_once(ray)
    assert run(file) == 0
    assert ray.calls == [*STARTED, "drain", "delete", "shutdown"]
    assert capsys.readouterr().out.strip() == f"ready: {URL}"


@pytest.mark.parametrize("status", list(Status))
def test_a_fleet_that_runs_already_is_left_alone(
    status: Status, ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    """Whatever its state. Its own port, which is taken, is not what the message is about."""
    ray.status = status
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        change(file, port=taken.getsockname()[1], cpus=99)
        assert run(file) == 2
    assert ray.calls == ["init auto", "shutdown"] and ray.status == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"runs already on this cluster ({status.value})" in error


def test_settings_without_room_touch_nothing(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    change(file, cpus=99)
    assert run(file) == 2
    assert ray.calls == ["init auto", "shutdown"]
    assert "has room for 0 engines" in capsys.readouterr().err


def test_ctrl_c_before_the_start_touches_nothing(ray: ScriptedRay, file: Path, run: Run) -> None:
    ray.status_failures = [RayError("the controller is being replaced")]
    ray.on_step = interrupt
    assert run(file) == 1
    assert ray.calls == ["init auto", "shutdown"]


def test_a_failed_start_is_one_line_and_ends_what_was_started(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    ray.has_cluster = False
    ray.run_error = RuntimeError("Deploying\nfailed")
    ray.place_failures = [RayServeException("no replica")]
    assert run(file) == 1
    assert ray.calls == ["init local", "serve", "run", "delete", "shutdown"]
    assert capsys.readouterr().err == "fleet.py: Deploying failed\n"


def test_an_address_that_fails_once_is_asked_for_again(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    ray.place_failures = [TimeoutError()]
    ray.on_step = lambda: interrupt_once(ray)  # not within the first wait
    assert run(file) == 0
    assert f"ready: {URL}" in capsys.readouterr().out


def test_an_address_that_never_comes_is_one_line(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    ray.place_failures = [TimeoutError() for _ in range(1000)]
    assert run(file) == 1
    assert ray.calls == [*STARTED, "delete", "shutdown"]
    error = capsys.readouterr().err
    assert error == "fleet.py: the proxy's replica does not answer: TimeoutError\n"


# Its end ------------------------------------------------------------------------------------------


def test_the_command_ends_with_its_fleet(
    ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    """Another command's `--end` has ended it: there is nothing left to end."""

    def step() -> None:
        ray.status = Status.DELETING if ray.clock < 6.0 else None
        if ray.clock > 60.0:
            interrupt()

    ray.on_step = step
    assert run(file) == 0
    assert ray.calls == [*STARTED, "shutdown"]
    assert capsys.readouterr().err == "fleet.py: the fleet has been ended by another command\n"


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("answers", [True, False])
def test_end_ends_a_fleet_in_any_state(
    answers: bool, status: Status, ray: ScriptedRay, run: Run, capsys: Output
) -> None:
    ray.status = status
    ray.place_failures = [] if answers else [TimeoutError(), TimeoutError()]
    assert run("--end") == 0
    assert ray.calls == ["init auto", *(["drain"] * answers), "delete", "shutdown"]
    assert ray.status is None and ray.clock < 20.0
    assert capsys.readouterr().out == "fleet.py: the fleet has ended\n"


@pytest.mark.parametrize("has_cluster", [True, False])
def test_end_without_a_fleet(
    has_cluster: bool, ray: ScriptedRay, file: Path, run: Run, capsys: Output
) -> None:
    ray.has_cluster = has_cluster
    assert run("--end", file) == 0
    assert ray.calls == [*(["init auto"] * has_cluster), "shutdown"]
    assert capsys.readouterr().out == "fleet.py: no fleet runs here\n"


def test_a_fleet_that_does_not_end_is_one_line(ray: ScriptedRay, run: Run, capsys: Output) -> None:
    ray.status = Status.UNHEALTHY
    ray.deleted_after = 10**6
    assert run("--end") == 1
    error = capsys.readouterr().err
    assert error == "fleet.py: the fleet has not ended within 735 s: DELETING\n"


def test_a_fleet_that_another_command_starts_meanwhile_is_not_waited_for(
    ray: ScriptedRay, run: Run
) -> None:
    ray.status = Status.RUNNING
    ray.deleted_after = 10**6

    def step() -> None:
        if ray.clock > 5.0:
            ray._steps_left = None
            ray.status = Status.RUNNING

    ray.on_step = step
    assert run("--end") == 0
    assert ray.clock < 10.0 and ray.calls.count("delete") == 1


def test_without_a_file_the_command_is_refused(run: Run, capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2 and "give a YAML file" in capsys.readouterr().err
