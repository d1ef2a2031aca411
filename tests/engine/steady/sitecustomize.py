"""Python imports this file at its start."""

import prepare_engine  # noqa: F401
