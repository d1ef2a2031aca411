"""Grants, keys and settings: what is believed and what is not."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg import config
from vllm_disagg.errors import BadGrant, ConfigError
from vllm_disagg.fleet import dialling, grants, keys, registration, sealing
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, StridedRegion
from vllm_disagg.protocol import peers

KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
GRANT = grants.Grant(
    2,
    "decode",
    "ab" * 16,
    "engine",
    [peers.WorkerInfo("n", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "", "h")],
    5.0,
)


def test_what_was_minted_verifies() -> None:
    assert grants.verify(KEY, grants.mint(KEY, GRANT)) == GRANT


def test_a_text_that_is_not_utf_8_is_no_grant() -> None:
    """Its MAC is right: without a key every client can mint."""
    payload = sealing.decode(grants.mint(KEY, GRANT).partition(".")[0])
    broken = payload.replace(b"engine", b"eng\xff\xfee")
    assert broken != payload
    token = sealing.seal(KEY, grants.USE, broken)
    with pytest.raises(BadGrant, match="not a grant"):
        grants.verify(KEY, token)


@pytest.mark.parametrize("other", [keys.FleetKey(b"x" * keys.KEY_BYTES), keys.FleetKey(None)])
def test_another_key_mints_nothing_we_believe(other: keys.FleetKey) -> None:
    with pytest.raises(BadGrant, match="another key"):
        grants.verify(KEY, grants.mint(other, GRANT))


def test_without_a_key_nothing_is_believed_except_where_that_is_asked_for() -> None:
    """Everybody can mint what has no key."""
    everybody = keys.FleetKey(None)
    with pytest.raises(BadGrant, match="no fleet key"):
        grants.verify(everybody, grants.mint(everybody, GRANT))
    assert grants.verify(keys.load("", insecure=True), grants.mint(everybody, GRANT)) == GRANT


def at(
    control: str = "tcp://127.0.0.1:1", data: str = "tcp://127.0.0.1:2", local: str = ""
) -> list[peers.WorkerInfo]:
    return [P, peers.WorkerInfo("n", control, data, local)]


P = peers.WorkerInfo(
    "p", "tcp://127.0.0.1:1", "tcp://[::1]:2", "ipc:///tmp/vllm-disagg-ab12_xyz/data"
)


@pytest.mark.parametrize(
    "local",
    ["", "ipc:///tmp/vllm-disagg-ab12_xyz/data", "ipc:///var/tmp/a b/vllm-disagg-abcdefgh/data"],
)
@pytest.mark.parametrize(
    "where",
    ["tcp://127.0.0.1:1", "tcp://127.9.9.9:65535", "tcp://[::1]:80", "tcp://[::ffff:127.0.0.1]:80"],
)
def test_what_an_engine_on_loopback_dials(where: str, local: str) -> None:
    assert not dialling.refusal(at(where, where, local), loopback_only=True)


@pytest.mark.parametrize(
    "where",
    ["tcp://10.0.0.1:1", "tcp://[2001:db8::1]:80", "tcp://8.8.8.8:1", "tcp://[::ffff:10.0.0.1]:1"],
)
def test_other_machines_are_dialled_only_by_those_who_have_a_key_and_an_address_there(
    where: str,
) -> None:
    assert not dialling.refusal(at(where, where), loopback_only=False)
    for workers in (at(where), at(data=where)):
        assert "not loopback" in dialling.refusal(workers, loopback_only=True)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        *[
            (f"tcp://{host}:1", "IP address")
            for host in ("localhost", "example.org", "127.1", "0x7f.0.0.1", "", "[127.0.0.1]")
        ],
        *[
            (f"tcp://{host}:1", "IP address")
            for host in ("127.0.0.1 ", "::1", "[::1", "[fe80::1%eth0]", "1;127.0.0.1", "*")
        ],
        *[
            (f"tcp://127.0.0.1{port}", "IP address")
            for port in ("", ":", ":0", ":65536", ":-1", ":http", ":1/x", ":1\n")
        ],
        *[
            (f"{scheme}127.0.0.1:1", "IP address")
            for scheme in ("", "http://", "ipc://", "inproc://", "udp://", "TCP://")
        ],
        *[(f"tcp://{host}:1", "unspecified") for host in ("0.0.0.0", "[::]", "[::ffff:0.0.0.0]")],
        *[(f"tcp://{host}:1", "multicast") for host in ("224.0.0.1", "[ff02::1]")],
        *[
            (f"tcp://{host}:80", "link-local")
            for host in ("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]")
        ],
        *[(f"tcp://{host}:1", "reserved") for host in ("255.255.255.255", "240.0.0.1", "0.1.2.3")],
    ],
)
def test_what_no_engine_dials(where: str, words: str) -> None:
    for workers in (at(where), at(data=where)):
        assert words in dialling.refusal(workers, loopback_only=False)


@pytest.mark.parametrize(
    "local",
    [
        "/tmp/vllm-disagg-ab12_xyz/data",
        "ipc:///run/docker.sock",
        "ipc://@hidden",
        "ipc://vllm-disagg-ab12_xyz/data",
        "ipc:///tmp/vllm-disagg-ab12_xyz/data/",
        "ipc:///tmp/vllm-disagg-ab12_xyz/other",
        "tcp://127.0.0.1:1",
        "ipc://",
        "ipc:///tmp/../run/vllm-disagg-ab12_xyz/data",
        f"ipc:///{'x' * 90}/vllm-disagg-ab12_xyz/data",
    ],
)
def test_a_local_address_is_one_that_an_engine_makes(local: str) -> None:
    assert "local address" in dialling.refusal(at(local=local), loopback_only=False)


def test_a_door_is_at_the_address_of_its_worker() -> None:
    assert dialling.is_at("tcp://[::1]:80", "::1") and dialling.is_at(
        "tcp://10.0.0.1:80", "10.0.0.1"
    )
    for host in ("10.0.0.2", "", "localhost", "::ffff:10.0.0.2"):
        assert not dialling.is_at("tcp://10.0.0.1:80", host)


@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.text(),
        st.dictionaries(st.text(), st.text()),
        st.lists(st.text()),
    )
)
def test_anything_else_is_a_bad_grant(token: object) -> None:
    with pytest.raises(BadGrant):
        grants.verify(KEY, token)


def test_a_grant_for_64_ranks_is_a_token() -> None:
    """With two kinds of layers, as Gemma 3 has them, and eighty of them."""
    axes: list[Axis] = [("h", 8, 1 << 15), ("c", 128, 256), ("t", 128, 2), ("c", 2, 1)]
    regions = [[StridedRegion(0, axes), StridedRegion(1 << 14, axes)]]
    kinds = [
        LayerLayout("keys and values of 128, bfloat16", 128, [1 << 18], regions, 8, 504, 512, group)
        for group in (0, 1)
    ]
    holds = RankLayout(kinds, [0, 1] * 40, 80)
    host = "tcp://[2001:0db8:85a3:0000:0000:8a2e:0370:7334]:65535"
    local = "ipc:///tmp/vllm-disagg-12345678/data"
    worker = peers.WorkerInfo(
        "0123456789ab/63", host, host, local, "a" * 36, ["nixl", "nccl"], holds
    )
    token = grants.mint(KEY, msgspec.structs.replace(GRANT, sources=[worker] * 64))
    assert (
        len(token) <= sealing.MAX_TOKEN_CHARACTERS
        and grants.verify(KEY, token).sources[63] == worker
    )


def test_every_flipped_bit_of_the_token_is_noticed() -> None:
    token = grants.mint(KEY, GRANT)
    body = token.partition(".")[0]
    for at in range(len(body)):
        for replacement in "AQ":
            if token[at] != replacement:
                with pytest.raises(BadGrant):
                    grants.verify(KEY, token[:at] + replacement + token[at + 1 :])


@pytest.mark.parametrize(
    "change",
    [
        *[{"version": 1}, {"version": 3}, {"until": -1.0}, {"until": float("nan")}],
        *[{"leg": "both"}, {"transfer": "not hex"}, {"patience": -1.0}, {"patience": float("nan")}],
    ],
)
def test_a_grant_of_another_shape_is_refused_even_with_the_right_key(
    change: dict[str, object],
) -> None:
    values = {name: getattr(GRANT, name) for name in GRANT.__struct_fields__} | change
    with pytest.raises(BadGrant):
        grants.verify(KEY, grants.mint(KEY, grants.Grant(**values)))  # type: ignore[arg-type]


def test_difference_names_the_fact() -> None:
    assert peers.difference({"dtype": "a", "x": "1"}, {"dtype": "a", "x": "1"}) == ""
    assert "dtype is a on one side and b" in peers.difference({"dtype": "a"}, {"dtype": "b"})
    assert "unknown" in peers.difference({"dtype": "a"}, {})


def test_uses_have_keys_of_their_own() -> None:
    assert (
        len(
            {
                KEY.derive("grant"),
                KEY.derive("curve-server"),
                KEY.derive("curve-client"),
                b"k" * keys.KEY_BYTES,
            }
        )
        == 4
    )
    assert "kkk" not in repr(KEY)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys.create(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (
        keys.load(str(path)).derive("grant")
        == keys.load(str(path)).derive("grant")
        != KEY.derive("grant")
    )
    with pytest.raises(ConfigError, match="exists"):
        keys.create(str(path))
    for text in (b"", b"abc", b"\xff\xfe", b"00" * 31):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="copy the fleet's file again"):
            keys.load(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        keys.load(str(tmp_path / "none"))
    assert not keys.load("").is_set


OLD, NEW = b"o" * keys.KEY_BYTES, b"n" * keys.KEY_BYTES


def written(path: Path, *secrets: bytes) -> keys.FleetKey:
    path.write_text("\n".join(secret.hex() for secret in secrets) + "\n")
    path.chmod(0o600)
    return keys.load(str(path))


def test_each_step_of_a_rotation_fits_its_neighbours(tmp_path: Path) -> None:
    """The old key, then both with the old one first, then with the new one first, then that."""
    files = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    steps = [written(tmp_path / str(number), *file) for number, file in enumerate(files)]
    note = registration.RegistrationNote("c", "i", 1, "decode", "http://h:1")
    for number, mine in enumerate(steps):
        for other in steps[max(0, number - 1) : number + 2]:
            assert grants.verify(other, grants.mint(mine, GRANT)) == GRANT
            assert registration.read(other, registration.sign(mine, note)) == note
            assert mine.named(other.name).derive("curve-server") == other.derive("curve-server")
    for mine, other in ((steps[0], steps[3]), (steps[3], steps[0])):
        with pytest.raises(BadGrant, match="another key"):
            grants.verify(other, grants.mint(mine, GRANT))
        with pytest.raises(BadGrant, match="another key"):
            registration.read(other, registration.sign(mine, note))
        assert mine.named(other.name) is mine
    assert keys.FleetKey(None).name == ""


def test_key_files_that_are_no_step_of_a_rotation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 keys, at most 2"):
        written(tmp_path / "key", OLD, NEW, b"x" * keys.KEY_BYTES)
    with pytest.raises(ConfigError, match="both lines have the same key"):
        written(tmp_path / "key", OLD, OLD)
    with pytest.raises(ConfigError, match="not 64 hexadecimal digits; copy the fleet's file"):
        written(tmp_path / "key", OLD, b"short")


def test_only_a_missing_key_file_is_to_be_made(tmp_path: Path) -> None:
    """Beside one that is there `vllm-disagg key` would make the key of another fleet."""
    with pytest.raises(ConfigError, match="make one with: vllm-disagg key"):
        keys.load(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"Is a directory$"):
        keys.load(str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"hots": "127.0.0.1"}, "hots"),
        ({"lease": "long"}, "lease"),
        ({"lease": -1}, "lease"),
        ({"peer_timeout": 1.0, "keepalive_interval": 0.5}, "peer_timeout"),
        ({"silence": 1.0, "peer_timeout": 1.0, "key_file": "k"}, "silence is the old name of"),
        ({"host": "0.0.0.0"}, "wildcard"),
        ({"host": "::"}, "wildcard"),
        *[
            ({"host": host, "key_file": "k"}, "no engine connects")
            for host in ("169.254.1.1", "fe80::1", "224.0.0.1", "240.0.0.1")
        ],
        ({"host": "example.org"}, "IP address"),
        ({"host": "10.0.0.1"}, "key_file"),
        ({"host": "10.0.0.1", "insecure": True}, "key_file"),
        ({}, "set key_file .*vllm-disagg key FILE.*insecure"),
        ({"key_file": ""}, "set key_file .*vllm-disagg key FILE.*insecure"),
        ({"insecure": False}, "set key_file .*vllm-disagg key FILE.*insecure"),
        ({"key_file": "k", "insecure": True}, "exclude"),
        ({"compress": "fp4"}, "compress"),
        *[
            ({"compress": "fp8", "transport": name}, f"compress.*transport is {name}")
            for name in ("nixl", "gloo", "nccl")
        ],
    ],
)
def test_bad_settings_are_named(extra: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.parse(extra)


def test_good_settings() -> None:
    assert config.parse({"key_file": "k"}) == config.Config(key_file="k")
    assert config.parse({"insecure": True}) == config.Config(insecure=True)
    assert config.parse({"host": "10.0.0.1", "key_file": "k"}).host == "10.0.0.1"
    assert config.parse({"key_file": "k"}).compress == "off"
    for transport in ("auto", "zmq"):
        assert (
            config.parse({"key_file": "k", "compress": "fp8", "transport": transport}).compress
            == "fp8"
        )


@pytest.mark.parametrize(("old", "new"), config.OLD_NAMES.items())
def test_old_names_of_settings_still_work(old: str, new: str) -> None:
    value = 4096 if new.endswith("_bytes") else 1.6
    if new == "keepalive_interval":
        value = 0.1
    extra = {"key_file": "k", old: value}
    assert getattr(config.parse(extra), new) == value
    assert config.old_names_warning(extra).count("\n") == 0
    assert f"{old} is now {new}" in config.old_names_warning(extra)
    assert config.old_names_warning({"key_file": "k", new: value}) == ""
