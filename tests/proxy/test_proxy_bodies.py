"""What clients may send, what is disaggregated, and what each leg gets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.proxy.bodies import _NOT_FOR_PREFILL, FORBIDDEN, BadBody, parse

COMPLETION = {"model": "m", "prompt": "hi"}


def whole(chat: bool = False, **fields: object) -> str:
    return parse(json.dumps({**COMPLETION, **fields}).encode()).whole(chat)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"a","kv_transfer_params":{}}',
        b'{"prompt":"a","kv_transfer_params":null}',
        b'{"kv_transfer_params":{"x":1},"prompt":"a","kv_transfer_params":null}',
        b'{"kv_transfer_param\\u0073":{}}',
        b'{"\\u006bv_transfer_params":{}}',
        b'{"kv\\u005Ftransfer\\u005fparams":{}}',
        b'{"vllm_xargs":{"kv_transfer_params":"x"}}',
        b'{"a":[{"b":[{"ec_transfer_params":1}]}]}',
        b'{"a":{"kv_transfer_params":1},"a":2}',
        b'{"ec_transfer_params":{}}',
    ],
)
@pytest.mark.parametrize("size", [0, 10_000])
def test_kv_fields_are_refused_however_they_are_written(raw: bytes, size: int) -> None:
    raw = raw[:-1] + b',"pad":"' + b"x" * size + b'"}'
    with pytest.raises(BadBody) as caught:
        body = parse(raw)
        if b"_transfer_params" not in body.plain():  # of a field given twice, an engine gets only the last
            raise BadBody("kv_transfer_params is gone", "kv_transfer_params")
    assert caught.value.param in ("kv_transfer_params", "ec_transfer_params")
    assert caught.value.param in str(caught.value)


@pytest.mark.parametrize("size", [0, 10_000])
def test_kv_fields_as_text_are_only_text(size: int) -> None:
    body = parse(b'{"prompt":"set \\"kv_transfer_params\\": {} \\u006b","pad":"' + b"x" * size + b'"}')
    assert json.loads(body.plain())["prompt"] == 'set "kv_transfer_params": {} k'


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'"a"', b"{", b'{"a":NaN}', b'{"a":[Infinity]}', b'{"a":1}x', b'{"\xff":1}', b"\xff\xfe{\x00}\x00",
     b'{"a":' + b"[" * 100_000, b'{"\\u0061":' + b"9" * 5000 + b"}", b'{"a":"\\ud800"}', b'\xef\xbb\xbf{"a":1}'],
)  # fmt: skip
def test_what_is_not_an_object_in_json_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse(raw)


def test_numbers_and_strings_stay_as_written() -> None:
    raw = b'{"prompt":"\\u00e9\\/","temperature":0.10,"seed":123456789012345678901234567890,"top_p":1e-7,"x":-0.0}'
    sent = parse(raw).decode("g")
    for part in (b'"\\u00e9\\/"', b":0.10,", b":123456789012345678901234567890,", b":1e-7,", b":-0.0,"):
        assert part in sent


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"best_of": 3}, {"echo": True}, {"use_beam_search": True}, {"prompt_logprobs": 0}, {"max_tokens": 0},
     {"prompt": ["a"]}, {"prompt": [[1, 2]]}, {"prompt": []}, {"prompt": 7}, {"prompt": None}, {"prompt_embeds": "x"},
     {"truncate_prompt_tokens": -1}, {"prompt": {"a": 1}}, {"n": "1"}],
)  # fmt: skip
def test_served_whole(fields: dict[str, object]) -> None:
    assert whole(**fields) == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 1}, {"n": None}, {"echo": False}, {"prompt": [1, 2, 3]}, {"prompt_logprobs": None}, {"max_tokens": 1},
     {"best_of": 1}, {"truncate_prompt_tokens": 5}, {"stream": True}, {"logprobs": 3}],
)  # fmt: skip
def test_disaggregated(fields: dict[str, object]) -> None:
    assert whole(**fields) == ""


def test_chat_needs_messages() -> None:
    assert whole(chat=True) == "messages"
    assert whole(chat=True, messages=[]) == ""
    assert whole(chat=True, messages=[], n=2) == "n"


def test_prefill_leg_of_a_completion() -> None:
    raw = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50, "min_tokens": 9,
           "n": 1, "logprobs": 2, "temperature": 0.5, "add_special_tokens": False, "cache_salt": "s"}  # fmt: skip
    leg = json.loads(parse(json.dumps(raw).encode()).prefill(False, "G"))
    assert leg == {**COMPLETION, "max_tokens": 1, "stream": False, "temperature": 0.5, "add_special_tokens": False,
                   "cache_salt": "s", "kv_transfer_params": {"disagg_grant": "G"}}  # fmt: skip


def test_prefill_leg_of_a_chat() -> None:
    raw = {"messages": [{"role": "user"}], "tools": [1], "tool_choice": "required", "max_completion_tokens": 50,
           "logprobs": True, "top_logprobs": 3, "response_format": {"type": "text"},
           "reasoning_effort": "low"}  # fmt: skip
    leg = json.loads(parse(json.dumps(raw).encode()).prefill(True, "G"))
    assert leg == {"messages": [{"role": "user"}], "tools": [1], "tool_choice": "required", "max_completion_tokens": 1,
                   "response_format": {"type": "text"}, "reasoning_effort": "low", "max_tokens": 1, "stream": False,
                   "kv_transfer_params": {"disagg_grant": "G"}}  # fmt: skip


names = st.text().filter(lambda name: name not in FORBIDDEN)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(names | st.sampled_from(["prompt", "n", "stream", "max_tokens"]), values), st.booleans())
def test_editing_preserves_all_other_fields(fields: dict[str, object], ascii_only: bool) -> None:
    body = parse(json.dumps(fields, ensure_ascii=ascii_only, indent=1).encode("utf-8", "replace"))
    grant = {"kv_transfer_params": {"disagg_grant": "G"}}
    fields = json.loads(json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "replace"))
    exact = repr  # tells 1 from 1.0 and True
    assert exact(json.loads(body.plain())) == exact(fields)
    assert exact(json.loads(body.decode("G"))) == exact({**fields, **grant})
    leg = json.loads(body.prefill(False, "G"))
    edited = {"max_tokens", "kv_transfer_params"} | _NOT_FOR_PREFILL
    assert exact({k: v for k, v in leg.items() if k not in edited}) == exact(
        {k: v for k, v in fields.items() if k not in edited}
    )
    # the order is the client's
    assert [k for k in json.loads(body.decode("G")) if k != "kv_transfer_params"] == list(fields)
