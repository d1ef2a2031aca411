"""Reads metrics pages as engines write them."""

import pytest

from vllm_disagg.proxy.telemetry.kv_traffic import KvRate, KvSums, KvTraffic


def page(received: int, early: int = 0, reused: int = 0, waiting: float = 0, **wire: int) -> bytes:
    label = 'engine="0",model_name="m"'
    lines = [
        "# TYPE vllm:disagg_received_bytes_total counter",
        f"vllm:disagg_received_bytes_total{{{label}}} {float(received)}",
        f"vllm:disagg_overlapped_bytes_total{{{label}}} {float(early)}",
        f"vllm:disagg_reused_bytes_total{{{label}}} {float(reused)}",
        f"vllm:num_requests_waiting{{{label}}} {waiting}",
    ]
    for name, count in wire.items():
        name_label = f'{label},transport="{name}"'
        lines.append(f"vllm:disagg_received_wire_bytes_total{{{name_label}}} {float(count)}")
    return "\n".join([*lines, "other 7\n"]).encode()


def test_rates_and_sums_are_those_of_the_last_minutes() -> None:
    traffic = KvTraffic()
    for second in range(0, 401, 2):
        traffic.on_metrics_read(
            "d",
            None,
            page(second * 100, second * 80, second, 3, tcp=second * 90, nixl=second * 10),
            float(second),
        )
    assert traffic.rate("d", 400.0) == KvRate(100.0, "tcp")
    assert traffic.sums(400.0) == KvSums(30_000, 24_000, 300)
    assert traffic.waiting("d") == 3
    # It is read no more: nothing flows that is known.
    assert traffic.rate("d", 430.0) == KvRate()


def test_a_new_process_begins_at_zero() -> None:
    traffic = KvTraffic()
    for second, received in ((0, 1000), (10, 9000), (20, 50), (30, 250)):
        traffic.on_metrics_read("d", None, page(received, tcp=received), float(second))
    assert traffic.sums(30.0).received == 200, "no negative bytes"
    assert traffic.rate("d", 30.0) == KvRate(20.0, "tcp")


def test_ranks_are_told_apart() -> None:
    traffic = KvTraffic()
    both = page(100, waiting=1) + page(700, waiting=5).replace(b'engine="0"', b'engine="1"')
    traffic.on_metrics_read("d@1", 1, page(0) + page(0).replace(b'engine="0"', b'engine="1"'), 0.0)
    traffic.on_metrics_read("d@1", 1, both, 10.0)
    assert traffic.sums(10.0).received == 700 and traffic.waiting("d@1") == 5


def test_what_an_engine_lacks_is_not_known() -> None:
    traffic = KvTraffic()
    traffic.on_metrics_read("d", None, b"vllm:other 7\n", 0.0)
    assert traffic.rate("d", 0.0) == KvRate() and traffic.waiting("d") is None
    assert traffic.rate("e", 0.0) == KvRate() and traffic.waiting("e") is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999"])
def test_numbers_without_a_value_are_left_out(value: str) -> None:
    traffic = KvTraffic()
    odd = f'vllm:disagg_received_bytes_total{{engine="0"}} {value}\n'.encode()
    traffic.on_metrics_read("d", None, odd, 0.0)
    traffic.on_metrics_read("d", None, page(5, quic=9), 10.0)  # a transport of another version
    assert traffic.sums(10.0).received == 5


def test_text_instead_of_a_number_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        KvTraffic().on_metrics_read("d", None, b"vllm:num_requests_waiting many\n", 0.0)


def test_engines_that_left_are_forgotten() -> None:
    traffic = KvTraffic()
    for url in ("d", "e"):
        traffic.on_metrics_read(url, None, page(0), 0.0)
        traffic.on_metrics_read(url, None, page(10), 10.0)
    traffic.keep(["e"])
    assert traffic.sums(10.0).received == 10 and traffic.waiting("d") is None
