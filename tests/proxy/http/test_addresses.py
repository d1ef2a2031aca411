"""Checks URLs and host names of instances, and the networks that they may be in."""

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy.http.addresses import (
    AllowedNetworks,
    bad_name,
    check_url,
    host_of,
    parse_networks,
)

LONG = "x" * 64
GOOD = [
    "http://gpu1:8200",
    "https://gpu1.cluster",
    "http://gpu1.cluster.:1",
    "http://10.0.0.1",
    "http://[::1]:81",
    "http://a_b-c.d:65535",
    "http://[fe80::1%eth0]:1",
    "http://xn--bcher-kva.example:443@3",
    f"https://{'x' * 63}.{'y' * 63}:80",
]
BAD = [
    "http://gpu1..cluster:8200",
    "http://.",
    "http://.a",
    "http://..",
    "http://127.1",
    "http://2852039166",
    "http://0xa9fea9fe",
    "http://1.2.3.4.5",
    "http://a.0x1",
    "http://h%41",
    "http://h:0",
    "http://h:65536",
    "http://h:999999999999999999999",
    "http://h:0065535999",
    "http://h:",
    "http://h:-1",
    "http://h:1:2",
    "http://u@h",
    "http://@h",
    "http://u:p@h",
    "http://h?",
    "http://h?q",
    "http://h#",
    "http://h/p",
    "ftp://h",
    "h:1",
    "http://",
    "http://[::1",
    "http://[::1]x",
    "http://[]",
    "http://[127.0.0.1]",
    "http://[a]:1",
    "http://::1",
    "http://h\\x",
    "http://b\u00fccher",
    "",
    "http://a b",
    "http://h:8 0",
    "http://h\n",
    "http://h\u0000",
    f"http://{LONG}:80",
    f"http://a.{LONG}.b",
    f"http://{'a.' * 126}aa",
]


@pytest.mark.parametrize("url", GOOD)
def test_good_urls(url: str) -> None:
    assert (
        check_url(url, "x")
        == check_url(url.replace("@3", "") + "/" + ("@3" if "@3" in url else ""), "x")
        == url
    )


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("HTTP://Gpu1.Cluster:8200/", "http://gpu1.cluster:8200"),
        ("http://h:08200@3", "http://h:8200@3"),
        ("http://[0:0::A]:1", "http://[::a]:1"),
        ("HTTP://h:080", "http://h"),
        ("https://[::1]:443@3", "https://[::1]@3"),
        ("http://[FE80::1%Eth0]:1", "http://[fe80::1%Eth0]:1"),
    ],
)
def test_an_instance_has_one_spelling(given: str, url: str) -> None:
    """Under two of them it was two instances, and each looked like another one to go to."""
    assert check_url(given, "x") == url


@pytest.mark.parametrize("url", BAD)
def test_bad_urls_are_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^x: ") as caught:
        check_url(url, "x")
    assert "\n" not in str(caught.value)


def test_every_good_name_can_be_looked_up() -> None:
    """A URL that passes the check can be encoded by the event loop."""
    for name in ("a", "a.", "a.b", "a_b", "10.0.0.1", "::1", "b\u00fccher.example", "x" * 63):
        assert not bad_name(name)
        name.encode("idna")
    for name in (
        "",
        ".",
        "a..b",
        LONG,
        "127.1",
        "a\x00",
        "\uff11\uff12\uff17.0.0.1",
        "a\u3002\u3002b",
    ):
        assert bad_name(name), name


@pytest.mark.parametrize(
    ("allowed", "address", "may"),
    [
        ("", "10.0.0.7", True),
        ("", "127.0.0.1", True),
        ("", "::1", True),
        ("", "169.254.169.254", False),
        ("", "::ffff:169.254.169.254", False),
        ("", "fe80::1", False),
        ("", "fe80::1%eth0", False),
        ("", "224.0.0.1", False),
        ("", "ff02::1", False),
        ("", "0.0.0.0", False),
        ("", "::", False),
        ("", "::ffff:0.0.0.0", False),
        ("10.0.0.0/8,127.0.0.0/8", "10.255.0.1", True),
        ("10.0.0.0/8, 127.0.0.0/8", "127.0.0.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("10.0.0.0/8", "::1", False),
        ("0.0.0.0/0", "169.254.169.254", False),
        ("0.0.0.0/0", "224.0.0.1", False),
        ("169.254.7.0/24", "169.254.7.1", True),
        ("fd00::/8", "fd00::1", True),
        ("", "fd00:ec2::254", False),
        ("fd00::/8", "fd00:ec2::254", False),
        ("", "fd20:ce::254", False),
        ("", "168.63.129.16", False),
        ("", "100.100.100.200", False),
        ("100.64.0.0/10", "100.100.100.200", False),
        ("100.64.0.0/10", "100.100.100.201", True),
        ("", "64:ff9b::169.254.169.254", False),
        ("", "64:ff9b::10.0.0.7", True),
        ("", "64:ff9b::100.100.100.200", False),
        ("", "2002:a9fe:a9fe::1", False),
        ("", "2002:a00:7::1", True),
        ("10.0.0.0/8", "2002:a00:7::1", False),
        ("2002::/16", "2002:a00:7::1", True),
        ("64:ff9b::/96", "64:ff9b::10.0.0.7", True),
        ("", "name", False),  # only addresses are asked for
    ],
)
def test_networks(allowed: str, address: str, may: bool) -> None:
    assert AllowedNetworks(parse_networks(allowed)).allow(address) is may


def test_urls_in_networks() -> None:
    networks = AllowedNetworks(parse_networks("10.0.0.0/8"))
    for url in ("http://10.1.2.3:1", "https://10.1.2.3@2", "http://name:80"):
        assert networks.check(url, "x") == url
    for url in ("http://11.1.2.3:1", "https://[::1]:4@2"):
        with pytest.raises(ConfigError, match=r"^x: .* in none of --instance-networks"):
            networks.check(url, "x")
    assert host_of("https://[::1]:4@2") == "::1"


@pytest.mark.parametrize("text", ["10.0.0.1/8", "x", "10.0.0.0/33", ",", "10.0.0.0/8,x"])
def test_networks_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--instance-networks: "):
        parse_networks(text)
