"""The tables of the bodies for runtimes that interpret: constants that layers share."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import Codec, plane_widths
from tq_onnx.graph.builder import Builder
from tq_onnx.plan import LayerPlan, Plan

_BYTES: Final = 256
_BITS: Final = 8
_LOWEST_BINADE: Final = -14
_BINADES: Final = 30
"""Of normal float16 numbers; what is below them is spaced like the lowest."""

_MANTISSA_BITS: Final = 10


def plane_of(codec: Codec) -> int:
    """Return the bits of a code in the first plane; one more is in a second, if there is one."""
    return plane_widths(codec)[0]


def has_tops(codec: Codec) -> bool:
    """Tell if the highest bits of codes are in a plane of their own."""
    return plane_of(codec) < codec.bits


def fields_per_byte(codec: Codec) -> int:
    """Return the number of codes in a byte of the first plane."""
    return _BITS // plane_of(codec)


def byte_order(codec: Codec, head_size: int) -> npt.NDArray[np.int64]:
    """Return the coordinates ``[D]`` in the order of the bytes that hold them, low bits first.

    The bytes are those of the first plane.
    """
    places = np.arange(head_size, dtype=np.int64).reshape(fields_per_byte(codec), -1)
    return np.ascontiguousarray(places.T).reshape(head_size)


def rotation(build: Builder, plan: Plan, layer: LayerPlan, codec: Codec) -> ir.Value:
    """Return the rotation of a layer ``[D, D]`` with its columns in the order of the bytes."""

    def make() -> ir.Value:
        matrix = rotation_of(codec, plan.rotation, layer.head_size, layer.layer, plan.seed)
        ordered = np.ascontiguousarray(matrix[:, byte_order(codec, layer.head_size)])
        return build.constant(f"tq.rotation.{layer.layer}.{codec.bits}bit", ordered)

    return build.once(("rotation", layer.layer, codec), make)


def boundaries(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """Return the decision boundaries ``[L - 1, 1, 1, 1, 1]``."""
    table = codebook_of(codec, head_size).boundaries.reshape(-1, 1, 1, 1, 1)
    return build.constant(f"tq.boundaries.{_name(codec, head_size)}", table)


def centroids(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """Return the centroids ``[L]``."""
    table = codebook_of(codec, head_size).centroids
    return build.constant(f"tq.centroids.{_name(codec, head_size)}", table)


def centroids_of_bytes(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """Return the centroids ``[256, k]`` of the codes in every byte.

    Where the highest bits are in a plane of their own, the k of a byte count as its bits from 256
    on: ``[256 * 2**k, k]``.
    """
    places, width = np.arange(fields_per_byte(codec)), plane_of(codec)
    bytes_ = np.arange(_BYTES << (len(places) if has_tops(codec) else 0))[:, None]
    codes = bytes_ >> width * places & ((1 << width) - 1)
    codes += (bytes_ >> _BITS + places & 1) << width
    table = codebook_of(codec, head_size).centroids[codes]
    return build.constant(f"tq.centroids_of_bytes.{_name(codec, head_size)}", table)


def tops_of_bytes(build: Builder, codec: Codec) -> ir.Value:
    """Return what bytes of highest bits add to the indices of ``centroids_of_bytes``, ``[256, r]``.

    Bits of one part are r apart.
    """
    parts, places = np.arange(plane_of(codec))[:, None], np.arange(fields_per_byte(codec))
    bits = np.arange(_BYTES)[:, None, None] >> parts + len(parts) * places & 1
    table = (bits << _BITS + places).sum(axis=-1)
    return build.constant(f"tq.tops_of_bytes.{codec.bits}bit", table.astype(np.int32))


def top_value(build: Builder, codec: Codec) -> ir.Value:
    """Return what the highest bit of a code is worth."""
    return build.constant(f"tq.top.{codec.bits}bit", np.float32(1 << plane_of(codec)))


def place_values(build: Builder, width: int, count: int) -> ir.Value:
    """Return the place values ``[count]`` of numbers of some bits in a byte."""
    weights = 2.0 ** (width * np.arange(count))
    return build.constant(f"tq.place_values.{width}bit_{count}", weights.astype(np.float32))


def byte_places(build: Builder) -> ir.Value:
    """Return the place values ``[2]`` of the bytes of a float16."""
    return build.constant("tq.byte_places", np.array([1, _BYTES], np.int32))


def halves(build: Builder, factor: float) -> ir.Value:
    """Return all float16 numbers ``[65536]`` by their bits, times a factor; 0 if not finite."""
    bits = np.arange(_BYTES * _BYTES).astype("<u2")
    numbers = bits.view("<f2").astype(np.float32)
    finite = np.where(np.isfinite(numbers), numbers, np.float32(0.0))
    table = finite * np.float32(factor)
    return build.constant(f"tq.halves_times_{factor:.9g}", table)


def half_powers(build: Builder) -> ir.Value:
    """Return the first numbers ``[30]`` of the binades of float16."""
    powers = 2.0 ** (_LOWEST_BINADE + np.arange(_BINADES))
    return build.constant("tq.half_powers", powers.astype(np.float32))


def half_units(build: Builder) -> ir.Value:
    """Return the float16 numbers in one, by how many of the powers a number reaches ``[31]``."""
    reached = np.arange(_BINADES + 1)
    units = 2.0 ** (_MANTISSA_BITS - _LOWEST_BINADE + 1 - np.maximum(reached, 1))
    return build.constant("tq.half_units", units.astype(np.float32))


def half_bases(build: Builder) -> ir.Value:
    """Return the bits of the first number of a binade less those of its mantissa ``[31]``."""
    reached = np.arange(_BINADES + 1)
    bases = 2.0**_MANTISSA_BITS * np.maximum(reached - 1, 0)
    return build.constant("tq.half_bases", bases.astype(np.float32))


def _name(codec: Codec, head_size: int) -> str:
    return f"{codec.bits}bit_d{head_size}"
