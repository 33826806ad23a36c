"""Write a model with outliers in its norm weights that computes what the original computes.

Trained Qwen3 has channels of keys that are many times as large as the others, because of the
weights of the norms in front of them; quantised keys suffer by that. A few RoPE pairs of channels
of each layer get keys that are 16 to 64 times as large, and queries that are as much smaller:
scores stay what they were, up to rounding. What conversions of the new model cost against those of
the original is what outliers do to a codec.

For exports with one initializer ``...layers.N...q_norm...`` and ``...k_norm...`` per layer, such as
those of the bundled model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

PAIRS: Final = 6
"""RoPE pairs of each layer that become outliers."""
SMALLEST, LARGEST = 16, 64


def write_with_outliers(original: Path, output: Path) -> None:
    """Write the model beside the original, whose external data it shares."""
    model = ir.load(original)
    rng = np.random.default_rng(0)
    layer = 0
    while True:
        query, key = (_weight(model, layer, role) for role in ("q", "k"))
        if query is None or key is None:
            break
        assert query.const_value is not None
        size = query.const_value.size
        factor = np.ones(size)
        chosen = rng.choice(size // 2, PAIRS, replace=False)
        factor[chosen] = np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST), PAIRS))
        factor[size // 2 :] = factor[: size // 2]
        for value, change in ((query, 1 / factor), (key, factor)):
            tensor = value.const_value
            assert tensor is not None
            scaled = (tensor.numpy() * change.reshape(tensor.shape.numpy())).astype(
                tensor.numpy().dtype
            )
            value.const_value = ir.tensor(scaled, name=value.name)
        layer += 1
    assert layer
    ir.save(model, output)


def _weight(model: ir.Model, layer: int, role: str) -> ir.Value | None:
    norms = [
        value
        for name, value in model.graph.initializers.items()
        if f"layers.{layer}." in name and f"{role}_norm" in name and value.const_value is not None
    ]
    return norms[0] if len(norms) == 1 else None
