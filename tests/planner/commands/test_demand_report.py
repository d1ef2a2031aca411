"""`plan --rate --report`: the same answer as text, as JSON and as a page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from profile_files import profile_file

from vllm_disagg import cli

GPUS = ["plan", "--gpu", "h100", "--decode-gpu", "h20", "--model", "llama-3.1-8b", "--rate", "20"]
GPUS += ["--gpus", "3", "--workload", "500:20", "--ttft", "1", "--requests", "150", "--seeds", "1"]


def _answers(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str
) -> tuple[str, dict[str, Any], str]:
    """Returns the text, the JSON document, and the page as plain text."""
    assert cli.main([*words, "--report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert cli.main([*words, "--report", str(folder), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["report"] == [str(folder / "report.html")]
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    page = (folder / "report.html").read_text()
    assert "<img" not in page and "src=" not in page
    return text, document, html.unescape(re.sub("<[^>]+>", "\n", page))


@pytest.mark.parametrize(
    ("words", "unit", "columns"),
    [
        ([], "GPU", "GPUs attainment"),
        (["--by", "power"], "kW", "GPUs kW attainment"),
        (["--prices", "prices.json"], "$/h", "GPUs $/h attainment"),
    ],
)
def test_a_demand_is_whole_in_each_form(
    words: list[str],
    unit: str,
    columns: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # No plot is drawn.
    monkeypatch.setattr("vllm_disagg.planner.commands.report.find_spec", lambda name: None)
    (tmp_path / "prices.json").write_text('{"h100": 2.5, "h20": 1.25}')
    text, document, page = _answers(capsys, tmp_path / "out", *GPUS, *words, "--spill")
    assert document["counted"] == unit
    assert " ".join(text.split()).count(columns) == 1 and " ".join(page.split()).count(columns) == 1
    lines = text.splitlines()
    verdict = next(line for line in lines if line.startswith(document["recommendation"] + ": "))
    assert verdict.endswith(" for 20 req/s") and " kW" in verdict
    for line in (verdict, *lines[:4]):
        assert line in page.split("\n"), line
    least = (
        f"by capacity alone no placement needs less than {document['least_possible']:.4g} {unit}"
    )
    assert least in text and least in page
    for kind in ("disaggregated", "colocated"):
        row = document[kind]
        for name in ("ttft_p90", "ttft_p99", "tpot_p90", "tpot_p99"):
            assert f" {row[name]:.3f} " in text and f"\n{row[name]:.3f}\n" in page
        assert ("cost_per_hour" in row) == (unit == "$/h") and row["kilowatts"] > 0
        assert f"{row['gpus']}" in page
    assert document["commands"]
    for command in document["commands"]:
        assert f"  {command}\n" in f"{text}\n" and command in page
    for remark in document["remarks"]:
        assert f"note: {remark}" in text and remark in page


def test_a_demand_from_a_profile_shows_its_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profile_file(tmp_path / "points.json", model="org/<m>")
    words = ["plan", "--profile", path, "--link", "none", "--rate", "1", "--gpus", "2"]
    words += ["--workload", "100:10", "--requests", "100", "--seeds", "1"]
    text, document, page = _answers(capsys, tmp_path / "out", *words)
    assert set(document["fits"][str(path)]["worst_error"]) == {"prefill", "decode"}
    fit = f"fit of {path}: prefill "
    assert text.count(fit) == 1 and page.count(fit) == 1
    assert "Residuals of the fit" in page and "\n+0.0%\n" in page
    assert "<m>" not in (tmp_path / "out" / "report.html").read_text()


def test_a_demand_with_drafts_tells_their_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in GPUS if word not in ("--decode-gpu", "h20")]
    words += ["--acceptance-length", "2.2", "--speculative-config"]
    words += ['{"method":"eagle3","num_speculative_tokens":2}']
    text, document, page = _answers(capsys, tmp_path, *words)
    assert document["drafts"]["acceptance_length"] == 2.2
    line = "drafts: 2 by eagle3, 2.2 a step: TPOT of a request alone"
    assert line in text and line in page


def test_one_gpu_is_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GPUS, "--rate", "2"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert ": 1 GPU, 0." in out and " 1 GPUs" not in out
