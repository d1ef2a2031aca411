"""Carries wheels to a machine without a network, in pieces of a bounded size.

    python scripts/pack_gpu.py pack OUT [--limit MIB] [--leave-out PATTERN] SPEC...
    python scripts/pack_gpu.py unpack FOLDER SITE

`pack`: each SPEC is a wheel's path, or something for `pip download --no-deps` (vllm==0.32.0,
nvidia-nccl-cu13>=2.30.4). OUT gets files of at most --limit MiB (64) and a manifest with their
SHA-256. --leave-out drops members of the wheels, as kernels of other GPUs. `unpack`: checks all of
it, puts the wheels together and unzips them into SITE; then

    PYTHONPATH=SITE VLLM_NCCL_SO_PATH=SITE/nvidia/nccl/lib/libnccl.so.2 vllm serve ...

vLLM 0.28.0 and 0.32.0 are built for torch 2.13: where the machine has another, name torch and its
libraries, too. Two ranks on one GPU need NCCL >= 2.30.4 and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MANIFEST = "manifest.json"
PLATFORM = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
CHUNK = 1 << 20


def fail(why: str) -> None:
    sys.exit(f"pack_gpu: {why}")


def fetch(spec: str, folder: Path) -> Path:
    if spec.endswith(".whl"):
        if not Path(spec).is_file():
            fail(f"{spec}: there is no such wheel")
        return Path(spec)
    before = set(folder.glob("*.whl"))
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *PLATFORM,
        *platforms,
    ]
    if subprocess.run([*command, "--dest", str(folder), spec], check=False).returncode:
        fail(f"{spec}: pip found no wheel; its own message is above")
    return next(iter(set(folder.glob("*.whl")) - before))


def thin(wheel: Path, pattern: str, folder: Path) -> Path:
    """Returns the wheel without the members that match."""
    if not pattern:
        return wheel
    target = folder / f"thin-{wheel.name}"
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for member in source.infolist():
            if fnmatch.fnmatch(member.filename, pattern):
                print(f"left out: {member.filename} ({member.compress_size >> 20} MiB)")
            else:
                out.writestr(member, source.read(member))
    return target


def pack(specs: list[str], out: Path, limit: int, leave_out: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        fail(f"{out} is not empty")
    manifest: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            wheel = fetch(spec, Path(folder))
            pieces = manifest[wheel.name] = []
            with thin(wheel, leave_out, Path(folder)).open("rb") as source:
                while data := source.read(limit):
                    name = f"{wheel.name}.{len(pieces):03}"
                    (out / name).write_bytes(data)
                    pieces.append(
                        {
                            "name": name,
                            "sha256": hashlib.sha256(data).hexdigest(),
                            "bytes": len(data),
                        }
                    )
            print(f"{wheel.name}: {len(pieces)} pieces")
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1))


def unpack(folder: Path, site: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        fail(f"{folder / MANIFEST}: {error}")
    pieces = [piece for parts in manifest.values() for piece in parts]
    missing = [piece["name"] for piece in pieces if not (folder / piece["name"]).is_file()]
    if missing:
        fail(
            f"{folder} lacks {len(missing)} of {len(pieces)} pieces, the first of them {missing[0]}"
        )
    site.mkdir(parents=True, exist_ok=True)
    for name, parts in manifest.items():
        with tempfile.TemporaryFile() as whole:
            for piece in parts:
                data = (folder / piece["name"]).read_bytes()
                if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                    fail(f"{piece['name']} is damaged; carry it again")
                whole.write(data)
            with zipfile.ZipFile(whole) as wheel:
                wheel.extractall(site)
        print(f"{name}: in {site}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("specs", nargs="+", metavar="SPEC")
    packing.add_argument("--limit", type=int, default=64, metavar="MIB")
    packing.add_argument("--leave-out", default="", metavar="PATTERN")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.specs, args.out, args.limit << 20, args.leave_out)
    else:
        unpack(args.folder, args.site)


if __name__ == "__main__":
    main()
