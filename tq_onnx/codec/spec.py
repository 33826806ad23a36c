"""The source of truth for codecs and row layouts.

One row holds one vector of one key/value head: codes first, metadata after. Rows live in uint8
tensors ``[B, N, S, W]`` (batch, KV head, token, row bytes), W static.

Packing is planar, because a plane unpacks with one mask and one shift on every vector unit. A plane
of ``w`` bits packs ``8 / w`` coordinates into a byte: with ``n = d * w / 8`` bytes, byte ``i``
holds coordinate ``i + k * n`` in its bits ``[k * w, (k + 1) * w)``. A code of ``b`` bits is split
into planes of falling width, low-order bits first: 4 = (4), 3 = (2, 1), 2 = (2), 5 = (4, 1).

Codes count levels from the lowest one. Those of ``uniform_signed`` are integers around 0, in two's
complement: the same with the highest bit the other way round (``Codec.sign_bit``).

Kinds that code a coordinate in a whole byte have one plane of eight bits: the byte is the code.

What follows the planes are fields, little-endian floats in a fixed order (``Field``).

A ``raw`` row has neither planes nor fields: it is the D coordinates one after the other, each in
the bytes of the model's own element type, little endian. With 16 bits that type is float16 or
bfloat16, and the row does not tell which: a reader knows the type of the model.

A cache may have wider rows than its codec needs, where a runtime wants keys and values of one
width: the bytes behind a row are zero when it is written, and never read.

A layout digest identifies the meaning of stored bytes. The C++ library has that of all codecs; it
must equal the package's. A model has that of the codecs that it uses in its metadata, so that a new
codec does not invalidate models without it. Another digest is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from tq_onnx.codec import rotated, unrotated
from tq_onnx.codec.kind import MAX_HALF, CodecKind

LAYOUT_VERSION: Final = 3

_FIRST_DIGEST: Final = "d0a46b4e80332dff"
"""That of all codecs of version 3, which models have that were converted before each had its own.
A new version takes it away."""

_PLANES: Final = "of a sequence: codes of all heads and slots, their fields, the rows in front"
_WINDOW: Final = "rows in front: D float16 as given, uint32 index + 1; t % recent behind the sinks"


def in_order(kinds: Iterable[CodecKind]) -> dict[str, CodecKind]:
    """Return the records by name, in the order of their numbers.

    Raises:
        ValueError: a name or a number is taken twice, or numbers do not count up from 0.
    """
    named: dict[str, CodecKind] = {}
    for place, kind in enumerate(sorted(kinds, key=lambda kind: kind.number)):
        last = next(reversed(named), "")
        if kind.name in named:
            raise ValueError(f"there are two codec kinds {kind.name}; give one another name")
        if place and kind.number == named[last].number:
            raise ValueError(
                f"the codec kinds {last} and {kind.name} have the same number {kind.number}; "
                "give the new one the next number that is free"
            )
        if kind.number != place:
            raise ValueError(
                f"the codec kind {kind.name} has the number {kind.number}; the next is {place}"
            )
        named[kind.name] = kind
    return named


KINDS: Final[dict[str, CodecKind]] = in_order((*rotated.KINDS, *unrotated.KINDS))
"""The record of every codec kind by name, in the order of their numbers."""

HEAD_SIZE_MULTIPLE: Final = 8
"""A head size must fill whole bytes of a one-bit plane."""

MAX_HEAD_SIZE: Final = 512


@dataclass(frozen=True)
class Codec:
    """The form in which the vectors of one cache are stored.

    Attributes:
        kind: name of the kind, of ``KINDS``.
        bits: bits per coordinate.
    """

    kind: str
    bits: int

    def __post_init__(self) -> None:
        """Refuse codecs that do not exist."""
        if self.kind not in KINDS:
            raise ValueError(f"codec kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.bits not in self.record.bits:
            raise ValueError(f"{self.kind} has no {self.bits}-bit form, only {self.record.bits}")

    def __str__(self) -> str:
        """Return kind and bits, as reports and messages name a codec."""
        return f"{self.kind} {self.bits}"

    @property
    def record(self) -> CodecKind:
        """Everything else about the kind."""
        return KINDS[self.kind]

    @property
    def is_raw(self) -> bool:
        """True if rows hold floats as they are."""
        return self.record.is_raw

    @property
    def is_rotated(self) -> bool:
        """True if vectors are rotated and quantised with a codebook."""
        return self.record.is_rotated

    @property
    def has_sketch(self) -> bool:
        """True if codes have a sign of a random projection beside the index."""
        return self.record.has_sketch

    @property
    def corrects_norm(self) -> bool:
        """True if the scale can make up for the norm that quantisation loses."""
        return self.record.corrects_norm

    @property
    def searches(self) -> bool:
        """True if an encoder may choose among codes of several gains."""
        return self.record.searches

    @property
    def is_signed(self) -> bool:
        """True if codes are integers, stored as two's complement, and scales have either sign."""
        return self.record.is_signed

    @property
    def sign_bit(self) -> int:
        """The bit of a stored code that is not that of its place among the levels; 0 if none."""
        return 1 << (self.bits - 1) if self.is_signed else 0

    @property
    def index_bits(self) -> int:
        """Bits of an index into the codebook; 0 if there is none."""
        return self.bits - self.has_sketch if self.is_rotated else 0

    @property
    def levels(self) -> int:
        """Number of centroids; 0 if there is no codebook."""
        return 1 << self.index_bits if self.is_rotated else 0

    @property
    def boundaries(self) -> int:
        """Number of boundaries between them."""
        return self.levels - self.is_rotated

    def coordinates(self, head_size: int) -> int:
        """Return the numbers that a row decodes to, in the space that the rotation leads to.

        With a sketch there are the D of the codebook and the D signs.
        """
        return 2 * head_size if self.has_sketch else head_size

    def for_elements(self, bits: int) -> Codec:
        """Return the codec in a model whose element type has so many bits.

        ``raw`` takes its width from there; what others store does not depend on it.

        Raises:
            ValueError: ``raw`` has no such width.
        """
        return Codec(self.kind, bits) if self.is_raw else self


