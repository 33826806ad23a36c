"""How kernels round queries and weights that they multiply with codes as integers.

Both are rounded to multiples of a step, a share of their largest number. Kernels that add products
in lanes of 16 bits take larger steps where a sum could leave these bits: with L the largest integer
of the codebook and n sums of two products in a lane,

    step >= lane / (limit / (2 L) - n)      of queries, lane the sum of one sign's coordinates
    step >= lane / (limit / L - n)          of weights, lane their sum

n is 2 up to L = 64, and 1 above (custom_ops/core/lane_sums.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.integers import LARGEST_SMALL_INTEGER, kernel_integers
from tq_onnx.codec.kind import Float64
from tq_onnx.codec.rotated import U8
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import UNIFORM

_BYTE: Final = 8
_GROUP: Final = 4
"""Neighbouring keys whose products with a weight each are added at once."""


@dataclass(frozen=True)
class Rounding:
    """How kernels round what they multiply with codes as integers."""

    query_steps: int  #: steps of the largest coordinate of a rotated query; 0 for exact queries
    weight_steps: int  #: steps of the largest weight; 0 for exact weights
    weight_rows: int  #: keys whose weights are rounded to the same steps
    lane_limit: int = 0  #: the largest sum of products in a lane; 0 where lanes have 32 bits


EXACT: Final = Rounding(query_steps=0, weight_steps=0, weight_rows=1)


@dataclass(frozen=True)
class Multiplied:
    """The codebook of a cache as kernels multiply it."""

    centroids: npt.NDArray[np.float32] | None  #: float32 ``[L]``; None of codecs without a codebook
    largest: int  #: the largest integer; 0 where floats are multiplied


def multiplied(codec: Codec, centroids: npt.NDArray[np.float32] | None, steps: int) -> Multiplied:
    """Return the codebook of a cache as kernels multiply it, as integers if they can.

    Args:
        centroids: float32 ``[L]``; None for codecs without a codebook.
    """
    exact = Multiplied(centroids, 0)
    if steps == 0:
        return exact
    if codec.kind == UNIFORM:
        # Codes count from the middle of the range, in halves.
        return Multiplied(centroids, (1 << codec.bits) - 1)
    if codec.is_signed:
        return Multiplied(centroids, codec.sign_bit)
    if not codec.is_rotated or centroids is None:
        return exact
    book = kernel_integers(centroids)
    if book is None:
        return exact
    integers, unit = book
    return Multiplied((integers * unit).astype(np.float32), int(np.abs(integers).max()))


def rounded_queries(
    queries: Float64,
    codec: Codec,
    rotation: npt.NDArray[np.float32] | None,
    largest: int,
    rounding: Rounding,
) -> Float64:
    """Return queries as kernels round them where they are multiplied with codes.

    Zeros of ``uniform`` meet the query as it is.

    Args:
        queries: float64 ``[B, H, T, D]``.
        rotation: float32 ``[D, C]``.
    """
    if not largest:
        return queries
    # Of ``prod`` the columns behind these are the projection of what remains.
    size = queries.shape[-1]
    basis = np.eye(size)
    if codec.is_rotated and rotation is not None:
        basis = rotation[:, :size].astype(np.float64)
    rotated = queries @ basis
    step = np.abs(rotated).max(axis=-1, keepdims=True) / rounding.query_steps
    if rounding.lane_limit:
        room = rounding.lane_limit / (2 * largest) - _sums_in_lane(largest)
        step = np.maximum(step, _lane_of_query(rotated, _plane_bits(codec), largest) / room)
    step[step == 0] = 1
    moved = np.round(rotated / step) * step - rotated
    if codec.kind == UNIFORM:
        moved -= moved.mean(axis=-1, keepdims=True)
    rounded: Float64 = queries + moved @ basis.T
    return rounded


def rounded_weights(
    weights: Float64,
    scales: Float64,
    slots: npt.NDArray[np.int64],
    largest: int,
    rounding: Rounding,
) -> Float64:
    """Return weights as kernels round them, which is done of their products with scales.

    Args:
        weights: float64 ``[S]`` of one query.
        scales: of the rows, float64 ``[S]``; those of either sign are rounded apart.
        slots: of the weights, int64 ``[S]``, rising.
    """
    if (scales < 0).any():
        parts = (
            rounded_weights(weights, np.maximum(sign * scales, 0), slots, largest, rounding)
            for sign in (1, -1)
        )
        return np.where(scales < 0, *reversed(list(parts)))
    rows = rounding.weight_rows
    sized = np.zeros((int(slots.max()) // rows + 1, rows))
    sized.flat[slots] = weights * scales
    step = sized.max(axis=-1, keepdims=True) / rounding.weight_steps
    if rounding.lane_limit:
        count = _sums_in_lane(largest)
        lanes = sized.reshape(len(sized), -1, count, _GROUP // 2, 2).sum(axis=(2, 4))
        room = rounding.lane_limit / largest - count
        step = np.maximum(step, lanes.max(axis=(1, 2))[:, None] / room)
    step[step == 0] = 1
    rounded: Float64 = (np.round(sized / step) * step).flat[slots] / np.where(scales > 0, scales, 1)
    return rounded


def _sums_in_lane(largest: int) -> int:
    return 2 if largest <= LARGEST_SMALL_INTEGER else 1


def _plane_bits(codec: Codec) -> int:
    """Return the bits of a code in the rows."""
    return _BYTE if codec.kind == U8 else codec.index_bits or codec.bits


def _lane_of_query(coordinates: Float64, bits: int, largest: int) -> Float64:
    """Return the largest sum of one sign in a lane, ``[..., 1]``.

    A lane adds two neighbours of a slot, which are the coordinates of one place in a byte of the
    narrowest plane, or of two slots that follow each other; of 5 bits slots k and k + 4 do.
    """
    slots = _BYTE // (1 if bits % 2 else bits)
    size = -(-coordinates.shape[-1] // slots)
    padding = [(0, 0)] * (coordinates.ndim - 1)
    filled = np.pad(coordinates, [*padding, (0, slots * size - coordinates.shape[-1])])
    by_slot = filled.reshape(*coordinates.shape[:-1], slots, size)
    pairs = np.pad(by_slot, [*padding, (0, 0), (0, size % 2)])
    pairs = pairs.reshape(*by_slot.shape[:-1], -1, 2)
    most = np.zeros((*coordinates.shape[:-1], 1))
    for sign in (1, -1):
        sums = np.maximum(sign * pairs, 0).sum(axis=-1)
        if slots > 1 and _sums_in_lane(largest) > 1:
            if bits == 5:
                sums = sums[..., : slots // 2, :] + sums[..., slots // 2 :, :]
            else:
                sums = sums[..., ::2, :] + sums[..., 1::2, :]
        most = np.maximum(most, sums.max(axis=(-2, -1))[..., None])
    return most
