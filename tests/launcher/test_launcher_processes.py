"""The launcher with real child processes that misbehave, and stand-ins for vllm."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_disagg.launcher import flags, guard
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo

SECONDS = 60.0  # limit of every wait
UP = ("up", "--model", "a/b", "--port", "0")

STAND_IN = """#!{python}
# A stand-in for vllm without a model: it answers /health and, by default, probes.
# In its answers it is an engine that is compatible with every other.
import http.server, json, os, subprocess, sys
role = "prefill" if "kv_producer" in " ".join(sys.argv) else "decode"
subprocess.Popen(["sleep", "300"])  # a descendant, like VLLM::EngineCore
open(os.path.join({pids!r}, role), "w").write(str(os.getpid()))
print(role, "in", os.getpid(), flush=True)
if "--die" in sys.argv and role == "decode":
    print("ValueError: no luck today")
    print("EngineDeadError: See stack trace (above) for the root cause.\\nbye")
    prefix = "(APIServer pid=1) WARNING 11-22 05:03:51 [x.py:1]"
    print(prefix, "This can cause errors like `OSError: [Errno 24] Too many`")
    sys.exit(3)
facts = json.loads({facts!r})[role]
if "--differ" in sys.argv:
    facts["layout"] = {{"dtype": role}}
if "--off" in sys.argv and role == "prefill":
    facts = None
    if "--silent" not in sys.argv:
        print("ERROR 11-22 05:03:51 [c.py:9] KV transfers are off: layer a; it serves", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never" in sys.argv else 200)
        self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": "a/b"}}]}}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(503 if "--mute" in sys.argv else 200)
        self.end_headers()
        answer = {{"model": body["model"], "choices": [{{"text": "x", "finish_reason": "length"}}]}}
        answer["kv_transfer_params"] = {{"disagg_engine": facts}}
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# The launcher learns about the proxy only when this is why the proxy is not ready.
PATIENT_PROBE = """
from vllm_disagg.launcher import main, processes
import time
def probe(command):
    answer = processes.probe(command)
    while command.name == "proxy" and "no decode instance can be used" not in answer[1]:
        time.sleep(0.05)
        answer = processes.probe(command)
    return answer
main.probe = probe
"""

FACTS = json.dumps(
    {
        role: msgspec.to_builtins(
            EngineInfo(role, role, [WorkerInfo(role, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")], {})
        )  # type: ignore[arg-type]
        for role in ("prefill", "decode")
    }
)


class Up:
    """`vllm-disagg up` with a stand-in for vllm."""

    def __init__(
        self,
        folder: Path,
        *extra: str,
        ready_limit: float = 60.0,
        more_code: str = "",
        flags: Any = (),
        cwd: bool = False,
        hangup: str = "SIG_DFL",
        closed: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "vllm").write_text(
            STAND_IN.format(python=sys.executable, pids=str(self.pids), facts=FACTS)
        )
        (folder / "vllm").chmod(0o755)
        code = (  # the checks have their own tests
            f"import signal; signal.signal(signal.SIGHUP, signal.{hangup}); "
            "import sys; from packaging.version import Version; from vllm_disagg import cli; "
            "from vllm_disagg.launcher import backoff, machine, main, model_check; "
            "model_check.check = lambda *_: None; backoff.FIRST_PAUSE_SECONDS = 0.1; "
            f"main.READY_TIMEOUT_SECONDS = {ready_limit}; "
            "machine.vllm_version = lambda: Version('0.32.0+cpu'); "
            "machine.check_plugin = lambda: None; "
            f"machine.executable = lambda name: {str(folder)!r} + '/' + name; "
            f"exec({more_code!r}); sys.exit(cli.main(sys.argv[1:]))"
        )
        closing = "".join(f" {number}>&-" for number in closed)
        shell = ["sh", "-c", f'exec "$@"{closing}', "sh"] if closed else []
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-c", code, *UP, *flags, "--", *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
            cwd=folder if cwd else None,
        )

    def leaders(self) -> list[int]:
        return [int(text) for file in self.pids.iterdir() if (text := file.read_text())]

    def wait_for_engines(self) -> None:
        eventually(lambda: len(self.leaders()) == 2)

    def end(self) -> tuple[int, str]:
        try:
            said = self.process.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()  # the guard ends its children
            raise
        return self.process.returncode, said

    def left(self) -> list[object]:
        """Processes and run directories that are still there."""
        return [*guard.members(self.leaders()), *self.folder.glob("vllm-disagg-*")]


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*extra: str, **more: Any) -> Up:
        started.append(Up(tmp_path, *extra, **more))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        guard.end(one.leaders(), lambda: True)
        one.process.communicate()  # closes its pipes, too


def test_a_child_that_dies_takes_all_with_it(up: Callable[..., Up]) -> None:
    running = up("--die")
    code, said = running.end()
    assert code == 1
    last = said.splitlines()[-1]
    cause = "decode-0 exited with code 3: ValueError: no luck today"
    assert last == f"vllm-disagg up: {cause}; everything is stopped"
    assert re.search(r"^\[prefill-0\] prefill in \d+$", said, re.MULTILINE)
    assert running.left() == []


@pytest.mark.parametrize("closed", [(2,), (1,), (0, 2), (0, 1, 2)])
def test_closed_streams_hide_no_end(up: Callable[..., Up], closed: tuple[int, ...]) -> None:
    """The cause goes to a stream that is open, if there is one."""
    running = up("--die", closed=closed)
    said = "".join(running.process.communicate(timeout=SECONDS))
    assert running.process.returncode == 1
    cause = "vllm-disagg up: decode-0 exited with code 3: ValueError: no luck today"
    last = [f"{cause}; everything is stopped"] if {1, 2}.difference(closed) else []
    assert said.splitlines()[-1:] == last
    assert running.left() == []


def test_closed_streams_stop_no_deployment(up: Callable[..., Up]) -> None:
    running = up(closed=(2,))
    said = "".join(wait_until_ready(running))
    assert "vllm-disagg up: proxy is ready after" in said
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SECONDS) == 0 and running.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(up: Callable[..., Up], number: signal.Signals) -> None:
    running = up("--never")
    running.wait_for_engines()
    keys = {path.name: path.read_text() for path in running.folder.glob("vllm-disagg-*/*.key")}
    assert keys.keys() == {"fleet.key", "admin.key"} and len(set(keys.values())) == 2
    assert all(
        path.stat().st_mode & 0o777 == 0o600 for path in running.folder.glob("vllm-disagg-*/*.key")
    )
    running.process.send_signal(number)
    code, said = running.end()
    assert code == 0 and said.splitlines()[-1] == "vllm-disagg up: stopped"
    assert not any(key.strip() in said for key in keys.values())
    assert running.left() == []


def test_a_closed_terminal_does_not_end_what_nohup_has_started(up: Callable[..., Up]) -> None:
    running = up("--never", hangup="SIG_IGN")
    running.wait_for_engines()  # after the signals are set
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert ignored >> (signal.SIGHUP - 1) & 1


def wait_until_ready(running: Up) -> list[str]:
    """Returns what `up` has printed on standard output until all are ready."""
    said: list[str] = []
    assert running.process.stdout
    for line in running.process.stdout:
        said.append(line)
        if "--decode http://" in line:
            return said
    raise AssertionError(running.end())


def test_the_output_goes_to_files_and_the_console_is_quiet(up: Callable[..., Up]) -> None:
    """Each child has a file; the console has phases with times, and the cause of an end."""
    running = up(flags=("--log-dir", "logs"), cwd=True)
    announced = "".join(wait_until_ready(running))
    os.kill(running.leaders()[0], signal.SIGKILL)
    code, said = running.end()
    assert code == 1
    for line in said.splitlines():
        assert line.startswith("vllm-disagg up: "), line
    assert re.search(r"prefill-0 is ready after \d+ s: imports \d+ s", said)
    assert re.search(r"proxy is ready after \d+ s$", said, re.MULTILINE)
    logs = running.folder / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        "access.log",
        "decode-0.log",
        "prefill-0.log",
        "proxy.log",
        "targets",
        "up.pid",
    ]
    for name, pattern in (
        ("proxies", r"ready: http://(\S+)"),
        ("engines", r"--(?:prefill|decode) http://(\S+)"),
    ):
        targets = json.loads((logs / "targets" / f"{name}.yml").read_text())
        assert targets == [{"targets": re.findall(pattern, announced)}]
    assert re.search(r"^prefill in \d+$", (logs / "prefill-0.log").read_text(), re.MULTILINE)
    assert re.search(r"was ended by SIGKILL.*\(see logs/\w+-0.log\); everything", said)
    assert running.left() == []


