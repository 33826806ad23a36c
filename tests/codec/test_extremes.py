"""Vectors that rows cannot hold are counted, for every codec, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec import extremes, reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.extremes import Extremes
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import CODECS, Codec

D = 64
QUANTISING = [codec for codec in CODECS if not codec.is_raw]


def rows_of(vectors: np.ndarray, codec: Codec) -> Extremes:
    rotation = rotation_of(codec, "qr", D, 0, 42) if codec.is_rotated else None
    codebook = codebook_of(codec, D) if codec.is_rotated else None
    rows = reference.encode(vectors, codec, rotation, codebook)
    centroids = None if codebook is None else codebook.centroids
    return extremes.of_rows(rows, vectors, codec, centroids, layer=3, cache="key")


def vectors_of(*factors: float) -> np.ndarray:
    """Five random directions of each length."""
    draws = np.random.default_rng(0).standard_normal((len(factors), 5, D))
    units = draws / np.linalg.norm(draws, axis=-1, keepdims=True)
    return units * np.array(factors)[:, None, None]


@pytest.mark.parametrize("codec", QUANTISING, ids=str)
def test_what_rows_hold_is_not_counted(codec: Codec) -> None:
    vectors = np.concatenate([vectors_of(0.1, 1, 30, 400), np.zeros((1, 5, D))])
    assert rows_of(vectors, codec) == Extremes(3, "key", 25)


@pytest.mark.parametrize("codec", QUANTISING, ids=str)
def test_each_kind_of_loss_is_counted(codec: Codec) -> None:
    vectors = vectors_of(1, 1e9, 1e-30, 1, 1)
    vectors[3, :2, 0] = np.nan
    vectors[4, :1, 5] = -np.inf
    found = rows_of(vectors, codec)
    # Norms in float32 hold what float16 does not; blocks are divided by 127 before they are stored.
    clamped = {"u8": 0, "uniform_signed": 0}.get(codec.kind, 5)
    assert found == Extremes(3, "key", 25, clamped=clamped, vanished=5, not_finite=3)
    assert found.with_others(found).lost == 2 * found.lost


def test_lengths_tell_the_same_where_no_codec_is_chosen() -> None:
    vectors = vectors_of(1, 6.6e4, 1e-9, 6.4e4, 1e-6)
    vectors[0, 0, 0] = np.inf
    expected = Extremes(0, "value", 25, clamped=5, vanished=5, not_finite=1)
    assert extremes.of_vectors(vectors, layer=0, cache="value") == expected


def test_one_sentence_names_the_layers() -> None:
    assert extremes.warnings_of([Extremes(0, "key", 9)]) == ()
    caches = [Extremes(layer, "key", 1000, clamped=layer) for layer in range(7)]
    (sentence,) = extremes.warnings_of([*caches, Extremes(9, "value", 5, vanished=1, not_finite=2)])
    assert "layer 0" not in sentence
    assert "layer 1 keys (1 too large and clamped, of 1,000), layer 2 keys" in sentence
    assert "and 3 more; leave these layers uncompressed" in sentence
    (sentence,) = extremes.warnings_of([Extremes(9, "value", 5, vanished=1, not_finite=2)])
    assert (
        "layer 9 values (1 too small and stored as zeros, 2 not finite and stored as zeros, of 5)"
        in sentence
    )
