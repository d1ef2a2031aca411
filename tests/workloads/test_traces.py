"""Tests traces: accepted formats, and the error texts for others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.workloads import traces
from vllm_disagg.workloads.traces import (
    ALIBABA_BLOCK_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    Trace,
    TraceRequest,
)


def write(folder: Path, *lines: str) -> str:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def record(**changed: object) -> str:
    fields = {
        "timestamp": 1500,
        "input_length": 600,
        "output_length": 5,
        "hash_ids": [7, 8],
    } | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def test_mooncake_is_in_milliseconds_with_512_tokens_to_an_id(tmp_path: Path) -> None:
    read = traces.read(
        write(tmp_path, record(timestamp=500), record(hash_ids=[7, 9]), ""), "--trace"
    )
    assert read == Trace(
        (TraceRequest(0.0, 600, 5, (7, 8)), TraceRequest(1.0, 600, 5, (7, 9))),
        MOONCAKE_BLOCK_TOKENS,
    )


def test_alibaba_is_in_seconds_with_16_tokens_to_an_id(tmp_path: Path) -> None:
    read = traces.read(
        write(
            tmp_path, record(timestamp=3, input_length=30), record(timestamp=4.5, input_length=20)
        ),
        "--trace",
    )
    assert read.block == ALIBABA_BLOCK_TOKENS
    assert [request.arrival for request in read.requests] == [0.0, 1.5]


def _turns(**later: object) -> list[str]:
    """A prompt of 40 tokens with an answer of 24, and a later one."""
    first = {"input_length": 40, "output_length": 24, "hash_ids": [1, 2, 3], "chat_id": 7}
    second = {"input_length": 90, "hash_ids": [1, 2, 4, 5, 6, 8], "chat_id": 9} | later
    return [record(**first, parent_chat_id=-1), record(**second)]


def test_a_later_turn_tells_the_blocks_of_an_answer(tmp_path: Path) -> None:
    """63 of 64 tokens have KV: two blocks that the prompt filled, and one of the answer."""
    path = write(tmp_path, *_turns(parent_chat_id=7))
    read = traces.read(path, "--trace").requests
    assert [request.answer_ids for request in read] == [(4,), ()]


def test_no_id_is_the_parent_of_none(tmp_path: Path) -> None:
    """Null was the text "None", so requests without ids were turns of one conversation."""
    turns = [json.loads(line) | {"chat_id": None} for line in reversed(_turns())]
    path = write(tmp_path, *(json.dumps(turn | {"parent_chat_id": None}) for turn in turns))
    read = traces.read(path, "--trace").requests
    assert [request.answer_ids for request in read] == [(), ()]


@pytest.mark.parametrize(
    "later",
    [
        {},
        {"parent_chat_id": 8},
        {"parent_chat_id": 7, "input_length": 63, "hash_ids": [1, 2, 4, 5]},
        {"parent_chat_id": 7, "hash_ids": [1, 9, 4, 5, 6, 8]},
    ],
    ids=["no parent", "another parent", "shorter than the answer", "another prompt"],
)
def test_an_answer_without_a_turn_that_has_it_is_not_known(
    later: dict[str, object], tmp_path: Path
) -> None:
    read = traces.read(write(tmp_path, *_turns(**later)), "--trace").requests
    assert [request.answer_ids for request in read] == [(), ()]


def test_azure_has_dates(tmp_path: Path) -> None:
    lines = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
    read = traces.read(
        write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", *lines), "--trace"
    )
    assert [(r.prompt, r.answer) for r in read.requests] == [(4808, 10), (3180, 8)]
    assert read.requests[1].arrival == pytest.approx(0.052, abs=1e-6)


def test_a_table_of_a_spreadsheet_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffarrival_s,input_tokens,output_tokens", "1.0,20,2")
    assert [request.prompt for request in traces.read(path, "--trace").requests] == [20]


def test_lengths_are_sorted_by_arrival(tmp_path: Path) -> None:
    read = traces.read(
        write(tmp_path, "arrival_s,input_tokens,output_tokens", "2.5,10,1", "1.0,20,2"), "--trace"
    )
    assert [(r.arrival, r.prompt) for r in read.requests] == [(0.0, 20), (1.5, 10)]


SAME = {
    "Mooncake": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]}\n',
    "Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,5\n"
    "2023-11-16 18:17:05.9799600,700,6\n",
    "lengths": "arrival_s,input_tokens,output_tokens\n0.5,600,5\n2.5,700,6\n",
    "DistServe": '[{"start_time": 1, "prompt_len": 600, "output_len": 5},'
    ' {"start_time": 3, "prompt_len": 700, "output_len": 6}]',
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_formats_are_told_by_their_fields(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "trace").write_bytes(compress(SAME[name].encode()))
    read = traces.read(str(tmp_path / "trace"), "--trace")
    assert read.timed and [(r.prompt, r.answer) for r in read.requests] == [(600, 5), (700, 6)]
    assert [r.arrival for r in read.requests] == pytest.approx([0, 2])


def test_vidurs_lengths_have_no_times(tmp_path: Path) -> None:
    read = traces.read(
        write(tmp_path, "num_prefill_tokens,num_decode_tokens,pd_ratio", "600,5,120", "700,6,1"),
        "--trace",
    )
    assert read == Trace((TraceRequest(0.0, 600, 5), TraceRequest(0.0, 700, 6)), timed=False)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
LENGTHS = "arrival_s,input_tokens,output_tokens"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "it is empty"),
        (["when,what", "1,2"], "the format of its first line is not known"),
        (["[1]"], "the format of its first line is not known"),
        ([record(), "{]"], "line 2: it is not a JSON object"),
        ([record(input_length=None)], "line 1: input_length is missing"),
        (
            [record(output_length="many")],
            "line 1: output_length is many, which is not a whole number",
        ),
        ([record(timestamp=True)], "line 1: timestamp is true"),
        (
            [record(input_length=-3, hash_ids=[])],
            "line 1: input_length is -3: it must be 1 or more",
        ),
        ([record(output_length=0)], "line 1: output_length is 0"),
        ([record(output_length=1.5)], "line 1: output_length is 1.5, which is not a whole number"),
        ([record(timestamp=-1)], "line 1: timestamp is -1"),
        ([record(hash_ids=[-1, 2])], "line 1: hash_ids"),
        ([record(hash_ids=[1, 2, 3])], "line 1: 3 hash_ids for 600 tokens"),
        ([AZURE, "2023-11-16 18:17:03,10"], "line 2: GeneratedTokens is missing"),
        ([AZURE, "yesterday,10,10"], "line 2: TIMESTAMP is yesterday"),
        ([LENGTHS, "1,2,3", "1,-2,3"], "line 3: input_tokens is -2"),
        ([LENGTHS, "1,nan,3"], "line 2: input_tokens is nan"),
        ([LENGTHS, "inf,2,3"], "line 2: arrival_s is inf"),
        ([LENGTHS], "the file holds no requests"),
        (["[]"], "the format of its first line is not known"),
        (["[{"], "it is not a JSON array"),
        (['[{"prompt_len": 1}]'], "record 1: start_time is missing"),
        (
            ['[{"start_time": 1, "prompt_len": 1, "output_len": 1}, 2]'],
            "record 2: it is not a JSON object",
        ),
        ([record(timestamp=None)], "line 1: timestamp is missing"),
        ([record(input_length=True)], "line 1: input_length is true, which is not a whole number"),
        ([record(hash_ids=7)], "line 1: hash_ids"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_in_one_line(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(ConfigError) as error:
        traces.read(path, "--trace")
    assert words in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--trace nowhere: No such file"):
        traces.read("nowhere", "--trace")


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    for content in (b"\xff\xfe\x00", gzip.compress(b"text")[:-9], b"\x1f\x8bnonsense"):
        (tmp_path / "trace").write_bytes(content)
        with pytest.raises(ConfigError, match=r"--trace .*: it is not text"):
            traces.read(str(tmp_path / "trace"), "--trace")