def test_sighup_opens_log_files_anew(up: Callable[..., Up]) -> None:
    running = up(flags=("--log-dir", "logs"), cwd=True)
    wait_until_ready(running)
    logs = running.folder / "logs"
    names = ("prefill-0", "decode-0", "proxy", "access")
    for name in names:
        (logs / f"{name}.log").rename(logs / f"{name}.log.1")
    assert (logs / "up.pid").read_text() == f"{running.process.pid}\n"
    running.process.send_signal(signal.SIGHUP)
    eventually(lambda: all((logs / f"{name}.log").exists() for name in names))
    sign = "access log, certificates and keys are opened anew"
    eventually(lambda: sign in (logs / "proxy.log").read_text())
    (logs / "proxy.log").unlink()
    (logs / "proxy.log").mkdir()
    running.process.send_signal(signal.SIGHUP)
    assert running.process.stderr
    for line in running.process.stderr:
        if "SIGHUP: --log-dir" in line:
            break
    assert line.endswith("proxy.log: Is a directory; lines go to the old file\n")
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0 and running.left() == []


HANGUPS = """
import signal, sys, time
from vllm_disagg.launcher.main import StopSignals
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
signals = StopSignals(has_log_files=True)
print("set", flush=True)
for _ in range(2):
    while not (signals.is_renewal_due or signals.count):
        time.sleep(0.02)
    with open(sys.argv[2], "a") as found:
        print(signals.is_renewal_due, signals.count, file=found)
    signals.is_renewal_due = False
"""


