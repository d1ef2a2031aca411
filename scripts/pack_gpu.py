"""Carries wheels to a machine without a network, in pieces of a bounded size.

    python scripts/pack_gpu.py pack OUT [--limit MIB] [--leave-out PATTERN] [--arch SM] SPEC...
    python scripts/pack_gpu.py unpack FOLDER SITE

`pack`: each SPEC is a wheel's path, or something for `pip download --no-deps` (vllm==0.32.0,
nvidia-nccl-cu13>=2.30.4). OUT gets files of at most --limit MiB (64) and a manifest with their
SHA-256. --leave-out drops members of the wheels. --arch 90 zeroes the device code that an H100 or
H200 does not run, which then packs to nothing: torch 2.13, vLLM and NCCL become 481 MB instead of
1,069. `unpack`: checks all of it, puts the wheels together and unzips them into SITE; then

    PYTHONPATH=SITE VLLM_NCCL_SO_PATH=SITE/nvidia/nccl/lib/libnccl.so.2 vllm serve ...

vLLM 0.28.0 and 0.32.0 are built for torch 2.13: where the machine has another, name torch, its
Triton and torchvision, too. Two ranks on one GPU need NCCL >= 2.30.4 and
NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePath

MANIFEST = "manifest.json"
PLATFORM = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
# A fat binary within a library: a header, then entries with a header each. NVIDIA does not document
# it; these fields are enough for each entry of vLLM 0.32.0, torch 2.13.0 and NCCL 2.30.7.
FAT_MAGIC = struct.pack("<I", 0xBA55ED50)
FAT_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of its code
ARCH_OFFSET = 28  # in an entry's header: of a number as 90
MIN_ENTRY_HEADER = ARCH_OFFSET + 4
PTX, CUBIN = 1, 2


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


def keep_arch(library: bytes, arch: int) -> bytes:
    """Returns a library whose device code for other GPUs is zeroes.

    The driver reads the headers, which stay, and takes the entry for its GPU. Where a fat binary
    has none, it takes code of an older GPU of that generation (80 or 86 on an 89, 100 on a 103),
    or compiles PTX of an older GPU: these stay, too.
    """
    kept = bytearray(library)
    at = library.find(FAT_MAGIC)
    while at >= 0:
        entries, end = _entries(library, at)
        is_native = any(kind == CUBIN and its == arch for kind, its, _, _ in entries)
        for kind, its, start, size in entries:
            is_older = its <= arch and (kind == PTX or its // 10 == arch // 10)
            is_used = kind == CUBIN and its == arch if is_native else is_older
            if not is_used:
                kept[start : start + size] = bytes(size)
        at = library.find(FAT_MAGIC, end)
    return bytes(kept)


def _entries(library: bytes, at: int) -> tuple[list[tuple[int, int, int, int]], int]:
    """Returns (kind, arch, offset of the code, its bytes) of each entry, and where they end.

    Returns no entry of what is no fat binary, although it begins like one.
    """
    no_entries: list[tuple[int, int, int, int]] = []
    if at + FAT_HEADER.size > len(library):
        return no_entries, len(library)
    _, version, header, size = FAT_HEADER.unpack_from(library, at)
    place, end = at + header, at + header + size
    if version != 1 or header != FAT_HEADER.size or end > len(library):
        return no_entries, at + len(FAT_MAGIC)
    entries = []
    while place < end:
        if place + MIN_ENTRY_HEADER > end:
            return no_entries, end
        kind, _, header, size = ENTRY_HEADER.unpack_from(library, place)
        (arch,) = struct.unpack_from("<I", library, place + ARCH_OFFSET)
        if kind not in (PTX, CUBIN) or header < MIN_ENTRY_HEADER or place + header + size > end:
            return no_entries, end
        entries.append((kind, arch, place + header, size))
        place += header + size
    return entries, end


def thin(wheel: Path, pattern: str, arch: int, folder: Path) -> Path:
    """Returns the wheel without the members that match, and with the code of one GPU only."""
    if not pattern and not arch:
        return wheel
    target = folder / f"thin-{wheel.name}"
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for member in source.infolist():
            if fnmatch.fnmatch(member.filename, pattern):
                print(f"left out: {member.filename} ({member.compress_size >> 20} MiB)")
                continue
            content = source.read(member)
            if arch and ".so" in PurePath(member.filename).suffixes:
                content = keep_arch(content, arch)
            out.writestr(member, content)
    return target


def pack(specs: list[str], out: Path, limit: int, leave_out: str, arch: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        fail(f"{out} is not empty")
    manifest: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            wheel = fetch(spec, Path(folder))
            pieces = manifest[wheel.name] = []
            with thin(wheel, leave_out, arch, Path(folder)).open("rb") as source:
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
    packing.add_argument("--arch", type=int, default=0, metavar="SM", help="as 90 of an H200")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.specs, args.out, args.limit << 20, args.leave_out, args.arch)
    else:
        unpack(args.folder, args.site)


if __name__ == "__main__":
    main()
