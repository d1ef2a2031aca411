"""Builds the files of the proxy's image without a container engine, and runs its command in them.

The build stage is the RUN line of deploy/docker/proxy.Dockerfile. Its base has no package here, so
the Debian packages that this base is made of stand for it. Needs root and apt. The last line is
JSON; exit status 1 if the image is larger than MAX_BYTES, or a command of COMMANDS does not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "proxy.Dockerfile"
MAX_BYTES = 150 * 10**6
USER = 65532  # of the image
# What distroless's image of Python is made of.
BASE_PACKAGES = [
    "base-files",
    "ca-certificates",
    "gcc-12-base",
    "libbz2-1.0",
    "libc6",
    "libcom-err2",
    "libcrypt1",
    "libdb5.3",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "libgomp1",
    "libgssapi-krb5-2",
    "libk5crypto3",
    "libkeyutils1",
    "libkrb5-3",
    "libkrb5support0",
    "liblzma5",
    "libncursesw6",
    "libnsl2",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libtinfo6",
    "libtirpc3",
    "libuuid1",
    "media-types",
    "netbase",
    "python3.11-minimal",
    "tzdata",
    "zlib1g",
]
# What an operator types into this image, and the beginning of what it prints. No proxy runs.
CLOSED = "http://127.0.0.1:1"
COMMANDS = (
    ("--version", "vllm-disagg "),
    ("proxy --help", "usage: "),
    (f"doctor --proxy {CLOSED}", f"FAIL proxy {CLOSED}: GET /health: Connection refused"),
    (f"drain {CLOSED}", f"vllm-disagg drain: cannot reach {CLOSED}"),
    ("doctor", "vllm-disagg doctor: numpy is not installed in "),
    (f"bench --url {CLOSED}", "vllm-disagg bench: numpy is not installed in "),
)
LEFT_OUT = ["usr/share/doc", "usr/share/man", "usr/share/locale"]


def build_base(folder: Path) -> None:
    """Writes the files of the base image."""
    debs = folder.parent / "debs"
    debs.mkdir()
    run(["apt-get", "download", "--quiet", *BASE_PACKAGES], debs)
    for package in sorted(debs.glob("*.deb")):
        run(["dpkg-deb", "--extract", str(package), str(folder)], folder)
    for name in LEFT_OUT:
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "usr/bin/python3").symlink_to("python3.11")


def build_app(source: Path, app: Path) -> None:
    """Runs the build stage: copies what the Dockerfile copies, and runs its RUN line."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE):
        *names, target = line.split()
        for name in names:
            place = source / target.removeprefix("/src").lstrip("/")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, place)
    (command,) = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    command = re.sub(r"(?<=[\s\"])/(app|src)\b", lambda m: str(source.parent / m[1]), command)
    run(["sh", "-c", command.replace("pip ", f"{sys.executable} -m pip ")], app.parent)


def run(command: list[str], folder: Path) -> None:
    """Runs a command with its output on standard error."""
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def size_of(folder: Path) -> int:
    """Returns the bytes of all files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def start(folder: Path, words: str) -> str:
    """Runs a command of the image as its user, in its root folder; returns the output."""
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "vllm_disagg", *words.split()],
        env={"PYTHONPATH": "/app", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: enter(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr, file=sys.stderr)
    return (done.stdout + done.stderr).strip()


def enter(folder: Path) -> None:
    """Makes a folder the root of this process, and drops root's rights."""
    os.chroot(folder)
    os.chdir("/")
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


def main() -> None:
    """Builds, measures and runs the image."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("root", "src", "app"):
            (folder / part).mkdir()
        build_base(folder / "root")
        build_app(folder / "src", folder / "app")
        shutil.move(folder / "app", folder / "root" / "app")
        size_bytes = size_of(folder / "root")
        said = {words: start(folder / "root", words) for words, _ in COMMANDS}
    wrong = [words for words, beginning in COMMANDS if not said[words].startswith(beginning)]
    print(json.dumps({"bytes": size_bytes, "runs": said["--version"], "wrong": wrong}))
    sys.exit(size_bytes > MAX_BYTES or bool(wrong))


if __name__ == "__main__":
    main()