CODECS: Final = tuple(Codec(kind.name, bits) for kind in KINDS.values() for bits in kind.bits)
MAX_BITS: Final = max(codec.bits for codec in CODECS if not codec.is_raw)
"""Every codec that there is."""


@dataclass(frozen=True)
class Plane:
    """One bit plane of a row."""

    offset: int  #: first byte within the row
    size: int  #: bytes of the plane
    width: int  #: bits per coordinate in this plane
    shift: int  #: the plane holds bits ``[shift, shift + width)`` of every code


@dataclass(frozen=True)
class Field:
    """Metadata of a row: one or more little-endian floats."""

    name: str  #: ``scale``, ``zero`` or ``residual_norm``
    offset: int  #: first byte within the row
    count: int  #: how many
    size: int  #: bytes of one: 2 (float16) or 4 (float32)


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of one row."""

    codec: Codec  #: the codec that the row belongs to
    head_size: int  #: coordinates of a vector
    planes: tuple[Plane, ...]  #: the bit planes, in byte order; none in a ``raw`` row
    code_bytes: int  #: bytes of the planes, or of the floats of a ``raw`` row
    fields: tuple[Field, ...]  #: the metadata, in byte order
    row_bytes: int  #: bytes of one row; a cache may give it more

    def field(self, name: str) -> Field:
        """Return the field of that name.

        Raises:
            KeyError: rows of this codec have none.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)


def plane_widths(codec: Codec) -> tuple[int, ...]:
    """Return bit widths of the planes, low-order bits first; none for ``raw``."""
    return codec.record.planes[codec.bits]


def expect_head_size(head_size: int) -> None:
    """Refuse what no row can hold.

    Raises:
        ValueError: the head size is not a positive multiple of 8, or larger than supported.
    """
    if head_size <= 0 or head_size % HEAD_SIZE_MULTIPLE or head_size > MAX_HEAD_SIZE:
        raise ValueError(
            f"head size {head_size} is not a multiple of {HEAD_SIZE_MULTIPLE} "
            f"between {HEAD_SIZE_MULTIPLE} and {MAX_HEAD_SIZE}"
        )


def row_layout(codec: Codec, head_size: int) -> RowLayout:
    """Return the layout of a row of ``head_size`` coordinates.

    Raises:
        ValueError: the head size is not a positive multiple of 8, or larger than supported.
    """
    expect_head_size(head_size)
    if codec.is_raw:
        size = head_size * codec.bits // 8
        return RowLayout(codec, head_size, (), size, (), size)
    planes = []
    offset = shift = 0
    for width in plane_widths(codec):
        size = head_size * width // 8
        planes.append(Plane(offset, size, width, shift))
        offset += size
        shift += width
    code_bytes = offset
    fields = []
    for form in codec.record.fields:
        count = form.count(head_size)
        fields.append(Field(form.name, offset, count, form.size))
        offset += count * form.size
    return RowLayout(codec, head_size, tuple(planes), code_bytes, tuple(fields), offset)


def layout_digest(
    codecs: Collection[Codec] = CODECS, *, has_window: bool = True, has_planes: bool = True
) -> str:
    """Return sixteen hexadecimal digits that change if a stored byte changes its meaning."""
    used = [codec for codec in CODECS if codec in codecs]
    rows = {
        f"{codec.kind}{codec.bits}/{head_size}": [
            [[p.offset, p.size, p.width, p.shift] for p in layout.planes]
            + [[f.name, f.offset, f.count, f.size] for f in layout.fields]
            + [layout.code_bytes, layout.row_bytes]
        ]
        for codec in used
        for head_size in (64, 128)
        for layout in (row_layout(codec, head_size),)
    }
    facts = {
        "version": LAYOUT_VERSION,
        "floats": ["float16 or float32", "little", MAX_HALF],
        "scale": {codec.kind: codec.record.formula for codec in used},
        "ties": "up",
        "offset": "row minus offset[min(slot, P - 1), head]",
        "rows": rows,
    }
    if has_window:
        facts["window"] = _WINDOW
    if has_planes:
        facts["planes"] = _PLANES
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def is_layout_of(
    digest: str, codecs: Collection[Codec], *, has_window: bool, has_planes: bool
) -> bool:
    """Return True if rows of these codecs have the layout that a model was made for."""
    own = layout_digest(codecs, has_window=has_window, has_planes=has_planes)
    return digest == own or (digest == _FIRST_DIGEST and not (has_window or has_planes))
