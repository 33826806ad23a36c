"""How attention looks centroids up: two at a time where they are multiples of a step, or each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import simulated_kernels as calls
from simulated_kernels import INT4, Kernels, rotation_of
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import Codebook, codebook_of

KEYS = 150
SIZES = (64, 128)


def _unrounded(book: Codebook) -> Codebook:
    """As of models that were converted before centroids were rounded: no multiples of a step."""
    upper = book.centroids[8:] * (1 + 0.01 * np.sin(np.arange(8))).astype(np.float32)
    return replace(book, centroids=np.concatenate([-upper[::-1], upper]), step=None)


def _nothing(book: Codebook) -> Codebook:
    return replace(book, centroids=np.zeros_like(book.centroids), step=None)


def _attend(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, size: int, book: Codebook
) -> tuple[float, int]:
    """The largest error, and how many repeats of 64 centroids or pairs were looked up."""
    monkeypatch.setattr(calls, "codebook_of", lambda codec, size: book)
    rng = np.random.default_rng(size)
    vectors = rng.standard_normal((2, 1, 1, KEYS, size))
    keys, values = (
        reference.encode(each, INT4, rotation_of(size, layer), book)
        for layer, each in enumerate(vectors)
    )
    query = rng.standard_normal((1, 2, 1, size)).astype(np.float32)
    rotations = (rotation_of(size), rotation_of(size, 1))
    with kernels.counted() as launches:
        output = kernels.attention(query, keys, values, KEYS - 1, rotations, scale=0.1, cores=1)
    assert not kernels.hazards, kernels.messages()
    expected = reference.attention(
        query, keys, values, np.array([KEYS - 1]),
        key=INT4, value=INT4, key_rotation=rotations[0], key_codebook=book.centroids,
        value_rotation=rotations[1], value_codebook=book.centroids, scale=0.1, causal=True,
    )  # fmt: skip
    found = [
        one.repeats
        for one in launches[0].cores[0].vector
        if (one.name, one.to_bytes) == ("Gather", 4)
    ]
    return float(np.abs(output - expected).max()), sum(found)


@pytest.mark.parametrize("size", SIZES)
def test_multiples_of_a_step_are_looked_up_in_pairs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    book = codebook_of(INT4, size)
    assert book.step is not None
    error, pairs = _attend(kernels, monkeypatch, size, book)
    assert error < 1e-5
    error, centroids = _attend(kernels, monkeypatch, size, _unrounded(book))
    assert error < 1e-5
    # Pairs are half as many; besides, vectors are put in order, and 2002 spreads weights so.
    all_codes = 2 * KEYS * size / 64
    assert centroids >= all_codes
    assert all_codes / 2 < pairs < centroids - 0.4 * all_codes


@pytest.mark.parametrize("size", SIZES)
def test_no_centroid_at_all(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A table without a largest entry has no step."""
    with np.errstate(invalid="ignore", divide="ignore"):
        error, _ = _attend(kernels, monkeypatch, size, _nothing(codebook_of(INT4, size)))
    assert error == 0
