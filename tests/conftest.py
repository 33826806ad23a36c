"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# CI must give the same answer for the same commit; anywhere else hypothesis explores.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
