"""Tiny families by mobius whose caches differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.agreement.harness import agreement
from tests.agreement.tolerances import allowed
from tests.exports.recipes import FAMILIES, UNREACHABLE, export_once

pytestmark = [
    pytest.mark.exports,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the exporters' pins need Python 3.11"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, environments: Path) -> Path:
    """The folder of all of them."""
    folder = tmp_path_factory.mktemp("families")
    status, told = export_once("mobius", folder, environments=environments, families=[*FAMILIES])
    if status == UNREACHABLE:
        pytest.skip(told)
    assert status == 0, told
    return folder / "mobius"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_raw_conversion_is_its_original(family: str, made: Path) -> None:
    found = agreement(made / family / FAMILIES[family], "raw", library=True)

    assert found.refusal == ""
    assert {"prompt", "chunks"} <= set(found.figures)
    assert found.worst <= allowed(found, "raw"), found.figures
