"""Python imports this file at its start."""

import no_amx  # noqa: F401
