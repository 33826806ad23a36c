"""Settings for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# CI must give the same answer for the same commit; anywhere else hypothesis explores.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles comes first: of two workers, none then waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_native.py")
