"""Real exports, their conversions, and models opened from them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
DYNAMO = "dynamo-op18-sdpa"
EAGER = "dynamo-op20-eager"
HALF = "dynamo-op18-sdpa-hd128-fp16"
GENAI = "genai-cpu-fp32"
CONVERTIBLE = (DYNAMO, EAGER, GENAI)
VOCABULARY = 97

_FOLDER = tempfile.TemporaryDirectory(prefix="tq-onnx-tests-")


def original(name: str) -> Path:
    return FIXTURES / f"{name}.onnx"


@cache
def converted(name: str) -> Path:
    output = Path(_FOLDER.name) / f"{name}.int4.onnx"
    convert(original(name), output, options=Options(residual_length=0, sink_tokens=0))
    return output


@cache
def opened(name: str, kind: str) -> OpenModel:
    """``kind``: original, kernel or body.

    Products are in floating point. Those of 8 bits round a query: where calls of different sizes
    differ in its last bit, a tie can part their logits by 1e-3, and the next layers' codes.
    """
    path = original(name) if kind == "original" else converted(name)
    return open_model(path, library=kind == "kernel", threads=1, exact=True)


def ids(count: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, count))
