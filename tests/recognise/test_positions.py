"""Tables of positions, in what they are read by in exports and in conversions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, GENAI, opened
from tq_onnx.errors import UsageError


@pytest.mark.parametrize("kind", ["original", "kernel"])
@pytest.mark.parametrize(
    ("name", "rows"),
    [(DYNAMO, None), (GENAI, 128), ("genai-cpu-fp16", 64), ("mobius-default", 64)],
    ids=["computed", "attention", "rotation", "gather"],
)
def test_rows_of_tables(name: str, rows: int | None, kind: str) -> None:
    assert opened(name, kind).positions == opened(name, kind).longest == rows


@pytest.mark.parametrize("kind", ["original", "kernel"])
def test_a_graph_with_less_room_than_positions(kind: str) -> None:
    model = opened("mobius-static", kind)
    assert (model.positions, model.room, model.longest) == (64, 24, 24)


@pytest.mark.parametrize("kind", ["original", "kernel"])
def test_a_text_that_is_longer_is_one_sentence_and_keeps_the_caches(kind: str) -> None:
    decoder = opened("mobius-default", kind).decoder()
    decoder.prefill(np.ones((1, 64), np.int64))
    with pytest.raises(UsageError, match="has 64 positions, and the text is longer; give fewer"):
        decoder.step([1])
    decoder.rewind(63)
    decoder.step([1])
    assert decoder.length == 64
