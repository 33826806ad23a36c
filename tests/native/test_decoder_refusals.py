"""Bad inputs and attributes of the decoder's own operators."""

from __future__ import annotations

from typing import Any

import pytest

from tests.native.badcalls import (
    DECODER_CALLS,
    DECODER_SHAPES,
    Bad,
    assert_not_made,
    assert_refused,
    each,
)
from tests.ops.decoder_oracles import decoder_feeds
from tests.singleop import decoder_model
from tq_onnx.ops.domain import RMS_NORMALIZATION, TRANSPOSE


@each(DECODER_CALLS)
def test_a_bad_call(case: Bad) -> None:
    good = decoder_feeds(case.op, DECODER_SHAPES[case.op])
    assert_refused(decoder_model(case.op).SerializeToString(), good, case, case.op)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        (RMS_NORMALIZATION, {"epsilon": -1.0}, "epsilon is -1.000000, expected a finite number"),
        (RMS_NORMALIZATION, {"epsilon": float("nan")}, "epsilon is nan, expected a finite number"),
        (RMS_NORMALIZATION, {"epsilon": float("inf")}, "epsilon is inf, expected a finite number"),
        (RMS_NORMALIZATION, {"epsilon": 1}, "attribute epsilon is missing or of another type"),
        (RMS_NORMALIZATION, {}, "attribute epsilon is missing or of another type"),
        (TRANSPOSE, {"perm": [0, 1, 2, 3]}, "perm is [0, 1, 2, 3], expected [0, 2, 1, 3]"),
        (TRANSPOSE, {"perm": [0, 2, 1]}, "perm is [0, 2, 1], expected [0, 2, 1, 3]"),
        (TRANSPOSE, {"perm": [0, 2, 1, 3, 4]}, "perm is [0, 2, 1, 3, 4], expected"),
        (TRANSPOSE, {"perm": 2}, "perm is [], expected [0, 2, 1, 3]"),
        (TRANSPOSE, {}, "attribute perm is missing or of another type"),
    ],
)
def test_bad_attributes(op: str, attributes: dict[str, Any], message: str) -> None:
    assert_not_made(decoder_model(op, attributes=attributes).SerializeToString(), message, op)
