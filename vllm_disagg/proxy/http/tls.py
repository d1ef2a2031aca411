"""Makes the TLS contexts of the proxy, and renews their certificates while it serves.

A context is changed in place: a connection that has been opened keeps its certificate, the next one
gets the new one.
"""

from __future__ import annotations

import ssl


def listener_context(certfile: str, keyfile: str) -> ssl.SSLContext | None:
    """Returns the context for clients' connections; None without a certificate."""
    if not certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_chain(context, certfile, keyfile)
    return context


def upstream_context(ca_file: str) -> ssl.SSLContext | None:
    """Returns the context for connections to instances; None for the system's trust store."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else None


def load_chain(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Loads a certificate and its key; raises OSError and changes nothing if they do not fit."""
    # OpenSSL replaces the certificate before it looks at the key, so a trial goes first.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None)
    context.load_cert_chain(certfile, keyfile or None)
