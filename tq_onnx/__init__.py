"""tq-onnx: a 4-bit TurboQuant KV cache for ONNX language models."""

from __future__ import annotations

__version__ = "0.1.0"
