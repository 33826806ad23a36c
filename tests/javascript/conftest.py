"""The bundled model for JavaScript runtimes, what the library makes of it, and npm packages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.javascript.packages import install
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.runtime.opening import open_converted
from tq_onnx.targets.registry import TARGETS

PROMPT = "Call me Ishmael."
TOKENS = 48
CACHE_BYTES = 1056
"""Of a token in all layers, with every preset here; of float32 they would be 8,192."""


@dataclass(frozen=True)
class Web:
    """The bundled model.

    Attributes:
        folder: of the original.
        model: the converted file; its data is beside it.
        tokens: that the library goes on with.
    """

    folder: Path
    model: Path
    tokens: list[int]


@pytest.fixture(scope="session")
def packages(request: pytest.FixtureRequest) -> Path:
    """The folder that the npm packages are in; skips where they cannot be had."""
    named = os.environ.get("TQ_NODE_PACKAGES")
    folder = Path(named) if named else Path(request.config.cache.mkdir("node"))
    reason = install(folder)
    if reason:
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session", params=["int4"])
def web(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Web:
    """The model of a preset."""
    folder = tmp_path_factory.mktemp("original")
    original = build_bundled("dynamo", folder)
    model = tmp_path_factory.mktemp("web") / "model.onnx"
    convert(original, model, preset=request.param, target=TARGETS["web"])
    with_operators = original.with_name("operators.onnx")
    plain = Options(gains=False, residual_length=0, sink_tokens=0)
    convert(original, with_operators, preset=request.param, options=plain)
    return Web(folder, model, _by_the_library(with_operators))


def _by_the_library(model: Path) -> list[int]:
    decoder = open_converted(model, threads=1, exact=True).decoder()
    logits = decoder.prefill(np.array([list(PROMPT.encode())]))
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < TOKENS:
        logits = decoder.prefill(np.array([tokens[-1:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens
