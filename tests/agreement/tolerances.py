"""How far a conversion may be from its reference."""

from __future__ import annotations

from tests.agreement.harness import Agreement
from tests.tolerances import bounds


def allowed(found: Agreement, preset: str) -> float:
    """The largest difference that is noise, for a model and a preset."""
    noise = bounds("agreement")
    if found.dtype == "FLOAT":
        return noise["float32"]
    if preset == "raw":
        return max(noise["float16"], noise["float16_noise_factor"] * found.noise)
    return noise["float16_quantised"]
