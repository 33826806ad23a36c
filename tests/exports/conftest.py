"""Exports are made once for each state of the recipes, and only where they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.exports.recipes import UNREACHABLE, export_once

#: The folder of a route's export.
Exports = Callable[[str], Path]


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Path:
    """The folder of the virtual environments."""
    named = os.environ.get("TQ_EXPORTS_ENVIRONMENTS")
    return Path(named) if named else Path(request.config.cache.mkdir("environments"))


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory, environments: Path) -> Exports:
    """Makes the export of a route; skips where its packages cannot be had."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def made(route: str) -> tuple[int, str]:
        return export_once(route, folder, environments=environments)

    def export(route: str) -> Path:
        status, told = made(route)
        if status == UNREACHABLE:
            pytest.skip(told)
        assert status == 0, told
        return folder / route

    return export
