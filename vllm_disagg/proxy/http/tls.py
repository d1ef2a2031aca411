"""Makes the TLS contexts of the proxy, and renews their certificates while it serves.

The listener's context is changed in place, and `UpstreamTrust` makes a new one, since certificates
cannot be removed from a context. A connection that has been opened keeps its certificate, the next
one gets the new one.
"""

from __future__ import annotations

import ssl

from ...errors import ConfigError


def listener_context(certfile: str, keyfile: str) -> ssl.SSLContext | None:
    """Returns the context for clients' connections; None without a certificate.

    Raises ConfigError as `load_chain` does.
    """
    if not certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_chain(context, certfile, keyfile)
    return context


def end_of_validity(certfile: str) -> float | None:
    """Returns when a file's first certificate expires, in seconds since the epoch; None if unknown.

    In public Python decodes certificates of verified peers only. So this is done as its own tests
    do it, and a Python that can do it no more gives None.
    """
    try:
        facts = ssl._ssl._test_decode_cert(certfile)  # type: ignore[attr-defined]
        return float(ssl.cert_time_to_seconds(facts["notAfter"]))
    except (AttributeError, OSError, ValueError):
        return None


class UpstreamTrust:
    """Holds the context for connections to instances. Empty: the system's trust store."""

    def __init__(self, ca_file: str = "") -> None:
        """Raises ConfigError when the file has no certificates."""
        self._ca_file = ca_file
        self.context = upstream_context(ca_file)

    def renew(self) -> None:
        """Trusts the file's present certificates alone; raises ConfigError and keeps the old."""
        self.context = upstream_context(self._ca_file)


def upstream_context(ca_file: str) -> ssl.SSLContext:
    """Returns a context that trusts a file's certificates; raises ConfigError without any."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        reason = _reason(error, "holds no certificates")
        raise ConfigError(f"--upstream-ca {ca_file}: {reason}") from None


def load_chain(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Loads a certificate and its key; raises ConfigError and changes nothing if they do not fit.

    The key must have no pass phrase.
    """

    def refuse_pass_phrase() -> str:
        # Without this function OpenSSL reads a pass phrase from the terminal, and all else waits.
        flag = f"--ssl-keyfile {keyfile}" if keyfile else f"--ssl-certfile {certfile}"
        raise ConfigError(f"{flag}: the key is encrypted; give one without a pass phrase")

    try:
        # OpenSSL replaces the certificate before it looks at the key, so a trial goes first.
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trial.load_cert_chain(certfile, keyfile or None, refuse_pass_phrase)
        context.load_cert_chain(certfile, keyfile or None, refuse_pass_phrase)
    except OSError as error:
        reason = _reason(error, "no certificate and key that fit")
        raise ConfigError(f"--ssl-certfile {certfile}: {reason}") from None


def _reason(error: OSError, tls_reason: str) -> str:
    """Describes why a file cannot be used."""
    if isinstance(error, ssl.SSLError):
        return tls_reason
    return error.strerror or str(error)
