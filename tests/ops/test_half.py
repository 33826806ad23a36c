"""The scale's bytes: every float16, every rounding case, in both runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.models import RUNTIMES, function_model

FINITE = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_bytes(runtime: str, scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = function_model(
        "ScaleToBytes",
        {"scale": ir.DataType.FLOAT},
        {"scale": ["n", 1]},
        ir.DataType.UINT8,
    )
    (pair,) = RUNTIMES[runtime](model, {"scale": scales.astype(np.float32)[:, None]})
    return np.ascontiguousarray(pair).view("<u2")[:, 0]


def to_scales(runtime: str, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = function_model(
        "RowScales",
        {"rows": ir.DataType.UINT8},
        {"rows": ["n", "W"]},
        ir.DataType.FLOAT,
    )
    codes = np.full((len(bits), 3), 0xA5, np.uint8)
    rows = np.concatenate([codes, bits.astype("<u2")[:, None].view(np.uint8)], axis=-1)
    (scales,) = RUNTIMES[runtime](model, {"rows": rows})
    return scales


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_float16_is_read_exactly(runtime: str) -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    scales = to_scales(runtime, bits)
    np.testing.assert_array_equal(scales[finite], expected[finite])
    assert not np.isfinite(scales[~finite]).any()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_finite_float16_is_written_exactly(runtime: str) -> None:
    np.testing.assert_array_equal(to_bytes(runtime, FINITE), np.arange(0x7C00))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rounding_at_every_midpoint_and_beside_it(runtime: str) -> None:
    middles = (FINITE[:-1] + FINITE[1:]) / 2
    for scales in (
        middles,
        np.nextafter(middles, np.float32(0)),
        np.nextafter(middles, np.float32(np.inf)),
    ):
        expected = scales.astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(to_bytes(runtime, scales), expected)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_large_scales_are_clamped_to_the_largest_finite(runtime: str) -> None:
    scales = np.array([65503.9, 65504, 65520, 1e6, 3.4e38, np.inf], np.float32)
    assert to_bytes(runtime, scales).tolist() == [0x7BFF] * 6


@given(st.lists(st.floats(0, 65504, width=32), min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_any_float32_is_rounded_as_numpy_rounds(scales: list[float]) -> None:
    array = np.array(scales, np.float32)
    expected = array.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(to_bytes("reference evaluator", array), expected)
