"""Comparison of rows that two backends made of the same vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.models import Arrays, Site
from tq_onnx.codec import reference
from tq_onnx.codec.bitpack import unpack
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8, rotate
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0

Array = np.ndarray[Any, Any]

# How near to where it turns a coordinate must be that float32 puts on the other side: of unit
# vectors, of steps of a code, and of the residual's norm.
_TIE = {LLOYD_MAX: 1e-6, U8: 1e-6, PROD: 1e-6}
_TIE_OF_STEPS = 2e-5
_TIE_OF_SIGNS = 2e-5


def assert_same_rows(site: Site, feeds: Arrays, presents: list[Any], expected: Any) -> None:
    """Equal bytes, but for coordinates on a boundary, and floats of fields a step apart.

    Raw rows have no boundaries.
    """
    for present, wanted, codec, name, rotation in (
        (presents[0], expected[0], site.key, "key", site.key_rotation),
        (presents[1], expected[1], site.value, "value", site.value_rotation),
    ):
        assert present.shape == wanted.shape
        size = row_layout(codec, site.head_size).row_bytes
        np.testing.assert_array_equal(present[..., size:], wanted[..., size:])
        if codec.is_raw and not site.offset_rows:
            np.testing.assert_array_equal(present, wanted)
            continue
        vectors = _vectors(site, feeds, name)
        for b, n, s in np.argwhere((present != wanted).any(axis=-1)):
            vector = vectors[b, n, s - np.broadcast_to(feeds["past_length"], len(present))[b]]
            pair = present[b, n, s], wanted[b, n, s]
            if codec.is_raw:
                got, want = (row[:size].view(f"<u{codec.bits // 8}") for row in pair)
                assert np.abs(got.astype(np.int64) - want.astype(np.int64)).max() <= 1
            else:
                _assert_same_row(site, codec, rotation, vector, pair)


def _vectors(site: Site, feeds: Arrays, name: str) -> Array:
    vectors = feeds[name].astype(np.float64)
    if not site.offset_rows:
        return vectors
    batch, _, new, _ = vectors.shape
    offset = reference.offset_rows(site.offset(name), feeds["past_length"], batch, new)
    return vectors - offset


def _assert_same_row(
    site: Site, codec: Codec, rotation: Array, vector: Array, pair: tuple[Array, Array]
) -> None:
    got, want = pair
    layout = row_layout(codec, site.head_size)
    codes, wanted_codes = unpack(got, layout), unpack(want, layout)
    moved = codes != wanted_codes
    assert (_distance(site, codec, rotation, vector, want)[moved] < 1).all()
    found, wanted = (reference.fields_of(row, layout) for row in (got, want))
    for field in layout.fields:
        values, others = found[field.name], wanted[field.name]
        step = np.spacing(np.abs(others).astype(f"f{field.size}")).astype(np.float64)
        # A code that moved moves the norm; in float32 a norm is a sum of many roundings.
        steps = 8 if field.size == 4 else 1 + 40 * moved.any()
        assert (np.abs(values - others) <= steps * step).all()


def _distance(site: Site, codec: Codec, rotation: Array, vector: Array, row: Array) -> Array:
    """Of each coordinate from where its code turns, as a multiple of what rounding may do."""
    size = site.head_size
    layout = row_layout(codec, size)
    if codec.is_rotated:
        _, y = rotate(vector, rotation[:, :size])
        boundaries = site.codebook(codec).boundaries
        distance = np.abs(y[:, None] - boundaries).min(axis=-1) / _TIE[codec.kind]
        if codec.kind != PROD:
            return distance
        indices = unpack(row, layout) & (codec.levels - 1)
        scale = reference.fields_of(row, layout)["scale"]
        centroids = site.codebook(codec).centroids.astype(np.float64)[indices]
        residual = vector - scale * centroids @ rotation[:, :size].astype(np.float64).T
        projected = np.abs(residual @ rotation[:, size:].astype(np.float64))
        return np.minimum(distance, projected / (_TIE_OF_SIGNS * np.linalg.norm(vector)))
    if codec.kind == FP8:
        # Arithmetic on powers of two: only an offset can bring a tie.
        return np.full(size, 0.0 if site.offset_rows else np.inf)
    if codec.kind == Q8_0:
        blocks = [vector[start : start + 32] for start in range(0, size, 32)]
        steps = np.concatenate([block / (np.abs(block).max() / 127) for block in blocks])
    else:
        scale = (vector.max() - vector.min()) / ((1 << codec.bits) - 1)
        steps = (vector - vector.min()) / scale
    return np.abs(steps - np.floor(steps) - 0.5) / _TIE_OF_STEPS
