"""The guide's nginx has the proxy's own numbers and paths; `operator_proof.py nginx` runs it."""

import re
from argparse import Namespace

from observability import ROOT
from vllm_disagg import cli
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.routes import ROUTES
from vllm_disagg.proxy.requests.api import ADMIN

GUIDE = (ROOT / "docs" / "how-to" / "behind-nginx.md").read_text()
SHOWN_TO_STRANGERS = {"/health", "/ping"}  # of the paths that the proxy answers itself


def defaults() -> Namespace:
    return cli._parser("proxy").parse_args(["proxy", "--decode=http://d:1"])


def test_nginx_ends_no_request_before_the_proxy_does() -> None:
    """With an equal time its page of a 504 would replace the proxy's answer."""
    times = re.findall(r"^    proxy_(?:read|send)_timeout (\d+)s;$", GUIDE, re.MULTILINE)
    assert len(times) == 2
    assert all(int(time) > defaults().request_timeout for time in times)


def test_nginx_takes_the_bodies_that_the_proxy_takes() -> None:
    size = re.search(r"^    client_max_body_size (\d+)m;$", GUIDE, re.MULTILINE)
    assert size and int(size[1]) << 20 == defaults().max_body_bytes


def test_nginx_closes_idle_connections_first() -> None:
    """A POST on a connection that the proxy is just closing would be 502, and is not repeated."""
    assert Limits().idle_seconds == 75.0
    assert "The proxy closes one after 75 s; nginx does so after 60 s" in GUIDE


def test_nginx_shows_no_view_of_the_fleet() -> None:
    pattern = re.search(r"^    location ~ (\S+) \{$", GUIDE, re.MULTILINE)
    assert pattern
    own = {path for path, (_, how) in ROUTES.items() if how == "own"} - SHOWN_TO_STRANGERS
    admin = {path for _, path in ADMIN}
    closed = {path for path in {*ROUTES, *admin} if re.search(pattern[1], path)}
    assert closed == own | admin
