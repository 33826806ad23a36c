"""The decoder's own operators: kernels of every level and bodies give the same numbers."""

from __future__ import annotations

import os

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.ops.decoder_oracles import (
    EMPTY_SHAPES,
    ORACLES,
    SHAPES,
    TYPES,
    Array,
    Shape,
    assert_close,
    decoder_feeds,
)
from tests.parity.backends import ISA, LEVELS
from tests.singleop import decoder_model, run_ort
from tq_onnx.ops.domain import GATHER, TRANSPOSE
from tq_onnx.runtime.library import get_library_path


def run_kernel(model: bytes, feeds: dict[str, Array], threads: int = 2) -> Array:
    """With the library; a registered operator never runs its body."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(get_library_path()))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    output: Array = session.run(None, feeds)[0]
    return output


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_kernels(
    case: tuple[str, Shape], dtype: ir.DataType, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, shape = case
    monkeypatch.setitem(os.environ, ISA, level)
    model, feeds = decoder_model(op, dtype), decoder_feeds(op, shape, dtype)
    given = run_kernel(model.SerializeToString(), feeds)
    assert_close(given, ORACLES[op](feeds), dtype)
    (body,) = run_ort(model, feeds)
    if op in {TRANSPOSE, GATHER}:
        np.testing.assert_array_equal(given, body)
    else:
        assert_close(given, body, dtype)


@pytest.mark.parametrize(("op", "shape"), EMPTY_SHAPES)
def test_nothing(op: str, shape: Shape) -> None:
    model, feeds = decoder_model(op), decoder_feeds(op, shape)
    given = run_kernel(model.SerializeToString(), feeds)
    assert given.shape == ORACLES[op](feeds).shape


@pytest.mark.parametrize(("op", "shape"), [case for case in SHAPES if np.prod(case[1]) > 300])
def test_the_number_of_threads_changes_nothing(op: str, shape: Shape) -> None:
    model, feeds = decoder_model(op).SerializeToString(), decoder_feeds(op, shape)
    np.testing.assert_array_equal(run_kernel(model, feeds, 1), run_kernel(model, feeds, 4))
