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
    """The pieces that write the rows of a codec."""

    rows: Piece  #: vectors, then ``tables``, to rows
    tables: tuple[str, ...] = ()  #: which of the operator's tables it takes, in order
    attributes: Mapping[str, int] = field(default_factory=dict)  #: its own attributes
    corrects_norm: bool = False  #: whether it takes the operator's attribute ``norm_correction``
    #: the same of an encoder that tries gains, which are one table more
    searched: Piece | None = None
    fed: Piece | None = None  #: the same of one with error feedback, which is one more again


@dataclass(frozen=True)
class Reader:
    """The pieces that read the rows of a codec."""

    coordinates: Piece  #: rows, head size and, if the codec is rotated, centroids to coordinates
    #: rows and head size to the scales that multiply them; None if they are in already
    scales: Piece | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)  #: the attributes of ``scales``


Pieces = Callable[[Codec, str], tuple[Writer, Reader]]
"""A codec and the model's element type to the pieces for its rows."""
