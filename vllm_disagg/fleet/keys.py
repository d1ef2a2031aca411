"""The fleet key, and the keys derived from it.

One secret of 32 bytes makes a fleet: its holders may mint grants and open control connections.
Each use has its own derived key, BLAKE2b with the use as personalisation.  So a derived key that
leaks reveals no other.

While a fleet changes its key, its members have two: a key file then has two lines.  A member mints,
signs and listens with the first, and accepts what others did with either.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from pathlib import Path

from .. import bearer_keys
from ..errors import ConfigError

log = logging.getLogger("vllm_disagg.keys")

KEY_BYTES = 32
FINGERPRINT_BYTES = 4
MAX_KEYS = 2  # in a key file
OTHERS_MODE = 0o077  # permissions of group and others
# Environment variable with the key that protects a proxy's admin API.
ADMIN_KEY = "DISAGG_ADMIN_KEY"


class FleetKey:
    """The secret of a fleet.  `FleetKey(None)`, of a fleet without one, authenticates no one.

    With `insecure`, an engine without a secret accepts grants, which then anyone can mint.
    `second` is accepted too, while the fleet's key is changed.
    """

    def __init__(
        self, secret: bytes | None, *, insecure: bool = False, second: FleetKey | None = None
    ) -> None:
        if secret is not None and len(secret) != KEY_BYTES:
            raise ConfigError(f"a fleet key has {KEY_BYTES} bytes, this one {len(secret)}")
        self._secret = secret
        self._insecure = insecure
        self._derived: dict[str, bytes] = {}
        self._keyed_hashes: dict[tuple[str, int], hashlib.blake2b] = {}
        # The own one first: it is right except for a few minutes of a fleet's life.
        self.accepted: tuple[FleetKey, ...] = (self,) if second is None else (self, second)

    @property
    def is_set(self) -> bool:
        """Whether the fleet has a secret."""
        return self._secret is not None

    @property
    def accepts_grants(self) -> bool:
        """Whether an engine with this key accepts grants minted with it."""
        return self.is_set or self._insecure

    @property
    def fingerprint(self) -> str:
        """Eight digits by which people compare keys; they reveal nothing of the key."""
        return self.derive("fingerprint")[:FINGERPRINT_BYTES].hex()

    @property
    def name(self) -> str:
        """The public name by which a peer finds this key among its own; empty without a key."""
        return self.fingerprint if self.is_set else ""

    def named(self, name: str) -> FleetKey:
        """Return the accepted key with this name; this key if none has it."""
        for key in self.accepted:
            if key.name == name:
                return key
        return self

    def derive(self, use: str) -> bytes:
        """Return the key of 32 bytes for `use`, which has at most 16 ASCII characters."""
        if use not in self._derived:
            derived = hashlib.blake2b(
                key=self._secret or b"", person=use.encode(), digest_size=KEY_BYTES
            ).digest()
            self._derived[use] = derived
        return self._derived[use]

    def keyed_hash(self, use: str, digest_bytes: int) -> hashlib.blake2b:
        """Return a new hash, still without data, that is keyed with the key for `use`."""
        keyed = self._keyed_hashes.get((use, digest_bytes))
        if keyed is None:
            keyed = hashlib.blake2b(key=self.derive(use), digest_size=digest_bytes)
            self._keyed_hashes[use, digest_bytes] = keyed
        return keyed.copy()

    def __repr__(self) -> str:
        return f"FleetKey({'set' if self.is_set else None})"


def load(path: str, *, insecure: bool = False) -> FleetKey:
    """Read a key file; an empty path gives the key of a fleet without one.  Raises ConfigError.

    A second line has a second key, which is accepted too.
    """
    if not path:
        return FleetKey(None, insecure=insecure)
    try:
        text = Path(path).read_text().strip()
    except FileNotFoundError as error:
        raise ConfigError(
            f"key file {path}: {error.strerror}; make one with: vllm-disagg key {path}"
            " (once for the fleet: copy it to each machine)"
        ) from None
    except OSError as error:  # such as a file of another user: a new key would be another fleet's
        raise ConfigError(f"key file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    except ValueError:
        raise ConfigError(f"key file {path!r}: no file can have this name") from None
    lines = text.split() or [""]
    if len(lines) > MAX_KEYS:
        raise ConfigError(
            f"key file {path}: {len(lines)} keys, at most {MAX_KEYS} (one a line): the fleet's, and"
            " while it is changed the other one"
        )
    if len(set(lines)) < len(lines):
        raise ConfigError(f"key file {path}: both lines have the same key; leave one out")
    try:
        *seconds, first = [bytes.fromhex(line) for line in reversed(lines)]
        second = FleetKey(seconds[0]) if seconds else None
        key = FleetKey(first, second=second)
    except (ValueError, ConfigError):
        raise ConfigError(
            f"key file {path}: not {2 * KEY_BYTES} hexadecimal digits; copy the fleet's file again"
        ) from None
    warn_of_mode(path)
    return key


def read_lines(path: str, flag: str) -> list[str]:
    """Read a file with one key a line; empty lines are left out.  Raises ConfigError."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: not a text file") from None
    except ValueError:
        raise ConfigError(f"{flag} {path!r}: no file can have this name") from None
    found = [
        bearer_keys.clean(line, f"{flag} {path}:") for line in text.splitlines() if line.strip()
    ]
    if not found:
        raise ConfigError(f"{flag} {path}: the file has no key; write one key a line")
    warn_of_mode(path)
    return found


def mode_for_others(path: str) -> int | None:
    """Return the mode of a key file that others than its owner may use; None if they may not."""
    try:
        status = os.stat(path)
    except FileNotFoundError:  # removed since it was read
        return None
    mode = stat.S_IMODE(status.st_mode)
    # Kubernetes gives a Secret to root, and with fsGroup to a group that the pod's process is in.
    is_secret = status.st_uid == 0 and os.geteuid() != 0
    is_open = mode & (OTHERS_MODE & ~stat.S_IRGRP if is_secret else OTHERS_MODE)
    return mode if is_open else None


def warn_of_mode(path: str) -> None:
    """Log a warning for a key file that others than its owner may use."""
    mode = mode_for_others(path)
    if mode is not None:
        log.warning(
            "key file %s: other users of this machine may read or change it (mode %04o);"
            " restrict it with: chmod 600 %s",
            path,
            mode,
            path,
        )


def create(path: str) -> None:
    """Write a new key to `path` with mode 0600.  Raises ConfigError if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"key file {path} exists already; it was not changed") from None
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
    except OSError as error:  # such as a full disk
        os.unlink(path)  # the next try must not find a file without a key
        raise ConfigError(f"key file {path}: {error.strerror}") from None