@pytest.mark.parametrize(("hangup", "at_end"), [("SIG_DFL", "False 1"), ("SIG_IGN", "True 0")])
def test_a_hangup_rotates_log_files_while_the_terminal_is_open(
    hangup: str, at_end: str, tmp_path: Path
) -> None:
    """The end of the terminal is another one: it stops all, unless `nohup` was the start."""
    found = tmp_path / "found"
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", HANGUPS, hangup, str(found)])
    try:
        assert os.read(terminal, 99).startswith(b"set")
        os.kill(pid, signal.SIGHUP)
        eventually(lambda: found.exists() and found.read_text() == "True 0\n")
        os.close(terminal)
        eventually(lambda: found.read_text() == f"True 0\n{at_end}\n")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_one_log_folder_serves_one_deployment(up: Callable[..., Up], tmp_path: Path) -> None:
    first = up("--never", flags=("--log-dir", "logs"), cwd=True)
    first.wait_for_engines()
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
    second = Up(tmp_path / "b", flags=("--log-dir", str(tmp_path / "logs")))
    eventually(lambda: second.process.poll() is not None or bool(second.leaders()))
    if second.leaders():
        second.process.kill()  # the guard ends its children
    code, said = second.end()
    assert code == 2 and said == (
        f"vllm-disagg up: --log-dir {tmp_path}/logs: another up (process {first.process.pid})"
        " writes there: choose another folder\n"
    )
    assert second.left() == [] and not second.leaders()
    first.process.kill()
    first.process.wait()
    third = Up(tmp_path / "c", "--die", flags=("--log-dir", str(tmp_path / "logs")))
    assert third.end()[0] == 1, "nothing to tidy up after kill -9"


def test_a_child_that_ends_starts_again(up: Callable[..., Up]) -> None:
    running = up(flags=("--restart", "on-failure"))
    wait_until_ready(running)
    pid = (running.pids / "decode").read_text()
    started_with = guard.members([int(pid)])
    assert len(started_with) == 2  # it has a descendant
    os.kill(int(pid), signal.SIGKILL)
    eventually(
        lambda: (
            running.process.poll() is not None
            or (running.pids / "decode").read_text() not in (pid, "")
        )
    )
    assert running.process.poll() is None
    assert guard.members([int(pid)]) == [], "the descendants of the dead one are ended, too"
    assert running.process.stderr
    ended = False
    for line in running.process.stderr:
        if line.startswith("vllm-disagg up: decode-0 was ended by SIGKILL"):
            assert line.endswith("it starts again in 0 s\n")
            ended = True
        if ended and line.startswith("vllm-disagg up: decode-0 is ready after"):
            break
    assert ended
    again = running.leaders()
    running.process.send_signal(signal.SIGTERM)
    code, _ = running.end()
    assert code == 0 and guard.members(again) == [] and running.left() == []


def test_a_child_that_ends_before_all_were_ready_ends_all(up: Callable[..., Up]) -> None:
    """A mistake in a flag would otherwise start again for ever."""
    running = up("--die", flags=("--restart", "on-failure"))
    code, said = running.end()
    assert code == 1 and said.splitlines()[-1].endswith("everything is stopped")
    assert running.left() == []


def test_kill_9_leaves_nothing(up: Callable[..., Up]) -> None:
    running = up("--never")
    running.wait_for_engines()
    running.process.kill()
    eventually(lambda: running.left() == [])


