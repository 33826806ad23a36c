"""How much smaller the caches become: exactly as much as the row layout says."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.trained.conftest import Pairs
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import ROUTES
from tq_onnx.runtime.model import OpenModel, open_converted, open_original

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: Bytes of a row of 128 elements, its scale included.
ROW_BYTES = {"int4": 66, "int3": 50, "int2": 34}


def _ratio(before: OpenModel, after: OpenModel, tokens: int) -> Fraction:
    prompt = np.arange(tokens)[None] % before.vocabulary
    own, other = before.decoder(), after.decoder()
    own.prefill(prompt)
    other.prefill(prompt)
    return Fraction(own.cache_bytes, other.cache_bytes)


@pytest.mark.parametrize("route", ROUTES)
def test_float32_caches_shrink_by_7_757(pairs: Pairs, route: str) -> None:
    pair = pairs(route)
    ratio = _ratio(pair.before, pair.after, 33)
    assert ratio == Fraction(128 * 4, 66)
    # 4 layers, keys and values, 2 heads
    assert pair.after.signature.bytes_per_token == 4 * 2 * 2 * 66


@pytest.mark.parametrize("preset", ["int3", "int2"])
def test_other_presets_shrink_by_their_rows(pairs: Pairs, preset: str) -> None:
    pair = pairs("dynamo", preset)
    assert _ratio(pair.before, pair.after, 33) == Fraction(128 * 4, ROW_BYTES[preset])


def test_float16_caches_shrink_by_3_88(tmp_path: Path) -> None:
    original = FIXTURES / "dynamo-op18-sdpa-hd128-fp16.onnx"
    output = tmp_path / "model.onnx"
    report = convert(original, output)
    ratio = _ratio(open_original(original, threads=1), open_converted(output, threads=1), 33)
    assert ratio == Fraction(128 * 2, 66) == Fraction(256, 66)
    assert (report.bytes_per_token_before, report.bytes_per_token_after) == (2048, 528)
