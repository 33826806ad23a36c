"""Mutated exports: a conversion or one sentence, and ``inspect`` and ``convert`` agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.mutations import broken_promise

FOUND = (294, 1528, 1753, 2033, 2668)
"""Mutations that once broke a promise."""


@pytest.mark.parametrize("number", [*range(60), *FOUND])
def test_no_promise_is_broken(number: int, tmp_path: Path) -> None:
    assert broken_promise(number, tmp_path) == ""
