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

TIE_DISTANCE: float = _TABLES["codes"]["tie_distance"]
TIE_DISTANCES: dict[str, float] = _TABLES["codes"]["tie_distances"]
SIGN_DISTANCE_FACTOR: float = _TABLES["codes"]["sign_distance_factor"]
TIE_RATE: float = _TABLES["codes"]["tie_rate"]
SCALE_STEPS: int = _TABLES["scales"]["float16_steps"]
FLOAT32_FIELD: float = _TABLES["scales"]["float32_relative"]
ATTENTION: dict[str, float] = _TABLES["attention"]
PER_QUERY_FACTOR: float = ATTENTION.pop("per_query_factor")
INTEGERS: float = ATTENTION.pop("integers")
