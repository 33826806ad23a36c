"""How far a conversion may be from its reference: read from ``tests/tolerances.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.agreement.harness import Agreement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def bounds(table: str) -> dict[str, float]:
    """A table of the file."""
    text = (Path(__file__).parents[1] / "tolerances.toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in tomllib.loads(text)[table].items()}


def allowed(found: Agreement, preset: str) -> float:
    """The largest difference that is noise, for a model and a preset."""
    noise = bounds("agreement")
    if found.dtype == "FLOAT":
        return noise["float32"]
    if preset == "raw":
        return max(noise["float16"], noise["float16_noise_factor"] * found.noise)
    return noise["float16_quantised"]
