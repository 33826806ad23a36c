"""The trained Qwen3, exported by both routes and converted by every preset, once per run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.trained.pair import Pair, make_pair

Pairs = Callable[..., Pair]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Makes the pair of a route and a preset, each only once."""
    folder: Path = tmp_path_factory.mktemp("qwen3")

    @cache
    def made(route: str, preset: str) -> Pair:
        return make_pair(folder, route, preset)

    return lambda route, preset="int4": made(route, preset)
