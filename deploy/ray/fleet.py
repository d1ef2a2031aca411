"""Serves a fleet of prefill and decode engines with Ray Serve, until a signal ends it.

    python deploy/ray/fleet.py deploy/ray/fleet.yaml
    python deploy/ray/fleet.py --end

Joins the Ray cluster that this machine belongs to. Without a cluster it starts Ray on this machine
alone, and ends it too. `--end` ends a fleet from anywhere in its cluster.
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
    parser.add_argument("file", nargs="?", help="YAML file with settings; not read with --end")
    parser.add_argument("--end", action="store_true", help="drain and end the running fleet")
    args = parser.parse_args()
    if not args.file and not args.end:
        parser.error("give a YAML file with settings, such as deploy/ray/fleet.yaml")
    try:
        return _run(None if args.end else fleet_settings.load(args.file))
    except DisaggError as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 2


def _run(settings: FleetSettings | None) -> int:
    """Serves a fleet with these settings; without any, ends the one that runs."""
    try:
        import fleet_app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        packages = f"Ray Serve is not installed in {sys.prefix}, or not whole ({error})"
        print(f"fleet.py: {packages}: pip install 'ray[serve]==2.60.0'", file=sys.stderr)
        return 2
    try:
        if settings:
            _serve(settings)
        else:
            had_fleet = fleet_app.end()
            print("fleet.py:", "the fleet has ended" if had_fleet else "no fleet runs here")
    except fleet_app.FleetFailed as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fleet.py: interrupted", file=sys.stderr)
        return 1
    finally:
        fleet_app.disconnect()
    return 0


def _serve(settings: FleetSettings) -> None:
    import fleet_app  # noqa: PLC0415

    fleet_app.connect(str(FOLDER))
    # After Ray, which sets handlers of its own. A shell may have had SIGINT ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fleet_app.check(settings)
    is_gone = False
    try:
        url = fleet_app.start(settings)
        print(f"\nready: {url}\n", flush=True)
        fleet_app.wait_until_gone()
        is_gone = True
        print("fleet.py: the fleet has been ended by another command", file=sys.stderr)
    except KeyboardInterrupt:
        print("fleet.py: stops once there is no request, in 10 minutes at most", file=sys.stderr)
    finally:
        if not is_gone:
            fleet_app.stop()


if __name__ == "__main__":
    sys.exit(main())
