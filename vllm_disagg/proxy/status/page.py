"""Serves the status page: one file, which holds no data and needs no key.

The page asks its user for the key, keeps it in the tab's session storage, and sends it as a bearer
token. Its policy allows exactly the script and the style in the file, and no other origin.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from ..http.headers import Headers

PAGE_FILE = Path(__file__).with_name("page.html")
_BLOCK = r"<{0}>(.*?)</{0}>"


def content_policy(page: str) -> str:
    """Returns the Content-Security-Policy of a page."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _hashes(page: str, tag: str) -> str:
    """Returns the sources that allow exactly the page's own blocks of a tag."""
    blocks = re.findall(_BLOCK.format(tag), page, re.DOTALL)
    digests = [hashlib.sha256(block.encode()).digest() for block in blocks]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


class StatusPage:
    """Holds the page and its headers, read once."""

    def __init__(self) -> None:
        text = PAGE_FILE.read_text()
        self.body = text.encode()
        self.headers: Headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", content_policy(text).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]
