"""How much smaller the caches become: exactly as much as rows and the exact window say."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.trained.conftest import Pairs
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import ROUTES
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted, open_original

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: Bytes of a row of 128 elements, its scale included.
ROW_BYTES = {"int4": 66, "int3": 50, "int2": 34}
#: Rows of an entry of the window: 128 numbers of float16 and a tag.
ENTRY_ROWS = {"int4": 4, "int3": 6, "int2": 8}
TOKENS = 33


def _ratio(before: OpenModel, after: OpenModel) -> Fraction:
    prompt = np.arange(TOKENS)[None] % before.vocabulary
    own, other = before.decoder(), after.decoder()
    own.prefill(prompt)
    other.prefill(prompt)
    return Fraction(own.cache_bytes, other.cache_bytes)


def _expected(preset: str, element_bytes: int) -> Fraction:
    rows = TOKENS + 36 * ENTRY_ROWS[preset]
    return Fraction(TOKENS * 128 * element_bytes, rows * ROW_BYTES[preset])


@pytest.mark.parametrize("route", ROUTES)
def test_float32_caches_shrink(pairs: Pairs, route: str) -> None:
    pair = pairs(route)
    assert _ratio(pair.before, pair.after) == _expected("int4", 4)
    # 4 layers, keys and values, 2 heads
    assert pair.after.signature.bytes_per_token == 4 * 2 * 2 * 66


@pytest.mark.parametrize("preset", ["int3", "int2"])
def test_other_presets_shrink_by_their_rows(pairs: Pairs, preset: str) -> None:
    pair = pairs("dynamo", preset)
    assert _ratio(pair.before, pair.after) == _expected(preset, 4)


def test_float16_caches_shrink_by_half_as_much(tmp_path: Path) -> None:
    original = FIXTURES / "dynamo-op18-sdpa-hd128-fp16.onnx"
    output = tmp_path / "model.onnx"
    report = convert(original, output)
    ratio = _ratio(open_original(original, threads=1), open_converted(output, threads=1))
    assert ratio == _expected("int4", 2)
    assert (report.bytes_per_token_before, report.bytes_per_token_after) == (2048, 528)
