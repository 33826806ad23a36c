"""Names of the operators: the only place that spells them.

Everything that needs an operator's name, its domain or its version imports it from here; the C++
library gets the same strings through ``tq/operators.h`` (``tq_onnx/ops/operatorheader.py``).
"""

from __future__ import annotations

from typing import Final

DOMAIN: Final = "ai.turboquant"
VERSION: Final = 1

MICROSOFT: Final = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

ENCODE: Final = "TurboQuantEncode"
ATTENTION: Final = "TurboQuantDequantAttention"

# The same over pages, for servers that join requests and let them go at any step.
PAGED_ENCODE: Final = "TurboQuantPagedEncode"
PAGED_ATTENTION: Final = "TurboQuantPagedDequantAttention"

# What else a decoder needs where an execution provider has too few of the standard operators
# (``tq_onnx.targets``). They are what standard ONNX calls by these names, less generality.
RMS_NORMALIZATION: Final = "RMSNormalization"
ROTARY_EMBEDDING: Final = "RotaryEmbedding"
SWISH: Final = "Swish"
TRANSPOSE: Final = "Transpose"
GATHER: Final = "Gather"
DECODER: Final = (RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE, GATHER)

# The default ONNX opset that the function bodies are written in; no newer operator may be used.
BODY_OPSET: Final = 18
