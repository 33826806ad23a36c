"""The source of truth for codec kinds, row layouts and constants.

One row holds one vector of one key/value head: codes first, metadata after. Rows live in uint8
tensors ``[B, N, S, W]`` (batch, KV head, token, row bytes), W static.

Packing is planar, because a plane unpacks with one mask and one shift on every vector unit. A plane
of ``w`` bits packs ``8 / w`` coordinates into a byte: with ``n = d * w / 8`` bytes, byte ``i``
holds coordinate ``i + k * n`` in its bits ``[k * w, (k + 1) * w)``. A code of ``b`` bits is split
into planes of falling width, low-order bits first: 4 = (4), 3 = (2, 1), 2 = (2), 5 = (4, 1).

A ``raw`` row has neither planes nor a scale: it is the D coordinates one after the other, each in
the bytes of the model's own element type, little endian. With 16 bits that type is float16 or
bfloat16, and the row does not tell which: whoever reads it knows the type of the model.

The layout digest goes into the C++ library, into the metadata of every converted model and into
this package; whoever meets a different digest refuses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

LAYOUT_VERSION: Final = 2

LLOYD_MAX: Final = "lloyd_max"
"""Codec kind: rotated, Lloyd-Max quantised coordinates and one scale per row."""

RAW: Final = "raw"
"""Codec kind: the coordinates as they are, not rotated, without metadata."""

LLOYD_MAX_BITS: Final = (2, 3, 4)
RAW_BITS: Final = (16, 32)

BITS: Final[dict[str, tuple[int, ...]]] = {LLOYD_MAX: LLOYD_MAX_BITS, RAW: RAW_BITS}
"""Bits per coordinate that a codec kind has."""

CODEC_KINDS: Final = tuple(BITS)

PLANES: Final[dict[int, tuple[int, ...]]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1)}
"""Bit widths of the planes of a code, low-order bits first, by bits per code."""

SCALE_BYTES: Final = 2
"""The scale of a row: one float16, little endian."""

MAX_SCALE: Final = 65504.0
"""Scales are clamped to the largest finite float16."""

HEAD_SIZE_MULTIPLE: Final = 8
"""A head size must fill whole bytes of a one-bit plane."""

MAX_HEAD_SIZE: Final = 512


@dataclass(frozen=True)
class Codec:
    """How the vectors of one cache are stored.

    Attributes:
        kind: one of ``CODEC_KINDS``.
        bits: bits per coordinate.
    """

    kind: str
    bits: int

    def __post_init__(self) -> None:
        """Refuses codecs that do not exist."""
        if self.kind not in CODEC_KINDS:
            raise ValueError(f"codec kind {self.kind!r} is not one of {', '.join(CODEC_KINDS)}")
        if self.bits not in BITS[self.kind]:
            raise ValueError(f"{self.kind} has no {self.bits}-bit form, only {BITS[self.kind]}")

    def __str__(self) -> str:
        """Kind and bits, as reports and messages name a codec."""
        return f"{self.kind} {self.bits}"

    @property
    def is_raw(self) -> bool:
        """Whether rows hold floats, so that there is no rotation and no codebook."""
        return self.kind == RAW

    @property
    def levels(self) -> int:
        """Number of centroids; 0 if there is no codebook."""
        return 0 if self.is_raw else 1 << self.bits

    def for_elements(self, bits: int) -> Codec:
        """The codec in a model whose element type has so many bits.

        ``raw`` takes its width from there; what others store does not depend on it.

        Raises:
            ValueError: ``raw`` has no such width.
        """
        return Codec(RAW, bits) if self.is_raw else self


@dataclass(frozen=True)
class Plane:
    """One bit plane of a row.

    Attributes:
        offset: first byte within the row.
        size: bytes of the plane.
        width: bits per coordinate in this plane.
        shift: the plane holds bits ``[shift, shift + width)`` of every code.
    """

    offset: int
    size: int
    width: int
    shift: int


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of one row.

    Attributes:
        codec: the codec that the row belongs to.
        head_size: coordinates of a vector.
        planes: the bit planes, in byte order; none in a ``raw`` row.
        scale_offset: byte offset of the float16 scale; ``row_bytes`` in a ``raw`` row, which has
            none.
        row_bytes: W, the bytes of one row.
    """

    codec: Codec
    head_size: int
    planes: tuple[Plane, ...]
    scale_offset: int
    row_bytes: int


def row_layout(codec: Codec, head_size: int) -> RowLayout:
    """Layout of a row of ``head_size`` coordinates.

    Raises:
        ValueError: the head size is not a positive multiple of 8, or larger than supported.
    """
    if head_size <= 0 or head_size % HEAD_SIZE_MULTIPLE or head_size > MAX_HEAD_SIZE:
        raise ValueError(
            f"head size {head_size} is not a multiple of {HEAD_SIZE_MULTIPLE} "
            f"between {HEAD_SIZE_MULTIPLE} and {MAX_HEAD_SIZE}"
        )
    if codec.is_raw:
        size = head_size * codec.bits // 8
        return RowLayout(codec, head_size, (), size, size)
    planes = []
    offset = shift = 0
    for width in PLANES[codec.bits]:
        size = head_size * width // 8
        planes.append(Plane(offset, size, width, shift))
        offset += size
        shift += width
    return RowLayout(codec, head_size, tuple(planes), offset, offset + SCALE_BYTES)


def layout_digest() -> str:
    """Sixteen hexadecimal digits that change whenever any stored byte would change its meaning."""
    rows = {
        f"{kind}{bits}/{head_size}": [
            [[p.offset, p.size, p.width, p.shift] for p in layout.planes]
            + [layout.scale_offset, layout.row_bytes]
        ]
        for kind in CODEC_KINDS
        for bits in BITS[kind]
        for head_size in (64, 128)
        for layout in (row_layout(Codec(kind, bits), head_size),)
    }
    facts = {
        "version": LAYOUT_VERSION,
        "scale": ["float16", "little", SCALE_BYTES, MAX_SCALE],
        "scale_meaning": "norm / norm(centroids[codes])",
        "ties": "up",
        "raw": ["elements of the model", "little", "coordinates in order"],
        "rows": rows,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
