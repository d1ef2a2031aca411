"""Serves a fleet of prefill and decode engines with Ray Serve, until a signal ends it.

    python deploy/ray/fleet.py deploy/ray/fleet.yaml

Joins the Ray cluster that this machine belongs to, and attaches to a fleet that runs there already.
Without a cluster it starts Ray on this machine alone, and ends it too.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import fleet_settings
from fleet_settings import FleetSettings
from vllm_disagg.cli import Parser
from vllm_disagg.errors import DisaggError

FOLDER = Path(__file__).parent


def main() -> int:
    """Runs the command; returns the exit status."""
    parser = Parser(prog="fleet.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="YAML file with settings, such as fleet.yaml")
    try:
        return _run(fleet_settings.load(parser.parse_args().file))
    except DisaggError as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 2


def _run(settings: FleetSettings) -> int:
    try:
        import fleet_app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        packages = f"Ray Serve is not installed in {sys.prefix}, or not whole ({error})"
        print(f"fleet.py: {packages}: pip install 'ray[serve]==2.60.0'", file=sys.stderr)
        return 2
    try:
        fleet_app.connect(str(FOLDER))
        # After Ray, which sets handlers of its own. A shell may have had SIGINT ignored.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        url = fleet_app.attach()
    except fleet_app.StartFailed as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fleet.py: leaves the running application as it is", file=sys.stderr)
        return 1
    # From here on the application is ended with this command.
    try:
        url = url or fleet_app.start(settings)
        print(f"\nready: {url}\n", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("fleet.py: stops once there is no request, in 10 minutes at most", file=sys.stderr)
    except fleet_app.StartFailed as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 1
    finally:
        fleet_app.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
