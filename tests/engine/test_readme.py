"""Runs the commands of README's code blocks unchanged, as a new user types them.

Only the model's name and the ports are replaced. No argument is added.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from engines import BIN, ROOT, free_port, get, wait

PATIENCE = 600.0  # seconds; with defaults each engine compiles its model
MODEL = ROOT / ".cache/models/dense"
NOT_RUN = ("make", "pip")  # `make test` runs this; an installation needs a network
COMMANDS = ("up", "curl", "key", "export", "vllm serve", "proxy", "plan", *NOT_RUN)
TRACE = '{"timestamp": %d, "input_length": 512, "output_length": 128}\n'
MARK = "DISAGG_README_TEST"  # in the environment of whatever a command starts


def blocks() -> list[list[str]]:
    """Returns README's code blocks that hold commands, each a list with line breaks kept."""
    found = re.findall(
        r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [commands(block) for block in found if re.match(r"(make|pip|vllm|vllm-disagg) ", block)]


def commands(block: str) -> list[str]:
    """Yields the commands of a block: a line goes on inside quotes and after a backslash."""
    made: list[str] = []
    text = ""
    for line in block.splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text.rstrip(), comments=True)
        except ValueError:  # no closing quotation, or nothing follows the backslash
            continue
        if words:
            made.append(text.strip())
        text = ""
    assert not text, f"README: not a whole command: {text}"
    return made


def kind(command: str) -> str:
    """Returns the kind of a command, by its first words."""
    words = shlex.split(command, comments=True)
    name = (
        words[1]
        if words[0] == "vllm-disagg"
        else " ".join(words[:2])
        if words[0] == "vllm"
        else words[0]
    )
    assert name in COMMANDS, f"README has a command that this test does not know: {command}"
    return name


def find(*kinds: str) -> list[str]:
    """Returns the commands of the one block that begins with these."""
    (block,) = (
        b
        for b in blocks()
        if [k for c in b if (k := kind(c)) not in NOT_RUN][: len(kinds)] == list(kinds)
    )
    return [command for command in block if kind(command) not in NOT_RUN]


