"""The bytes of fields: every float16, every rounding case, in both runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.singleop import RUNTIMES, function_model

FINITE = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_bytes(runtime: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = function_model(
        "HalfBytes",
        {"values": ir.DataType.FLOAT},
        {"values": [1, 1, "T", "n"]},
        ir.DataType.UINT8,
    )
    # Three fields in a row.
    rows = np.resize(values.astype(np.float32), (1, 1, -(-len(values) // 3), 3))
    (pairs,) = RUNTIMES[runtime](model, {"values": rows})
    return np.ascontiguousarray(pairs).view("<u2").ravel()[: len(values)]


def to_values(runtime: str, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = function_model(
        "HalfValues",
        {"pairs": ir.DataType.UINT8},
        {"pairs": ["n", 2]},
        ir.DataType.FLOAT,
    )
    (values,) = RUNTIMES[runtime](model, {"pairs": bits.astype("<u2")[:, None].view(np.uint8)})
    return values


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_float16_is_read_exactly(runtime: str) -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    scales = to_values(runtime, bits)
    np.testing.assert_array_equal(scales[finite], expected[finite])
    assert not np.isfinite(scales[~finite]).any()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_finite_float16_is_written_exactly(runtime: str) -> None:
    np.testing.assert_array_equal(to_bytes(runtime, FINITE), np.arange(0x7C00))
    # But for minus zero, which no field has use for.
    np.testing.assert_array_equal(to_bytes(runtime, -FINITE[1:]), np.arange(0x8001, 0xFC00))


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
    assert to_bytes(runtime, -scales).tolist() == [0xFBFF] * 6


@given(
    st.lists(st.floats(-65504, 65504, width=32).map(lambda x: x or 0.0), min_size=1, max_size=50)
)
@settings(max_examples=60)
def test_any_float32_is_rounded_as_numpy_rounds(scales: list[float]) -> None:
    array = np.array(scales, np.float32)
    expected = array.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(to_bytes("reference evaluator", array), expected)
