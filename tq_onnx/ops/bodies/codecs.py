"""Choose the pieces of the bodies that write and read the rows of a codec.

Both operators' bodies are put together from them (``tq_onnx.ops.bodies.operators``). The pieces of
a kind stand in one module, with the row of the table that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import elements, rotated, signed, unrotated
from tq_onnx.ops.bodies.pieces import Pieces, Reader, Writer

_PIECES: Final[Mapping[str, Pieces]] = {
    **rotated.PIECES,
    **signed.PIECES,
    **unrotated.PIECES,
    **elements.PIECES,
}


def writer(codec: Codec, element: str) -> Writer:
    """Return the pieces that write rows of the codec, in a model of this element type."""
    return _PIECES[codec.kind](codec, element)[0]


def reader(codec: Codec, element: str) -> Reader:
    """Return the pieces that read rows of the codec, in a model of this element type."""
    return _PIECES[codec.kind](codec, element)[1]
