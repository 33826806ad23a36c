"""Masks as users feed them: padding on the right, padding between, rows that see nothing."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest

from tests.decoders.running import Array, Batch, Decoder, batch, convert, load, session

EXPORTS = (
    "dynamo-op18-sdpa",
    "dynamo-op18-eager",
    "dynamo-op23-sdpa",
    "dynamo-op24-sdpa",
    "legacy-op14-eager",
    "legacy-op17-sdpa",
    "optimum",
    "mobius-default",
)
CAPACITY = 16


@functools.cache
def pair(name: str) -> tuple[onnxruntime.InferenceSession, onnxruntime.InferenceSession]:
    """The original and its raw conversion."""
    changed = load(name)
    convert(changed, "raw")
    return session(load(name)), session(changed)


def logits(name: str, data: Batch, *, capacity: int = 0) -> tuple[Array, Array]:
    original, converted = pair(name)
    size = len(data.tokens)
    return Decoder(original, size).run(data), Decoder(converted, size, capacity).run(data)


def masked(*gaps: tuple[int, int, int]) -> Batch:
    """Three sequences of twelve tokens; each gap is a sequence, its first and last hidden token."""
    data = batch(12, 3, seed=5)
    for sequence, first, last in gaps:
        data.mask[sequence, first : last + 1] = 0
    return data


@pytest.mark.parametrize("capacity", [0, CAPACITY])
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize(
    "data",
    [
        # The prompt is 7 tokens long; what follows it comes one call later.
        pytest.param(masked((0, 4, 6), (1, 6, 6)), id="right"),
        pytest.param(masked((0, 0, 2), (1, 3, 4), (2, 5, 8)), id="left, between and across calls"),
    ],
)
def test_a_hidden_token_stays_hidden(name: str, data: Batch, capacity: int) -> None:
    expected, found = logits(name, data, capacity=capacity)

    difference = np.abs(found - expected)[data.real].max()
    assert difference <= 1e-5 * np.abs(expected[data.real]).max()
    shown = Batch(data.tokens, np.ones_like(data.mask))
    unmasked, _ = logits(name, shown)
    assert np.abs(unmasked - expected)[data.real].max() > 1e-3  # the mask matters


@pytest.mark.parametrize("name", EXPORTS)
def test_rows_that_see_no_key_are_numbers_and_disturb_nobody(name: str) -> None:
    data = masked((0, 0, 11), (1, 0, 5))
    alone = Batch(data.tokens[2:], data.mask[2:])

    _, found = logits(name, data)
    _, expected = logits(name, alone)

    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[2], expected[0], atol=1e-5 * np.abs(expected).max())
