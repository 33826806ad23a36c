"""What the caches of a decoder hold, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from tq_onnx.runtime.feeding import Tokens


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The contents of a decoder's caches.

    Attributes:
        planes: the rows in use of each cache ``[B, N, used, row]``, in signature order; those of
            an exact window are the first.
        mask: ``[B, length]``, 0 for padding.
        states: of recurrent layers, by their inputs.
    """

    planes: tuple[npt.NDArray[Any], ...]
    mask: Tokens
    states: dict[str, npt.NDArray[Any]]
