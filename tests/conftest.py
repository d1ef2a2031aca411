"""For all tests: Hypothesis looks at what happens, never at how long it took."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("project", deadline=None)
settings.load_profile("project")
