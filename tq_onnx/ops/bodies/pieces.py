"""The record of the pieces that write and read the rows of one codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnxscript import OnnxFunction

from tq_onnx.codec.spec import Codec

Piece = OnnxFunction[..., Any]

ALL_TABLES: Final = ("rotation", "centroids", "boundaries")


@dataclass(frozen=True)
class Writer:
    """The pieces that write the rows of a codec.

    Attributes:
        rows: vectors, then ``tables``, to rows.
        tables: which of the operator's tables it takes, in order.
        attributes: its own attributes.
        corrects_norm: whether it takes the operator's attribute ``norm_correction``.
        searched: the same of an encoder that tries gains, which are one table more.
        fed: the same of one with error feedback, which is one more again.
    """

    rows: Piece
    tables: tuple[str, ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    corrects_norm: bool = False
    searched: Piece | None = None
    fed: Piece | None = None


@dataclass(frozen=True)
class Reader:
    """The pieces that read the rows of a codec.

    Attributes:
        coordinates: rows, head size and, if the codec is rotated, centroids to coordinates.
        scales: rows and head size to the scales that multiply them; None if they are in already.
        attributes: the attributes of ``scales``.
    """

    coordinates: Piece
    scales: Piece | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)


Pieces = Callable[[Codec, str], tuple[Writer, Reader]]
"""A codec and the model's element type to the pieces for its rows."""