class Shell:
    """The terminals of a new user, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.ports: dict[str, int] = {}
        self.env = {
            **os.environ,
            MARK: self.mark,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(
                ROOT
            ),  # what pip installs here is this tree, whichever it was installed from
            "TMPDIR": str(folder),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "http_proxy": "http://127.0.0.1:9",  # as in many companies; it reaches no own address
        }
        self.running: list[subprocess.Popen[str]] = []

    def text(self, command: str) -> str:
        """Returns a command with this machine's model and ports."""

        def port(found: re.Match[str]) -> str:
            return str(self.ports.setdefault(found[0], free_port()))

        return re.sub(r"\bMODEL\b", str(MODEL), re.sub(r"\b8[0-9]{3}\b", port, command))

    def run(self, command: str) -> str:
        """Runs a command to its end; returns its output."""
        done = subprocess.run(
            ["bash", "-c", self.text(command)],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,  # only ends a command that hangs
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def export(self, command: str) -> None:
        """Sets a variable for the following commands."""
        name, _, value = shlex.split(command, comments=True)[1].partition("=")
        self.env[name] = value

    def start(self, command: str) -> subprocess.Popen[str]:
        """Starts a command in a separate terminal; it runs until Ctrl-C."""
        log = self.log(len(self.running)).open("w")
        with log:
            self.running.append(
                subprocess.Popen(
                    ["bash", "-c", self.text(command)],
                    cwd=self.folder,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    process_group=0,
                )
            )
        return self.running[-1]

    def log(self, number: int) -> Path:
        return self.folder / f"terminal-{number}.log"

    def expect(self, number: int, words: str) -> str:
        """Returns the output of a terminal as soon as it contains these words."""
        process, path = self.running[number], self.log(number)

        def shown() -> bool:
            text = path.read_text(errors="replace")
            assert process.poll() is None or words in text, (
                f"ended with {process.returncode}:\n{text[-6000:]}"
            )
            return words in text

        wait(f"{words!r} in terminal {number}", shown, PATIENCE)
        return path.read_text(errors="replace")

    def interrupt(self) -> list[int]:
        """Sends Ctrl-C to each terminal, the last one first; returns the exit statuses."""
        for process in self.running[::-1]:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(120)
        return [process.returncode for process in self.running]

    def left(self) -> list[int]:
        """Returns processes of the commands that still run."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:  # it has ended meanwhile
                continue
        return found

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.running:
            process.wait()


@pytest.fixture
def shell(machine: object, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.end()


def expect_answer(text: str, model: str = str(MODEL)) -> None:
    answer = json.loads(text)
    assert answer["model"] == model and answer["usage"]["completion_tokens"] > 0, text


def usable(rows: str) -> list[bool]:
    """Returns of each instance whether the proxy can use it now."""
    return [row["usable"] for row in json.loads(rows)]


def test_the_command_that_pip_installs_is_this_tree(shell: Shell) -> None:
    shebang = (BIN / "vllm-disagg").read_text().splitlines()[0]
    assert Path(shebang.removeprefix("#!")).resolve() == (BIN / "python").resolve()
    where = shell.run(
        "python -c 'import vllm_disagg.cli, kv_connectors; print(vllm_disagg.__file__)'"
    )
    assert Path(where.strip()).is_relative_to(ROOT)
    assert shell.run("command -v vllm-disagg").strip() == str(BIN / "vllm-disagg")


def test_up(shell: Shell) -> None:
    up, curl = find("up", "curl")
    # Compiling takes minutes. `test_by_hand` leaves it on.
    shell.env["TORCH_COMPILE_DISABLE"] = "1"
    shell.start(up)
    said = shell.expect(0, "The same by hand:")
    assert f"ready: http://127.0.0.1:{shell.ports['8000']}" in said
    expect_answer(shell.run(curl))
    printed = [line for line in said.splitlines() if line.startswith("curl ")]
    expect_answer(shell.run(printed[0]))
    wait("both can be used", lambda: usable(shell.run(printed[1])) == [True, True], every=1.0)
    assert json.loads(shell.run(printed[2]))["drained"]
    expect_answer(shell.run(curl))
    time.sleep(20)
    said = shell.log(0).read_text()
    assert said.count("GET /health") + said.count("GET /metrics") <= 2, "the log can be read"
    assert shell.interrupt() == [0]
    assert shell.log(0).read_text().splitlines()[-1] == "vllm-disagg up: stopped"
    wait("nothing is left", lambda: not shell.left())
    assert not list(shell.folder.glob("vllm-disagg-up-*")), "the run directory, with its keys"


@pytest.mark.wide
def test_by_hand(shell: Shell) -> None:
    *first, prefill, decode, proxy = find("key")
    for command in first:
        (shell.export if kind(command) == "export" else shell.run)(command)
    assert (shell.folder / "fleet.key").stat().st_mode & 0o777 == 0o600
    shell.start(prefill)
    shell.start(decode)
    for number in (0, 1):
        shell.expect(number, "Application startup complete")
    shell.start(proxy)
    shell.expect(2, "listening on")
    url = f"http://127.0.0.1:{shell.ports['8000']}"
    wait("the pair can serve", lambda: get(url, "/readiness?mode=pair", 5.0)[0] == 200)
    expect_answer(shell.run(find("up", "curl")[1]))
    received = get(f"http://127.0.0.1:{shell.ports['8200']}", "/metrics", 10.0)[1]
    assert re.search(r"^vllm:disagg_received_bytes_total\S* [1-9]", received, re.MULTILINE), (
        "KV was transferred"
    )
    assert shell.interrupt()[-1] == 0
    wait("nothing is left", lambda: not shell.left())


def test_plan(shell: Shell) -> None:
    (plan,) = find("plan")
    (shell.folder / "trace.jsonl").write_text("".join(TRACE % (at * 200) for at in range(4000)))
    said = shell.run(plan)
    assert "vllm serve meta-llama/Llama-3.1-70B" in said, said
    assert list(shell.folder.glob("out*"))
