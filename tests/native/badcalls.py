"""Bad calls: one sentence that names the operator, and the session lives on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.native.single_node import Array, make_session, run
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE

HIGHEST, LOWEST = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@dataclass(frozen=True)
class Bad:
    """A call with some other inputs, and what its refusal says."""

    message: str
    changes: Mapping[str, Array]
    op: str = ""


def bad(message: str, **changes: Array) -> Bad:
    return Bad(message, changes)


def bad_call_of(op: str, message: str, **changes: Array) -> Bad:
    return Bad(message, changes, op)


def each(cases: Sequence[Bad]) -> pytest.MarkDecorator:
    """Every row of a table."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.message)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def rows(*shape: int) -> Array:
    return np.zeros(shape, np.uint8)


def numbers(*values: Any) -> Array:
    return np.array(values, np.int64)


def assert_refused(
    model: bytes, good: Mapping[str, Array], case: Bad, op: str, *, runs: bool = True
) -> None:
    """Asserts the sentence; that a good call gives the same before and after, if it ``runs``."""
    session = make_session(model)
    before = run(session, good) if runs else None
    with pytest.raises(Exception, match=re.escape(case.message)) as caught:
        run(session, {**good, **case.changes})
    assert f"{op}: " in str(caught.value)
    if before is not None:
        np.testing.assert_array_equal(run(session, good), before)


def assert_not_made(model: bytes, message: str, op: str) -> None:
    """Asserts that no session is made of a model, and why."""
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        make_session(model)
    assert f"{op}: " in str(caught.value)


#: Of the first input, in calls of the decoder's operators that are good.
DECODER_SHAPES: dict[str, tuple[int, ...]] = {
    RMS_NORMALIZATION: (3, 64),
    ROTARY_EMBEDDING: (2, 2, 4, 64),
    SWISH: (3, 5),
    TRANSPOSE: (2, 3, 4, 5),
    GATHER: (6, 5),
}
DECODER_CALLS = [
    bad_call_of(RMS_NORMALIZATION, "X has shape [], expected 1 dimension or more", X=zeros()),
    bad_call_of(
        RMS_NORMALIZATION,
        "scale has shape [1], expected [64] for the last dimension of X",
        scale=zeros(1),
    ),
    bad_call_of(RMS_NORMALIZATION, "scale has shape [1, 64]", scale=zeros(1, 64)),
    bad_call_of(
        ROTARY_EMBEDDING, "X has shape [2, 4, 64], expected 4 dimensions", X=zeros(2, 4, 64)
    ),
    bad_call_of(
        ROTARY_EMBEDDING, "X has head size 7, expected an even number", X=zeros(2, 2, 4, 7)
    ),
    bad_call_of(
        ROTARY_EMBEDDING, "cos_cache has shape [17], expected 2 dimensions", cos_cache=zeros(17)
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "cos_cache has shape [17, 64], expected [17, 32] for the head size of X",
        cos_cache=zeros(17, 64),
    ),
    bad_call_of(
        ROTARY_EMBEDDING, "sin_cache has shape [16, 32], expected [17, 32]", sin_cache=zeros(16, 32)
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids has shape [4], expected 2 dimensions",
        position_ids=numbers(0, 1, 2, 3),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids has shape [3, 4], expected [2, 4]",
        position_ids=np.zeros((3, 4), np.int64),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids has shape [0, 4], expected [2, 4]",
        position_ids=np.zeros((0, 4), np.int64),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids has shape [1, 5], expected [1, 4] for the tokens of X",
        position_ids=np.zeros((1, 5), np.int64),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids[1, 1] is -1, expected 0 or more and less than the 17 rows of cos_cache",
        position_ids=numbers([0, 0, 0, 0], [0, -1, 0, 0]),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "position_ids[0, 3] is 17, expected 0 or more and less than the 17 rows of cos_cache",
        position_ids=numbers([0, 0, 0, 17]),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        f"position_ids[0, 0] is {LOWEST}, expected",
        position_ids=numbers([LOWEST, 0, 0, 0]),
    ),
    bad_call_of(
        ROTARY_EMBEDDING,
        "expected 0 or more and less than the 0 rows of cos_cache",
        cos_cache=zeros(0, 32),
        sin_cache=zeros(0, 32),
    ),
    bad_call_of(TRANSPOSE, "X has shape [2, 3, 4], expected 4 dimensions", X=zeros(2, 3, 4)),
    bad_call_of(GATHER, "data has shape [64], expected 2 dimensions", data=zeros(64)),
    bad_call_of(GATHER, "indices has shape [], expected 2 dim", indices=np.array(1)),
    bad_call_of(
        GATHER,
        "indices has shape [1, 1, 1], expected 2 dimensions",
        indices=np.zeros((1, 1, 1), np.int64),
    ),
    bad_call_of(
        GATHER,
        "indices[1] is 6, expected -6 or more and less than the 6 rows of data",
        indices=numbers(0, 6),
    ),
    bad_call_of(
        GATHER,
        "indices[1, 0] is -7, expected -6 or more and less than the 6 rows of data",
        indices=numbers([0, 1], [-7, 2]),
    ),
    bad_call_of(GATHER, f"indices[0] is {HIGHEST}, expected", indices=numbers(HIGHEST)),
    bad_call_of(GATHER, f"indices[0] is {LOWEST}, expected", indices=numbers(LOWEST)),
    bad_call_of(GATHER, "expected 0 or more and less than the 0 rows of data", data=zeros(0, 64)),
    bad_call_of(GATHER, "indices[0] is 6, expected", data=zeros(6, 0), indices=numbers(6)),
]
