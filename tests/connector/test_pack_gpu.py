"""Packs wheels in pieces: contents survive, missing and damaged pieces are named."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.version import Version

from vllm_disagg.fleet.conventions import OLDEST_VLLM

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/pack_gpu.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_pack_unpack_and_their_errors(tmp_path: Path) -> None:
    wheel, out, site = tmp_path / "a-1-py3-none-any.whl", tmp_path / "out", tmp_path / "site"
    big = os.urandom(3 << 20)
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("a/__init__.py", "x = 1")
        made.writestr("a/big.so", big)
        made.writestr("a/_unused_C.so", b"0" * 1000)
    done = run("pack", out, "--limit", 1, "--leave-out", "*_unused_C*", wheel)
    assert done.returncode == 0 and "left out: a/_unused_C.so" in done.stdout, done
    pieces = sorted(out.glob("*.whl.*"))
    assert len(pieces) == 4 and all(piece.stat().st_size <= 1 << 20 for piece in pieces)
    assert run("unpack", out, site).returncode == 0
    assert (site / "a/big.so").read_bytes() == big and not (site / "a/_unused_C.so").exists()
    pieces[1].write_bytes(b"damaged")
    done = run("unpack", out, site)
    assert (
        done.returncode == 1
        and done.stderr == f"pack_gpu: {pieces[1].name} is damaged; carry it again\n"
    )
    pieces[1].unlink()
    done = run("unpack", out, site)
    assert done.returncode == 1 and "lacks 1 of 4 pieces" in done.stderr
    for arguments in (
        ("unpack", tmp_path / "none", site),
        ("pack", out, wheel),
        ("pack", tmp_path / "x", "no.whl"),
    ):
        done = run(*arguments)
        assert (
            done.returncode == 1
            and done.stderr.startswith("pack_gpu: ")
            and "Traceback" not in done.stderr
        ), done


def entry(kind: int, arch: int, code: bytes) -> bytes:
    """Returns an entry of a fat binary, with a header of 64 bytes."""
    header = struct.pack("<HHIQ12xI32x", kind, 1, 64, len(code), arch)
    return header + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_code_of_one_gpu_is_packed(tmp_path: Path) -> None:
    """Headers stay, and PTX where a fat binary has no code for that GPU. 1 is PTX, 2 a cubin."""
    code = b"code" * 8
    native = fat(entry(2, 80, code), entry(2, 90, b"here" * 8), entry(1, 90, code))
    older = fat(entry(2, 80, code), entry(1, 80, b"text" * 8), entry(1, 120, code))
    no_fat_binary = native[:4] + b"else" * 20
    text = b"text between" + native[:10]  # cut within the header
    wheel, out, site = tmp_path / "a-1-py3-none-any.whl", tmp_path / "out", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("a/lib.so.2", b"elf" + native + no_fat_binary + older + text)
        made.writestr("a/data.bin", native)
    assert run("pack", out, "--arch", 90, wheel).returncode == 0
    assert run("unpack", out, site).returncode == 0
    zeroes = bytes(32)
    kept = fat(entry(2, 80, zeroes), entry(2, 90, b"here" * 8), entry(1, 90, zeroes))
    kept_older = fat(entry(2, 80, zeroes), entry(1, 80, b"text" * 8), entry(1, 120, zeroes))
    found = (site / "a/lib.so.2").read_bytes()
    assert found == b"elf" + kept + no_fat_binary + kept_older + text
    assert (site / "a/data.bin").read_bytes() == native, "no library"


def test_a_gpu_runs_code_of_older_ones_of_its_generation() -> None:
    """Most of torch 2.13's fat binaries have this code: none of an L40S (89) or B300 (103)."""
    spec = importlib.util.spec_from_file_location("pack_gpu", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    code, zeroes = b"code" * 8, bytes(32)
    archs = (75, 80, 86, 90, 100, 120)
    for arch, kept in ((89, (80, 86)), (103, (100,)), (90, (90,))):
        found = script.keep_arch(fat(*(entry(2, its, code) for its in archs)), arch)
        assert found == fat(*(entry(2, its, code if its in kept else zeroes) for its in archs))


def test_the_recipe_packs_a_vllm_that_the_connector_supports() -> None:
    for file in (SCRIPT, ROOT / "docs/how-to/run-on-gpus.md"):
        versions = re.findall(r"vllm==([\d.]+)", file.read_text())
        assert versions, file
        assert all(Version(version) >= OLDEST_VLLM for version in versions), file
