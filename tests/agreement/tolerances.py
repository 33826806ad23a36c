"""How far a conversion may be from its reference: read from ``tests/tolerances.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.agreement.harness import Agreement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def allowed(found: Agreement, preset: str) -> float:
    """The largest difference that is noise, for a model and a preset."""
    text = (Path(__file__).parents[1] / "tolerances.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)["agreement"]
    if found.dtype == "FLOAT":
        return float(table["float32"])
    if preset == "raw":
        return max(float(table["float16"]), table["float16_noise_factor"] * found.noise)
    return float(table["float16_quantised"])
