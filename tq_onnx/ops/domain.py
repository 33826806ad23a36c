"""Names of the operators: the only place that spells them.

Everything that needs an operator's name, its domain or its version imports it from here; the C++
library gets the same strings through the generated header (see ``tq_onnx/codec/header.py``).
"""

from __future__ import annotations

from typing import Final

DOMAIN: Final = "ai.turboquant"
VERSION: Final = 1

ENCODE: Final = "TurboQuantEncode"
ATTENTION: Final = "TurboQuantDequantAttention"

# The default ONNX opset that the function bodies are written in; no newer operator may be used.
BODY_OPSET: Final = 18
