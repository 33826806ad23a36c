"""Bad inputs and attributes of the decoder's own operators: one sentence, and the session lives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.native.single_node import Array, make_session
from tests.ops.decoder_oracles import decoder_feeds
from tests.singleop import decoder_model
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE

SHAPES: dict[str, tuple[int, ...]] = {
    RMS_NORMALIZATION: (3, 8),
    ROTARY_EMBEDDING: (2, 2, 4, 8),
    SWISH: (3, 5),
    TRANSPOSE: (2, 3, 4, 5),
    GATHER: (6, 5),
}
HIGHEST, LOWEST = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def numbers(*values: Any) -> Array:
    return np.array(values, np.int64)


CASES: dict[str, tuple[str, dict[str, Array], str]] = {
    "a scalar": (RMS_NORMALIZATION, {"X": zeros()}, "X has shape [], expected 1 dimension or more"),
    "another scale": (
        RMS_NORMALIZATION,
        {"scale": zeros(1)},
        "scale has shape [1], expected [8] for the last dimension of X",
    ),
    "a scale of rank 2": (RMS_NORMALIZATION, {"scale": zeros(1, 8)}, "scale has shape [1, 8]"),
    "X of rank 3": (
        ROTARY_EMBEDDING,
        {"X": zeros(2, 4, 8)},
        "X has shape [2, 4, 8], expected 4 dimensions",
    ),
    "odd head size": (
        ROTARY_EMBEDDING,
        {"X": zeros(2, 2, 4, 7)},
        "X has head size 7, expected an even number",
    ),
    "tables of rank 1": (
        ROTARY_EMBEDDING,
        {"cos_cache": zeros(17)},
        "cos_cache has shape [17], expected 2 dimensions",
    ),
    "wide cosines": (
        ROTARY_EMBEDDING,
        {"cos_cache": zeros(17, 8)},
        "cos_cache has shape [17, 8], expected [17, 4] for the head size of X",
    ),
    "few sines": (
        ROTARY_EMBEDDING,
        {"sin_cache": zeros(16, 4)},
        "sin_cache has shape [16, 4], expected [17, 4]",
    ),
    "positions of rank 1": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers(0, 1, 2, 3)},
        "position_ids has shape [4], expected 2 dimensions",
    ),
    "positions of another batch": (
        ROTARY_EMBEDDING,
        {"position_ids": np.zeros((3, 4), np.int64)},
        "position_ids has shape [3, 4], expected [2, 4]",
    ),
    "no positions": (
        ROTARY_EMBEDDING,
        {"position_ids": np.zeros((0, 4), np.int64)},
        "position_ids has shape [0, 4], expected [2, 4]",
    ),
    "positions of other tokens": (
        ROTARY_EMBEDDING,
        {"position_ids": np.zeros((1, 5), np.int64)},
        "position_ids has shape [1, 5], expected [1, 4] for the tokens of X",
    ),
    "negative position": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([0, 0, 0, 0], [0, -1, 0, 0])},
        "position_ids[1, 1] is -1, expected 0 or more and less than the 17 rows of cos_cache",
    ),
    "position beyond": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([0, 0, 0, 17])},
        "position_ids[0, 3] is 17, expected 0 or more and less than the 17 rows of cos_cache",
    ),
    "lowest position": (
        ROTARY_EMBEDDING,
        {"position_ids": numbers([LOWEST, 0, 0, 0])},
        f"position_ids[0, 0] is {LOWEST}, expected",
    ),
    "no table of positions": (
        ROTARY_EMBEDDING,
        {"cos_cache": zeros(0, 4), "sin_cache": zeros(0, 4)},
        "expected 0 or more and less than the 0 rows of cos_cache",
    ),
    "transposed rank 3": (
        TRANSPOSE,
        {"X": zeros(2, 3, 4)},
        "X has shape [2, 3, 4], expected 4 dimensions",
    ),
    "data of rank 1": (GATHER, {"data": zeros(5)}, "data has shape [5], expected 2 dimensions"),
    "indices of rank 0": (GATHER, {"indices": np.array(1)}, "indices has shape [], expected 2 dim"),
    "indices of rank 3": (
        GATHER,
        {"indices": np.zeros((1, 1, 1), np.int64)},
        "indices has shape [1, 1, 1], expected 2 dimensions",
    ),
    "index beyond": (
        GATHER,
        {"indices": numbers(0, 6)},
        "indices[1] is 6, expected -6 or more and less than the 6 rows of data",
    ),
    "index before": (
        GATHER,
        {"indices": numbers([0, 1], [-7, 2])},
        "indices[1, 0] is -7, expected -6 or more and less than the 6 rows of data",
    ),
    "highest index": (GATHER, {"indices": numbers(HIGHEST)}, f"indices[0] is {HIGHEST}, expected"),
    "lowest index": (GATHER, {"indices": numbers(LOWEST)}, f"indices[0] is {LOWEST}, expected"),
    "an empty table": (
        GATHER,
        {"data": zeros(0, 5)},
        "expected 0 or more and less than the 0 rows of data",
    ),
    "rows without columns are counted": (
        GATHER,
        {"data": zeros(6, 0), "indices": numbers(6)},
        "indices[0] is 6, expected",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_call(case: str) -> None:
    op, changes, message = CASES[case]
    session = make_session(decoder_model(op).SerializeToString())
    good = decoder_feeds(op, SHAPES[op])
    with pytest.raises(Exception, match=f"{op}: .*{re.escape(message)}"):
        session.run(None, {**good, **changes})
    assert np.isfinite(session.run(None, good)[0]).all()


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
    with pytest.raises(Exception, match=f"{op}: {re.escape(message)}"):
        make_session(decoder_model(op, attributes=attributes).SerializeToString())
