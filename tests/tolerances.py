"""Reads ``tests/tolerances.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def bounds(table: str) -> dict[str, float]:
    """A table of the file."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in tomllib.loads(text)[table].items()}
