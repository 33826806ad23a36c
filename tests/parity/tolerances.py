"""Reads ``tests/tolerances.toml``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[1] / "tolerances.toml").read_text(encoding="utf-8")
)

ATTENTION: dict[str, float] = _TABLES["attention"]
PER_QUERY_FACTOR: float = ATTENTION.pop("per_query_factor")
INTEGERS: float = ATTENTION.pop("integers")