def children_of(pid: int) -> list[int]:
    """Returns the processes that have this one as their parent."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (process / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(process.name))
    return found


def test_kill_9_of_the_launcher_and_its_children_leaves_nothing(up: Callable[..., Up]) -> None:
    """Ray ends an actor in this way; the descendants of its children stay."""
    running = up("--never")
    running.wait_for_engines()
    for pid in [*children_of(running.process.pid), running.process.pid]:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: running.left() == [])


def processes_with(text: str) -> list[int]:
    """Returns the processes that have this text in their arguments, as `pkill -f` finds them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text in (process / "cmdline").read_text(errors="replace"):
                found.append(int(process.name))
    return found


def session_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


@pytest.mark.parametrize("word", ["the run directory", "vllm", sys.executable])
def test_kill_9_by_a_part_of_the_arguments_leaves_nothing(up: Callable[..., Up], word: str) -> None:
    """The children have it in theirs; their descendants have not."""
    running = up("--never")
    running.wait_for_engines()
    (directory,) = running.folder.glob("vllm-disagg-up-*")
    text = str(directory) if word == "the run directory" else word
    mine = [pid for pid in processes_with(text) if session_of(pid) == running.process.pid]
    killed = [*mine, running.process.pid]
    assert set(running.leaders()) < set(killed)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: running.left() == [])


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "GRACE_SECONDS", 0.3)
    deaf = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo deaf; sleep 300"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert deaf.stdout
    deaf.stdout.readline()
    guard.end([deaf.pid])
    assert guard.members([deaf.pid]) == [] and deaf.wait() == -signal.SIGKILL
    deaf.stdout.close()


def test_the_proxy_says_why_it_is_not_ready(up: Callable[..., Up]) -> None:
    """Stand-ins answer /health, but no probe."""
    running = up("--mute", ready_limit=1.0, more_code=PATIENT_PROBE)
    code, said = running.end()
    assert code == 1
    assert "proxy is not ready after 1 s: " in said and "no decode instance can be used" in said
    assert running.left() == []


def test_instances_that_can_never_be_paired_are_not_waited_for(up: Callable[..., Up]) -> None:
    running = up("--differ", ready_limit=10 * SECONDS)
    code, said = running.end()
    assert code == 1
    (line,) = (line for line in said.splitlines() if "no two instances can be paired" in line)
    assert line.startswith("vllm-disagg up: ") and line.endswith("; everything is stopped")
    assert "do not fit: dtype is prefill on one side and decode on the other" in line
    assert running.left() == []


@pytest.mark.parametrize("more", [(), ("--silent",)])
def test_an_engine_without_transfers_is_not_waited_for(
    more: tuple[str, ...], up: Callable[..., Up]
) -> None:
    running = up("--off", *more, ready_limit=10 * SECONDS)
    code, said = running.end()
    assert code == 1
    (line,) = (line for line in said.splitlines() if "no two instances can be paired" in line)
    reason = line.removeprefix("vllm-disagg up: no two instances can be paired: ")
    if more:  # as an engine whose line was lost
        assert "KV transfers are off" in reason and reason.startswith("http://127.0.0.1:")
    else:
        words = "KV transfers are off: layer a; it serves; everything is stopped"
        assert reason == f"prefill-0: {words}"
    assert running.left() == []


def test_what_is_printed_once_all_are_ready_can_be_typed(
    up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `up` without arguments after --, as in README.

    Each printed line works in a shell, with the generated admin key, and behind an HTTP proxy.
    """
    for name in flags.HTTP_PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    running = up()
    said = wait_until_ready(running)
    assert len([line for line in said if line.startswith("ready: http://127.0.0.1:")]) == 1, (
        running.end()
    )
    seen, drain = (line for line in said if line.startswith("curl") and "/disagg/instances" in line)
    rows = json.loads(subprocess.check_output(seen, shell=True, text=True))
    assert [(row["role"], row["usable"]) for row in rows] == [("prefill", True), ("decode", True)]
    assert json.loads(subprocess.check_output(drain, shell=True, text=True))["drained"]
    (example,) = (line for line in said if line.startswith("curl") and "/v1/completions" in line)
    assert json.loads(subprocess.check_output(example, shell=True, text=True))["model"] == "a/b"
    running.process.send_signal(signal.SIGINT)
    code, log = running.end()
    assert code == 0 and log.splitlines()[-1] == "vllm-disagg up: stopped"
    assert running.left() == []
