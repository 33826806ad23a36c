"""Describe the operands of attention by values of the graph.

``tq_onnx.conversion.siteoperands`` makes the nodes that these facts call for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.recognise.caches import Dims

HEADS: Final[Dims] = ("B", "H", "T", "D")
FLAT_HEADS: Final[Dims] = ("B", "T", "HD")
FOLDED_HEADS: Final[Dims] = ("B", "N", "G", "D")
"""All queries of one token that share a key."""
MERGED_HEADS: Final[Dims] = ("BH", "T", "D")


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm of each head."""

    weight: ir.Value  #: ``[D]``
    epsilon: float  #: what is added to the mean square


@dataclass(frozen=True, eq=False)
class Vectors:
    """Queries, new keys or new values."""

    value: ir.Value  #: holds the vectors
    dims: Dims  #: meaning of its dimensions
    norm: Norm | None = None  #: what attention itself does to each head; None if nothing
    #: what attention itself adds to them, ``[heads * D]``; None if nothing
    bias: npt.NDArray[Any] | None = None

    @property
    def is_flat(self) -> bool:
        """Whether heads stand side by side: ``[B, T, heads * D]``."""
        return self.dims[-1] != "D" and len(self.dims) == len(FLAT_HEADS)

    @property
    def token_axis(self) -> int:
        """The axis with one entry for each new token."""
        return self.dims.index("T")


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding that attention itself applies to queries and new keys."""

    cos: ir.Value  #: ``[positions, width / 2]``
    sin: ir.Value  #: likewise
    #: ``[B, T]``; None for the past length and the numbers that follow it
    positions: ir.Value | None
    width: int  #: coordinates of a head that are rotated, the first ones
    interleaved: int  #: 1 if neighbours make a pair, 0 if the halves do


@dataclass(frozen=True, eq=False)
class Mask:
    """Something that hides keys."""

    value: ir.Value  #: a float added to the scores, or a Boolean that selects
    #: None for an additive mask; otherwise the truth value that keeps a key
    keeps: bool | None = None
    #: what an additive mask is multiplied by, where the scores are scaled behind it
    factor: float = 1.0
    fill: float = float("-inf")  #: the score of a key that a Boolean mask hides
    merged: bool = False  #: True if it is of scores ``[B * H, T, S]``, and of rank 3 like them

    def scaled(self, factor: float) -> Mask:
        """Return the mask of scores that are scaled after it was applied."""
        return replace(self, factor=self.factor * factor, fill=self.fill * factor)
